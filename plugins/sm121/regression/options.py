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
            "word trusted (the newest run of sm121 trust). A failure does not count if the "
            "trusted run failed in the same way"
        ),
    )
    add(
        "--ab",
        nargs=2,
        metavar=("A", "B"),
        help=(
            "compare two sides, A and B. A side is a text with engine arguments, KEY=VALUE or "
            "--engine-python PATH, which are added to the configuration under test ('' adds "
            "nothing); or it is the URL of a server, optionally followed by --server-log PATH. "
            "If a side begins with a single hyphen, put a space before it: ' -q fp8'"
        ),
    )
    add(
        "--ab-pairs",
        metavar="N",
        help=(
            "number of times that --ab starts each side; if it cannot decide then, it starts "
            "them up to twice as often (default: 3)"
        ),
    )
    add(
        "--hypothesis",
        metavar="FILE",
        help="file with the expected effects of a feature; --ab tests whether they occur",
    )
