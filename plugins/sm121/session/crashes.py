"""What happens after an abnormal end: a bundle, one line of output and a fresh server. Where a
fresh server is not enough, later results are distrusted."""

import errno
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sm121.core.printable import printable
from sm121.core.redaction import redact_arguments, redact_environment
from sm121.core.server import Node
from sm121.engines.life import DYING_S, Dead, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError, ServerStalled, ServerTimedOut, StartError
from sm121.evidence import cgroup, crash_bundle, death, kernel_messages
from sm121.evidence.failure import Cause, classify
from sm121.run.verdict_file import CrashReport
from sm121.session.session import Session
from sm121.stress.checks import OWNERS, UnderLoad

#: After these the server no longer works, or may not.
_REPLACE = ("hang", "stuck_request", "connection", "memory_floor", "not_idle", "zombie", "http_5xx")
#: Faults under load after which a server may turn out to be dying.
_MAY_BE_DYING = ("connection", "http_5xx", "bad_stream")
#: At the boundaries of tests /health is not asked more often: they may come by the hundred.
_LATELY_S = 1.0
_ATTACHED = "the server is attached: its processes are its owner's"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RanOutOfTime(Exception):
    """A test did not end within its time limit; the message is the first line that says so."""


class CrashDesk:
    """Reports each abnormal end of a session once, and replaces the server."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.on_crash = self.after_crash
        session.on_unwritten = self.after_unwritten
        #: Logs of servers already reported: all tests that want such a server have its error.
        self._reported: set[Path] = set()
        self._test_began = 0.0

    def before_test(self, test: str, level: str) -> None:
        """A test is about to begin. A process that ended earlier is not blamed on it."""
        if level != self._session.phase[0]:
            self._session.judge_errors()
            self._session.judge_paths_again()
            self._session.judge_kernel()
        self._look(level, f"before {test}")
        self._session.phase = (level, f"in {test}")
        self._test_began = time.monotonic()

    def after_test(self, test: str, level: str) -> None:
        """A test has ended and is decided. Look whether its server still lives."""
        self._look(level, f"after {test}")

    def _look(self, level: str, where: str) -> None:
        self._session.phase = (level, where)
        self._session.look_at_the_server(lately_s=_LATELY_S)

    @property
    def _managed(self) -> ManagedServer | None:
        if self._session.pool is not None:
            return self._session.pool.latest
        return None

    def after_error(self, test: str, error: Exception) -> None:
        """A test ended with an error which means that its server may have failed."""
        if isinstance(error, ServerError):
            if error.log in self._reported:
                return
            self._reported.add(error.log)
        managed = self._managed
        evidence = self._gather(test, error, managed)
        self._tell(evidence, _happened(error, ended=evidence.exit_status is not None))
        dead = managed is not None and not managed.running
        if dead or not isinstance(error, UnderLoad) or evidence.cause.kind in _REPLACE:
            self._replace_server(evidence)

    def after_crash(self, end: ServerError | Dead, test: str | None) -> Cause:
        """A server died between two tests, or in a cell of the matrix."""
        managed = self._managed
        evidence = self._gather(test, end, managed)
        if managed is None:
            evidence.what = "the attached server"
            self._tell(evidence)
        else:
            self._tell(evidence, _happened(end, ended=True))
            self._replace_server(evidence)
        return evidence.cause

    def after_unwritten(self, error: OSError, why: str) -> None:
        """The report cannot be written: the disk is full, or the directory is gone."""
        evidence = self._gather(None, None, self._managed)
        evidence.what = "the report"
        evidence.cause = Cause(
            kind="disk_full" if error.errno in _DISK_FULL else "report_unwritable",
            summary=f"{self._session.directory}: {why}",
            owner="whoever keeps this disk: what is not written is lost",
            remedy="make room, or give another --report-dir",
        )
        self._tell(evidence)

    def after_abort(self) -> None:
        """The machine ended the run. Report it, unless a server's death was reported for it."""
        session = self._session
        if session.aborted is None:
            return
        if all(crash.kind != session.aborted[0] for crash in session.file.crashes):
            evidence = self._gather(None, None, self._managed)
            evidence.what = "the machine, with no server of the suite to blame"
            self._tell(evidence)

    def _gather(
        self, test: str | None, error: Exception | Dead | None, managed: ManagedServer | None
    ) -> crash_bundle.Evidence:
        session = self._session
        dying = self._is_dying(error)
        since = managed.launched if managed is not None and managed.launched else session.started
        kernel = kernel_messages.since(since, session.pool.start_spans if session.pool else ())
        exits = managed.exits() if managed is not None else []
        tree = managed.look_at_tree() if managed is not None else []
        pids = managed.known_pids if managed is not None else set()
        cause = self._cause(error, managed if dying else None, tree)
        if managed is not None and (fault := managed.fault()) is not None:
            cause = fault.cause
        elif isinstance(error, ServerError) or dying or (managed and isinstance(error, Dead)):
            kills = cgroup.kills(session.cgroup_before)
            cause = death.cause_of(cause, exits=exits, kernel=kernel, kills=kills, pids=pids)
        spans = session.attached.nodes if session.attached is not None else ()
        if spans and (isinstance(error, Dead) or cause.kind in (*_REPLACE, "timeout")):
            cause = _by_logs(cause, spans)
        if session.aborted is not None:
            cause = Cause(
                kind="memory_floor", summary=session.aborted[1], owner=OWNERS["memory_floor"]
            )
        load = session.load
        evidence = crash_bundle.Evidence(
            cause=cause,
            what=_what(error),
            test=test,
            exits=exits,
            tree=tree,
            kernel=kernel,
            cgroup_before=session.cgroup_before,
            cgroup_after=cgroup.memory_events(),
            memory=self._memory(),
            in_flight=None if load is None else [each.record() for each in load.client.under_way()],
            metrics=self._metrics(managed),
            debug=session.settings.engine_debug,
            rerun=self._rerun(test),
        )
        if managed is not None:
            evidence.log = managed.log
            evidence.exit_status = managed.exit_status
            evidence.configuration = self._record(managed)
            evidence.nodes = managed.described()
            evidence.environment = session.engine_environment(managed.configuration)
            return evidence
        evidence.log = session.settings.server_log
        why = _ATTACHED
        log = {"log": "not known; give --server-log"} if evidence.log is None else {}
        evidence.missing = {"tree": why, "exits": why, **log}
        named = {f"node-{node.rank}": (node.log, {"node": str(node)}) for node in spans[1:]}
        evidence.nodes = named
        return evidence

    def _is_dying(self, error: Exception | Dead | None) -> bool:
        managed = self._managed
        life = self._session.life
        if not isinstance(life, ManagedLife):
            if managed is None or managed.was_stopped:
                return False
            return managed.exit_status is not None
        lost = isinstance(error, UnderLoad) and error.kind in _MAY_BE_DYING
        wait_s = DYING_S if lost or isinstance(error, ServerError | Dead) else 0.0
        return life.ended_since(self._test_began, wait_s=wait_s)

    def _tell(self, evidence: crash_bundle.Evidence, happened: str = "") -> None:
        """Write the bundle, note it in verdict.json, and print one line. `happened`: in words
        without the cause; nothing where the cause says it."""
        session = self._session
        cause = evidence.cause
        bundle: Path | None = None
        elsewhere: str | None
        try:
            bundle, elsewhere = crash_bundle.write_somewhere(
                evidence, session.directory / crash_bundle.FOLDER, session.redact
            )
        except OSError as error:
            elsewhere = f"no bundle could be written: {error}"
        crash = CrashReport(
            kind=cause.kind,
            summary=printable(session.redact(cause.summary)),
            owner=cause.owner,
            happened=happened,
            test=evidence.test,
        )
        if bundle is not None:
            inside = bundle.is_relative_to(session.directory)
            crash.bundle = str(bundle.relative_to(session.directory) if inside else bundle)
        session.file.crashes.append(crash)
        note = f" ({elsewhere})" if elsewhere and bundle is not None else ""
        line = (
            f"{cause.kind}: {crash.summary} ({evidence.what}; ask: {cause.owner}); "
            f"bundle: {bundle or elsewhere}{note}"
        )
        session.say("crash", printable(session.redact(line)))

    def _replace_server(self, evidence: crash_bundle.Evidence) -> None:
        session = self._session
        xids = evidence.kernel.xids
        if xids:
            session.distrusted = (
                f"the driver reported an error of the GPU ({xids[0].strip()[:120]}): nothing "
                "measured or computed after it can be trusted; reset the GPU or reboot"
            )
        if session.pool is None:
            if session.life is not None and not session.life.answers():
                session.distrusted = (
                    "the attached server answers no more, and is not the suite's to restart"
                )
            return
        if session.life is not None:
            session.life.accounted = True  # the bundle has its log
        report = session.pool.stop()
        if report is not None and not report.clean:
            session.distrusted = (
                "the machine is not as it was before the crash: "
                f"{len(report.survivors)} processes left, port free: {report.port_free}, "
                f"{report.memory.missing_bytes / 2**30:.1f} GiB missing"
            )
        if session.box is not None and session.aborted is None:
            session.box.doubt()

    def _cause(
        self, error: Exception | Dead | None, dead: ManagedServer | None, tree: list[dict[str, Any]]
    ) -> Cause:
        if isinstance(error, ServerTimedOut | ServerStalled) and error.cause.kind in death.VAGUE:
            return Cause(
                kind="hang",
                summary=_what(error),
                owner=OWNERS["hang"],
                remedy="run again with --engine-debug, and take stacks (py-spy dump) while it "
                "hangs",
                lines=error.cause.lines,
            )
        if isinstance(error, ServerError | Dead):
            return error.cause
        if dead is not None:
            return classify(dead.log, dead.exit_status)
        stopped = [f"{e['name']} ({e['pid']})" for e in tree if e["status"] == "stopped"]
        aside = f"; stopped by a signal: {', '.join(stopped)}" if stopped else ""
        if isinstance(error, UnderLoad):
            faults = (self._session.redact(str(fault)) for fault in error.faults)
            return Cause(
                kind=error.kind,
                summary=error.faults[0].text + aside,
                owner=OWNERS[error.kind],
                lines=list(dict.fromkeys(faults))[:20],
            )
        return Cause(
            kind="timeout",
            summary=f"the test did not end in its time ({error}){aside}",
            owner="the engine, if requests were under way (in-flight.json); else the test",
            remedy="raise [test_timeout_s] of the profile only when the server was making progress",
        )

    def _memory(self) -> dict[str, Any] | None:
        session = self._session
        under_load = session.load.timeline.record() if session.load is not None else None
        history = [*session.sampler.history] if session.sampler is not None else []
        if under_load is None and not history:
            return None
        return {
            "under_load": under_load,
            "run": {
                "columns": ["monotonic_s", "rss_bytes", "available_bytes"],
                "now": round(time.monotonic(), 2),
                "samples": history,
            },
        }

    def _metrics(self, managed: ManagedServer | None) -> str | None:
        load = self._session.load
        if load is not None and load.timeline.metrics is not None:
            return load.timeline.metrics
        file = self._session.metrics_file(managed.log if managed is not None else None)
        if file.is_file():
            return file.read_text("utf-8", "replace")
        return None

    def _record(self, managed: ManagedServer) -> dict[str, Any]:
        configuration = managed.configuration
        secrets = self._session.secrets
        return {
            "name": configuration.name,
            "engine": configuration.engine,
            "version": self._session.file.engine.version,
            "python": configuration.python,
            "model": configuration.model,
            "arguments": redact_arguments(configuration.arguments, secrets),
            "environment": redact_environment(dict(configuration.environment), secrets),
            "debug": configuration.debug,
        }

    def _rerun(self, test: str | None) -> str:
        if self._session.pool is None:
            return (
                "start the server with --engine-debug's variables (see the README) and attach again"
            )
        if self._session.settings.engine_debug:
            return ""
        if self._session.again is not None:
            return self._session.again(test)
        return f"pytest --engine-debug {shlex.quote(test or '')}".rstrip()


