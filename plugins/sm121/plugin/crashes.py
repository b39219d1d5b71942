"""What happens after an abnormal end: a bundle, one line, a fresh server, and no trust where none
is due."""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from sm121.core.printable import printable
from sm121.core.redaction import redact_arguments, redact_environment
from sm121.engines.managed import ManagedServer, ServerError, ServerStalled, ServerTimedOut
from sm121.evidence import cgroup, crash_bundle, death, kernel_messages
from sm121.evidence.crash_bundle import Evidence
from sm121.evidence.failure import Cause, classify
from sm121.plugin.box import BOX
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import ID, LEVEL
from sm121.plugin.terminal import announce
from sm121.run.verdict_file import CrashReport
from sm121.stress.fault import OWNERS, UnderLoad

#: After these the server is good for nothing, or not known to be.
_REPLACE = ("hang", "stuck_request", "connection", "memory_floor", "not_idle", "zombie", "http_5xx")
_DONE = pytest.StashKey[set[str]]()
#: How pytest-timeout's message begins: it raises pytest's own exception.
_TIMEOUT = "Timeout "
#: Within which an API server ends after its engine has.
_DYING_S = 6.0
#: When the test that runs began, by ``time.monotonic``.
_BEGAN = pytest.StashKey[float]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash.get(RUN, None)
    if run is None or LEVEL not in item.stash:
        return
    item.config.stash[_BEGAN] = time.monotonic()
    if run.aborted is not None:
        _tell_of_the_abort(run)
        pytest.skip(f"NOT_RUN: the run was ended: {run.aborted[1]}")
    if run.distrusted is not None:
        pytest.skip(f"NOT_RUN: {run.distrusted}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    run = item.config.stash.get(RUN, None)
    if run is not None and LEVEL in item.stash and call.excinfo is not None:
        error = call.excinfo.value
        if isinstance(error, ServerError | UnderLoad) or _timed_out(error):
            _after(run, item, error)
    return (yield)


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, pytest.fail.Exception) and str(error).startswith(_TIMEOUT)


def _after(run: Run, item: pytest.Item, error: BaseException) -> None:
    if isinstance(error, ServerError):
        seen = run.config.stash.setdefault(_DONE, set())
        if str(error.log) in seen:
            return  # every test that wants this server gets the same error
        seen.add(str(error.log))
    managed = run.pool.latest if run.pool is not None else None
    evidence = gather(run, item.stash[ID], error, managed)
    kind = evidence.cause.kind
    tell(run, evidence)
    dead = managed is not None and not managed.running
    if dead or kind in _REPLACE or _timed_out(error) or isinstance(error, ServerError):
        replace_server(run, evidence)


@pytest.hookimpl(tryfirst=True)  # before the run is closed
def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN, None)
    if run is not None and run.aborted is not None:
        _tell_of_the_abort(run)


def _tell_of_the_abort(run: Run) -> None:
    """Once; where a server was ended by it, the server's death has told."""
    assert run.aborted is not None
    kind, _ = run.aborted
    if all(crash.kind != kind for crash in run.file.crashes):
        found = gather(run, "", None, run.pool.latest if run.pool is not None else None)
        found.what, found.test = "the machine, with no server of the suite to blame", None
        tell(run, found)


@pytest.hookimpl(trylast=True)  # after the run was opened
def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN, None)
    if run is not None:
        run.on_unwritten = _unwritten


def _unwritten(run: Run, error: OSError) -> None:
    """A full disk, or a report directory that has gone."""
    cause = Cause(
        kind="disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "report_unwritable",
        summary=f"{run.directory}: {run.unwritten}",
        owner="whoever keeps this disk: what is not written is lost",
        remedy="make room, or give another --report-dir",
    )
    managed = run.pool.latest if run.pool is not None else None
    found = gather(run, "", None, managed)
    found.cause, found.what, found.test = cause, "the report", None
    tell(run, found)


