"""The options that say what is measured."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the group "measuring".

    Args:
        add: Adds an option.
    """
    _add_sizes(add)
    add(
        "--percentiles",
        action="store_true",
        help=(
            "send as many requests as the gates on percentiles need, p99 some hundreds (--certify "
            "does so too)"
        ),
    )
    add(
        "--kernel-trace",
        choices=("auto", "keep", "restart", "off"),
        default="auto",
        help=(
            "names of the kernels of some decode steps, by a profiler: the server is then kept, "
            "or restarted so that no number is taken of it; off: none (default: auto, as the "
            "profile says)"
        ),
    )


def _add_sizes(add: AddOption) -> None:
    add(
        "--pp",
        metavar="N",
        help=(
            "tokens of the measured prompt in place of the profile's: 512. Gates of rates and "
            "times hold for the profile's prompt, and are left out"
        ),
    )
    add(
        "--depth",
        metavar="LIST",
        help=("context before the measured prompt, in tokens, besides the profile's: 1024,65536"),
    )
    add(
        "--depths",
        metavar="LIST",
        help=(
            "only these depths: 0,4096. Gates of other depths have no number, and the last line "
            "names them"
        ),
    )
    add(
        "--tg",
        metavar="LIST",
        help="tokens that are generated and timed, besides the profile's: 16,256",
    )
    add(
        "--concurrency",
        metavar="LIST",
        help="streams at the same time, besides the profile's: 3,6",
    )
    add(
        "--rounds",
        metavar="N",
        help="rounds of each measurement before a gate asks for more (default: the profile's)",
    )
