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
        help=(
            "configuration of the profile that the run tests (default: the first one in the "
            "profile's list fastest that the build supports, or else the profile's under_test)"
        ),
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
        help=("file with waivers: known failures that do not count until a date (default: none)"),
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
            "test plan to run: quick, merge, full, or another plan of the profile (default: "
            "quick; but full if a path, -k or -m names levels or tests, with --certify, and with "
            "--shard)"
        ),
    )
    add(
        "--slow",
        action="store_true",
        help=(
            "also run the tests that take minutes each, such as compiling FlashInfer's modules "
            "with nvcc"
        ),
    )
    add(
        "--certify",
        action="store_true",
        help=(
            "make a certificate: the run fails if a required check is skipped, deselected or not "
            "proven"
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
            "continue the killed or interrupted run in --report-dir, without its finished checks "
            "of the kernel and correctness levels and its finished cells of the matrix"
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
            "run part I of N parts of the tests; all tests of one server configuration are in "
            "the same part. `sm121 merge DIR...` merges the reports of the parts"
        ),
    )
