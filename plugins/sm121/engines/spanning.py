"""A server that spans machines, started by vLLM's own ``--nnodes``.

Rank 0 runs here, under this suite's supervisor, and the other ranks run through their nodes'
commands, under one of their own. The server ends with the first of its ranks: the others would wait
for it for minutes, while /health answers with status 200.
"""

import contextlib
import dataclasses
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sm121.core.configuration import Rank
from sm121.core.errors import UsageError
from sm121.core.server import Node, Server
from sm121.core.waiting import until
from sm121.engines import node_agent, node_process, nodes
from sm121.engines.endings import StopReport
from sm121.engines.managed import ManagedServer
from sm121.engines.memory import Returned
from sm121.engines.node_process import NodeProcess
from sm121.engines.process_tree import Survivor
from sm121.engines.server_errors import ServerError, ServerExited
from sm121.evidence import death, failure
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.unanswered import Connection, unanswered

_WATCH_EVERY_S = 0.5
_SAY_EVERY_S = 2.0
#: A node's time to look at its memory, beside the time to end its rank.
_REPORT_WITHIN_S = 40.0
#: A node that was silent before gets this time alone.
_SILENT_REPORT_WITHIN_S = 5.0


@dataclass
class SpanningServer(ManagedServer):
    """Rank 0, and the other nodes of its server."""

    others: list[NodeProcess] = field(init=False, default_factory=list)
    _fault: ServerError | None = field(init=False, default=None)
    #: The nodes connect to it to test whether they reach this machine.
    _beacon: socket.socket | None = field(init=False, default=None)
    #: Ends the thread that watches.
    _watching: threading.Event = field(init=False, default_factory=threading.Event)
    #: The variables of this node's end of the link.
    _bound: dict[str, str] = field(init=False, default_factory=dict)
    #: When the nodes were last shown that this machine lives (``time.monotonic``).
    _said: float = field(init=False, default=0.0)
    _ready_at: float = field(init=False, default=-math.inf)
    #: When each process of rank 0 was first found stopped.
    _stopped_since: dict[int, float] = field(init=False, default_factory=dict)
    #: When each connection of rank 0 was first found without an answer.
    _unanswered_since: dict[Connection, float] = field(init=False, default_factory=dict)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, rank 0 first."""
        here = Node(0, "this machine", self.launch.log)
        return (here, *(other.node for other in self.others))

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Return the first fault of a node, or None. The first fault stands.

        Args:
            settle_s: How long to wait for reports of the nodes, in seconds.
        """
        until(self._is_settled, settle_s)
        return self._fault

    def _is_settled(self) -> bool:
        if self._fault is None and not self.launch.was_stopped:
            self._fault = next(self._faults(), None)
        return self._fault is not None or self.launch.was_stopped

    def stop(self) -> StopReport:
        """Stop rank 0, and then the others. The report names the remains on every node."""
        self._watching.set()
        report = super().stop()
        if self._beacon is not None:
            self._beacon.close()
            self._beacon = None
        others = self.others
        self.others = []
        for other in others:
            within_s = self.limits.stop_s + _REPORT_WITHIN_S
            if time.monotonic() - other.heard_at >= nodes.bounds().silent_after_s.value:
                within_s = _SILENT_REPORT_WITHIN_S
            answer = other.close(within_s)
            self._redact(other.node.log)
            report = _with_node(report, other.node, answer, other.heard_at - self._ready_at)
        return report

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last report of each other node, by a name for files.

        The report has its processes, memory, exits and kernel messages.
        """
        described = {}
        for other in self.others:
            state = {"node": str(other.node), "last_line": other.last_line, **other.state}
            described[f"node-{other.node.rank}"] = (other.node.log, state)
        return described

    def _start_once(self) -> Server:
        self._fault = None
        self._unanswered_since = {}
        self._ready_at = -math.inf
        server = super()._start_once()
        self._ready_at = time.monotonic()
        server = dataclasses.replace(server, nodes=self.nodes)
        self._watching.clear()
        threading.Thread(target=self._watch, daemon=True, name="sm121-nodes").start()
        return server

    def _start_process(self) -> None:
        span = self.configuration.span
        assert span is not None
        try:
            host, port = nodes.master(span)
        except UsageError as error:
            raise self._of_node(Node(0, "this machine"), str(error), self.launch.log) from error
        self.rank = Rank(0, span.count, host, port)
        self._bound = node_agent.bound_to(host, self.configuration)
        self.added = {**self.added, **self._bound}
        super()._start_process()
        self._beacon = socket.create_server((host, 0), backlog=128)
        self._beacon.setblocking(False)
        for rank, command in enumerate(span.commands, 1):
            self.others.append(self._start_node(rank, command))

    def _start_node(self, rank: int, command: tuple[str, ...]) -> NodeProcess:
        assert self.rank is not None
        assert self._beacon is not None
        log = self.launch.log.with_name(f"{self.launch.log.stem}-node-{rank}.log")
        log.write_text("", "utf-8")
        added = {name: value for name, value in self.added.items() if name not in self._bound}
        request = node_process.question(
            self.configuration,
            "start",
            rank=dataclasses.asdict(dataclasses.replace(self.rank, number=rank)),
            beacon=self._beacon.getsockname()[:2],
            added=added,
            stop_s=self.limits.stop_s,
            lease_s=nodes.bounds().lease_s.value,
            run=self.run_id,
        )
        try:
            return NodeProcess(rank, command, request, log)
        except UsageError as error:
            node = Node(rank, node_process.name_of(command), log)
            raise self._of_node(node, str(error), log) from error

    def _watch(self) -> None:
        """End the server with its first rank, so that every client has an answer or an error."""
        while not self._watching.wait(_WATCH_EVERY_S):
            if self.fault() is not None and not self._watching.is_set():
                self.kill()
                return

    def _keep_company(self) -> None:
        """Accept the nodes' connections, and show them now and then that this machine lives."""
        with contextlib.suppress(BlockingIOError, OSError):
            while self._beacon is not None:
                self._beacon.accept()[0].close()
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        for other in self.others:
            other.say("\n")
        addresses = {other.state.get("address", "") for other in self.others}
        found = unanswered(self.launch.processes, addresses)
        before = self._unanswered_since
        self._unanswered_since = {each: before.get(each, now) for each in found}

    def _faults(self) -> Iterator[ServerError]:
        """Yield the faults of all nodes, in the order in which they are judged."""
        now = time.monotonic()
        self._keep_company()
        ends = [entry["monotonic_s"] for entry in _unwanted_ends(self.launch.exits())]
        first_here = min(ends, default=math.inf)
        for other in self.others:
            yield from self._faults_of_command(other, now)
            yield from self._faults_of_processes(other, now)
            yield from self._faults_of_link(other, now)
            yield from self._faults_of_rank(other, first_here)
        yield from self._faults_of_rank_0(now)

    def _faults_of_command(self, other: NodeProcess, now: float) -> Iterator[ServerError]:
        """Yield a fault if the command of a node has ended, or is silent."""
        data = nodes.bounds()
        log = other.node.log or self.launch.log
        if other.exit_status is not None:
            how = f"its command ended with {other.exit_status}; last: {other.last_line}"
            yield self._of_node(other.node, how, log)
        silent_s = now - other.heard_at
        # A node that starts has reported no state yet, and may take longer.
        patience_s = data.silent_after_s.value
        if not other.state:
            patience_s = max(patience_s, data.answers_within_s.value)
        if silent_s >= patience_s:
            how = f"it has told nothing for {silent_s:.0f} s; last: {other.last_line}"
            yield self._of_node(other.node, how, log)

    def _faults_of_processes(self, other: NodeProcess, now: float) -> Iterator[ServerError]:
        """Yield a fault for each process of a rank that is stopped by a signal for too long."""
        patience_s = nodes.bounds().stopped_after_s.value
        for entry in other.state.get("tree", ()):
            since = other.since.get(str(entry["pid"]))
            if since is not None and now - since >= patience_s:
                how = _stopped(entry["name"], entry["pid"], now - since)
                yield self._of_node(other.node, how, other.node.log or self.launch.log)

    def _faults_of_link(self, other: NodeProcess, now: float) -> Iterator[ServerError]:
        """Yield a fault if a node does not reach this machine, or connections have no answer."""
        patience_s = nodes.bounds().unreachable_after_s.value
        state = other.state
        log = other.node.log or self.launch.log
        since = other.since.get("unreachable")
        if since is not None:
            if now - since >= patience_s:
                how = f"for {now - since:.0f} s it does not reach this machine"
                why = f"the link is down: {how} ({state['unreachable']})"
                yield self._of_node(other.node, why, log)
            return
        unanswered_since = list(other.unanswered_since.items())
        for connection, began in self._unanswered_since.items():
            if connection.remote.address == state.get("address"):
                unanswered_since.append((str(connection), began))
        for end, began in unanswered_since:
            if now - began >= patience_s:
                how = f"{end} has no answer for {now - began:.0f} s"
                why = f"the link is down, or a port is blocked: {how}"
                yield self._of_node(other.node, why, log)

    def _faults_of_rank(self, other: NodeProcess, first_here: float) -> Iterator[ServerError]:
        """Yield a fault if the rank of a node ended before rank 0; else it followed rank 0."""
        state = other.state
        log = other.node.log or self.launch.log
        ends = _unwanted_ends(state.get("exits", ()))
        if ends:
            first = max(ends, key=lambda entry: entry["ago_s"])
            if other.state_at - first["ago_s"] < first_here:
                yield self._of_node(other.node, _ended(first), log, state)
        elif first_here == math.inf and state.get("exit_status") is not None:
            how = f"its rank ended with status {state['exit_status']}"
            yield self._of_node(other.node, how, log, state)

    def _faults_of_rank_0(self, now: float) -> Iterator[ServerError]:
        """Yield a fault for each process of this machine that is stopped by a signal too long."""
        patience_s = nodes.bounds().stopped_after_s.value
        for process in self.launch.known:  # as it was when it was ready
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    self._stopped_since.pop(process.pid, None)
                    continue
                since = self._stopped_since.setdefault(process.pid, now)
                if now - since >= patience_s:
                    how = _stopped(process.name(), process.pid, now - since)
                    yield self._of_node(self.nodes[0], how, self.launch.log)

    def _of_node(
        self, node: Node, how: str, log: Path, state: Mapping[str, Any] | None = None
    ) -> ServerError:
        cause = failure.ended("node", [], node=node, machine=node.name, how=how)
        if state is not None:
            logged = failure.classify(log, state["exit_status"])
            cause_there = death.cause_of(
                logged,
                exits=state["exits"],
                kernel=KernelMessages(tuple(state["kernel"])),
                kills=0,
                pids={entry["pid"] for entry in state["exits"]},
            )
            summary = f"{node}: {how}: {cause_there.summary}"
            owner = f"{cause_there.owner}; on {node.name}"
            cause = cause_there.model_copy(update={"summary": summary, "owner": owner})
        kind = ServerExited if self.endpoint is None else ServerError
        return kind(f"{node} is lost to the server: {how}", cause, log)


