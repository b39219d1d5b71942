"""Adds the options for the target of a run, and for the part of the suite to run."""

from sm121.core.options import AddOption


def add_target(add: AddOption) -> None:
    """Add the options of the group "target".

    Args:
        add: A function that adds an option.
    """
    add(
        "--profile",
        metavar="NAME|PATH",
        help="profile with the requirements and gates of the target (default: by architecture)",
    )
    add(
        "--configuration",
        metavar="NAME",
        help="configuration of the profile to judge (default: the profile's under_test)",
    )
    add(
        "--model",
        metavar="PATH|ID",
        help=(
            "checkpoint to serve (default: the profile's); with --base-url: the model's name on "
            "the server"
        ),
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help=(
            "name of the model on the server (default: the profile's; with --base-url: the only "
            "model of the server)"
        ),
    )
    add(
        "--waivers",
        metavar="PATH",
        help=("file of known failures that do not count (default: none)"),
    )


def add_plan(add: AddOption) -> None:
    """Add the options that select the checks to run.

    Args:
        add: A function that adds an option.
    """
    add(
        "--plan",
        metavar="quick|merge|full",
        help=(
            "test plan to run: quick, merge, full, or another row of the profile's [plans] "
            "(default: quick; full if a path, -k or -m selects levels or tests, with --certify, "
            "and with --shard)"
        ),
    )
    add(
        "--slow",
        action="store_true",
        help=(
            "also run the tests that take minutes each (they compile FlashInfer's modules with "
            "nvcc)"
        ),
    )
    add(
        "--certify",
        action="store_true",
        help=(
            "run the merge gate: a required check that is skipped, deselected or unproven fails it"
        ),
    )


def add_resume(add: AddOption) -> None:
    """Add the option that continues a killed run.

    Args:
        add: A function that adds an option.
    """
    add(
        "--resume",
        action="store_true",
        help=(
            "continue the killed or interrupted run in --report-dir; finished checks of the "
            "kernel and correctness levels and finished cells of the matrix are not run again"
        ),
    )


def add_shard(add: AddOption) -> None:
    """Add the option that divides a run into shards.

    Args:
        add: A function that adds an option.
    """
    add(
        "--shard",
        metavar="I/N",
        help=(
            "run the I-th of N parts of the tests; all tests of a server configuration are in "
            "one part; `sm121 merge DIR...` merges the reports of the parts"
        ),
    )
