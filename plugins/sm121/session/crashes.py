"""Reports an abnormal end: writes a crash bundle, prints one line, and replaces the server.

If a new server is not sufficient, for example after a GPU error, later results are distrusted.
"""

import errno
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from sm121.core.printable import printable
from sm121.core.server import Node
from sm121.engines import managed_evidence
from sm121.engines.life import DYING_S, Dead, ManagedLife, logged_cause
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError, StartError
from sm121.evidence import cgroup, crash_bundle, death, kernel_messages
from sm121.evidence.failure import Cause, classify
from sm121.evidence.kernel_messages import KernelBefore
from sm121.run.events import Died
from sm121.run.load import Load
from sm121.run.machine_report import CrashReport
from sm121.run.paths import metrics_file
from sm121.run.record import RunRecord
from sm121.run.servers import Servers
from sm121.session.settings import Settings
from sm121.stress.checks import OWNERS, UnderLoad

#: The kinds of failure after which the server is replaced, because it may not work any more.
_REPLACE = ("hang", "stuck_request", "connection", "memory_floor", "not_idle", "zombie", "http_5xx")
#: The faults under load that a dying server may cause.
_MAY_BE_DYING = ("connection", "http_5xx", "bad_stream")
#: The maximum number of distinct faults under load that a cause lists.
_MOST_FAULTS = 20
_ATTACHED = "the server is attached: the suite does not inspect its processes"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RanOutOfTime(Exception):
    """A test exceeded its timeout. The message is the first line of pytest-timeout's report."""


