"""What is written for people and for CI when a run ends, and what they need of it before."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Generator
from pathlib import Path

import pytest

from sm121.core.errors import Sm121Error
from sm121.core.files import write_text
from sm121.core.printable import printable
from sm121.plugin.benchmarks import recorder_of
from sm121.plugin.options import SETTINGS
from sm121.plugin.regression import HISTORY, history_of
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import ID, LEVEL
from sm121.plugin.terminal import announce
from sm121.report import details, findings, github, junit, page, stored, summary
from sm121.report.details import Details, FailureDetail
from sm121.report.stored import StoredReport

DETAILS = pytest.StashKey[Details]()
#: Options that say what else a run is or where it goes: running one test again needs none of them.
_NOT_REPEATED = {
    "--report-dir": 1,
    "--junitxml": 1,
    "--junit-xml": 1,
    "--benchmark-save": 1,
    "--benchmark-autosave": 0,
    "--certify": 0,
    "--shard": 1,  # another test is in the part
    "--resume": 0,  # what has ended is not run
    "--dist": 1,
    "-m": 1,
    "-k": 1,
    "-n": 1,
    "-q": 0,
    "-v": 0,
}
_MOST_SECTION = 4000
_MOST_EVIDENCE = 3
_WITH_A_SERVER = frozenset({"server", "servers"})
_WITHOUT_A_SERVER = frozenset({"kernels", "compilation"})
#: How many servers had been started when a test began.
_STARTS = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)  # after the run was opened
def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN, None)
    if run is None:
        return
    session.config.stash[DETAILS] = Details(
        command=_line(run, _arguments(session.config)),
        requirements={
            item.nodeid: text
            for item in session.items
            if LEVEL in item.stash and (text := _requirement(item))
        },
    )


def _requirement(item: pytest.Item) -> str:
    """What a test requires: its docstring, on one line."""
    text = inspect.getdoc(getattr(item, "function", None)) or ""
    return " ".join(text.split())


@pytest.hookimpl(tryfirst=True)  # before a fixture starts a server
def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash.get(RUN, None)
    if run is not None and run.pool is not None:
        item.stash[_STARTS] = len(run.pool.starts)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the recorder has found the verdict
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = item.config.stash.get(RUN, None)
    known = item.config.stash.get(DETAILS, None)
    if run is None or known is None or LEVEL not in item.stash or not report.failed:
        return report
    file, line, _ = item.location
    known.failures = [failure for failure in known.failures if failure.id != item.nodeid]
    known.failures.append(
        FailureDetail(
            id=item.nodeid,
            text=details.shortened(run.redact(report.longreprtext)),
            sections={
                heading: run.redact(content)[-_MOST_SECTION:]
                for heading, content in report.sections
            },
            location=f"{file}:{line + 1}" if line is not None else file,
            logs=_logs(run, item),
            reproduce=_line(run, [_named_from_here(item), *_repeated(item.config)]),
        )
    )
    details.write(known, run.directory)
    return report


def _named_from_here(item: pytest.Item) -> str:
    """The test as it is named where pytest was started: its id is relative to the root directory,
    which is another folder when the suite is run from somebody else's checkout."""
    _, separator, name = item.stash[ID].partition("::")
    file = os.path.relpath(item.path, item.config.invocation_params.dir)
    return f"{file}{separator}{name}"


def _logs(run: Run, item: pytest.Item) -> list[str]:
    """Of the servers that a test used: those started for it, and the one that runs."""
    names = set(getattr(item, "fixturenames", ()))
    if run.pool is None or (names & _WITHOUT_A_SERVER and not names & _WITH_A_SERVER):
        return []
    logs = [start.log for start in run.pool.starts[item.stash.get(_STARTS, 0) :]]
    if run.pool.latest is not None:
        logs.append(run.pool.latest.log.name)
    return list(dict.fromkeys(logs))


def _arguments(config: pytest.Config) -> list[str]:
    return [str(argument) for argument in config.invocation_params.args]


