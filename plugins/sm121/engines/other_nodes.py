"""The interface between `ManagedServer` and the other nodes of its server.

`NoOtherNodes` is for a server without other nodes, `spanning.RankNodes` is for vLLM's own
``--nnodes``, and `ray_cluster.RayNodes` is for a Ray cluster.
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
    """The rank and the environment variables of the process on this machine."""

    #: The rank of this machine; None if this machine runs the whole server.
    rank: Rank | None = None
    #: Environment variables with which the process finds the other nodes.
    variables: Mapping[str, str] = field(default_factory=dict)


class OtherNodes(Protocol):
    """The other nodes of one server, from before its start to after its stop.

    If the port of a server was taken, `ManagedServer` starts the server again. Each attempt begins
    with `place`, and ends with `stopping` and `stopped`.
    """

    def place(self, launch: Launch) -> Placement:
        """Return the placement of a launch on this machine, before it is started.

        Args:
            launch: The launch, which has no process yet.

        Raises:
            StartError: The server cannot be started on these nodes.
            UsageError: The nodes do not answer.
        """

    def start(self, launch: Launch) -> None:
        """Start the ranks on the other nodes.

        Args:
            launch: The launch on this machine, which has been started.

        Raises:
            StartError: A rank cannot be started.
        """

    def ready(self, launch: Launch) -> tuple[Node, ...]:
        """Return all nodes of the server, this machine first; empty if it is the only node.

        Args:
            launch: The launch on this machine, whose server is ready.
        """

    def fault(self, launch: Launch, settle_s: float) -> ServerError | None:
        """Return the first fault of a node in this attempt, or None.

        Args:
            launch: The launch on this machine.
            settle_s: How long to wait for reports of the nodes, in seconds.
        """

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last state of each other node. The keys fit in file names."""

    def stacks(self) -> Mapping[str, str]:
        """Return each other node's stack traces, or why there are none.

        The keys fit in file names.
        """

    def nccl_by_node(self, launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return, for each node, the NCCL libraries that its ranks have mapped.

        Args:
            launch: The launch on this machine.
        """

    def stopping(self) -> None:
        """Prepare for the stop of the server. The stop follows this call."""

    def stopped(self, report: StopReport) -> StopReport:
        """Stop the ranks on the other nodes, and add what they leave behind to a report.

        Args:
            report: The report of the stop on this machine.
        """


@dataclass(frozen=True)
class NoOtherNodes:
    """The nodes of a server on this machine only, or of one rank if the user starts the others."""

    rank: Rank | None = None

    def place(self, _launch: Launch) -> Placement:
        """Return the rank from the configuration, without environment variables.

        Args:
            _launch: Not used, because the configuration contains the rank.
        """
        return Placement(self.rank)

    def start(self, _launch: Launch) -> None:
        """Start nothing.

        Args:
            _launch: Not used, because there is no other node.
        """

    def ready(self, _launch: Launch) -> tuple[Node, ...]:
        """Return an empty tuple.

        Args:
            _launch: Not used, because there is no other node.
        """
        return ()

    def fault(self, _launch: Launch, _settle_s: float) -> None:
        """Return None, because there is no other node.

        Args:
            _launch: Not used.
            _settle_s: Not used.
        """

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return an empty mapping."""
        return {}

    def stacks(self) -> Mapping[str, str]:
        """Return an empty mapping."""
        return {}

    def nccl_by_node(self, launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return the NCCL libraries that the processes of this machine have mapped.

        Args:
            launch: The launch.
        """
        return nccl_here(launch)

    def stopping(self) -> None:
        """Do nothing."""

    def stopped(self, report: StopReport) -> StopReport:
        """Return the report unchanged.

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
    """Return the NCCL libraries that the processes of this machine have mapped.

    Args:
        launch: The launch on this machine.
    """
    return {str(this_machine(launch)): mapped.nccl(launch.processes())}
