"""The options that say what is measured."""

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
            "send as many requests as gates on percentiles need, several hundred for p99 "
            "(--certify does this, too)"
        ),
    )
    add(
        "--kernel-trace",
        choices=("auto", "keep", "restart", "off"),
        default="auto",
        help=(
            "profile some decode steps to list their kernels; keep: use the server afterwards; "
            "restart: start a new one, so that no number is measured on the profiled server; "
            "off: do not profile (default: auto, as the profile says)"
        ),
    )


def _add_sizes(add: AddOption) -> None:
    add(
        "--pp",
        metavar="N",
        help=(
            "length of the measured prompt in tokens, instead of the profile's: 512. The gates "
            "on rates and times are then left out, because they apply to the profile's prompt "
            "length"
        ),
    )
    add(
        "--depth",
        metavar="LIST",
        help=(
            "context lengths before the measured prompt, in tokens, in addition to the "
            "profile's: 1024,65536"
        ),
    )
    add(
        "--depths",
        metavar="LIST",
        help=(
            "measure only these depths: 0,4096. Gates of other depths get no number, and the "
            "last line lists them"
        ),
    )
    add(
        "--tg",
        metavar="LIST",
        help="numbers of tokens to generate and time, in addition to the profile's: 16,256",
    )
    add(
        "--concurrency",
        metavar="LIST",
        help="numbers of concurrent streams, in addition to the profile's: 3,6",
    )
    add(
        "--rounds",
        metavar="N",
        help="rounds of each measurement, before a gate needs more (default: the profile's)",
    )
