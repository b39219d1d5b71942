"""What GitHub Actions shows: annotations on failures, and the summary of the job.

See https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import findings, headline
from sm121.report.stored import StoredReport

#: GitHub shows ten annotations of a kind for each step.
_MOST = 10
_LIMIT = 1 << 20  # bytes of a step's summary
_LEVELS = {Verdict.FAIL: "error", Verdict.INVALID: "error", Verdict.INCONCLUSIVE: "warning"}


def active(environment: Mapping[str, str]) -> bool:
    """Whether this runs in a job of GitHub Actions."""
    return environment.get("GITHUB_ACTIONS") == "true"


def commands(report: StoredReport, root: Path, workspace: Path | None = None) -> list[str]:
    """Workflow commands: the run's sentence, and one for each thing that did not hold."""
    lines = []
    if report.run.verdict is not Verdict.PASS:
        title = {"title": f"SM121 conformance: {report.run.verdict.value}"}
        said = headline.of(report.run).said
        if (then := headline.action(report)) is not None:
            said += f"\n{then.what}: {then.text}"
        lines.append(command(_LEVELS.get(report.run.verdict, "error"), title, said))
    for finding in findings.grouped(report)[: _MOST - len(lines)]:
        place, _, line = (finding.detail.location or "").rpartition(":")
        file = place or finding.ids[0].partition("::")[0]
        properties = {}
        if file.endswith(".py"):
            properties["file"] = Path(os.path.relpath(root / file, workspace or root)).as_posix()
        if line.isdecimal():
            properties["line"] = line
        more = f" and {len(finding.ids) - 1} more" if len(finding.ids) > 1 else ""
        properties["title"] = f"{finding.verdict.value}: {finding.title}{more}"
        required = f"required: {finding.required}; seen: " if finding.required else ""
        lines.append(command(_LEVELS[finding.verdict], properties, f"{required}{finding.seen}"))
    return lines


def command(name: str, properties: Mapping[str, str], message: str) -> str:
    """One workflow command; no text in it can end it or begin another one."""
    escaped = {k: _data(v).replace(":", "%3A").replace(",", "%2C") for k, v in properties.items()}
    listed = ",".join(f"{key}={value}" for key, value in escaped.items())
    return f"::{name}{' ' if listed else ''}{listed}::{_data(message)}"


def _data(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(escaped)


def append_summary(text: str, file: Path) -> None:
    """Add to the job's summary what still fits into it.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    taken = file.stat().st_size if file.is_file() else 0
    if taken + len(data) > _LIMIT:
        return  # GitHub would refuse all of it
    with file.open("ab") as stream:
        stream.write(data + b"\n")
