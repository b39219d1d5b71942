"""The report of an abnormal end: a bundle, one line of output and a fresh server.

Where a fresh server is not enough, later results are distrusted.
"""

import errno
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sm121.core.printable import printable
from sm121.core.server import Node
from sm121.engines import managed_evidence
from sm121.engines.life import DYING_S, Dead, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError, ServerStalled, ServerTimedOut, StartError
from sm121.evidence import cgroup, crash_bundle, death, kernel_messages
from sm121.evidence.failure import Cause, classify
from sm121.evidence.kernel_messages import KernelMessages
from sm121.run.events import Died, Distrusted
from sm121.run.machine_report import CrashReport
from sm121.session.session import Session
from sm121.stress.checks import OWNERS, UnderLoad

#: Kinds of failure after which the server no longer works, or may not.
_REPLACE = ("hang", "stuck_request", "connection", "memory_floor", "not_idle", "zombie", "http_5xx")
#: Faults under load after which a server may turn out to be dying.
_MAY_BE_DYING = ("connection", "http_5xx", "bad_stream")
#: At the boundaries of tests /health is not requested more often: they may come by the hundred.
_LATELY_S = 1.0
#: Distinct faults under load that a cause lists.
_MOST_FAULTS = 20
_ATTACHED = "the server is attached: its processes are its owner's"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RanOutOfTime(Exception):
    """A test did not end within its time limit; the message is the first line that says so."""


