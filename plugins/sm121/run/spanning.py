"""The kernel path and the transport of each rank of a server on several machines.

If the ranks differ, or if the transport is wrong, every number of the server is INVALID.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from sm121.core.engine_settings import KernelPathRequirement, Nodes
from sm121.core.server import Node, Server
from sm121.engines.attached_processes import AttachedProcesses
from sm121.evidence import ranks, transport
from sm121.evidence.ranks import RankPath
from sm121.evidence.requirement import Contradiction
from sm121.evidence.transport import Transport
from sm121.machine import roofline
from sm121.run.engine_report import NodeReport

#: The transports whose bytes the counters of RDMA ports include.
_RDMA = {"RoCE", "IB"}
#: The length in tokens of the prompt that is sent to count its bytes.
_PROMPT_TOKENS = 1024


@dataclass
class Spanned:
    """The ranks of one server, with the faults found in them."""

    ranks: list[RankPath]
    #: The transport of each rank for which it is known, by the index in ``ranks``.
    carried: dict[int, Transport]
    #: The contradictions between the ranks and the profile.
    wrong: list[Contradiction] = field(default_factory=list)
    #: The properties for which there is no evidence.
    silent: list[str] = field(default_factory=list)
    #: The properties that make the server slower.
    remarks: list[str] = field(default_factory=list)

    def rows(self) -> list[NodeReport]:
        """Return a row for each rank, as the report shows it."""
        return [
            NodeReport.of(rank, self.carried.get(index)) for index, rank in enumerate(self.ranks)
        ]


def judge_ranks(
    server: Server, nodes: Nodes, required: KernelPathRequirement, counted: Transport | None = None
) -> Spanned:
    """Judge the ranks of a server by its logs.

    Args:
        server: The server.
        nodes: The nodes of the profile.
        required: The kernel path that the profile requires of each rank.
        counted: The transport that the counters of this machine's RDMA ports show, for ranks
            whose log does not show it.

    Raises:
        OSError: A log cannot be read.
    """
    logs = [(node.name, node.log) for node in server.nodes if node.log is not None]
    if not logs and server.log is not None:
        logs = [(server.endpoint.base_url, server.log)]
    of_ranks = ranks.read_ranks(logs, server.reader or "vllm", one_run=server.managed)
    carried = {}
    for index, rank in enumerate(of_ranks):
        used = transport.of_path(rank.path) or counted
        if used is not None:
            carried[index] = used
    judged = Spanned(of_ranks, carried)
    judged.wrong += ranks.contradictions(of_ranks, required, nodes.tensor_parallel)
    judged.wrong += transport.contradictions(of_ranks, carried, nodes.transports)
    judged.silent += ranks.missing(of_ranks, nodes.tensor_parallel)
    for index, rank in enumerate(of_ranks):
        if index not in carried:
            judged.silent.append(
                f"transport of {rank}: no line of the log shows it; {transport.REMEDY}"
            )
    if nodes.devices is not None:
        judged.remarks += transport.remarks(of_ranks, carried, nodes.devices)
    return judged


def judge_ranks_by_counters(
    server: Server,
    nodes: Nodes,
    required: KernelPathRequirement,
    counted: dict[Path | None, Transport | None],
    model: str,
) -> Spanned:
    """Judge the ranks of a server by its logs; find a missing transport by counters.

    Args:
        server: The server.
        nodes: The nodes of the profile.
        required: The kernel path that the profile requires of each rank.
        counted: For each log, the transport that the counters showed. Each log gets one prompt.
        model: The served model. Its config.json gives the number of bytes that ranks exchange.

    Raises:
        OSError: A log cannot be read.
    """
    judged = judge_ranks(server, nodes, required, counted.get(server.log))
    if len(judged.carried) < len(judged.ranks) and server.log not in counted:
        config = roofline.read_config(model) or {}
        counted[server.log] = count_a_prompt(server, nodes, config)
        judged = judge_ranks(server, nodes, required, counted[server.log])
    return judged


class RanksOfLogs(NamedTuple):
    """The ranks of a server, read from its logs.

    Attributes:
        rows: A row for each rank; empty for a server with one rank.
        faults: One line for each difference between ranks, and for each missing rank.
    """

    rows: list[NodeReport]
    faults: list[str]


def of_logs(logs: Sequence[Path], engine: str) -> RanksOfLogs:
    """Read the ranks of a server from its logs, without a profile.

    Args:
        logs: The logs of its nodes.
        engine: The name of the engine.

    Raises:
        OSError: A log cannot be read.
    """
    of_ranks = ranks.read_ranks([(str(log), log) for log in logs], engine)
    world = len(of_ranks)
    for rank in of_ranks:
        world = max(world, rank.path.log.world_size or 0)
    if world < 2:
        return RanksOfLogs([], [])
    no_requirement = KernelPathRequirement(source="nothing is required")
    faults = [str(fault) for fault in ranks.contradictions(of_ranks, no_requirement, world)]
    faults += ranks.missing(of_ranks, world)
    rows = [NodeReport.of(rank, transport.of_path(rank.path)) for rank in of_ranks]
    return RanksOfLogs(rows, faults)


def count_a_prompt(server: Server, nodes: Nodes, config: Mapping[str, Any]) -> Transport | None:
    """Find the transport: send one prompt, and read this machine's RDMA counters before and after.

    Args:
        server: The server. It receives a prompt that is in no cache.
        nodes: The nodes of the profile.
        config: The model's config.json.

    Returns:
        The transport. None if no RDMA is required, if this machine has no RDMA port or runs no
        rank, or if the server refuses the prompt.
    """
    before = transport.read_counters()
    hidden = config.get("hidden_size")
    layers = config.get("num_hidden_layers")
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


def rows(judged: Spanned, node_facts: Mapping[Node, Mapping[str, Any]]) -> list[NodeReport]:
    """Return a row for each rank of the server under test, with the memory of its node.

    Args:
        judged: The ranks of the server.
        node_facts: The facts about each node, collected before the start.
    """
    facts_by_name = {node.name: facts for node, facts in node_facts.items()}
    of_ranks = judged.rows()
    for row in of_ranks:
        if row.node in facts_by_name:
            available = facts_by_name[row.node]["available_bytes"]
            row.memory_available_gib = available / 2**30
    return of_ranks
