"""A server on the user's Ray cluster: it is looked at before a start, and nothing is left there
after a stop. The cluster is the user's: nothing here starts, changes or stops it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm121.core import architecture, interpreter
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.server import Node, Server
from sm121.engines import nodes, registry
from sm121.engines.endings import StopReport
from sm121.engines.managed import ManagedServer
from sm121.engines.process_tree import Survivor
from sm121.engines.python_engine import IN_ENGINE
from sm121.engines.server_errors import ServerError
from sm121.evidence import failure

#: The resource of a rank, as Ray calls it: on a CPU by ``in_engine/sm121_cpu_ray.py``.
_KEYS = {architecture.CPU: "sm121_rank"}
_START = "start it with ray start --head here, and ray start --address=HOST:6379 on the others"
_REMOVED_WITHIN_S = 15.0


def look(configuration: ServerConfiguration, arch: str, ranks: int) -> list[tuple[Node, Any]]:
    """The nodes of the cluster, the head first. `ranks`: of each node. Raises UsageError, in one
    line: there is no cluster, it has other nodes or versions, or an earlier server is there."""
    cluster, key = _ask(configuration), _KEYS.get(arch, "GPU")
    span = configuration.span
    assert span is not None
    entries = [e for e in cluster["nodes"] if e["resources"].get(key, 0) >= ranks]
    listed = "; ".join(f"{e['name']} {e['address']}: {e['resources'].get(key, 0):g} {key}"
                       for e in cluster["nodes"])  # fmt: skip
    if len(entries) != span.count:
        raise UsageError(
            f"--launcher ray: expected {span.count} nodes with {ranks} {key} each; {listed}"
        )
    if left := [*cluster["groups"], *cluster["holders"]]:
        raise UsageError(
            f"--launcher ray: an earlier server holds the cluster: {', '.join(left[:4])}: end it, "
            "or start the cluster anew (ray stop on each node)"
        )
    looks = [(Node(rank, _name(entry, entries)), entry) for rank, entry in enumerate(entries)]
    for node, entry in looks:
        if entry["facts"] is None:
            raise UsageError(f"{node} of the Ray cluster does not answer: {entry['why']}")
        if wrong := nodes.unequal(_compared(looks[0][1]["facts"]), _compared(entry["facts"])):
            raise UsageError(f"{node} is not as {looks[0][0]}: {'; '.join(wrong[:5])}")
    return looks


def _name(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Of a node: its host's, where no other of the cluster has that."""
    is_alone = sum(each["name"] == entry["name"] for each in entries) == 1
    return str(entry["name"] if is_alone else entry["address"])


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    of_a_node = nodes.bounds().own_variables
    variables = {n: v for n, v in facts["variables"].items() if n not in of_a_node}
    gpus = {"GPUs": ", ".join(facts["gpus"])} if facts["gpus"] else {}
    return {"Python": facts["python"], **facts["packages"], **variables, **gpus}


def _ask(configuration: ServerConfiguration, remove: Sequence[str] = ()) -> Any:
    data = nodes.bounds()
    environment = registry.engine(configuration.engine).environment(configuration, api_key="")
    question = {
        "packages": data.packages,
        "variables": data.variables,
        "remove": [*remove],
        "within_s": data.silent_after_s.value,
    }
    script, within_s = IN_ENGINE / "sm121_ray.py", data.answers_within_s.value
    try:
        return interpreter.ask(
            configuration.python, script, environment, question, within_s=within_s
        )
    except interpreter.NoAnswer as error:
        raise UsageError(f"--launcher ray: no cluster answers ({error}); {_START}") from error


@dataclass
class RayServer(ManagedServer):
    """A server whose ranks are actors of Ray."""

    nodes: tuple[Node, ...] = field(init=False, default=())
    _fault: ServerError | None = field(init=False, default=None)
    #: Shared memory of its ranks: Ray ends them by SIGKILL.
    _segments: list[str] = field(init=False, default_factory=list)

    def _start_once(self) -> Server:
        cluster = _ask(self.configuration)
        entries = [entry for entry in cluster["nodes"] if entry["facts"] is not None]
        self.nodes = tuple(Node(rank, _name(e, entries)) for rank, e in enumerate(entries))
        if entries:
            # A server's temporary files are elsewhere: Ray would not find its cluster there.
            link = {"VLLM_HOST_IP": entries[0]["address"], "RAY_ADDRESS": cluster["address"]}
            link["RAY_DEDUP_LOGS"] = "0"  # else Ray leaves out what a rank says as another did
            self.added = {**self.added, **link}
        server = super()._start_once()
        self._note_segments()
        first = dataclasses.replace(self.nodes[0], log=self.log)
        return dataclasses.replace(server, nodes=(first, *self.nodes[1:]))

    def _note_segments(self) -> None:
        for entry in _ask(self.configuration)["nodes"]:
            self._segments += (entry["facts"] or {}).get("segments", ())

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Which node the cluster has lost; it is asked where something is amiss alone."""
        if settle_s and self._fault is None and not self.was_stopped:
            try:
                entries, lost = _ask(self.configuration)["nodes"], "Ray has lost it"
            except UsageError as error:
                entries, lost = [], str(error)
            whys = {e[key]: e["why"] for e in entries for key in ("name", "address")}
            for node in self.nodes:
                if (how := whys.get(node.name, lost)) is None:
                    continue
                cause = failure.ended("node", [], node=node, machine=node.name, how=how)
                self._fault = ServerError(f"{node} is lost to the server: {how}", cause, self.log)
                break
        return self._fault

    def stop(self) -> StopReport:
        """As of any server; and what it has left in the cluster."""
        served = bool(self.nodes)
        if served and not self._segments:  # its start has failed
            with contextlib.suppress(UsageError):  # told below
                self._note_segments()
        report = super().stop()
        if not served:
            return report
        deadline, left = math.inf, ["the cluster does not answer"]
        self.nodes = ()
        while left and time.monotonic() < deadline:
            try:
                cluster = _ask(self.configuration, self._segments)
            except UsageError as error:
                left = [str(error)]
                break
            left = [*cluster["groups"], *cluster["holders"]]
            deadline = min(deadline, time.monotonic() + _REMOVED_WITHIN_S)
        self._segments = []
        remains = tuple(Survivor(0, "in the Ray cluster", each) for each in left)
        return dataclasses.replace(report, survivors=(*report.survivors, *remains))
