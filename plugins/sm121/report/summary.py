"""summary.md: the verdict, short enough for a pull request."""

import os
import re
from collections.abc import Mapping

from sm121.core import templates
from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.report import certainty, findings, headline, key_numbers, metric_verdicts
from sm121.report.rows import counts_shown
from sm121.report.stored import StoredReport
from sm121.run.fingerprint import profile_label
from sm121.run.verdict_file import VerdictFile

_MARKDOWN_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]()!#|~"}
    | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)
#: GitHub would write to whom a model's output names; a backslash does not keep it from that.
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=\w)")
#: A pull request is read, a report is searched: the rest is in report.html.
_MOST_FAILURES = 5
_MOST_LENGTH = 200


class Markdown(str):
    """Text that is Markdown already, and is none of a model's."""


def plain(value: object) -> str:
    """Anything as plain text on one line of Markdown: it may come from a log or a model."""
    if isinstance(value, Markdown):
        return value
    line = str(value).replace("\n", " ").replace("\r", " ")
    text = printable(line).translate(_MARKDOWN_SPECIAL)
    return _MENTION.sub("@\u2060", text)


def _fenced(command: str) -> Markdown:
    """A command that can be copied: a block of code, whatever is in it."""
    line = printable(" ".join(command.splitlines()))
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 3)
    return Markdown(f"{fence}sh\n{line}\n{fence}")


def link(environment: Mapping[str, str]) -> str:
    """Where a job of GitHub Actions or GitLab keeps its files; empty elsewhere."""
    if server := environment.get("GITHUB_SERVER_URL"):
        names = environment.get("GITHUB_REPOSITORY"), environment.get("GITHUB_RUN_ID")
        return f"{server}/{names[0]}/actions/runs/{names[1]}#artifacts" if all(names) else ""
    job = environment.get("CI_JOB_URL")
    return f"{job}/artifacts/browse" if job else ""


def markdown(run: VerdictFile, report: StoredReport | None = None) -> str:
    """The summary of a run, finished or not. `report`: of the same run, where it is written: it
    knows the command and what to do next."""
    reason = findings.reason_of
    failures = findings.same(findings.failures(run), lambda test: (test.verdict, reason(test)))
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
        reason=reason,
        more=len(failures[_MOST_FAILURES:]),
        metrics={name: run.metrics[name] for name in key_numbers.names(run)},
        numbers=key_numbers.rows(run),
        hidden_gates=key_numbers.not_shown(run),
        bound_doubt=key_numbers.bound_doubt(run),
        number=number,
        interval=certainty.certainty,
        required=metric_verdicts.required,
        judged=lambda name: metric_verdicts.of_run(run, name).text,
        link=Markdown(link(os.environ)),
        fenced=_fenced,
        bold=lambda text: Markdown(f"**{plain(text)}**"),
        short=lambda text: headline.brief(text, _MOST_LENGTH),
    )
