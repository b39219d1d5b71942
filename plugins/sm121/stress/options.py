"""The option of the stress level."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the option of the stress level.

    Args:
        add: Adds an option.
    """
    add(
        "--soak",
        metavar="DURATION",
        help="mixed load for so long, with every check of the stress level: 30s, 10m, 2h",
    )
