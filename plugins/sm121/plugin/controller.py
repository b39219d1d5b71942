"""The controller of pytest-xdist: it runs no test, and makes one report of those of its workers."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.plugin import certification, scheduling, target, workers
from sm121.plugin.options import SETTINGS
from sm121.plugin.run import RUN, Run, end_on_signals
from sm121.plugin.selection import architectures_asked_for
from sm121.plugin.terminal import announce
from sm121.report import merging
from sm121.run import directory as report_directory
from sm121.run import merge as merged
from sm121.run import verdict_file
from sm121.run.verdict_file import TestReport, VerdictFile

_NAME = pytest.StashKey[str]()
_GROUPS = pytest.StashKey[dict[str, str]]()
#: What xdist says of a worker that ended by Ctrl-C.
_INTERRUPTED = "keyboard-interrupt"
#: Workers that died while they had no test, and what is known of that.
_DIED = pytest.StashKey[dict[str, str]]()
_SAID = pytest.StashKey[list[dict[str, Any]]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before xdist decides, also with -p sm121.plugin
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """``-n`` alone means that what needs a server goes to one worker."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What belongs together is read from the workers' folders."""
    if config.getoption("dist") != "loadgroup":
        return None
    return scheduling.by_groups(config, log, lambda: _groups(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker is about to be started: it is told what it is part of."""
    config = node.config
    name = config.stash.setdefault(_NAME, uuid.uuid4().hex[:12])
    node.workerinput["sm121_run"] = name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    """A worker has opened its part of the run, if there are tests of a level."""
    config = node.config
    settings = config.stash[SETTINGS]
    name = config.stash.get(_NAME, "")
    if RUN in config.stash or not report_directory.is_shared(settings.report_dir, name):
        return
    try:
        if settings.certify:
            certification.refuse_a_selection(config)
        asked = architectures_asked_for(config.getoption("markexpr", "") or "")
        chosen = target.resolve(settings, asked)
        taken = report_directory.take(settings.report_dir, name)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    parts = _parts(settings.report_dir)
    if not parts:
        taken.lock.close()
        return
    if config.option.dist != "loadgroup":
        raise pytest.UsageError(
            f"--dist {config.option.dist}: expected -n N alone: what needs a server is for one "
            "worker, and a test that kills its worker is not tried again"
        )
    first = next(iter(parts.values()))
    begun = psutil.Process().create_time()
    for kept in (settings.report_dir / "earlier").glob("*"):
        if kept.stat().st_ctime > begun:  # moved there by the first of our workers
            announce(config, "report", f"the earlier one is kept in {kept}")
    config.stash[RUN] = run = Run(
        config=config,
        settings=settings,
        target=chosen,
        directory=settings.report_dir,
        lock=taken.lock,
        file=first.model_copy(deep=True),
        run_id=name,
    )
    run.save()
    end_on_signals(run)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Results come from the workers with pytest's own reports."""
    config = _config
    if config is None or (run := config.stash.get(RUN, None)) is None:
        return
    said = getattr(report, "sm121", None)
    if said is not None:
        _take(run, TestReport.model_validate(said))
    elif report.failed:
        _crashed(run, report)


#: The controller's own config; pytest gives `pytest_runtest_logreport` none.
_config: pytest.Config | None = None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    global _config
    parallel = bool(getattr(config.option, "numprocesses", None))
    if parallel and not hasattr(config, "workerinput"):
        _config = config


def pytest_unconfigure(config: pytest.Config) -> None:
    global _config
    if _config is config:
        _config = None


def _take(run: Run, finding: TestReport) -> None:
    if finding.id in run.ledger:
        run.ledger.decide(finding)
        run.save()


def _crashed(run: Run, report: pytest.TestReport) -> None:
    """A worker died in the middle of a test: xdist reports that, with no word of ours."""
    if report.when in ("setup", "call", "teardown"):
        return
    if (node := getattr(report, "node", None)) is not None:
        run.config.stash.setdefault(_DIED, {}).pop(node.gateway.id, None)  # the test tells of it
    identity = merged.plain_id(report.nodeid, {test.id for test in run.file.tests})
    level = next((test.level for test in run.file.tests if test.id == identity), None)
    if level is not None:
        message = f"the worker died: {str(report.longrepr).splitlines()[0]}"[:600]
        _take(run, TestReport(id=identity, level=level, verdict=Verdict.FAIL, message=message))


def _died(name: str, error: str) -> TestReport:
    return TestReport(
        id=f"end of the run::worker {name}",
        level="smoke",
        verdict=Verdict.FAIL,
        message=f"required: each worker ends its part, seen of {name}, beside its tests: {error}",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A worker has ended: what it knew and did not write."""
    said = (getattr(node, "workeroutput", None) or {}).get("sm121")
    if error is None and RUN in node.config.stash and not (said or {}).get("closed"):
        error = "it could not end its part, see its output"
    if error not in (None, _INTERRUPTED):
        node.config.stash.setdefault(_DIED, {})[node.gateway.id] = str(error)
    if said is not None:
        node.config.stash.setdefault(_SAID, []).append(said)


@pytest.hookimpl(tryfirst=True)  # before the run is closed and its file written
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    run = config.stash.get(RUN, None)
    if run is None:
        return
    if (worker := workers.of(config)) is not None:
        config.workeroutput["sm121"] = {  # type: ignore[attr-defined]
            "worker": worker.id,
            "deselected": run.deselected,
            "inapplicable": sorted(run.inapplicable),
        }
        return
    if config is not _config:
        return
    parts = _parts(run.directory)
    folders = {f"{report_directory.WORKERS}/{name}": part for name, part in parts.items()}
    merged.merge(run.file, run.ledger, folders)
    for name, error in config.stash.get(_DIED, {}).items():
        first = (error.splitlines() or [""])[0]
        run.ledger.decide(_died(name, printable(run.redact(first))[:600]))
    merging.judge_matrix(run.directory, run.ledger, folders, run.remark)
    said = config.stash.get(_SAID, [])
    run.deselected = list(dict.fromkeys(name for part in said for name in part["deselected"]))
    run.inapplicable = frozenset(name for part in said for name in part["inapplicable"])


def _groups(config: pytest.Config) -> dict[str, str]:
    """What must be in one worker, by node id; each worker has collected the same."""
    if _GROUPS not in config.stash:
        config.stash[_GROUPS] = {}
        run = config.stash.get(RUN, None)
        for folder in sorted((run.directory / report_directory.WORKERS).glob("*")) if run else []:
            try:
                config.stash[_GROUPS] = workers.read_groups(folder)
                break
            except (OSError, ValueError):
                continue  # it died before it had written them; another has
    return config.stash[_GROUPS]


def _parts(directory: Path) -> dict[str, VerdictFile]:
    """The workers' own files, by worker."""
    found = {}
    for folder in sorted((directory / report_directory.WORKERS).glob("*")):
        try:
            found[folder.name] = verdict_file.read(folder / "verdict.json")
        except (OSError, ValueError):
            continue  # it died before it had written one
    return found