def _repeated(config: pytest.Config) -> list[str]:
    """The run's own arguments, as far as they matter to one of its tests."""
    positional = set(config.option.file_or_dir or ())
    kept: list[str] = []
    skip = 0
    for argument in _arguments(config):
        name, separator, _ = argument.partition("=")
        if skip:
            skip -= 1
        elif name in _NOT_REPEATED:
            skip = 0 if separator else _NOT_REPEATED[name]
        elif _is_short(argument) and argument[:2] in _NOT_REPEATED:
            continue  # -n2, -vv
        elif argument not in positional:
            kept.append(argument)
    return kept


def _is_short(argument: str) -> bool:
    return argument.startswith("-") and not argument.startswith("--") and len(argument) > 2


def _line(run: Run, arguments: list[str]) -> str:
    return printable(run.redact(shlex.join(["python", "-m", "pytest", *arguments])))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    # Now, and not when the session ends: pytest-benchmark stores this run before that.
    run = session.config.stash.get(RUN, None)
    known = session.config.stash.get(DETAILS, None)
    if run is not None and known is not None:
        _take_history(run, known)
    return result


def _take_history(run: Run, known: Details) -> None:
    if not recorder_of(run).recorded:
        return
    history = history_of(run)
    try:
        known.history = details.series_of(history.current, history.runs, run.file.started)
    except (Sm121Error, AssertionError):
        return  # nothing to compare with; the regression level says why
    if HISTORY in run.config.stash:
        known.findings = [printable(line) for line in run.config.stash[HISTORY].findings]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    run = session.config.stash.get(RUN, None)
    if run is None:
        return result
    known = session.config.stash.get(DETAILS, None) or Details()
    recorder = recorder_of(run)
    known.samples = {
        recorded.measurement.name: details.samples_of(recorder.described(recorded))
        for recorded in recorder.recorded
    }
    details.write(known, run.directory)
    report = stored.read(run.directory)
    write_text(junit.xml(report), run.directory / junit.NAME)
    page.write(report)
    session.config.stash[_REPORT] = report
    _to_github(run)
    return result


_REPORT = pytest.StashKey[StoredReport]()


def _to_github(run: Run) -> None:
    """The summary of the job, where this is one of GitHub Actions."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    try:
        github.append_summary(summary.markdown(run.file), Path(file))
    except OSError as error:
        announce(run.config, "note", f"GITHUB_STEP_SUMMARY {file}: {error}")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    report = config.stash.get(_REPORT, None)
    if report is not None and github.active(os.environ):
        workspace = os.environ.get("GITHUB_WORKSPACE")
        for line in github.commands(
            report, config.rootpath, Path(workspace) if workspace else None
        ):
            terminalreporter.write_line(line)


def first_finding(config: pytest.Config) -> list[str]:
    """The gravest thing that did not hold, in a few lines; nothing when all is well."""
    report = config.stash.get(_REPORT, None)
    found = findings.grouped(report) if report is not None else []
    if not found:
        return []
    first = found[0]
    more = f" and {len(first.ids) - 1} more for the same reason" if len(first.ids) > 1 else ""
    lines = [f"{first.verdict.value}: {first.ids[0]}{more}"]
    if first.requirement:
        lines.append(f"  requirement: {first.requirement}")
    if first.required:
        lines.append(f"  required: {first.required}")
    lines.append(f"  seen: {first.seen}")
    if first.evidence:
        directory = config.stash[SETTINGS].report_dir
        shown = [str(directory / name) for name in first.evidence[:_MOST_EVIDENCE]]
        rest = len(first.evidence) - len(shown)
        lines.append(f"  evidence: {', '.join(shown)}" + (f" and {rest} more" if rest else ""))
    if first.detail.reproduce:
        lines.append(f"  run again: {first.detail.reproduce}")
    if len(found) > 1:
        lines.append(f"  {len(found) - 1} more findings are in the report")
    return lines
