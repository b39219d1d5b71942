"""The kernel path of each rank of a server that spans machines: one for each rank, from one log or
from one log a node, and equal on all of them."""

import ast
import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.core.engine_settings import KernelPathRequirement
from sm121.evidence.kernel_path import KernelPath, LogReader
from sm121.evidence.requirement import (
    COMPARED,
    MUST_BE_SHOWN,
    Contradiction,
    accepted_values,
)

#: Equal on all ranks, beside what a profile may require.
_EQUAL = (*COMPARED, "native_fp4", "block_size", "graph_sizes", "group", "version")
#: Minutes: more than time zones differ; more still is the turn of a year.
_ANOTHER_DAY = range(15 * 60, 180 * 24 * 60)


class RankPath(data_file.Record):
    """What one rank runs, by the log of its node."""

    rank: int | None
    """None: no line says which rank it is."""
    node: str
    """The node's name, or the address that its lines carry."""
    path: KernelPath

    def __str__(self) -> str:
        return f"rank {'?' if self.rank is None else self.rank} on {self.node}"


def read_ranks(
    logs: Sequence[tuple[str, Path]], engine: str, *, one_run: bool = False
) -> list[RankPath]:
    """The path of each rank that `logs` show, by rank. `logs`: a node's name and its log; of one
    log for several nodes a line's address names the node. What the first rank of a node says holds
    for its others where they are silent: vLLM says most of it once a node. Raises OSError."""
    rank_paths: list[RankPath] = []
    for name, log in logs:
        reader = LogReader(engine, one_run=one_run)
        reader.read(log)
        of_node: dict[str, list[RankPath]] = {}
        workers = reader.workers()
        for worker, path in workers.items():
            twins = [p.rank for w, p in workers.items() if w != worker and w.pid == worker.pid]
            is_twin = path.rank in twins and path.rank is not None
            if is_twin and bool(worker.node) == (path.rank == 0):
                continue  # two nodes of Ray on one host read each other's files; rank 0 is here
            node = worker.node or name
            of_node.setdefault(node, []).append(RankPath(rank=path.rank, node=node, path=path))
        for ranks in of_node.values():
            ranks.sort(key=_order)
            first = ranks[0].path
            for other in ranks[1:]:
                for field in _EQUAL:
                    if getattr(other.path, field) is None and field != "group":
                        setattr(other.path, field, getattr(first, field))
                        other.path.also |= {n: v for n, v in first.also.items() if n == field}
        for each in itertools.chain.from_iterable(of_node.values()):
            path = each.path  # a start may have other processes with a worker's name
            if path.rank is not None or path.attention is not None or path.channels:
                rank_paths.append(each)
    return sorted(rank_paths, key=_order)


def _order(each: RankPath) -> int:
    return 1 << 30 if each.rank is None else each.rank


def contradictions(
    ranks: Sequence[RankPath], required: KernelPathRequirement, world_size: int
) -> Iterator[Contradiction]:
    """What differs between ranks, and a size of the world that is another one; each names rank and
    node."""
    for each in ranks:
        size = each.path.world_size
        if size is not None and size != world_size:
            part = f"world size of {each}"
            yield Contradiction(part, str(size), f"{part}: required {world_size}, seen {size}")
    for field in _EQUAL:
        yield from _unequal(ranks, field, accepted_values(required, field))
    shown = [(each, _arguments(each.path)) for each in ranks if each.path.asked]
    for each, arguments in shown[1:]:
        like, first = shown[0]
        for name in sorted({*arguments, *first}):
            value, other = arguments.get(name, "not set"), first.get(name, "not set")
            if value != other:
                part = f"argument {name} of {each}"
                yield Contradiction(part, str(value), f"{part}: {value}, of {like}: {other}")
    for each in ranks:
        for name in each.path.fallbacks:  # the first rank's are judged with its path
            if name not in (*ranks[0].path.fallbacks, *required.accepted_fallbacks):
                line = each.path.evidence[f"fallbacks.{name}"]
                text = f"fallback {name} of {each}: {line}"
                yield Contradiction(f"fallback of {each}", name, text)


def missing(ranks: Sequence[RankPath], world_size: int) -> list[str]:
    """What is not proven since the logs do not show it, a line each."""
    numbers = [each.rank for each in ranks]
    lines = [
        f"rank {number}: no line of the logs is of it; give the log of its node"
        for number in range(world_size)
        if number not in numbers
    ]
    lines += [
        f"rank {n}: two logs show it" for n in {*numbers} if n is not None and numbers.count(n) > 1
    ]
    starts = {each.path.start for each in ranks if each.path.start}
    minutes = [each.path.since for each in ranks if each.path.since is not None] or [0]
    kinds, apart = {start[:3] for start in starts}, max(minutes) - min(minutes)
    all_by_id = all((each.path.start or "").startswith("com") for each in ranks)  # NCCL's
    if len(starts) > len(kinds) or (apart in _ANOTHER_DAY and not all_by_id):
        of_each = ", ".join(f"{each}: {each.path.start}" for each in ranks)
        lines.append(f"the logs are not of one start ({of_each}; {apart // 60} h apart)")
    has_graphs = any(each.path.cuda_graphs for each in ranks)
    for field in (*MUST_BE_SHOWN[:2], *["cuda_graphs"] * has_graphs):
        silent = [str(each) for each in ranks if getattr(each.path, field) is None]
        if silent:
            lines.append(f"{field} of {', '.join(silent)}: no line shows it")
    return lines


def _unequal(
    ranks: Sequence[RankPath], field: str, accepted: Collection[str] | None
) -> Iterator[Contradiction]:
    shown = [each for each in ranks if getattr(each.path, field) is not None]
    values = [_all_of(each.path, field) for each in shown]
    if len({*values}) < 2:
        return
    fit = [each for each, value in zip(shown, values, strict=True) if value in (accepted or ())]
    like = (fit or shown)[0]
    other = _all_of(like.path, field)
    for each, value in zip(shown, values, strict=True):
        if value != other:
            evidence = each.path.evidence
            line = evidence.get(f"{field}_also" if ", " in value else field, "no line")
            part = f"{field} of {each}"
            yield Contradiction(part, value, f"{part}: {value}, of {like}: {other} ({line})")


def _all_of(path: KernelPath, field: str) -> str:
    return ", ".join([str(getattr(path, field)), *sorted(map(str, path.also.get(field, ())))])


def _arguments(path: KernelPath) -> Mapping[str, Any]:
    values: Any = {}
    of_a_node = data_file.load_key("node-arguments.toml", "of_a_node", frozenset[str])
    with contextlib.suppress(ValueError, SyntaxError):
        values = ast.literal_eval(path.asked or "{}")
    return {name: value for name, value in values.items() if name not in of_a_node}
