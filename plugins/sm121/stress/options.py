"""The options of the stress level."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the stress level.

    Args:
        add: Adds an option.
    """
    add(
        "--soak",
        metavar="DURATION",
        help="mixed load for so long, with every check of the stress level: 30s, 10m, 2h",
    )
    add(
        "--requests",
        metavar="N",
        help="requests of the load in place of the profile's: 200 (STRESS_REQUESTS of the guide)",
    )
    add(
        "--crowd",
        metavar="N",
        help="how many of them run at once: 8 (STRESS_CONCURRENCY of the guide)",
    )
