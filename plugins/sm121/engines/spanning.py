"""A server that spans machines, started by vLLM's own ``--nnodes``: rank 0 here, under this suite's
supervisor, and the others through their nodes' commands, under one of their own. It ends with the
first of its ranks: the others would wait for it for minutes, under a /health that says 200."""

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
from sm121.engines import node_agent, nodes
from sm121.engines.endings import OF_ENGINES, StopReport
from sm121.engines.managed import ManagedServer
from sm121.engines.memory import Returned
from sm121.engines.nodes import NodeProcess
from sm121.engines.process_tree import Survivor
from sm121.engines.server_errors import ServerError, ServerExited
from sm121.evidence import death, failure
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.unanswered import unanswered

_WATCH_EVERY_S, _SAY_EVERY_S = 0.5, 2.0
#: Beside its own: to end its rank, and to look at its memory.
_REPORT_WITHIN_S = 40.0


@dataclass
class SpanningServer(ManagedServer):
    """Rank 0, and the other nodes of its server."""

    others: list[NodeProcess] = field(init=False, default_factory=list)
    _fault: ServerError | None = field(init=False, default=None)
    _beacon: socket.socket | None = field(init=False, default=None)
    _watching: threading.Event = field(init=False, default_factory=threading.Event)
    #: The variables of this node's end of the link.
    _bound: dict[str, str] = field(init=False, default_factory=dict)
    _said: float = field(init=False, default=0.0)
    _ready_at: float = field(init=False, default=-math.inf)
    _stopped_since: dict[int, float] = field(init=False, default_factory=dict)
    _unanswered_since: dict[str, float] = field(init=False, default_factory=dict)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All of them, rank 0 first."""
        here = Node(0, "this machine", self.log)
        return (here, *(other.node for other in self.others))

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """The first thing that has befallen a node: it stands."""
        until(self._is_settled, settle_s)
        return self._fault

    def _is_settled(self) -> bool:
        if self._fault is None and not self.was_stopped:
            self._fault = next(self._faults(), None)
        return self._fault is not None or self.was_stopped

    def stop(self) -> StopReport:
        """As of one machine; then of the others. What is left on any of them is named."""
        self._watching.set()
        report = super().stop()
        if self._beacon is not None:
            self._beacon.close()
            self._beacon = None
        others, self.others = self.others, []
        for other in others:
            silent = time.monotonic() - other.heard_at >= nodes.bounds().silent_after_s.value
            theirs = other.close(5.0 if silent else self.limits.stop_s + _REPORT_WITHIN_S)
            self._redact(other.node.log)
            report = _together(report, other.node, theirs, other.heard_at - self._ready_at)
        return report

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """What each other node told last: its processes, memory, exits and kernel messages."""
        return {
            f"node-{other.node.rank}": (
                other.node.log,
                {"node": str(other.node), "last_line": other.last_line, **other.state},
            )
            for other in self.others
        }

    def _start_once(self) -> Server:
        self._fault, self._unanswered_since, self._ready_at = None, {}, -math.inf
        server = super()._start_once()
        self._ready_at = time.monotonic()
        server = dataclasses.replace(server, nodes=self.nodes)
        self._watching.clear()
        threading.Thread(target=self._watch, daemon=True, name="sm121-nodes").start()
        return server

    def _launch(self) -> None:
        span = self.configuration.span
        assert span is not None
        try:
            host, port = nodes.master(span)
        except UsageError as error:
            raise self._of_node(Node(0, "this machine"), str(error), self.log) from error
        self.rank = Rank(0, span.count, host, port)
        self._bound = node_agent.bound_to(host, self.configuration)
        self.added = {**self.added, **self._bound}
        super()._launch()
        self._beacon = socket.create_server((host, 0), backlog=128)
        self._beacon.setblocking(False)
        for rank, command in enumerate(span.commands, 1):
            self.others.append(self._start_node(rank, command))

    def _start_node(self, rank: int, command: tuple[str, ...]) -> NodeProcess:
        assert self.rank is not None and self._beacon is not None
        log = self.log.with_name(f"{self.log.stem}-node-{rank}.log")
        log.write_text("", "utf-8")
        added = {name: value for name, value in self.added.items() if name not in self._bound}
        asked = nodes.question(
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
            return NodeProcess(rank, command, asked, log)
        except UsageError as error:
            node = Node(rank, nodes.name_of(command), log)
            raise self._of_node(node, str(error), log) from error

    def _watch(self) -> None:
        """End the server with its first rank, so that every client has an answer or an error."""
        while not self._watching.wait(_WATCH_EVERY_S):
            if self.fault() is not None and not self._watching.is_set():
                self.kill()
                return

    def _keep_company(self) -> None:
        """Take the nodes' calls, and tell each now and then that this machine lives."""
        with contextlib.suppress(BlockingIOError, OSError):
            while self._beacon is not None:
                self._beacon.accept()[0].close()
        if time.monotonic() - self._said >= _SAY_EVERY_S:
            self._said = time.monotonic()
            for other in self.others:
                other.say("\n")
            ends = unanswered(self.processes, {o.state.get("address", "") for o in self.others})
            first = self._unanswered_since
            self._unanswered_since = {end: first.get(end, self._said) for end in ends}

    def _faults(self) -> Iterator[ServerError]:
        data, now = nodes.bounds(), time.monotonic()
        self._keep_company()
        first_here = min((e["monotonic_s"] for e in _ends(self.exits())), default=math.inf)
        for other in self.others:
            state, node, log = other.state, other.node, other.node.log or self.log
            if other.exit_status is not None:
                how = f"its command ended with {other.exit_status}; last: {other.last_line}"
                yield self._of_node(node, how, log)
            silent_s = now - other.heard_at
            if silent_s >= data.silent_after_s.value and (
                state or silent_s >= data.answers_within_s.value
            ):
                how = f"it has told nothing for {silent_s:.0f} s; last: {other.last_line}"
                yield self._of_node(node, how, log)
            for entry in state.get("tree", ()):
                since = other.since.get(str(entry["pid"]))
                if since is not None and now - since >= data.stopped_after_s.value:
                    yield self._of_node(node, _stopped(entry, now - since), log)
            since = other.since.get("unreachable")
            if since is not None and now - since >= data.unreachable_after_s.value:
                how = f"for {now - since:.0f} s it does not reach this machine"
                why = f"the link is down: {how} ({state['unreachable']})"
                yield self._of_node(node, why, log)
            by_end = self._unanswered_since.items()
            of_rank_0 = [e for e in by_end if _far_host(e[0]) == state.get("address")]
            both = [*other.unanswered_since.items(), *of_rank_0]
            for end, since in both if "unreachable" not in other.since else ():
                if now - since >= data.unreachable_after_s.value:
                    how = f"{end} has no answer for {now - since:.0f} s"
                    yield self._of_node(node, f"the link is down, or a port is blocked: {how}", log)
            # What ended first, the others followed.
            ends = sorted(_ends(state.get("exits", ())), key=lambda e: -e["ago_s"])
            if ends and other.state_at - ends[0]["ago_s"] < first_here:
                yield self._of_node(node, _ended(ends[0]), log, state)
            elif not ends and first_here == math.inf and state.get("exit_status") is not None:
                how = f"its rank ended with status {state['exit_status']}"
                yield self._of_node(node, how, log, state)
        for process in self._by_pid.values():  # as it was when it was ready
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    self._stopped_since.pop(process.pid, None)
                    continue
                since = self._stopped_since.setdefault(process.pid, now)
                if now - since >= data.stopped_after_s.value:
                    entry = {"name": process.name(), "pid": process.pid}
                    yield self._of_node(self.nodes[0], _stopped(entry, now - since), self.log)

    def _of_node(
        self, node: Node, how: str, log: Path, state: Mapping[str, Any] | None = None
    ) -> ServerError:
        cause = failure.ended("node", [], node=node, machine=node.name, how=how)
        if state is not None:
            logged = failure.classify(log, state["exit_status"])
            theirs = death.cause_of(
                logged,
                exits=state["exits"],
                kernel=KernelMessages(tuple(state["kernel"])),
                kills=0,
                pids={entry["pid"] for entry in state["exits"]},
            )
            summary = f"{node}: {how}: {theirs.summary}"
            owner = f"{theirs.owner}; on {node.name}"
            cause = theirs.model_copy(update={"summary": summary, "owner": owner})
        kind = ServerExited if self.endpoint is None else ServerError
        return kind(f"{node} is lost to the server: {how}", cause, log)


