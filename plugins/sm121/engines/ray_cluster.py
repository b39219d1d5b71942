"""Check the user's Ray cluster before a server is started on it, and clean up after the stop.

The suite never starts, changes or stops the cluster.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.core import architecture, interpreter
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.server import Node
from sm121.engines import nodes, registry
from sm121.engines.endings import StopReport
from sm121.engines.launch import Launch
from sm121.engines.nodes import NodeLook
from sm121.engines.other_nodes import Placement
from sm121.engines.process_tree import Survivor
from sm121.engines.python_engine import IN_ENGINE
from sm121.engines.server_errors import ServerError
from sm121.evidence import failure
from sm121.evidence.mapped import MappedLibrary

#: Ray's name for the resource of a rank, where it is not "GPU". On a CPU,
#: ``in_engine/sm121_cpu_ray.py`` defines it.
_KEYS = {architecture.CPU: "sm121_rank"}
_START = "start it with ray start --head here, and ray start --address=HOST:6379 on the others"
_REMOVED_WITHIN_S = 15.0
#: The maximum number of differences that a message lists.
_SHOWN_DIFFERENCES = 5
#: The maximum number of earlier servers that a message lists.
_SHOWN_SERVERS = 4


def check_cluster(configuration: ServerConfiguration, arch: str, ranks: int) -> list[NodeLook]:
    """Check the cluster, and return its nodes, the head node first.

    Args:
        configuration: The configuration of the server.
        arch: The architecture of the nodes.
        ranks: The number of ranks of each node.

    Raises:
        UsageError: There is no cluster, its nodes or versions are not the expected ones, or an
            earlier server still uses it. The message is one line.
    """
    cluster = _ask(configuration)
    key = _KEYS.get(arch, "GPU")
    span = configuration.span
    assert span is not None
    entries = [entry for entry in cluster["nodes"] if entry["resources"].get(key, 0) >= ranks]
    if len(entries) != span.count:
        listed = "; ".join(_list_resource(entry, key) for entry in cluster["nodes"])
        raise UsageError(
            f"--launcher ray: expected {span.count} nodes with {ranks} {key} each, got {listed}"
        )
    left = [*cluster["groups"], *cluster["holders"]]
    if left:
        raise UsageError(
            "--launcher ray: an earlier server still uses the cluster: "
            f"{', '.join(left[:_SHOWN_SERVERS])}. End it, or restart the cluster (ray stop on "
            "each node)"
        )
    looks: list[NodeLook] = []
    for rank, entry in enumerate(entries):
        node = Node(rank, _name(entry, entries))
        if entry["facts"] is None:
            raise UsageError(f"{node} of the Ray cluster does not answer: {entry['why']}")
        looks.append(NodeLook(node, entry["facts"]))
        first = looks[0]
        differences = nodes.unequal(_compared(first.facts), _compared(entry["facts"]))
        if differences:
            shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
            raise UsageError(f"{node} differs from {first.node}: {shown}")
    return looks


def _list_resource(entry: Mapping[str, Any], key: str) -> str:
    return f"{entry['name']} {entry['address']}: {entry['resources'].get(key, 0):g} {key}"


def _name(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the host name of a node, or its address if another node has the same name."""
    names = [one["name"] for one in entries]
    is_alone = names.count(entry["name"]) == 1
    return str(entry["name"] if is_alone else entry["address"])


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that must be equal on all nodes; the keys are their names in messages."""
    own_variables = nodes.bounds().own_variables
    compared = {"Python": facts["python"], **facts["packages"]}
    for name, value in facts["variables"].items():
        if name not in own_variables:
            compared[name] = value
    if facts["gpus"]:
        compared["GPUs"] = ", ".join(facts["gpus"])
    return compared


def _ask(configuration: ServerConfiguration, remove: Sequence[str] = ()) -> Any:
    """Run ``in_engine/sm121_ray.py`` on this machine, and return its answer.

    Args:
        configuration: The configuration of the server.
        remove: Names of shared memory segments that the nodes must remove.
    """
    data = nodes.bounds()
    environment = registry.engine(configuration.engine).environment(configuration, api_key="")
    question = {
        "packages": data.packages,
        "variables": data.variables,
        "remove": [*remove],
        "within_s": data.silent_after_s.value,
    }
    try:
        return interpreter.ask(
            configuration.python,
            IN_ENGINE / "sm121_ray.py",
            environment,
            question,
            within_s=data.answers_within_s.value,
        )
    except interpreter.NoAnswer as error:
        raise UsageError(f"--launcher ray: no cluster answers ({error}); {_START}") from error


@dataclass
class RayNodes:
    """The nodes of a server whose ranks are actors of Ray; implements `OtherNodes`."""

    configuration: ServerConfiguration
    nodes: tuple[Node, ...] = field(init=False, default=())
    #: Shared memory segments of the ranks. The suite removes them, because Ray ends ranks with
    #: SIGKILL.
    segments: list[str] = field(init=False, default_factory=list)
    #: The first fault that was found: the cluster has lost a node.
    _found: ServerError | None = field(init=False, default=None)
    #: For each node, the NCCL libraries that its ranks have mapped.
    _nccl: dict[str, list[MappedLibrary]] = field(init=False, default_factory=dict)

    def place(self, _launch: Launch) -> Placement:
        """Return the environment variables with which vLLM finds the cluster.

        Args:
            _launch: Not used, because the variables are the same for each launch.

        Raises:
            UsageError: The cluster does not answer.
        """
        cluster = _ask(self.configuration)
        entries = [entry for entry in cluster["nodes"] if entry["facts"] is not None]
        self.nodes = tuple(Node(rank, _name(one, entries)) for rank, one in enumerate(entries))
        if not entries:
            return Placement()
        # The server has a temporary folder of its own, in which Ray would not find the address of
        # its cluster. Therefore a variable contains the address.
        link = {"VLLM_HOST_IP": entries[0]["address"], "RAY_ADDRESS": cluster["address"]}
        link["RAY_DEDUP_LOGS"] = "0"  # keep equal lines of several ranks
        return Placement(variables=link)

    def start(self, _launch: Launch) -> None:
        """Start nothing: Ray starts the ranks.

        Args:
            _launch: Not used.
        """

    def ready(self, launch: Launch) -> tuple[Node, ...]:
        """Return all nodes, and record the shared memory and the NCCL libraries of their ranks.

        Args:
            launch: The launch on this machine.

        Raises:
            UsageError: The cluster does not answer.
        """
        self.note_ranks()
        first = dataclasses.replace(self.nodes[0], log=launch.log)
        return (first, *self.nodes[1:])

    def note_ranks(self) -> None:
        """Record the shared memory of the nodes, and the NCCL libraries that the ranks have mapped.

        Raises:
            UsageError: The cluster does not answer.
        """
        for entry in _ask(self.configuration)["nodes"]:
            facts = entry["facts"] or {}
            self.segments += facts.get("segments", ())
            rows = [MappedLibrary.model_validate(row) for row in facts.get("nccl", ())]
            for node in self.nodes:
                if node.name in (entry["name"], entry["address"]):
                    self._nccl[str(node)] = rows

    def fault(self, launch: Launch, settle_s: float) -> ServerError | None:
        """Return an error if the cluster has lost a node, else None.

        Args:
            launch: The launch on this machine.
            settle_s: If this is 0, the cluster is not queried, and only a known fault is returned.
                A caller that suspects a fault passes a larger number.
        """
        if settle_s and self._found is None and not launch.was_stopped:
            self._found = self._find_fault(launch.log)
        return self._found

    def _find_fault(self, log: Path) -> ServerError | None:
        reasons: dict[str, str | None] = {}
        lost = "Ray has lost the node"
        try:
            for entry in _ask(self.configuration)["nodes"]:
                reasons[entry["name"]] = entry["why"]
                reasons[entry["address"]] = entry["why"]
        except UsageError as error:
            lost = str(error)
        for node in self.nodes:
            how = reasons.get(node.name, lost)
            if how is not None:
                cause = failure.ended("node", [], node=node, machine=node.name, how=how)
                return ServerError(f"{node} no longer takes part in the server: {how}", cause, log)
        return None

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return an empty mapping, because Ray collects the logs of all ranks on this machine."""
        return {}

    def stacks(self) -> Mapping[str, str]:
        """Return an empty mapping, because the processes on the other nodes belong to Ray."""
        return {}

    def nccl_by_node(self, _launch: Launch) -> Mapping[str, list[MappedLibrary]]:
        """Return the NCCL libraries that Ray's workers had mapped when the server was ready.

        Args:
            _launch: Not used, because `note_ranks` has recorded the libraries.
        """
        return self._nccl

    def stopping(self) -> None:
        """Record the shared memory of a failed start, while its ranks still run."""
        if self.nodes and not self.segments:
            with contextlib.suppress(UsageError):  # `stopped` will report the error
                self.note_ranks()

    def stopped(self, report: StopReport) -> StopReport:
        """Remove the shared memory of the ranks, and report what still occupies the cluster.

        Args:
            report: The report of the stop on this machine.
        """
        if not self.nodes:
            return report
        left = self._clean()
        remains = tuple(Survivor(0, "in the Ray cluster", name) for name in left)
        return dataclasses.replace(report, survivors=(*report.survivors, *remains))

    def _clean(self) -> list[str]:
        """Remove the server's shared memory, and return what still occupies the cluster."""
        deadline = math.inf
        left = ["the cluster does not answer"]
        while left and time.monotonic() < deadline:
            try:
                cluster = _ask(self.configuration, self.segments)
            except UsageError as error:
                left = [str(error)]
                break
            left = [*cluster["groups"], *cluster["holders"]]
            deadline = min(deadline, time.monotonic() + _REMOVED_WITHIN_S)
        self.nodes = ()
        self.segments = []
        return left
