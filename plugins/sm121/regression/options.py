"""The options that compare a run with another one, or two configurations with each other."""

from dataclasses import dataclass

from sm121.core.option_values import whole_number
from sm121.core.options import option


@dataclass(frozen=True)
class ComparingOptions:
    """The options of the group "comparing"."""

    #: A path, or the word ``trusted``.
    against: str | None = option(
        "--against",
        metavar="RUN",
        help=(
            "compare this run with a trusted run: a report directory, a verdict.json, or the "
            "word trusted (the newest run of sm121 trust). A failure does not count if the "
            "trusted run failed in the same way"
        ),
    )
    ab: list[str] | None = option(
        "--ab",
        value=None,
        nargs=2,
        metavar=("A", "B"),
        help=(
            "compare two sides, A and B. A side is a text with engine arguments, KEY=VALUE or "
            "--engine-python PATH, which are added to the configuration under test ('' adds "
            "nothing); or it is the URL of a server, optionally followed by --server-log PATH. "
            "If a side begins with a single hyphen, put a space before it: ' -q fp8'"
        ),
    )
    ab_pairs: int | None = option(
        "--ab-pairs",
        whole_number(100, "starts of each side"),  # each start takes minutes
        metavar="N",
        help=(
            "number of times that --ab starts each side; if it cannot decide then, it starts "
            "them up to twice as often (default: 3)"
        ),
    )
    hypothesis: str | None = option(
        "--hypothesis",
        metavar="FILE",
        help="file with the expected effects of a feature; --ab tests whether they occur",
    )
