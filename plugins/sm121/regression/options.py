"""The options that compare a run with another one, or two configurations with each other."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the group "comparing".

    Args:
        add: A function that adds an option.
    """
    add(
        "--against",
        metavar="RUN",
        help=(
            "compare this run with a trusted run: a report directory, a verdict.json, or the "
            "word trusted (see sm121 trust); a failure that the trusted run has in the same way "
            "is known and does not count"
        ),
    )
    add(
        "--ab",
        nargs=2,
        metavar=("A", "B"),
        help=(
            "compare two configurations (engine arguments, KEY=VALUE, --engine-python PATH, "
            "added to the configuration under test; '' adds nothing) or two URLs, each followed "
            "by --server-log PATH if you have its log; put a space before a value that begins "
            "with one hyphen: ' -q fp8'"
        ),
    )
    add(
        "--ab-pairs",
        metavar="N",
        help=(
            "number of starts of each side before --ab decides; at most twice as many (default: 3)"
        ),
    )
    add(
        "--hypothesis",
        metavar="FILE",
        help="file with the expected effects of a feature, judged by the --ab run",
    )