def gather(
    run: Run, test: str, error: BaseException | None, managed: ManagedServer | None
) -> Evidence:
    """Everything that is known at this moment; nothing is stopped."""
    dying = managed is not None and _is_dying(managed, error, run.config.stash.get(_BEGAN, 0.0))
    since = managed.launched if managed is not None and managed.launched else run.started
    kernel = kernel_messages.since(since)
    after = cgroup.memory_events()
    exits = managed.exits() if managed is not None else []
    tree = managed.look_at_tree() if managed is not None else []
    status = managed.exit_status if managed is not None else None
    cause = _cause(run, error, managed if dying else None, tree)
    if isinstance(error, ServerError) or dying:
        cause = death.cause_of(
            cause,
            exits=exits,
            kernel=kernel,
            kills=_kills(run.cgroup_before, after),
            pids=managed.known_pids if managed is not None else set(),
        )
    if run.aborted is not None:
        cause = Cause(kind="memory_floor", summary=run.aborted[1], owner=OWNERS["memory_floor"])
    observer = run.observer
    configuration = managed.configuration if managed is not None else None
    variables = run.engine_environment(configuration) if configuration is not None else {}
    history = [*run.sampler.history] if run.sampler is not None else []
    return Evidence(
        cause=cause,
        what=_what(error),
        test=test,
        log=managed.log if managed is not None else run.settings.server_log,
        exit_status=status,
        exits=exits,
        tree=tree,
        kernel=kernel,
        cgroup_before=run.cgroup_before,
        cgroup_after=after,
        memory=_memory(observer.memory_record() if observer else None, history),
        in_flight=None if observer is None else observer.under_way(),
        metrics=_metrics(run, managed),
        configuration=None
        if configuration is None
        else {
            "name": configuration.name,
            "engine": configuration.engine,
            "version": run.file.engine.version,
            "python": configuration.python,
            "model": configuration.model,
            "arguments": redact_arguments(configuration.arguments, run.secrets),
            "environment": redact_environment(dict(configuration.environment), run.secrets),
            "debug": configuration.debug,
        },
        environment=variables,
        debug=run.settings.engine_debug,
        rerun=_rerun(run, test),
        missing=_missing(run, managed),
    )


def tell(run: Run, evidence: Evidence) -> None:
    """Write the bundle, note it in verdict.json, and say it in one line."""
    bundle: Path | None = None
    elsewhere: str | None
    try:
        bundle, elsewhere = crash_bundle.write_somewhere(
            evidence, run.directory / crash_bundle.FOLDER, run.redact
        )
    except OSError as error:
        elsewhere = f"no bundle could be written: {error}"
    inside = bundle is not None and bundle.is_relative_to(run.directory)
    where = str(bundle.relative_to(run.directory) if inside and bundle else bundle or elsewhere)
    summary = printable(run.redact(evidence.cause.summary))
    run.file.crashes.append(
        CrashReport(
            kind=evidence.cause.kind,
            summary=summary,
            owner=evidence.cause.owner,
            test=evidence.test,
            bundle=where if bundle is not None else None,
        )
    )
    note = f" ({elsewhere})" if elsewhere and bundle is not None else ""
    announce(
        run.config,
        "crash",
        printable(
            run.redact(
                f"{evidence.cause.kind}: {summary} ({evidence.what}; ask: {evidence.cause.owner}); "
                f"bundle: {bundle or where}{note}"
            )
        ),
    )


def replace_server(run: Run, evidence: Evidence) -> None:
    """Stop the server, so that the next test gets another, and see whether the machine is well."""
    if xids := evidence.kernel.xids:
        run.distrusted = (
            f"the driver reported an error of the GPU ({xids[0].strip()[:120]}): nothing measured "
            "or computed after it can be trusted; reset the GPU or reboot"
        )
    if run.pool is None:
        _look_at_attached(run)
        return
    report = run.pool.stop()
    if report is not None and not report.clean:
        run.distrusted = (
            "the machine is not as it was before the crash: "
            f"{len(report.survivors)} processes left, port free: {report.port_free}, "
            f"{report.memory_missing_bytes / 2**30:.1f} GiB missing"
        )
    box = run.config.stash.get(BOX, None)
    if box is not None and run.aborted is None:
        box.read_after()  # DEGRADED makes every later measurement INCONCLUSIVE


