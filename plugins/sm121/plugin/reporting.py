"""Adds to the report of a test its requirement, its failure, and how to run it again."""

import inspect
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest

from pytest_llm_server import redacting
from sm121.core.errors import UsageError
from sm121.core.files import cause_of
from sm121.plugin import run_again
from sm121.plugin.selection import uses_a_server
from sm121.plugin.stash import ID, LEVEL, SESSION, STARTS
from sm121.report import page
from sm121.report.stored import StoredReport
from sm121.run import details
from sm121.run.events import Described, FailureShown
from sm121.session.session import Session

_MOST_SECTION = 4000
#: The maximum size of a job summary in bytes. GitHub rejects a longer one completely.
_LONGEST_SUMMARY = 1 << 20


def refuse_place_of_junit(config: pytest.Config) -> None:
    """Refuse a file of ``--junitxml`` that pytest could not write at the end of the run.

    As pytest does at the end, this makes the folder of the file.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: The folder cannot be made, or no file can be written in it.
    """
    named = config.getoption("xmlpath", None)
    if not named or hasattr(config, "workerinput"):
        return
    folder = Path(os.path.expandvars(named)).expanduser().absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--junitxml {named}: expected a file that can be written, got: {cause_of(error)}. "
            "Name a file in another folder."
        ) from error


def begin(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """Record the command of the run, and the requirement of each test.

    Args:
        config: The configuration of pytest.
        session: The run.
        items: The selected tests.
    """
    requirements: dict[str, str] = {}
    for item in items:
        if LEVEL not in item.stash:
            continue
        text = inspect.getdoc(getattr(item, "function", None))
        if text:
            requirements[item.stash[ID]] = " ".join(text.split())

    session.run.record.emit(Described(run_again.whole(config, session), requirements))


def command_again(config: pytest.Config, ids: Collection[str], test: str | None) -> str:
    """Return the command that repeats a test, or the whole run, with ``--engine-debug``.

    Args:
        config: The configuration of pytest. The run is open.
        ids: The ids of its tests.
        test: The id of the test; None for the whole run.
    """
    session = config.stash[SESSION]
    if test is not None and test in ids:
        return run_again.of_test(config, session, test, "--engine-debug")
    return run_again.whole(config, session, "--engine-debug")


def note_failure(session: Session, item: pytest.Item, report: pytest.TestReport) -> None:
    """Record the text of a failure.

    Args:
        session: The run.
        item: The test.
        report: pytest's report on the failed phase.
    """
    run = session.run
    sections = {}
    for heading, content in report.sections:
        sections[heading] = run.record.redact(content)[-_MOST_SECTION:]
    file, line, _ = item.location
    failure = details.FailureDetail(
        id=item.stash[ID],
        text=details.shortened(run.record.redact(report.longreprtext)),
        sections=sections,
        location=f"{file}:{line + 1}" if line is not None else file,
        logs=_logs(session, item),
        reproduce=run_again.of_test(item.config, session, item.stash[ID]),
    )
    run.record.emit(FailureShown(failure))


def write(config: pytest.Config, session: Session, known: details.Details) -> StoredReport:
    """Write the report files of a closed run, and the summary of a GitHub job.

    Args:
        config: The configuration of pytest.
        session: The run.
        known: The details of the report.

    Returns:
        The written report.
    """
    run = session.run
    known = known.model_copy(update={"again": run_again.of_failed(config, session)})
    report = page.write_all(run.record.directory, known)
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file and session.settings.worker is None:
        text = (run.record.directory / "summary.md").read_bytes()
        try:
            with Path(file).open("ab") as stream:
                if stream.tell() + len(text) <= _LONGEST_SUMMARY:
                    stream.write(text + b"\n")
        except OSError as error:
            run.record.say("note", f"GITHUB_STEP_SUMMARY {file}: {error}")
    return report


def redact(session: Session, report: pytest.TestReport) -> None:
    """Remove secrets from a report, and show the place of a skipped test.

    Args:
        session: The run. It knows the secrets.
        report: pytest's report on a phase. It is changed.
    """
    redacting.clean(report, session.run.record.redact)
    if isinstance(report.longrepr, tuple):
        # The place of the test does not depend on where the suite is installed.
        file, line, _ = report.location
        report.longrepr = (file, (line or 0) + 1, report.longrepr[2])


def _logs(session: Session, item: pytest.Item) -> list[str]:
    run = session.run
    if run.servers.pool is None or not uses_a_server(item):
        return []
    logs = [start.log for start in run.servers.pool.starts[item.stash.get(STARTS, 0) :]]
    if run.servers.pool.latest is not None:
        logs.append(run.servers.pool.latest.launch.log.name)
    return list(dict.fromkeys(logs))
