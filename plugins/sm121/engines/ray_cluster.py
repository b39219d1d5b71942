"""A server on the user's Ray cluster: check the cluster before a start, clean up after a stop.

The cluster is the user's: nothing here starts, changes or stops it.
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
from sm121.core.server import Node, Server
from sm121.engines import nodes, registry
from sm121.engines.endings import StopReport
from sm121.engines.managed import ManagedServer
from sm121.engines.nodes import NodeLook
from sm121.engines.process_tree import Survivor
from sm121.engines.python_engine import IN_ENGINE
from sm121.engines.server_errors import ServerError
from sm121.evidence import failure
from sm121.evidence.mapped import MappedLibrary

#: Ray's name for the resource of a rank: on a CPU by ``in_engine/sm121_cpu_ray.py``.
_KEYS = {architecture.CPU: "sm121_rank"}
_START = "start it with ray start --head here, and ray start --address=HOST:6379 on the others"
_REMOVED_WITHIN_S = 15.0
#: Limit of the differences in a message.
_SHOWN_DIFFERENCES = 5
#: Limit of the earlier servers in a message.
_SHOWN_SERVERS = 4


def look(configuration: ServerConfiguration, arch: str, ranks: int) -> list[NodeLook]:
    """Return the nodes of the cluster, the head first.

    Args:
        configuration: The configuration of the server.
        arch: The architecture of the nodes.
        ranks: The number of ranks of each node.

    Raises:
        UsageError: There is no cluster, it has other nodes or versions, or an earlier server is
            there. The message is one line.
    """
    cluster = _ask(configuration)
    key = _KEYS.get(arch, "GPU")
    span = configuration.span
    assert span is not None
    entries = [entry for entry in cluster["nodes"] if entry["resources"].get(key, 0) >= ranks]
    if len(entries) != span.count:
        listed = "; ".join(_list_resource(entry, key) for entry in cluster["nodes"])
        raise UsageError(
            f"--launcher ray: expected {span.count} nodes with {ranks} {key} each; {listed}"
        )
    left = [*cluster["groups"], *cluster["holders"]]
    if left:
        raise UsageError(
            "--launcher ray: an earlier server holds the cluster: "
            f"{', '.join(left[:_SHOWN_SERVERS])}: end it, "
            "or start the cluster anew (ray stop on each node)"
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
            raise UsageError(f"{node} is not as {first.node}: {shown}")
    return looks


def _list_resource(entry: Mapping[str, Any], key: str) -> str:
    return f"{entry['name']} {entry['address']}: {entry['resources'].get(key, 0):g} {key}"


def _name(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a node's host, or its address if another node has that name."""
    names = [one["name"] for one in entries]
    is_alone = names.count(entry["name"]) == 1
    return str(entry["name"] if is_alone else entry["address"])


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that must be equal on all nodes, by their names for people."""
    own_variables = nodes.bounds().own_variables
    compared = {"Python": facts["python"], **facts["packages"]}
    for name, value in facts["variables"].items():
        if name not in own_variables:
            compared[name] = value
    if facts["gpus"]:
        compared["GPUs"] = ", ".join(facts["gpus"])
    return compared


def _ask(configuration: ServerConfiguration, remove: Sequence[str] = ()) -> Any:
    """Return the answer of ``in_engine/sm121_ray.py`` on this machine.

    Args:
        configuration: The configuration of the server.
        remove: Names of shared memory that the nodes are to remove.
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
class RayPlaces:
    """What a server has in a cluster: its nodes, and shared memory and NCCL there."""

    nodes: tuple[Node, ...] = ()
    #: The fault of a node that the cluster has lost; the first one stands.
    fault: ServerError | None = None
    #: Shared memory of its ranks: Ray ends them by SIGKILL.
    segments: list[str] = field(default_factory=list)
    #: The NCCL that the ranks of each node mapped, by the node.
    nccl: dict[str, list[MappedLibrary]] = field(default_factory=dict)

    def note_ranks(self, configuration: ServerConfiguration) -> None:
        """Note the shared memory of the nodes, and the NCCL that the ranks mapped.

        Args:
            configuration: The configuration of the server.

        Raises:
            UsageError: The cluster does not answer.
        """
        for entry in _ask(configuration)["nodes"]:
            facts = entry["facts"] or {}
            self.segments += facts.get("segments", ())
            rows = [MappedLibrary.model_validate(row) for row in facts.get("nccl", ())]
            for node in self.nodes:
                if node.name in (entry["name"], entry["address"]):
                    self.nccl[str(node)] = rows

    def find_fault(self, configuration: ServerConfiguration, log: Path) -> ServerError | None:
        """Return the fault of a node that the cluster has lost, or None.

        Args:
            configuration: The configuration of the server.
            log: Its log.
        """
        reasons: dict[str, str | None] = {}
        lost = "Ray has lost it"
        try:
            for entry in _ask(configuration)["nodes"]:
                reasons[entry["name"]] = entry["why"]
                reasons[entry["address"]] = entry["why"]
        except UsageError as error:
            lost = str(error)
        for node in self.nodes:
            how = reasons.get(node.name, lost)
            if how is not None:
                cause = failure.ended("node", [], node=node, machine=node.name, how=how)
                return ServerError(f"{node} is lost to the server: {how}", cause, log)
        return None

    def clean(self, configuration: ServerConfiguration) -> list[str]:
        """Remove the server's shared memory, and return what still holds the cluster.

        Args:
            configuration: The configuration of the server.
        """
        deadline = math.inf
        left = ["the cluster does not answer"]
        while left and time.monotonic() < deadline:
            try:
                cluster = _ask(configuration, self.segments)
            except UsageError as error:
                left = [str(error)]
                break
            left = [*cluster["groups"], *cluster["holders"]]
            deadline = min(deadline, time.monotonic() + _REMOVED_WITHIN_S)
        self.nodes = ()
        self.segments = []
        return left


