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
        help="duration of a mixed load with all checks of the stress level: 30s, 10m, 2h",
    )
    add(
        "--requests",
        metavar="N",
        help=(
            "number of requests of the load, instead of the profile's: 200 (STRESS_REQUESTS of "
            "the guide)"
        ),
    )
    add(
        "--crowd",
        metavar="N",
        help="number of these requests that run at once: 8 (STRESS_CONCURRENCY of the guide)",
    )
