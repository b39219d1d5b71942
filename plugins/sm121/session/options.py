"""The options that say what a run judges, and how much of the suite it runs."""

from sm121.core.options import AddOption


def add_target(add: AddOption) -> None:
    """Add the options of the group "target".

    Args:
        add: Adds an option.
    """
    add(
        "--profile",
        metavar="NAME|PATH",
        help="what the target must be and reach (default: by arch)",
    )
    add(
        "--configuration",
        metavar="NAME",
        help="which of the profile's configurations is judged (default: the profile's)",
    )
    add(
        "--model",
        metavar="PATH|ID",
        help="the checkpoint (default: the profile's); with --base-url the name on the server",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help=(
            "its name on the server (default: the profile's; of --base-url the only one that the "
            "server serves)"
        ),
    )
    add("--waivers", metavar="PATH", help="failures tolerated by name (default: none)")


def add_plan(add: AddOption) -> None:
    """Add the options that select how much is asked.

    Args:
        add: Adds an option.
    """
    add(
        "--plan",
        metavar="quick|merge|full",
        help=(
            "test plan to run: quick, merge, full, or another row of the profile's [plans] "
            "(default: quick; full where a path, -k or -m names levels or tests, with --certify "
            "and with --shard)"
        ),
    )
    add(
        "--slow",
        action="store_true",
        help=("also run the tests that take minutes each (FlashInfer's modules compiled by nvcc)"),
    )
    add(
        "--certify",
        action="store_true",
        help="the merge gate: nothing required may be skipped, deselected or unproven",
    )


def add_resume(add: AddOption) -> None:
    """Add the option that goes on with a run that was killed.

    Args:
        add: Adds an option.
    """
    add(
        "--resume",
        action="store_true",
        help=(
            "go on with the run of --report-dir that was killed or interrupted: its checks of the "
            "kernel and correctness levels that were decided are not run again"
        ),
    )


def add_shard(add: AddOption) -> None:
    """Add the option that divides a run.

    Args:
        add: Adds an option.
    """
    add(
        "--shard",
        metavar="I/N",
        help=(
            "run the I-th of N parts; tests of one server configuration are in one part; `sm121 "
            "merge DIR...` makes one verdict of the parts"
        ),
    )
