"""The options that compare a run with another one, or two configurations with each other."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the group "comparing".

    Args:
        add: Adds an option.
    """
    add(
        "--against",
        metavar="RUN",
        help=(
            "compare this run with one that is trusted: a report directory, a verdict.json, or "
            "the word trusted (sm121 trust); what failed there in the same way is known, and not "
            "red"
        ),
    )
    add(
        "--ab",
        nargs=2,
        metavar=("A", "B"),
        help=(
            "compare two configurations (engine arguments, KEY=VALUE, --engine-python PATH, on "
            "top of the one under test; '' for itself) or two URLs, each with --server-log PATH "
            "behind it where its log is there; what begins with one hyphen has a blank before "
            "it: ' -q fp8'"
        ),
    )
    add(
        "--ab-pairs",
        metavar="N",
        help="starts of each side before --ab decides; twice as many at most (default: 3)",
    )
    add(
        "--hypothesis",
        metavar="FILE",
        help="what a feature promised, judged from the --ab run",
    )
