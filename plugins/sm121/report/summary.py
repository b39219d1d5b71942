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
#: GitHub would notify users whose names appear in a model's output. A backslash does not prevent
#: that.
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=\w)")
#: Maximum number of failures in the summary. report.html has all of them.
_MOST_FAILURES = 5
_MOST_LENGTH = 200


class Markdown(str):
    """Text that is already Markdown. It must not contain a model's output."""


def plain(value: object) -> str:
    """Escape a value as one line of plain text in Markdown.

    Args:
        value: Any value, even from a log or a model. `Markdown` is returned unchanged.
    """
    if isinstance(value, Markdown):
        return value
    line = str(value).replace("\n", " ").replace("\r", " ")
    text = printable(line).translate(_MARKDOWN_SPECIAL)
    return _MENTION.sub("@\u2060", text)


def _fenced(command: str) -> Markdown:
    """Return a code block with a command to copy. The command may contain backticks."""
    line = printable(" ".join(command.splitlines()))
    longest = max(re.findall("`+", line), key=len, default="")
    fence = longest + "```"
    return Markdown(f"{fence}sh\n{line}\n{fence}")


def link(environment: Mapping[str, str]) -> str:
    """Return the URL of a CI job's artifacts in GitHub Actions or GitLab.

    Args:
        environment: The environment variables of the process.

    Returns:
        The URL; an empty string outside these two.
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
        run: The verdict file of a run, which may be in progress.
        report: The stored report of the same run, for the command and the next step; None while
            the run is in progress.
    """

    def judged(name: str) -> str:
        return metric_verdicts.of_run(run, name).text

    failures = findings.same(findings.failures(run), _verdict_and_reason)
    return templates.rendered(
        "summary.md.j2",
        plain,
        run=run,
        headline=headline.headline_of(run),
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
