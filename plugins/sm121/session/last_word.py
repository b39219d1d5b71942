"""The reports for people and for CI, written when a session has closed."""

import os
from pathlib import Path

from sm121.core.files import write_text
from sm121.report import junit, page, stored, summary
from sm121.run import details
from sm121.session.session import Session

#: Bytes of a step's summary: GitHub refuses all of a longer one.
_LONGEST_SUMMARY = 1 << 20


def write_report(session: Session, known: details.Details) -> stored.StoredReport:
    """Write details.json, summary.md, junit.xml, report.html and the summary of a GitHub job, of a
    closed session. ``known`` is shown beside verdict.json."""
    details.write(known, session.directory)
    report = stored.read(session.directory)
    text = summary.markdown(report.run, report)
    write_text(text, session.directory / "summary.md")
    write_text(junit.xml(report), session.directory / junit.NAME)
    page.write(report)
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file:
        data = text.encode("utf-8", "backslashreplace")
        try:
            with Path(file).open("ab") as stream:
                if stream.tell() + len(data) <= _LONGEST_SUMMARY:
                    stream.write(data + b"\n")
        except OSError as error:
            session.say("note", f"GITHUB_STEP_SUMMARY {file}: {error}")
    return report