def _by_logs(cause: Cause, nodes: Collection[Node]) -> Cause:
    """Which node of an attached server was lost: the one whose log says why it ended, else what
    another's says of its peer; the cause itself where none does."""
    logged = [(node, classify(node.log)) for node in nodes if node.log and node.log.is_file()]
    definite = [each for each in logged if each[1].kind not in death.VAGUE]
    for node, node_cause in sorted(definite, key=lambda each: each[1].kind == "nccl"):
        says = f"as {node} says, " if node_cause.kind == "nccl" else f"{node}: "
        summary = f"{says}{node_cause.summary} ({cause.summary})"
        owner = f"{node_cause.owner}; on {node.name}"
        return node_cause.model_copy(update={"summary": summary, "owner": owner})
    return cause


def _happened(error: Exception | Dead, *, ended: bool) -> str:
    if isinstance(error, StartError):
        return "the server did not start"
    if isinstance(error, ServerError | Dead) or ended:
        return "the server died"
    if isinstance(error, RanOutOfTime):
        return "a test ran out of time"
    return "the server failed"


def _what(error: Exception | Dead | None) -> str:
    if isinstance(error, UnderLoad):
        return f"under load ({error.what})"
    if isinstance(error, ServerError | Dead):
        return error.what
    return "a test ran out of time"
