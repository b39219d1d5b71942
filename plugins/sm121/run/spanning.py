"""What a server that spans machines shows of each of its ranks: its path, and what carries its
bytes. A difference between ranks, or a wrong carrier, makes every number of it INVALID."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sm121.core.engine_settings import KernelPathRequirement, Nodes
from sm121.core.server import Server
from sm121.engines.attached_processes import AttachedProcesses
from sm121.evidence import ranks, transport
from sm121.evidence.ranks import RankPath
from sm121.evidence.requirement import Contradiction
from sm121.evidence.transport import Transport
from sm121.run.engine_report import NodeReport

_RDMA = {"RoCE", "IB"}
_PROMPT_TOKENS = 1024


@dataclass
class Spanned:
    """Of one server. ``wrong``: what contradicts the profile; ``silent``: what nothing proves;
    ``remarks``: what costs speed. ``carried``: by index in ``ranks``."""

    ranks: list[RankPath]
    carried: dict[int, Transport]
    wrong: list[Contradiction] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def rows(self) -> list[NodeReport]:
        """A row for each rank, as the report shows it."""
        return [NodeReport.of(each, self.carried.get(n)) for n, each in enumerate(self.ranks)]


def look(
    server: Server, nodes: Nodes, required: KernelPathRequirement, counted: Transport | None = None
) -> Spanned:
    """Judge the ranks of a server by its logs. `counted`: what the counters of this machine's RDMA
    ports say, where no line tells what carries the bytes. Raises OSError."""
    logs = [(node.name, node.log) for node in server.nodes if node.log is not None]
    if not logs and server.log is not None:
        logs = [(server.endpoint.base_url, server.log)]
    of_ranks = ranks.read_ranks(logs, server.reader or "vllm", one_run=server.managed)
    lines = {index: transport.of_path(each.path) for index, each in enumerate(of_ranks)}
    carried = {index: by for index, each in lines.items() if (by := each or counted) is not None}
    judged = Spanned(of_ranks, carried)
    judged.wrong += ranks.contradictions(of_ranks, required, nodes.tensor_parallel)
    judged.wrong += transport.contradictions(of_ranks, carried, nodes.transports)
    judged.silent += ranks.missing(of_ranks, nodes.tensor_parallel)
    judged.silent += [
        f"transport of {each}: no line shows what carries its bytes; {transport.REMEDY}"
        for index, each in enumerate(of_ranks)
        if index not in carried
    ]
    if nodes.devices is not None:
        judged.remarks += transport.remarks(of_ranks, carried, nodes.devices)
    return judged


def of_logs(logs: Sequence[Path], engine: str) -> tuple[list[NodeReport], list[str]]:
    """A row for each rank that the logs of a server show, and what differs or is missing; empty
    where there is one rank. Raises OSError."""
    of_ranks = ranks.read_ranks([(str(log), log) for log in logs], engine)
    world = max([len(of_ranks), *(each.path.world_size or 0 for each in of_ranks)], default=0)
    if world < 2:
        return [], []
    nothing = KernelPathRequirement(source="nothing is required")
    unequal = [
        *map(str, ranks.contradictions(of_ranks, nothing, world)),
        *ranks.missing(of_ranks, world),
    ]
    return [NodeReport.of(each, transport.of_path(each.path)) for each in of_ranks], unequal


def count_a_prompt(server: Server, nodes: Nodes, config: Mapping[str, Any]) -> Transport | None:
    """What the counters of this machine's RDMA ports count while the server takes a prompt that no
    cache has; None where no RDMA is required, where this machine has none or does not run a rank,
    or where the prompt is refused. `config`: of the model (config.json)."""
    before = transport.read_counters()
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if not before or not hidden or not layers or not _RDMA & set(nodes.transports):
        return None
    if not server.managed and not AttachedProcesses(server.endpoint.base_url).here:
        return None
    tokens = random.sample(range(1000, 1000 + 8 * _PROMPT_TOKENS), _PROMPT_TOKENS)
    body = {"model": server.endpoint.served_name, "prompt": tokens, "max_tokens": 1}
    with server.endpoint.http(timeout_s=60.0) as http:
        try:
            answer = http.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return None
    if answer.status_code != 200:
        return None
    counted = transport.difference(before, transport.read_counters())
    least = transport.least_bytes(_PROMPT_TOKENS, hidden, layers + 1)
    return transport.by_counters(counted, least)
