"""The reports for people and for CI, written when a session has closed."""

from __future__ import annotations

import os
from pathlib import Path

from sm121.core.files import write_text
from sm121.report import details, github, junit, page, stored, summary
from sm121.report.details import Details
from sm121.report.stored import StoredReport
from sm121.session.session import Session


def write_report(session: Session, known: Details) -> StoredReport:
    """Write details.json, summary.md, junit.xml, report.html and the summary of a GitHub job.

    Args:
        session: closed.
        known: what is shown beside verdict.json.
    """
    details.write(known, session.directory)
    report = stored.read(session.directory)
    text = summary.markdown(report.run, report)
    write_text(text, session.directory / "summary.md")
    write_text(junit.xml(report), session.directory / junit.NAME)
    page.write(report)
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file:
        try:
            github.append_summary(text, Path(file))
        except OSError as error:
            session.say("note", f"GITHUB_STEP_SUMMARY {file}: {error}")
    return report