class CrashDesk:
    """Reports each abnormal end of a session once, and replaces the server.

    Args:
        session: The session. The desk sets its `crashed` and `on_unwritten`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        session.run.servers.crashed = self.after_crash
        session.run.record.on_unwritten = self.after_unwritten
        #: The causes of servers already reported, by log: all tests that want such a server have
        #: its error.
        self._reported: dict[Path, Cause] = {}
        self._test_began = 0.0

    def before_test(self, test: str, level: str) -> None:
        """Look at the server before a test, so that the test is not blamed for an earlier end.

        Args:
            test: The test's id.
            level: Its level.
        """
        run = self._session.run
        if level != run.record.phase[0]:
            run.log_errors.judge()
            run.paths.judge_again()
            self._session.kernel.judge()
            self._session.note_resources()
        self._look(level, f"before {test}")
        run.record.phase = (level, f"in {test}")
        self._test_began = time.monotonic()

    def after_test(self, test: str, level: str) -> None:
        """Look at the server after a test that has ended and is decided.

        Args:
            test: The test's id.
            level: Its level.
        """
        self._look(level, f"after {test}")

    def _look(self, level: str, where: str) -> None:
        self._session.run.record.phase = (level, where)
        self._session.run.servers.look(lately_s=_LATELY_S)

    @property
    def _managed(self) -> ManagedServer | None:
        if self._session.run.servers.pool is not None:
            return self._session.run.servers.pool.latest
        return None

    def after_error(self, test: str, error: Exception) -> None:
        """Report an error of a test which means that its server may have failed.

        Args:
            test: The test's id.
            error: The error, which gets the cause that is found. Errors of a server that was
                reported already get its cause, and are not reported again.
        """
        if isinstance(error, ServerError) and error.log in self._reported:
            error.cause = self._reported[error.log]
            return
        managed = self._managed
        evidence = self._gather(test, error, managed)
        if isinstance(error, ServerError):
            error.cause = self._reported[error.log] = evidence.cause
        self._report(evidence, _happened(error, ended=evidence.processes.exit_status is not None))
        dead = managed is not None and not managed.running
        if dead or not isinstance(error, UnderLoad) or evidence.cause.kind in _REPLACE:
            self._replace_server(evidence)

    def after_crash(self, end: ServerError | Dead, test: str | None) -> Cause:
        """Report a server that died between two tests, or in a cell of the matrix.

        Args:
            end: The error of its start, or its death.
            test: The test's id; None between two tests.

        Returns:
            The cause.
        """
        managed = self._managed
        evidence = self._gather(test, end, managed)
        if isinstance(end, ServerError):
            end.cause = evidence.cause
        if managed is None:
            evidence.what = "the attached server"
            self._report(evidence)
        else:
            self._report(evidence, _happened(end, ended=True))
            self._replace_server(evidence)
        return evidence.cause

    def after_unwritten(self, error: OSError, why: str) -> None:
        """Report that the report cannot be written: the disk is full, or the directory is gone.

        Args:
            error: The error of the operating system.
            why: The reason in words.
        """
        evidence = self._gather(None, None, self._managed)
        evidence.what = "the report"
        kind = "disk_full" if error.errno in _DISK_FULL else "report_unwritable"
        evidence.cause = Cause(
            kind=kind,
            summary=f"{self._session.run.record.directory}: {why}",
            owner="whoever keeps this disk: what is not written is lost",
            remedy="make room, or give another --report-dir",
        )
        self._report(evidence)

    def after_abort(self) -> None:
        """Report that the machine ended the run, unless a server's death was reported for it."""
        session = self._session
        run = session.run
        if run.servers.aborted is None:
            return
        if all(crash.kind != run.servers.aborted[0] for crash in run.record.file.crashes):
            evidence = self._gather(None, None, self._managed)
            evidence.what = "the machine, with no server of the suite to blame"
            self._report(evidence)

    def _gather(
        self, test: str | None, error: Exception | Dead | None, managed: ManagedServer | None
    ) -> crash_bundle.Evidence:
        """Collect the evidence of an end, with its cause."""
        session = self._session
        run = session.run
        is_dying = self._is_dying(error)
        kernel = self._kernel_messages(managed)
        processes = managed_evidence.processes_of(managed)
        cause = self._cause_at_end(error, managed, processes, kernel, is_dying=is_dying)
        load = run.servers.load
        evidence = crash_bundle.Evidence(
            cause=cause,
            what=_subject(error),
            test=test,
            processes=processes,
            kernel=kernel,
            cgroup=crash_bundle.CgroupCounters(
                session.kernel.cgroup_before, cgroup.memory_events()
            ),
            memory=self._memory(),
            metrics=self._metrics(managed),
            setup=crash_bundle.EngineSetup(debug=session.settings.engine.debug),
            rerun=self._rerun(test),
        )
        if load is not None:
            evidence.in_flight = [request.record() for request in load.client.under_way()]
        if managed is not None:
            version = run.record.file.engine.version
            managed_evidence.add(evidence, managed, version=version, secrets=run.record.secrets)
        else:
            self._add_attached(evidence)
        return evidence

    def _kernel_messages(self, managed: ManagedServer | None) -> KernelMessages:
        """The kernel's messages since the server's start, or since the session's."""
        session = self._session
        since = session.kernel.began
        if managed is not None and managed.launch.at:
            since = managed.launch.at
        if session.run.servers.pool is None:
            return kernel_messages.since(since, ())
        return kernel_messages.since(since, session.run.servers.pool.start_spans)

    def _cause_at_end(
        self,
        error: Exception | Dead | None,
        managed: ManagedServer | None,
        processes: crash_bundle.EngineProcesses,
        kernel: KernelMessages,
        *,
        is_dying: bool,
    ) -> Cause:
        """The cause by the error, the processes, the kernel, and the logs of the nodes."""
        session = self._session
        run = session.run
        if run.servers.aborted is not None:
            return Cause(
                kind="memory_floor",
                summary=run.servers.aborted[1],
                owner=OWNERS["memory_floor"],
            )
        dead = managed if is_dying else None
        cause = self._cause(error, dead, processes.tree)
        fault = managed.fault() if managed is not None else None
        is_death = isinstance(error, ServerError) or (managed and isinstance(error, Dead))
        if fault is not None:
            cause = fault.cause
        elif is_death or is_dying:
            cause = death.cause_of(
                cause,
                exits=processes.exits,
                kernel=kernel,
                kills=cgroup.kills(session.kernel.cgroup_before),
                pids=processes.pids,
            )
        spans = run.servers.attached.nodes if run.servers.attached is not None else ()
        if spans and (isinstance(error, Dead) or cause.kind in (*_REPLACE, "timeout")):
            return _by_logs(cause, spans)
        return cause

    def _add_attached(self, evidence: crash_bundle.Evidence) -> None:
        session = self._session
        given = session.settings.attached
        evidence.log = given.log if given is not None else None
        evidence.missing = {"tree": _ATTACHED, "exits": _ATTACHED}
        if evidence.log is None:
            evidence.missing["log"] = "not known; give --server-log"
        evidence.nodes = {}
        if session.run.servers.attached is not None:
            for node in session.run.servers.attached.nodes[1:]:
                evidence.nodes[f"node-{node.rank}"] = (node.log, {"node": str(node)})

    def _is_dying(self, error: Exception | Dead | None) -> bool:
        managed = self._managed
        life = self._session.run.servers.life
        if not isinstance(life, ManagedLife):
            if managed is None or managed.launch.was_stopped:
                return False
            return managed.launch.exit_status is not None
        lost = isinstance(error, UnderLoad) and error.kind in _MAY_BE_DYING
        wait_s = 0.0
        if lost or isinstance(error, ServerError | Dead):
            wait_s = DYING_S
        return life.ended_since(self._test_began, wait_s=wait_s)

    def _report(self, evidence: crash_bundle.Evidence, happened: str = "") -> None:
        """Write the bundle, note it in verdict.json, and print one line.

        ``happened``: the end in words without the cause; empty where the cause has them.
        """
        session = self._session
        run = session.run
        cause = evidence.cause
        bundle: Path | None = None
        elsewhere: str | None
        try:
            bundle, elsewhere = crash_bundle.write_somewhere(
                evidence,
                run.record.directory / crash_bundle.FOLDER,
                run.record.redact,
            )
        except OSError as error:
            elsewhere = f"no bundle could be written: {error}"
        crash = CrashReport(
            kind=cause.kind,
            summary=printable(run.record.redact(cause.summary)),
            owner=cause.owner,
            happened=happened,
            test=evidence.test,
        )
        if bundle is not None:
            crash.bundle = str(bundle)
            if bundle.is_relative_to(run.record.directory):
                crash.bundle = str(bundle.relative_to(run.record.directory))
        run.record.emit(Died(crash))
        where = str(bundle or elsewhere)
        if bundle is not None and elsewhere:
            where += f" ({elsewhere})"
        line = (
            f"{cause.kind}: {crash.summary} ({evidence.what}; ask: {cause.owner}); bundle: {where}"
        )
        run.record.say("crash", printable(run.record.redact(line)))

    def _replace_server(self, evidence: crash_bundle.Evidence) -> None:
        session = self._session
        run = session.run
        xids = evidence.kernel.xids
        if xids:
            self._distrust(
                f"the driver reported an error of the GPU ({xids[0].strip()[:120]}): nothing "
                "measured or computed after it can be trusted; reset the GPU or reboot"
            )
        if run.servers.pool is None:
            if run.servers.life is not None and not run.servers.life.answers():
                self._distrust(
                    "the attached server answers no more, and is not the suite's to restart"
                )
            return
        if run.servers.life is not None:
            run.servers.life.accounted = True  # the bundle has its log
        report = run.servers.pool.stop()
        if report is not None and not report.clean:
            self._distrust(
                "the machine is not as it was before the crash: "
                f"{len(report.survivors)} processes left, port free: {report.port_free}, "
                f"{report.memory.missing_bytes / 2**30:.1f} GiB missing"
            )
        if session.box is not None and run.servers.aborted is None:
            session.box.doubt()

    def _distrust(self, why: str) -> None:
        """Run no further test: its result would not be sure."""
        self._session.run.servers.distrusted = why
        self._session.run.record.emit(Distrusted(why))

    def _cause(
        self, error: Exception | Dead | None, dead: ManagedServer | None, tree: list[dict[str, Any]]
    ) -> Cause:
        if isinstance(error, ServerTimedOut | ServerStalled) and error.cause.kind in death.VAGUE:
            return Cause(
                kind="hang",
                summary=_subject(error),
                owner=OWNERS["hang"],
                remedy="read stacks.txt of the bundle, then run again with --engine-debug",
                lines=error.cause.lines,
            )
        if isinstance(error, ServerError | Dead):
            return error.cause
        if dead is not None:
            return classify(dead.launch.log, dead.launch.exit_status)
        stopped = []
        for process in tree:
            if process["status"] == "stopped":
                stopped.append(f"{process['name']} ({process['pid']})")
        aside = f"; stopped by a signal: {', '.join(stopped)}" if stopped else ""
        if isinstance(error, UnderLoad):
            faults = [self._session.run.record.redact(str(fault)) for fault in error.faults]
            return Cause(
                kind=error.kind,
                summary=error.faults[0].text + aside,
                owner=OWNERS[error.kind],
                lines=list(dict.fromkeys(faults))[:_MOST_FAULTS],
            )
        return Cause(
            kind="timeout",
            summary=f"the test did not end in its time ({error}){aside}",
            owner="the engine, if requests were under way (in-flight.json); else the test",
            remedy="raise [test_timeout_s] of the profile only when the server was making progress",
        )

    def _memory(self) -> dict[str, Any] | None:
        session = self._session
        under_load = None
        if session.run.servers.load is not None:
            under_load = session.run.servers.load.timeline.record()
        history = []
        if session.sampler is not None:
            history = list(session.sampler.history)
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
        load = self._session.run.servers.load
        if load is not None and load.timeline.metrics is not None:
            return load.timeline.metrics
        file = self._session.run.paths.metrics_file(
            managed.launch.log if managed is not None else None
        )
        if file.is_file():
            return file.read_text("utf-8", "replace")
        return None

    def _rerun(self, test: str | None) -> str:
        if self._session.run.servers.pool is None:
            return (
                "start the server with --engine-debug's variables (see the README) and attach again"
            )
        if self._session.settings.engine.debug:
            return ""
        if self._session.again is not None:
            return self._session.again(test)
        return f"pytest --engine-debug {shlex.quote(test or '')}".rstrip()


