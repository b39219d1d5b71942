"""Detect which of the other nodes of a server that spans machines are lost, and why."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sm121.core.errors import UsageError
from sm121.core.server import Node
from sm121.engines import nodes
from sm121.engines.launch import Launch
from sm121.engines.node_process import NodeProcess
from sm121.engines.other_nodes import this_machine
from sm121.engines.server_errors import ServerError
from sm121.evidence import death, failure, stacks
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.unanswered import Connection, unanswered

_SAY_EVERY_S = 2.0
#: The time limit for reading the stack traces of the other nodes, in seconds.
_STACKS_WITHIN_S = 20.0
#: The shorter time limit after the loss of a node, because clients wait until the server is ended.
_STACKS_AT_FAULT_WITHIN_S = 5.0


@dataclass(frozen=True)
class NodeLoss:
    """A node that no longer takes part in its server.

    Attributes:
        node: The node.
        how: The evidence of the loss.
        state: The last report of the node, if its rank has ended; None if the rank has not ended.
    """

    node: Node
    how: str
    state: Mapping[str, Any] | None = None

    def error(self, kind: type[ServerError], log: Path) -> ServerError:
        """Return the loss as an error of the server.

        Args:
            kind: The class of the error.
            log: The log of rank 0, which is named if the node has no log.
        """
        log = self.node.log or log
        cause = failure.ended("node", [], node=self.node, machine=self.node.name, how=self.how)
        if self.state is not None:
            cause = self._cause_there(self.state, log)
        return kind(f"{self.node} no longer takes part in the server: {self.how}", cause, log)

    def _cause_there(self, state: Mapping[str, Any], log: Path) -> failure.Cause:
        cause = death.cause_of(
            failure.classify(log, state["exit_status"]),
            exits=state["exits"],
            kernel=KernelMessages(tuple(state["kernel"])),
            kills=0,
            pids={entry["pid"] for entry in state["exits"]},
        )
        summary = f"{self.node}: {self.how}: {cause.summary}"
        owner = f"{cause.owner}; on {self.node.name}"
        return cause.model_copy(update={"summary": summary, "owner": owner})


@dataclass
class NodeWatch:
    """Watches the other nodes of a server, and this machine's end of the network links to them."""

    others: list[NodeProcess] = field(default_factory=list)
    #: The first fault of a node in the current attempt to start; later faults do not replace it.
    fault: ServerError | None = None
    #: When the server was ready (``time.monotonic``); minus infinity before.
    ready_at: float = -math.inf
    #: Set when the server is being stopped, which ends the watching thread.
    is_over: threading.Event = field(default_factory=threading.Event)
    #: For each connection of rank 0 without an answer from the other node: when this was first
    #: noticed.
    unanswered_since: dict[Connection, float] = field(default_factory=dict)
    #: The stack traces of each other node, read when a fault was found. The keys fit in file names.
    stacks_at_fault: dict[str, str] = field(default_factory=dict)
    #: Locked by the watching thread or by a test while it searches for a fault.
    _looking: threading.Lock = field(default_factory=threading.Lock)
    #: The socket to which the nodes connect, to check that they reach this machine.
    _beacon: socket.socket | None = None
    #: When a heartbeat was last sent to the nodes (``time.monotonic``).
    _said: float = 0.0
    #: For each process of rank 0 that is stopped by a signal: when this was first noticed.
    _stopped_since: dict[int, float] = field(default_factory=dict)

    def open(self, host: str) -> tuple[str, int]:
        """Open the port to which the nodes connect, and return its address.

        Args:
            host: The address of this machine.
        """
        self._beacon = socket.create_server((host, 0), backlog=128)
        self._beacon.setblocking(False)
        address, port = self._beacon.getsockname()[:2]
        return address, port

    def end(self) -> list[NodeProcess]:
        """Close the port, remove all nodes from this object, and return them."""
        if self._beacon is not None:
            self._beacon.close()
            self._beacon = None
        others = self.others
        self.others = []
        return others

    def begin(self) -> None:
        """Discard the results of an earlier attempt to start the server."""
        self.fault = None
        self.stacks_at_fault = {}
        self.unanswered_since = {}
        self.ready_at = -math.inf

    def look(self, launch: Launch, kind: type[ServerError]) -> None:
        """Search for a fault of a node, unless one was found before, and store it in `fault`.

        Args:
            launch: The launch of rank 0.
            kind: The class of the error.
        """
        with self._looking:
            if self.fault is not None:
                return
            loss = next(self._faults(launch), None)
            if loss is None:
                return
            if loss.state is None:  # the rank of the lost node has not ended, so it may hang
                self._keep_stacks(launch)
            self.fault = loss.error(kind, launch.log)

    def _keep_stacks(self, launch: Launch) -> None:
        """Read the stack traces of all nodes, before the server is ended."""
        tree = launch.look_at_tree()
        launch.stacks = stacks.take_or_why(tree, launch.supervision.stacks_folder)
        self.stacks_at_fault = self.take_stacks(_STACKS_AT_FAULT_WITHIN_S)

    def take_stacks(self, within_s: float = _STACKS_WITHIN_S) -> dict[str, str]:
        """Return the stack traces of each other node, or why there are none.

        The keys fit in file names.

        Args:
            within_s: How long to wait for each node, in seconds.
        """
        asked: list[NodeProcess] = []
        taken: dict[str, str] = {}
        for other in self.others:
            silent_s = time.monotonic() - other.heard_at
            if silent_s < nodes.bounds().silent_after_s.value:
                other.ask_for_stacks()
                asked.append(other)
            else:
                taken[name_of_files(other)] = f"it has sent nothing for {silent_s:.0f} s\n"
        for other in asked:
            try:
                text = other.wait_for("stacks", within_s)
            except UsageError as error:
                text = f"{error}\n"
            taken[name_of_files(other)] = text
        return taken

    def _send_heartbeats(self, launch: Launch) -> None:
        """Accept the nodes' connections, and send heartbeats to the nodes."""
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
        found = unanswered(launch.processes, addresses)
        before = self.unanswered_since
        self.unanswered_since = {each: before.get(each, now) for each in found}

    def _faults(self, launch: Launch) -> Iterator[NodeLoss]:
        """Yield the faults of all nodes, in the order in which they are judged."""
        now = time.monotonic()
        self._send_heartbeats(launch)
        ends = [entry["monotonic_s"] for entry in _unwanted_ends(launch.exits())]
        first_here = min(ends, default=math.inf)
        for other in self.others:
            yield from _faults_of_command(other, now)
            yield from _faults_of_processes(other, now)
            yield from self._faults_of_link(other, now)
            yield from _faults_of_rank(other, first_here)
        yield from self._faults_of_rank_0(launch, now)

    def _faults_of_link(self, other: NodeProcess, now: float) -> Iterator[NodeLoss]:
        """Yield a fault if a node cannot reach this machine, or a connection gets no answer."""
        patience_s = nodes.bounds().unreachable_after_s.value
        state = other.state
        since = other.since.get("unreachable")
        if since is not None:
            if now - since >= patience_s:
                how = f"it has not reached this machine for {now - since:.0f} s"
                why = f"the link is down: {how} ({state['unreachable']})"
                yield NodeLoss(other.node, why)
            return
        unanswered_since = list(other.unanswered_since.items())
        for connection, began in self.unanswered_since.items():
            if connection.remote.address == state.get("address"):
                unanswered_since.append((str(connection), began))
        for end, began in unanswered_since:
            if now - began >= patience_s:
                how = f"{end} has no answer for {now - began:.0f} s"
                why = f"the link is down, or a port is blocked: {how}"
                yield NodeLoss(other.node, why)

    def _faults_of_rank_0(self, launch: Launch, now: float) -> Iterator[NodeLoss]:
        """Yield a fault for each process of rank 0 that is stopped by a signal for too long."""
        patience_s = nodes.bounds().stopped_after_s.value
        for process in launch.known:  # all processes that the server had when it was ready
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    self._stopped_since.pop(process.pid, None)
                    continue
                since = self._stopped_since.setdefault(process.pid, now)
                if now - since >= patience_s:
                    how = _stopped(process.name(), process.pid, now - since)
                    yield NodeLoss(this_machine(launch), how)


