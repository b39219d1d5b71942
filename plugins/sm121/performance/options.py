"""The options that select what is measured."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the group "measuring".

    Args:
        add: A function that adds an option.
    """
    _add_sizes(add)
    add(
        "--percentiles",
        action="store_true",
        help=(
            "send as many requests as the gates on percentiles need: several hundred for p99 "
            "(--certify does the same)"
        ),
    )
    add(
        "--kernel-trace",
        choices=("auto", "keep", "restart", "off"),
        default="auto",
        help=(
            "profile some decode steps to list their kernels. keep: continue to use the server "
            "afterwards; restart: start a new server afterwards, so that no number is measured "
            "on the profiled server; off: do not profile; auto: as the profile sets it (default: "
            "auto)"
        ),
    )


def _add_sizes(add: AddOption) -> None:
    add(
        "--pp",
        metavar="N",
        help=(
            "length of the measured prompt in tokens, for example 512 (default: the profile's "
            "length). With another length than the profile's, the gates on rates and times are "
            "left out, because they apply to the profile's length"
        ),
    )
    add(
        "--depth",
        metavar="LIST",
        help=(
            "measure additionally with these numbers of context tokens before the prompt, for "
            "example 1024,65536. To measure only with some numbers, use --depths"
        ),
    )
    add(
        "--depths",
        metavar="LIST",
        help=(
            "measure only with these numbers of context tokens, for example 0,4096 (default: those "
            "of the plan). To add a number, use --depth. Gates at other depths are not judged, and "
            "the last line lists them"
        ),
    )
    add(
        "--tg",
        metavar="LIST",
        help=(
            "additional numbers of generated tokens, for example 16,256 (default: only the "
            "profile's numbers)"
        ),
    )
    add(
        "--concurrency",
        metavar="LIST",
        help=(
            "additional numbers of concurrent streams whose rates are measured, for example 3,6 "
            "(default: only the profile's numbers); --crowd sets the number for the stress level"
        ),
    )
    add(
        "--rounds",
        metavar="N",
        help=(
            "minimum number of rounds of each measurement; a gate that cannot decide yet "
            "measures more (default: the profile's number)"
        ),
    )