def _by_logs(cause: Cause, nodes: Collection[Node]) -> Cause:
    """The cause of the node of an attached server that was lost.

    It is the cause in the log of a node that has one; else the one in the log of a node whose
    connection to its peer broke; else the given cause.
    """
    of_peer: Cause | None = None
    for node in nodes:
        if not node.log or not node.log.is_file():
            continue
        node_cause = classify(node.log)
        if node_cause.kind in death.VAGUE:
            continue
        if node_cause.kind != "nccl":
            return _on_node(node, node_cause, f"{node}: {node_cause.summary} ({cause.summary})")
        if of_peer is None:
            summary = f"as {node} says, {node_cause.summary} ({cause.summary})"
            of_peer = _on_node(node, node_cause, summary)
    return of_peer or cause


def _on_node(node: Node, cause: Cause, summary: str) -> Cause:
    owner = f"{cause.owner}; on {node.name}"
    return cause.model_copy(update={"summary": summary, "owner": owner})


def _happened(error: Exception | Dead, *, ended: bool) -> str:
    if isinstance(error, StartError):
        return "the server did not start"
    if isinstance(error, ServerError | Dead) or ended:
        return "the server died"
    if isinstance(error, RanOutOfTime):
        return "a test ran out of time"
    return "the server failed"


def _subject(error: Exception | Dead | None) -> str:
    if isinstance(error, UnderLoad):
        return f"under load ({error.what})"
    if isinstance(error, ServerError | Dead):
        return error.what
    return "a test ran out of time"