@dataclass
class RayServer(ManagedServer):
    """A server whose ranks are actors of Ray."""

    places: RayPlaces = field(init=False, default_factory=RayPlaces)

    def _start_once(self) -> Server:
        cluster = _ask(self.configuration)
        entries = [entry for entry in cluster["nodes"] if entry["facts"] is not None]
        found = tuple(Node(rank, _name(one, entries)) for rank, one in enumerate(entries))
        self.places.nodes = found
        if entries:
            # A server's temporary files are elsewhere: Ray would not find its cluster there.
            link = {"VLLM_HOST_IP": entries[0]["address"], "RAY_ADDRESS": cluster["address"]}
            link["RAY_DEDUP_LOGS"] = "0"  # else Ray leaves out a rank's line that another had too
            self.added = {**self.added, **link}
        server = super()._start_once()
        self.places.note_ranks(self.configuration)
        first = dataclasses.replace(found[0], log=self.launch.log)
        return dataclasses.replace(server, nodes=(first, *found[1:]))

    def nccl_by_node(self) -> dict[str, list[MappedLibrary]]:
        """Return the NCCL that the ranks mapped when the server was ready: Ray's workers alone."""
        return self.places.nccl

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Return the fault of the node that the cluster has lost, or None.

        Args:
            settle_s: More than 0 if something is amiss; only then the cluster is asked.
        """
        places = self.places
        if settle_s and places.fault is None and not self.launch.was_stopped:
            places.fault = places.find_fault(self.configuration, self.launch.log)
        return places.fault

    def stop(self) -> StopReport:
        """Stop the server. The report names its remains in the cluster, too."""
        places = self.places
        served = bool(places.nodes)
        if served and not places.segments:  # its start has failed
            with contextlib.suppress(UsageError):  # told below
                places.note_ranks(self.configuration)
        report = super().stop()
        if not served:
            return report
        left = places.clean(self.configuration)
        remains = tuple(Survivor(0, "in the Ray cluster", name) for name in left)
        return dataclasses.replace(report, survivors=(*report.survivors, *remains))