def _stopped(name: str, pid: int, seconds: float) -> str:
    return f"process {name} ({pid}) is stopped by a signal for {seconds:.0f} s"


def _unwanted_ends(exits: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ends that the suite did not cause: by a signal, or of a process of the engine."""
    unwanted = []
    for entry in exits:
        by_signal = (entry["status"] or 0) < 0
        of_engine = str(entry["name"]).startswith(death.OF_ENGINES)
        if (by_signal or of_engine) and not entry["by_us"]:
            unwanted.append(entry)
    return unwanted


def _ended(entry: Mapping[str, Any]) -> str:
    status = entry["status"]
    how = "ended, and its parent does not say how" if status is None else f"ended with {status}"
    return f"process {entry['name']} ({entry['pid']}) {how}"


def _with_node(
    report: StopReport, node: Node, answer: Mapping[str, Any] | None, served_s: float
) -> StopReport:
    """Add the stop of another node to a report.

    Args:
        report: The report so far.
        node: The node.
        answer: Its own report; None if it gave none.
        served_s: How long the server had been ready when the node was heard last.
    """
    if answer is None:
        lost = Survivor(0, "unknown", f"{node} did not tell what is left there")
        return dataclasses.replace(report, survivors=(*report.survivors, lost))
    left = []
    for entry in answer["survivors"]:
        left.append(Survivor(entry["pid"], entry["status"], f"{node}: {entry['command']}"))
    crash = f"{node}: {answer['crash']}" if answer["crash"] else None
    lines, unavailable, now = answer["kernel"]  # by the clock of that node, from its start on
    kernel = KernelMessages(tuple(lines), unavailable, [(0.0, now - served_s)])
    return dataclasses.replace(
        report,
        survivors=(*report.survivors, *left),
        memory=report.memory.with_other(Returned(**answer["memory"]), str(node)),
        crash=report.crash or crash,
        kernels={**report.kernels, str(node): kernel},
    )