def name_of_files(other: NodeProcess) -> str:
    """Return the part of file names that identifies a node, for example ``node-1``.

    Args:
        other: The node.
    """
    return f"node-{other.node.rank}"


def _faults_of_command(other: NodeProcess, now: float) -> Iterator[NodeLoss]:
    """Yield a fault if the command of a node has ended, or has sent nothing for too long."""
    data = nodes.bounds()
    if other.exit_status is not None:
        how = (
            f"its command ended with {other.exit_status}; last line of its output: "
            f"{other.last_line}"
        )
        yield NodeLoss(other.node, how)
    silent_s = now - other.heard_at
    # A node that has not reported a state yet is still starting, and may be silent for longer.
    patience_s = data.silent_after_s.value
    if not other.state:
        patience_s = max(patience_s, data.answers_within_s.value)
    if silent_s >= patience_s:
        how = (
            f"it has sent nothing for {silent_s:.0f} s; last line of its output: {other.last_line}"
        )
        yield NodeLoss(other.node, how)


def _faults_of_processes(other: NodeProcess, now: float) -> Iterator[NodeLoss]:
    """Yield a fault for each process of a rank that is stopped by a signal for too long."""
    patience_s = nodes.bounds().stopped_after_s.value
    for entry in other.state.get("tree", ()):
        since = other.since.get(str(entry["pid"]))
        if since is not None and now - since >= patience_s:
            how = _stopped(entry["name"], entry["pid"], now - since)
            yield NodeLoss(other.node, how)


def _faults_of_rank(other: NodeProcess, first_here: float) -> Iterator[NodeLoss]:
    """Yield a fault if the rank of a node ended before rank 0. A later end is no fault."""
    state = other.state
    ends = _unwanted_ends(state.get("exits", ()))
    if ends:
        first = max(ends, key=lambda entry: entry["ago_s"])
        if other.state_at - first["ago_s"] < first_here:
            yield NodeLoss(other.node, _ended(first), state)
    elif first_here == math.inf and state.get("exit_status") is not None:
        how = f"its rank ended with status {state['exit_status']}"
        yield NodeLoss(other.node, how, state)


def _stopped(name: str, pid: int, seconds: float) -> str:
    return f"process {name} ({pid}) is stopped by a signal for {seconds:.0f} s"


def _unwanted_ends(exits: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ends of processes that are faults.

    These are ends by a signal and ends of the engine's processes, if the suite did not cause them.
    """
    unwanted = []
    for entry in exits:
        by_signal = (entry["status"] or 0) < 0
        of_engine = str(entry["name"]).startswith(death.OF_ENGINES)
        if (by_signal or of_engine) and not entry["by_us"]:
            unwanted.append(entry)
    return unwanted


def _ended(entry: Mapping[str, Any]) -> str:
    status = entry["status"]
    how = (
        "ended, and its parent process does not report how"
        if status is None
        else f"ended with {status}"
    )
    return f"process {entry['name']} ({entry['pid']}) {how}"