class CrashDesk:
    """Reports each crash of a run once, and makes the run start a new server.

    Args:
        record: The record of the run, which gets the crash and knows the secrets that no bundle may
            show.
        settings: The settings of the run.
        again: Returns the command that repeats the given test with ``--engine-debug``, or the whole
            run if the test is None. None if the run was not started by a command line.

    Attributes:
        before: The moment at which the run began.
    """

    def __init__(
        self,
        record: RunRecord,
        settings: Settings,
        again: Callable[[str | None], str] | None = None,
    ) -> None:
        self._record = record
        self._settings = settings
        self._again = again
        self.before = KernelBefore()
        #: The reported cause of each server's end. The keys are the servers' logs. All later tests
        #: that need such a server get the same error.
        self._reported: dict[Path, Cause] = {}
        self._unwritten_reported = False
        self._test_began = 0.0
        self._load: Load | None = None

    def begin_test(self) -> None:
        """Record that a test begins. If its server ends from now on, it ended during the test."""
        self._test_began = time.monotonic()

    def under_load(self, load: Load | None) -> None:
        """Add the samples of this load test to each crash bundle that is written from now on.

        Args:
            load: The load that begins; None: the load has ended.
        """
        self._load = load

    def after_error(self, servers: Servers, test: str, error: Exception) -> None:
        """Report an error of a test that a failed server may have caused.

        Args:
            servers: The servers of the run.
            test: The test's id.
            error: The error. The cause that is found is added to it. If the end of this server was
                already reported, its cause is added, and nothing is reported again.
        """
        if isinstance(error, ServerError) and error.log in self._reported:
            error.cause = self._reported[error.log]
            return
        managed = _latest(servers)
        evidence = self._gather(servers, test, error)
        if isinstance(error, ServerError):
            error.cause = self._reported[error.log] = evidence.cause
        self._report(evidence, _happened(error, ended=evidence.processes.exit_status is not None))
        dead = managed is not None and not managed.running
        if dead or not isinstance(error, UnderLoad) or evidence.cause.kind in _REPLACE:
            _stop_crashed(servers, evidence)

    def after_crash(self, servers: Servers, end: ServerError | Dead, test: str | None) -> Cause:
        """Report a server that died between two tests, or in a cell of the matrix.

        Args:
            servers: The servers of the run.
            end: The error of the server's failed start, or the error that reports its death.
            test: The test's id; None between two tests.

        Returns:
            The cause.
        """
        evidence = self._gather(servers, test, end)
        if isinstance(end, ServerError):
            end.cause = evidence.cause
        if _latest(servers) is None:
            evidence.what = "the attached server"
            self._report(evidence)
        else:
            self._report(evidence, _happened(end, ended=True))
            _stop_crashed(servers, evidence)
        return evidence.cause

    def after_unwritten(self, servers: Servers) -> None:
        """Report once if the report cannot be written: the disk is full, or the directory is gone.

        Args:
            servers: The servers of the run.
        """
        error = self._record.write_error
        if error is None or self._unwritten_reported:
            return
        self._unwritten_reported = True
        evidence = self._gather(servers, None, None)
        evidence.what = "the report"
        kind = "disk_full" if error.errno in _DISK_FULL else "report_unwritable"
        evidence.cause = Cause(
            kind=kind,
            summary=f"{self._record.directory}: {self._record.unwritten}",
            owner="the owner of this disk: the report is lost",
            remedy="make room, or give another --report-dir",
        )
        self._report(evidence)

    def after_abort(self, servers: Servers) -> None:
        """Report that the run ended for lack of memory, unless a server's death was reported.

        Args:
            servers: The servers of the run.
        """
        if servers.aborted is None:
            return
        if all(crash.kind != servers.aborted[0] for crash in self._record.file.crashes):
            evidence = self._gather(servers, None, None)
            evidence.what = "the machine; no server of the suite was running"
            self._report(evidence)

    def _gather(
        self, servers: Servers, test: str | None, error: Exception | Dead | None
    ) -> crash_bundle.Evidence:
        """Collect the evidence of an end, with its cause."""
        managed = _latest(servers)
        if managed is not None:
            evidence = self._of_managed(servers, managed, error)
        else:
            evidence = self._of_attached(servers, error)
        evidence.test = test
        evidence.memory = self._memory(servers)
        evidence.metrics = self._metrics(servers)
        evidence.setup.debug = self._settings.engine.debug
        evidence.rerun = self._rerun(servers, test)
        if self._load is not None:
            under_way = self._load.client.under_way()
            evidence.in_flight = [request.record() for request in under_way]
        return evidence

    def _of_managed(
        self, servers: Servers, managed: ManagedServer, error: Exception | Dead | None
    ) -> crash_bundle.Evidence:
        """Collect the evidence of the end of a server that the suite started."""
        is_dying = self._is_dying(servers, managed, error)
        cause = self._cause(servers, error, dead=managed if is_dying else None)
        is_refined = is_dying or isinstance(error, ServerError | Dead)
        if servers.aborted is not None:
            is_refined = False
        elif (fault := managed.fault()) is not None:
            cause = fault.cause
            is_refined = False
        return managed_evidence.gather(
            managed,
            cause,
            _subject(error),
            before=self.before,
            starts=_starts(servers),
            secrets=self._record.secrets,
            version=self._record.file.engine.version,
            is_refined=is_refined,
        )

    def _of_attached(
        self, servers: Servers, error: Exception | Dead | None
    ) -> crash_bundle.Evidence:
        """Collect the evidence of an end in a run that has started no server."""
        cause = self._cause(servers, error)
        nodes = servers.attached.nodes if servers.attached is not None else ()
        may_be_dead = isinstance(error, Dead) or cause.kind in (*_REPLACE, "timeout")
        if servers.aborted is None and may_be_dead:
            cause = _by_logs(cause, nodes)
        evidence = crash_bundle.Evidence(
            cause=cause,
            what=_subject(error),
            kernel=kernel_messages.since(self.before.at, _starts(servers)),
            cgroup=crash_bundle.CgroupCounters(self.before.cgroup, cgroup.memory_events()),
            missing={"tree": _ATTACHED, "exits": _ATTACHED},
            nodes={f"node-{node.rank}": (node.log, {"node": str(node)}) for node in nodes[1:]},
        )
        given = self._settings.attached
        if given is not None:
            evidence.log = given.log
        if evidence.log is None:
            evidence.missing["log"] = "not known; give --server-log"
        return evidence

    def _is_dying(
        self, servers: Servers, managed: ManagedServer, error: Exception | Dead | None
    ) -> bool:
        life = servers.life
        if not isinstance(life, ManagedLife):
            return not managed.launch.was_stopped and managed.launch.exit_status is not None
        lost = isinstance(error, UnderLoad) and error.kind in _MAY_BE_DYING
        wait_s = 0.0
        if lost or isinstance(error, ServerError | Dead):
            wait_s = DYING_S
        return life.ended_since(self._test_began, wait_s=wait_s)

    def _report(self, evidence: crash_bundle.Evidence, happened: str = "") -> None:
        """Write the bundle, record it in verdict.json, and print one line.

        ``happened``: the end in words, without the cause; empty if the cause includes it.
        """
        record = self._record
        cause = evidence.cause
        bundle: Path | None = None
        elsewhere: str | None
        try:
            bundle, elsewhere = crash_bundle.write_somewhere(
                evidence,
                record.directory / crash_bundle.FOLDER,
                record.redact,
            )
        except OSError as error:
            elsewhere = f"the crash bundle could not be written: {error}"
        crash = CrashReport(
            kind=cause.kind,
            summary=printable(record.redact(cause.summary)),
            owner=cause.owner,
            happened=happened,
            test=evidence.test,
        )
        if bundle is not None:
            crash.bundle = str(bundle)
            if bundle.is_relative_to(record.directory):
                crash.bundle = str(bundle.relative_to(record.directory))
        record.emit(Died(crash))
        where = str(bundle or elsewhere)
        if bundle is not None and elsewhere:
            where += f" ({elsewhere})"
        line = (
            f"{cause.kind}: {crash.summary} ({evidence.what}; ask: {cause.owner}); bundle: {where}"
        )
        record.say("crash", printable(record.redact(line)))

    def _cause(
        self,
        servers: Servers,
        error: Exception | Dead | None,
        *,
        dead: ManagedServer | None = None,
    ) -> Cause:
        """Find the cause from the error, and from the log of a managed server that is dead."""
        if servers.aborted is not None:
            return Cause(
                kind="memory_floor",
                summary=servers.aborted[1],
                owner=OWNERS["memory_floor"],
            )
        if isinstance(error, StartError):
            return error.cause_or_hang(
                owner=OWNERS["hang"],
                remedy="read stacks.txt of the bundle, then run again with --engine-debug",
            )
        if dead is not None:  # its log may have grown since the error
            return logged_cause(dead)
        if isinstance(error, ServerError | Dead):
            return error.cause
        aside = _stopped_by_a_signal(_latest(servers))
        if isinstance(error, UnderLoad):
            faults = [self._record.redact(str(fault)) for fault in error.faults]
            return Cause(
                kind=error.kind,
                summary=error.faults[0].text + aside,
                owner=OWNERS[error.kind],
                lines=list(dict.fromkeys(faults))[:_MOST_FAULTS],
            )
        return Cause(
            kind="timeout",
            summary=f"the test exceeded its timeout ({error}){aside}",
            owner="the engine, if requests were in flight (in-flight.json); otherwise the test",
            remedy="raise [test_timeout_s] of the profile only if the server was making progress",
        )

    def _metrics(self, servers: Servers) -> str | None:
        if self._load is not None and self._load.timeline.metrics is not None:
            return self._load.timeline.metrics
        managed = _latest(servers)
        log = managed.launch.log if managed is not None else None
        file = metrics_file(self._record.directory, log)
        if file.is_file():
            return file.read_text("utf-8", "replace")
        return None

    def _memory(self, servers: Servers) -> dict[str, Any] | None:
        under_load = None
        if self._load is not None:
            under_load = self._load.timeline.record()
        history = []
        if servers.sampler is not None:
            history = list(servers.sampler.history)
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

    def _rerun(self, servers: Servers, test: str | None) -> str:
        if servers.pool is None:
            return (
                "start the server with --engine-debug's variables (see the README) and attach again"
            )
        if self._settings.engine.debug:
            return ""
        if self._again is not None:
            return self._again(test)
        return f"pytest --engine-debug {shlex.quote(test or '')}".rstrip()


