"""summary.md: the verdict, short enough for a pull request."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from sm121.report.verdict_file import VerdictFile
from sm121.verdict import Verdict

_MARKDOWN_SPECIAL = str.maketrans(
    {"|": "\\|", "<": "&lt;", ">": "&gt;", "`": "'", "*": "\\*", "_": "\\_", "[": "\\[", "\n": " "}
)


def _cell(text: str) -> str:
    """Text from outside (a log, a model) as plain text on one line of Markdown."""
    return text.translate(_MARKDOWN_SPECIAL)


def markdown(run: VerdictFile) -> str:
    """The summary of a run, finished or not."""
    # Markdown, not HTML: what comes from outside goes through the `cell` filter.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("sm121.report"), undefined=StrictUndefined
    )
    environment.filters["cell"] = _cell
    bad = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE)
    failures = [test for test in run.tests if test.verdict in bad and not test.waived]
    return environment.get_template("summary.md.j2").render(run=run, failures=failures)
