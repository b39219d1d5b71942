"""A server that spans machines, started by vLLM's own ``--nnodes``.

Rank 0 runs here, under this suite's supervisor, and the other ranks run through their nodes'
commands, under one of their own. The server ends with the first of its ranks: the others would wait
for it for minutes, while /health answers with status 200.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.core.configuration import Rank
from sm121.core.errors import UsageError
from sm121.core.server import Node, Server
from sm121.core.waiting import until
from sm121.engines import node_agent, node_process, nodes
from sm121.engines.endings import StopReport
from sm121.engines.managed import ManagedServer
from sm121.engines.memory import Returned
from sm121.engines.node_process import NodeProcess
from sm121.engines.node_watch import NodeLoss, NodeWatch, this_machine
from sm121.engines.process_tree import Survivor
from sm121.engines.server_errors import ServerError, ServerExited
from sm121.evidence.kernel_messages import KernelMessages

_WATCH_EVERY_S = 0.5
#: A node's time to look at its memory, beside the time to end its rank.
_REPORT_WITHIN_S = 40.0
#: A node that was silent before gets this time alone.
_SILENT_REPORT_WITHIN_S = 5.0


@dataclass
class SpanningServer(ManagedServer):
    """Rank 0, and the other nodes of its server."""

    watch: NodeWatch = field(init=False, default_factory=NodeWatch)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, rank 0 first."""
        here = this_machine(self.launch)
        return (here, *(other.node for other in self.watch.others))

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Return the first fault of a node, or None. The first fault stands.

        Args:
            settle_s: How long to wait for reports of the nodes, in seconds.
        """
        until(self._is_settled, settle_s)
        return self.watch.fault

    def _is_settled(self) -> bool:
        if not self.launch.was_stopped:
            self.watch.look(self.launch, self._loss)
        return self.watch.fault is not None or self.launch.was_stopped

    @property
    def _loss(self) -> type[ServerError]:
        """The error of a lost node: before the server is ready, its start has failed."""
        return ServerExited if self.endpoint is None else ServerError

    def stop(self) -> StopReport:
        """Stop rank 0, and then the others. The report names the remains on every node."""
        self.watch.is_over.set()
        report = super().stop()
        for other in self.watch.end():
            within_s = self.limits.stop_s + _REPORT_WITHIN_S
            if time.monotonic() - other.heard_at >= nodes.bounds().silent_after_s.value:
                within_s = _SILENT_REPORT_WITHIN_S
            answer = other.close(within_s)
            self._redact(other.node.log)
            report = _with_node(report, other.node, answer, other.heard_at - self.watch.ready_at)
        return report

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last report of each other node, by a name for files.

        The report has its processes, memory, exits and kernel messages.
        """
        described = {}
        for other in self.watch.others:
            state = {"node": str(other.node), "last_line": other.last_line, **other.state}
            described[f"node-{other.node.rank}"] = (other.node.log, state)
        return described

    def _start_once(self) -> Server:
        self.watch.begin()
        server = super()._start_once()
        self.watch.ready_at = time.monotonic()
        server = dataclasses.replace(server, nodes=self.nodes)
        self.watch.is_over.clear()
        threading.Thread(target=self._watch, daemon=True, name="sm121-nodes").start()
        return server

    def _start_process(self) -> None:
        span = self.configuration.span
        assert span is not None
        try:
            host, port = nodes.master(span)
        except UsageError as error:
            here = Node(0, "this machine")
            raise NodeLoss(here, str(error)).error(self._loss, self.launch.log) from error
        self.rank = Rank(0, span.count, host, port)
        # The variables of this node's end of the link.
        bound = node_agent.bound_to(host, self.configuration)
        others_added = {name: value for name, value in self.added.items() if name not in bound}
        self.added = {**self.added, **bound}
        super()._start_process()
        address = self.watch.open(host)
        for rank, command in enumerate(span.commands, 1):
            self.watch.others.append(self._start_node(rank, command, address, others_added))

    def _start_node(
        self,
        rank: int,
        command: tuple[str, ...],
        beacon: tuple[str, int],
        added: Mapping[str, str],
    ) -> NodeProcess:
        assert self.rank is not None
        log = self.launch.log.with_name(f"{self.launch.log.stem}-node-{rank}.log")
        log.write_text("", "utf-8")
        request = node_process.question(
            self.configuration,
            "start",
            rank=dataclasses.asdict(dataclasses.replace(self.rank, number=rank)),
            beacon=beacon,
            added=added,
            stop_s=self.limits.stop_s,
            lease_s=nodes.bounds().lease_s.value,
            run=self.run_id,
        )
        try:
            return NodeProcess(rank, command, request, log)
        except UsageError as error:
            node = Node(rank, node_process.name_of(command), log)
            raise NodeLoss(node, str(error)).error(self._loss, log) from error

    def _watch(self) -> None:
        """End the server with its first rank, so that every client has an answer or an error."""
        while not self.watch.is_over.wait(_WATCH_EVERY_S):
            if self.fault() is not None and not self.watch.is_over.is_set():
                self.kill()
                return


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
