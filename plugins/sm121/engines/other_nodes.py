"""The other nodes of a server: the calls that `ManagedServer` makes, and the class for no nodes.

`spanning.RankNodes` is for vLLM's own ``--nnodes``, `ray_cluster.RayNodes` for a Ray cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sm121.core.configuration import Rank
from sm121.core.server import Node
from sm121.engines.endings import StopReport
from sm121.engines.launch import Launch
from sm121.engines.server_errors import ServerError
from sm121.evidence import mapped
from sm121.evidence.mapped import MappedLibrary


@dataclass(frozen=True)
class Placement:
    """The rank and the variables with which the launch on this machine finds the other nodes."""

    #: The rank of this machine; None if the launch on it is a whole server.
    rank: Rank | None = None
    #: Variables that are added to its environment.
    variables: Mapping[str, str] = field(default_factory=dict)


class OtherNodes(Protocol):
    """The other nodes of one server, from before its start to after its stop.

    A server is started again if its port was taken: `place` begins an attempt, `stopping` and
    `stopped` end it.
    """

    def place(self, launch: Launch) -> Placement:
        """Return the placement of a launch on this machine, which is started next.

        Args:
            launch: The launch, which has no process yet.

        Raises:
            StartError: The server cannot be started on these nodes.
            UsageError: They do not answer.
        """

    def start(self, launch: Launch) -> None:
        """Start the other nodes' parts.

        Args:
            launch: The launch on this machine, which has been started.

        Raises:
            StartError: A part cannot be started.
        """

    def ready(self, launch: Launch) -> tuple[Node, ...]:
        """Return all nodes of the server, this machine first; empty: it is this machine alone.

        Args:
            launch: The launch on this machine, which serves now.
        """

    def fault(self, launch: Launch, settle_s: float) -> ServerError | None:
        """Return the first fault of a node in this attempt, or None.

        Args:
            launch: The launch on this machine.
            settle_s: How long to wait for reports of the nodes, in seconds.
        """

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last state of each other node, by a name for files."""

    def stacks(self) -> Mapping[str, str]:
        """Return the stacks of each other node, or why there are none, by a name for files."""

    def nccl_by_node(self, launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return the NCCL that the ranks of each node mapped, by the node.

        Args:
            launch: The launch on this machine.
        """

    def stopping(self) -> None:
        """Prepare for the stop of the server, which comes next."""

    def stopped(self, report: StopReport) -> StopReport:
        """Stop the other nodes' parts, and add what is left of them to a report.

        Args:
            report: The report of the stop on this machine.
        """


@dataclass(frozen=True)
class NoOtherNodes:
    """No other nodes: a whole server, or one rank whose other ranks the user starts."""

    rank: Rank | None = None

    def place(self, _launch: Launch) -> Placement:
        """Return the rank."""
        return Placement(self.rank)

    def start(self, _launch: Launch) -> None:
        """Start nothing."""

    def ready(self, _launch: Launch) -> tuple[Node, ...]:
        """Return no node."""
        return ()

    def fault(self, _launch: Launch, _settle_s: float) -> None:
        """Return None."""

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return nothing."""
        return {}

    def stacks(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def nccl_by_node(self, launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return the NCCL of this machine.

        Args:
            launch: The launch.
        """
        return nccl_here(launch)

    def stopping(self) -> None:
        """Do nothing."""

    def stopped(self, report: StopReport) -> StopReport:
        """Return the report as it is.

        Args:
            report: The report.
        """
        return report


def this_machine(launch: Launch) -> Node:
    """Return the node of rank 0.

    Args:
        launch: The launch of rank 0.
    """
    return Node(0, "this machine", launch.log)


def nccl_here(launch: Launch) -> dict[str, list[MappedLibrary]]:
    """Return the NCCL that the processes of this machine mapped, by its node.

    Args:
        launch: The launch on this machine.
    """
    return {str(this_machine(launch)): mapped.nccl(launch.processes())}
