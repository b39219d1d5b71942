"""The options of the stress level."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the stress level.

    Args:
        add: A function that adds an option.
    """
    add(
        "--soak",
        metavar="DURATION",
        help=(
            "add a mixed load of this duration (for example 30s, 10m, 2h), with all checks of "
            "the stress level (default: no soak)"
        ),
    )
    add(
        "--requests",
        metavar="N",
        help=(
            "number of requests that a load of the stress level sends, for example 200 (default: "
            "the profile's number)"
        ),
    )
    add(
        "--crowd",
        metavar="N",
        help=(
            "number of requests of the stress level that run at the same time, for example 8 "
            "(default: the profile's number); --concurrency is for measured rates"
        ),
    )
