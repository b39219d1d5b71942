"""summary.md: the result of a run, short enough for a pull request."""

import os
import re
from collections.abc import Mapping

from sm121.core import templates
from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import certainty, findings, headline, key_numbers, metric_verdicts
from sm121.report.rows import counts_shown
from sm121.report.stored import StoredReport
from sm121.run.fingerprint import profile_label
from sm121.run.verdict_file import TestReport, VerdictFile

_MARKDOWN_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]()!#|~"}
    | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)
#: GitHub would notify the people that a model's output names; a backslash does not prevent that.
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=\w)")
#: A pull request is read, a report is searched: the rest is in report.html.
_MOST_FAILURES = 5
_MOST_LENGTH = 200


class Markdown(str):
    """Text that is Markdown already. It must not contain a model's output."""


def plain(value: object) -> str:
    """Return a value as plain text on one line of Markdown.

    Args:
        value: Any value: it may come from a log or a model. `Markdown` is returned as it is.
    """
    if isinstance(value, Markdown):
        return value
    line = str(value).replace("\n", " ").replace("\r", " ")
    text = printable(line).translate(_MARKDOWN_SPECIAL)
    return _MENTION.sub("@\u2060", text)


def _fenced(command: str) -> Markdown:
    """A block of code from which a command can be copied. The command may have backticks."""
    line = printable(" ".join(command.splitlines()))
    longest = max(re.findall("`+", line), key=len, default="")
    fence = longest + "```"
    return Markdown(f"{fence}sh\n{line}\n{fence}")


def link(environment: Mapping[str, str]) -> str:
    """Return the address of a job's files in GitHub Actions or GitLab.

    Args:
        environment: The variables of the process.

    Returns:
        The address; an empty text elsewhere.
    """
    server = environment.get("GITHUB_SERVER_URL")
    if server:
        repository = environment.get("GITHUB_REPOSITORY")
        run = environment.get("GITHUB_RUN_ID")
        if not repository or not run:
            return ""
        return f"{server}/{repository}/actions/runs/{run}#artifacts"
    job = environment.get("CI_JOB_URL")
    if job:
        return f"{job}/artifacts/browse"
    return ""


def markdown(run: VerdictFile, report: StoredReport | None = None) -> str:
    """Return the summary of a run.

    Args:
        run: The verdict file of a run, finished or not.
        report: The stored report of the same run, which has the command and the next step; None
            while the run goes on.
    """

    def judged(name: str) -> str:
        return metric_verdicts.of_run(run, name).text

    failures = findings.same(findings.failures(run), _verdict_and_reason)
    return templates.rendered(
        "summary.md.j2",
        plain,
        run=run,
        headline=headline.of(run),
        action=headline.action(report) if report is not None else None,
        command=report.details.command if report is not None else None,
        label=profile_label(run.profile, run.fingerprint),
        counts=counts_shown(run.levels.values()),
        failures=failures[:_MOST_FAILURES],
        reason=findings.reason_of,
        more=len(failures[_MOST_FAILURES:]),
        metrics={name: run.metrics[name] for name in key_numbers.names(run)},
        numbers=key_numbers.rows(run),
        hidden_gates=key_numbers.not_shown(run),
        bound_doubt=key_numbers.bound_doubt(run),
        number=number,
        interval=certainty.certainty,
        required=metric_verdicts.required,
        judged=judged,
        link=Markdown(link(os.environ)),
        fenced=_fenced,
        bold=_bold,
        short=_short,
    )


def _verdict_and_reason(test: TestReport) -> tuple[Verdict, str]:
    return test.verdict, findings.reason_of(test)


def _bold(text: str) -> Markdown:
    return Markdown(f"**{plain(text)}**")


def _short(text: str) -> str:
    return headline.brief(text, _MOST_LENGTH)
