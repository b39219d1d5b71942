"""The other ranks of a server that spans machines with vLLM's own option ``--nnodes``.

Rank 0 runs on this machine, under this suite's supervisor. The command of each other node starts
the rank of that node, under a supervisor there. If one rank ends, the suite ends the whole server.
Otherwise the other ranks would wait for minutes, while /health still returns status 200.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.core.configuration import Rank, ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.server import Node
from sm121.core.waiting import until
from sm121.engines import node_agent, node_process, nodes
from sm121.engines.endings import StopReport
from sm121.engines.launch import Launch
from sm121.engines.memory import Returned
from sm121.engines.node_process import NodeProcess
from sm121.engines.node_watch import NodeLoss, NodeWatch, name_of_files
from sm121.engines.other_nodes import Placement, nccl_here, this_machine
from sm121.engines.process_tree import Survivor
from sm121.engines.server_errors import ServerError, ServerExited
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.mapped import MappedLibrary

_WATCH_EVERY_S = 0.5
#: Seconds that a node gets to read its memory after a stop, in addition to the time for ending its
#: rank.
_REPORT_WITHIN_S = 40.0
#: Seconds that a node gets in total if it sent nothing before the stop.
_SILENT_REPORT_WITHIN_S = 5.0


@dataclass
class RankNodes:
    """The ranks of a server on other machines than rank 0; implements `OtherNodes`."""

    configuration: ServerConfiguration
    #: How long a rank gets between SIGTERM and SIGKILL, in seconds.
    stop_s: float
    #: The id of the run, which is in the environment of each process of the server.
    run_id: str
    #: Environment variables to add to each rank.
    added: Mapping[str, str] = field(default_factory=dict)
    watch: NodeWatch = field(init=False, default_factory=NodeWatch)
    #: Rank 0 of the current attempt to start the server.
    _rank_0: Rank = field(init=False)
    #: The environment variables that make rank 0 use the network link to the other nodes.
    _bound: Mapping[str, str] = field(init=False, default_factory=dict)

    def place(self, launch: Launch) -> Placement:
        """Return rank 0, and the variables that make it use the network link to the other nodes.

        Args:
            launch: The launch of rank 0.

        Raises:
            StartError: This machine has no address at which the other nodes can reach it.
        """
        self.watch.begin()
        span = self.configuration.span
        assert span is not None
        try:
            host, port = nodes.master(span)
        except UsageError as error:
            here = Node(0, "this machine")
            raise NodeLoss(here, str(error)).error(ServerExited, launch.log) from error
        self._rank_0 = Rank(0, span.count, host, port)
        self._bound = node_agent.bound_to(host, self.configuration)
        return Placement(self._rank_0, self._bound)

    def start(self, launch: Launch) -> None:
        """Start the other ranks.

        Args:
            launch: The launch of rank 0.

        Raises:
            StartError: The command of a node cannot be started.
        """
        span = self.configuration.span
        assert span is not None
        address = self.watch.open(self._rank_0.address)
        for rank, command in enumerate(span.commands, 1):
            self.watch.others.append(self._start_node(rank, command, address, launch.log))

    def ready(self, launch: Launch) -> tuple[Node, ...]:
        """Return all nodes, rank 0 first, and watch them until the server is stopped.

        Args:
            launch: The launch of rank 0.
        """
        self.watch.ready_at = time.monotonic()
        self.watch.is_over.clear()
        threading.Thread(target=self._watch, args=[launch], daemon=True, name="sm121-nodes").start()
        return (this_machine(launch), *(other.node for other in self.watch.others))

    def fault(self, launch: Launch, settle_s: float) -> ServerError | None:
        """Return the first fault of any node, or None.

        Args:
            launch: The launch of rank 0.
            settle_s: How long to wait for reports of the nodes, in seconds.
        """
        until(lambda: self._is_settled(launch), settle_s)
        return self.watch.fault

    def _is_settled(self, launch: Launch) -> bool:
        if not launch.was_stopped:
            # A fault before the server was ready means that its start has failed.
            kind = ServerExited if self.watch.ready_at == -math.inf else ServerError
            self.watch.look(launch, kind)
        return self.watch.fault is not None or launch.was_stopped

    def stopping(self) -> None:
        """Stop watching. From now on, the end of a rank is not a fault."""
        self.watch.is_over.set()

    def stopped(self, report: StopReport) -> StopReport:
        """Stop the other ranks, and add what they leave behind on their nodes to a report.

        Args:
            report: The report of rank 0.
        """
        for other in self.watch.end():
            within_s = self.stop_s + _REPORT_WITHIN_S
            if time.monotonic() - other.heard_at >= nodes.bounds().silent_after_s.value:
                within_s = _SILENT_REPORT_WITHIN_S
            answer = other.close(within_s)
            report = _with_node(report, other.node, answer, other.heard_at - self.watch.ready_at)
        return report

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last report of each other node. The keys fit in file names.

        A report has the processes, memory, exit statuses and kernel messages of the node.
        """
        described = {}
        for other in self.watch.others:
            state = {"node": str(other.node), "last_line": other.last_line, **other.state}
            described[name_of_files(other)] = (other.node.log, state)
        return described

    def stacks(self) -> Mapping[str, str]:
        """Return the stack traces of each other node. The keys fit in file names.

        After a fault, these are the stack traces that were read then. Otherwise they are read now.
        """
        return self.watch.stacks_at_fault or self.watch.take_stacks()

    def nccl_by_node(self, launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return, for each node, the NCCL libraries that its ranks have mapped.

        For other nodes, this is read from their last reports.

        Args:
            launch: The launch of rank 0.
        """
        libraries = nccl_here(launch)
        for other in self.watch.others:
            if "nccl" in other.state:
                rows = [MappedLibrary.model_validate(row) for row in other.state["nccl"]]
                libraries[str(other.node)] = rows
        return libraries

    def _start_node(
        self,
        rank: int,
        command: tuple[str, ...],
        beacon: tuple[str, int],
        log_of_rank_0: Path,
    ) -> NodeProcess:
        log = log_of_rank_0.with_name(f"{log_of_rank_0.stem}-node-{rank}.log")
        log.write_text("", "utf-8")
        # The variables in `_bound` are for this machine's end of the network link. Each other node
        # determines its own.
        added = {name: value for name, value in self.added.items() if name not in self._bound}
        request = node_process.question(
            self.configuration,
            "start",
            rank=dataclasses.asdict(dataclasses.replace(self._rank_0, number=rank)),
            beacon=beacon,
            added=added,
            stop_s=self.stop_s,
            lease_s=nodes.bounds().lease_s.value,
            run=self.run_id,
        )
        try:
            return NodeProcess(rank, command, request, log)
        except UsageError as error:
            node = Node(rank, node_process.name_of(command), log)
            raise NodeLoss(node, str(error)).error(ServerExited, log) from error

    def _watch(self, launch: Launch) -> None:
        """End the server if a node is lost, so that each client gets an answer or an error."""
        while not self.watch.is_over.wait(_WATCH_EVERY_S):
            fault = self.fault(launch, settle_s=0.0)
            if fault is not None and not self.watch.is_over.is_set():
                launch.kill()
                return


def _with_node(
    report: StopReport, node: Node, answer: Mapping[str, Any] | None, served_s: float
) -> StopReport:
    """Add the stop of another node to a report.

    Args:
        report: The report so far.
        node: The node.
        answer: The node's own report; None if it sent none.
        served_s: Seconds from the server's readiness to the node's last message.
    """
    if answer is None:
        lost = Survivor(
            0,
            "unknown",
            f"{node} did not report whether a process, port or memory of the server is left there",
        )
        return dataclasses.replace(report, survivors=(*report.survivors, lost))
    left = []
    for entry in answer["survivors"]:
        left.append(Survivor(entry["pid"], entry["status"], f"{node}: {entry['command']}"))
    crash = f"{node}: {answer['crash']}" if answer["crash"] else None
    lines, unavailable, now = answer["kernel"]  # `now` is the time on the clock of that node
    kernel = KernelMessages(tuple(lines), unavailable, [(0.0, now - served_s)])
    return dataclasses.replace(
        report,
        survivors=(*report.survivors, *left),
        memory=report.memory.with_other(Returned(**answer["memory"]), str(node)),
        crash=report.crash or crash,
        kernels={**report.kernels, str(node): kernel},
    )
