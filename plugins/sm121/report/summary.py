"""summary.md: the verdict, short enough for a pull request."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from sm121.report.printable import printable
from sm121.report.verdict_file import VerdictFile
from sm121.verdict import Verdict

_MARKDOWN_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]()!#|~"}
    | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def _plain(value: object) -> str:
    """Anything as plain text on one line of Markdown: it may come from a log or a model."""
    line = str(value).replace("\n", " ").replace("\r", " ")
    return printable(line).translate(_MARKDOWN_SPECIAL)


def markdown(run: VerdictFile) -> str:
    """The summary of a run, finished or not."""
    # Markdown, not HTML: everything that is put in goes through `_plain`.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("sm121.report"), undefined=StrictUndefined, finalize=_plain
    )
    bad = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE)
    failures = [test for test in run.tests if test.verdict in bad and not test.waived]
    return environment.get_template("summary.md.j2").render(run=run, failures=failures)