def _far_host(end: str) -> str:
    return end.partition(" -> ")[2].rpartition(":")[0].strip("[]")


def _stopped(entry: Mapping[str, Any], seconds: float) -> str:
    return f"process {entry['name']} ({entry['pid']}) is stopped by a signal for {seconds:.0f} s"


def _ends(exits: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that nobody here asked for: by a signal, or of a process of the engine."""
    return [
        entry
        for entry in exits
        if not entry["by_us"]
        and ((entry["status"] or 0) < 0 or str(entry["name"]).startswith(OF_ENGINES))
    ]


def _ended(entry: Mapping[str, Any]) -> str:
    status = entry["status"]
    how = "ended, and its parent does not say how" if status is None else f"ended with {status}"
    return f"process {entry['name']} ({entry['pid']}) {how}"


def _together(
    report: StopReport, node: Node, theirs: Mapping[str, Any] | None, served_s: float
) -> StopReport:
    """A report with that of another node (None: it gave none), where a rank served for so long."""
    if theirs is None:
        lost = Survivor(0, "unknown", f"{node} did not tell what is left there")
        return dataclasses.replace(report, survivors=(*report.survivors, lost))
    left = [Survivor(e["pid"], e["status"], f"{node}: {e['command']}") for e in theirs["survivors"]]
    crash = f"{node}: {theirs['crash']}" if theirs["crash"] else None
    lines, unavailable, now = theirs["kernel"]  # by the clock of that node, from its start on
    kernel = KernelMessages(tuple(lines), unavailable, [(0.0, now - served_s)])
    return dataclasses.replace(
        report,
        survivors=(*report.survivors, *left),
        memory=report.memory.with_other(Returned(**theirs["memory"]), f"{node}"),
        crash=report.crash or crash,
        kernels={**report.kernels, f"{node}": kernel},
    )