def _look_at_attached(run: Run) -> None:
    if run.attached is None:
        return
    with run.attached.endpoint.http(timeout_s=10.0) as http:
        try:
            healthy = http.get("/v1/models").status_code == 200
        except httpx.HTTPError:
            healthy = False
    if not healthy:
        run.distrusted = "the attached server answers no more, and is not the suite's to restart"


def _is_dying(managed: ManagedServer, error: BaseException | None, began: float) -> bool:
    """Whether the server has ended since the test began, or a process without which it does not
    serve. What its clients see comes first: a reset connection, a 500; so it is given some seconds.
    """
    if managed.was_stopped:
        return False
    asked = isinstance(error, ServerError) or (
        isinstance(error, UnderLoad) and error.kind in ("connection", "http_5xx", "bad_stream")
    )
    deadline = time.monotonic() + (_DYING_S if asked else 0.0)
    while managed.exit_status is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if managed.exit_status is not None:
        return True
    killed = [
        entry
        for entry in managed.exits()
        if (entry.get("status") or 0) < 0
        and entry["status"] != -signal.SIGTERM
        and entry.get("monotonic_s", began) >= began
    ]
    return bool(killed) and not managed.answers()


def _cause(
    run: Run, error: BaseException | None, managed: ManagedServer | None, tree: list[dict[str, Any]]
) -> Cause:
    if isinstance(error, ServerTimedOut | ServerStalled) and error.cause.kind in death.VAGUE:
        return Cause(
            kind="hang",
            summary=_what(error),
            owner=OWNERS["hang"],
            remedy="run again with --engine-debug, and take stacks (py-spy dump) while it hangs",
            lines=error.cause.lines,
        )
    if isinstance(error, ServerError):
        return error.cause
    if managed is not None:
        return classify(managed.log, managed.exit_status)
    stopped = [f"{e['name']} ({e['pid']})" for e in tree if e["status"] == "stopped"]
    aside = f"; stopped by a signal: {', '.join(stopped)}" if stopped else ""
    if isinstance(error, UnderLoad):
        return Cause(
            kind=error.kind,
            summary=error.faults[0].text + aside,
            owner=OWNERS[error.kind],
            lines=list(dict.fromkeys(run.redact(str(fault)) for fault in error.faults))[:20],
        )
    return Cause(
        kind="timeout",
        summary=f"the test did not end in its time ({str(error).splitlines()[0]}){aside}",
        owner="the engine, if requests were under way (in-flight.json); else the test",
        remedy="raise [test_timeout_s] of the profile only when the server was making progress",
    )


def _what(error: BaseException | None) -> str:
    if isinstance(error, UnderLoad):
        return f"under load ({error.what})"
    if isinstance(error, ServerError):
        return error.what
    return "a test ran out of time"


def _kills(before: Mapping[str, int] | str, after: Mapping[str, int] | str) -> int:
    if isinstance(before, str) or isinstance(after, str):
        return 0
    return after.get("oom_kill", 0) - before.get("oom_kill", 0)


def _memory(
    timeline: dict[str, Any] | None, history: list[tuple[float, int, int]]
) -> dict[str, Any] | None:
    if timeline is None and not history:
        return None
    return {
        "under_load": timeline,
        "run": {
            "columns": ["monotonic_s", "rss_bytes", "available_bytes"],
            "now": round(time.monotonic(), 2),
            "samples": history,
        },
    }


def _metrics(run: Run, managed: ManagedServer | None) -> str | None:
    if run.observer is not None and run.observer.metrics is not None:
        return run.observer.metrics
    name = managed.log.stem if managed is not None else "attached"
    kept = run.directory / f"metrics-{name}.txt"
    return kept.read_text("utf-8", "replace") if kept.is_file() else None


def _rerun(run: Run, test: str) -> str:
    if run.pool is None:
        return "start the server with --engine-debug's variables (see the README) and attach again"
    if run.settings.engine_debug:
        return ""
    return f"pytest --engine-debug '{test}'"


def _missing(run: Run, managed: ManagedServer | None) -> dict[str, str]:
    if managed is not None:
        return {}
    why = "the server is attached: its processes are its owner's"
    log = {} if run.settings.server_log else {"log": "not known; give --server-log"}
    return {"tree": why, "exits": why, **log}