def _latest(servers: Servers) -> ManagedServer | None:
    """Return the server that the suite started last; None if the suite has not started a server."""
    return servers.pool.latest if servers.pool is not None else None


def _starts(servers: Servers) -> Sequence[tuple[float, float]]:
    return servers.pool.start_spans if servers.pool is not None else ()


def _stopped_by_a_signal(managed: ManagedServer | None) -> str:
    """Return the names and ids of processes that a signal has stopped, as the end of a summary.

    The text is empty if no process is stopped.
    """
    if managed is None:
        return ""
    stopped = []
    for process in managed.launch.look_at_tree():
        if process["status"] == "stopped":
            stopped.append(f"{process['name']} ({process['pid']})")
    return f"; stopped by a signal: {', '.join(stopped)}" if stopped else ""


def _stop_crashed(servers: Servers, evidence: crash_bundle.Evidence) -> None:
    """Stop the rest of a server that crashed. After a GPU error, later results are not trusted."""
    xids = evidence.kernel.xids
    why_distrusted = None
    if xids:
        why_distrusted = (
            f"the driver reported an error of the GPU ({xids[0].strip()[:120]}): later "
            "measurements and answers cannot be trusted. Reset the GPU, or reboot"
        )
    servers.stop_crashed(why_distrusted)


def _by_logs(cause: Cause, nodes: Collection[Node]) -> Cause:
    """Find the cause in the logs of an attached server's nodes.

    The result is the first of these: the cause in the log of a node, the lost connection in the log
    of a node, the given cause.
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
            summary = f"according to {node}, {node_cause.summary} ({cause.summary})"
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
        return "a test exceeded its timeout"
    return "the server failed"


def _subject(error: Exception | Dead | None) -> str:
    if isinstance(error, UnderLoad):
        return f"under load ({error.what})"
    if isinstance(error, ServerError | Dead):
        return error.what
    return "a test exceeded its timeout"
