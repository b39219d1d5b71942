"""The kernel path of each rank of a server that spans machines.

One log may have all ranks, or each node has its own log. The paths must be equal on all ranks.
"""

import ast
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.core.engine_settings import KernelPathRequirement
from sm121.evidence.kernel_path import KernelPath, LogReader, give, shown
from sm121.evidence.log_message import Worker
from sm121.evidence.requirement import (
    COMPARED,
    Contradiction,
    accepted_values,
)

#: Fields that are equal on all ranks, beside those that a profile may require.
_EQUAL = (*COMPARED, "native_fp4", "block_size", "graph_sizes", "group", "version")
#: Fields that the log of each rank must show.
_SHOWN_BY_EACH = ("attention", "moe")
#: Minutes: more than time zones differ; more still is the turn of a year.
_ANOTHER_DAY = range(15 * 60, 180 * 24 * 60)
#: The number in the order of ranks of a rank without a number.
_LAST = 1 << 30
#: The beginning of a start's id that NCCL made (``commId``).
_NCCL_ID = "com"


class RankPath(data_file.Record):
    """The path of one rank, by the log of its node."""

    rank: int | None
    """None: no line has the number of the rank."""
    node: str
    """The node's name, or the address that its lines carry."""
    path: KernelPath

    def __str__(self) -> str:
        number = "?" if self.rank is None else self.rank
        return f"rank {number} on {self.node}"


def read_ranks(
    logs: Sequence[tuple[str, Path]], engine: str, *, one_run: bool = False
) -> list[RankPath]:
    """Read the path of each rank.

    vLLM logs most values once a node. So the values of a node's first rank hold for its other
    ranks, where their own lines do not have them.

    Args:
        logs: The name and the log of each node. If one log has several nodes, the address in a line
            names its node.
        engine: The engine.
        one_run: Whether no line is of an older run, whatever its time.

    Returns:
        The paths, by rank.

    Raises:
        OSError: A log cannot be read.
        DataFileError: The engine has no signatures.
    """
    rank_paths: list[RankPath] = []
    for name, log in logs:
        reader = LogReader(engine, one_run=one_run)
        reader.read(log)
        for ranks in _by_node(reader.workers(), name).values():
            ranks.sort(key=_order)
            _share_values(ranks)
            # A start may have other processes with a worker's name.
            rank_paths += [rank for rank in ranks if _is_rank(rank.path)]
    return sorted(rank_paths, key=_order)


def _by_node(workers: Mapping[Worker, KernelPath], log_node: str) -> dict[str, list[RankPath]]:
    """Group the workers of a log by their node. `log_node`: the node of lines without address."""
    nodes: dict[str, list[RankPath]] = {}
    for worker, path in workers.items():
        if _is_copied(worker, workers):
            continue
        node = worker.node or log_node
        nodes.setdefault(node, []).append(RankPath(rank=path.log.rank, node=node, path=path))
    return nodes


def _is_copied(worker: Worker, workers: Mapping[Worker, KernelPath]) -> bool:
    """Whether the lines of a worker are a copy of another's.

    Two nodes of Ray on one host read each other's files. Rank 0 is the one without an address.
    """
    rank = workers[worker].log.rank
    if rank is None:
        return False
    has_twin = False
    for other, path in workers.items():
        if other != worker and other.pid == worker.pid and path.log.rank == rank:
            has_twin = True
    has_address = bool(worker.node)
    return has_twin and has_address == (rank == 0)


def _share_values(ranks: Sequence[RankPath]) -> None:
    """Give the values of a node's first rank to its other ranks without values of their own."""
    first = ranks[0].path
    for rank in ranks[1:]:
        for field in _EQUAL:
            if field == "group" or shown(rank.path, field) is not None:
                continue
            give(rank.path, field, shown(first, field))
            if field in first.also:
                rank.path.also[field] = first.also[field]


def _is_rank(path: KernelPath) -> bool:
    has_number = path.log.rank is not None
    return has_number or path.attention is not None or bool(path.log.links.channels)


def _order(rank: RankPath) -> int:
    return _LAST if rank.rank is None else rank.rank


def contradictions(
    ranks: Sequence[RankPath], required: KernelPathRequirement, world_size: int
) -> Iterator[Contradiction]:
    """Compare the ranks with each other, and the size of their world with the required one.

    Args:
        ranks: The paths, by rank.
        required: The path that the profile requires.
        world_size: The number of ranks that the server was started with.

    Yields:
        The differences; each names a rank and its node.
    """
    yield from _wrong_world_sizes(ranks, world_size)
    for field in _EQUAL:
        yield from _unequal_values(ranks, field, accepted_values(required, field))
    yield from _unequal_arguments(ranks)
    yield from _unaccepted_fallbacks(ranks, required)


def _wrong_world_sizes(ranks: Sequence[RankPath], world_size: int) -> Iterator[Contradiction]:
    for rank in ranks:
        size = rank.path.log.world_size
        if size is not None and size != world_size:
            part = f"world size of {rank}"
            yield Contradiction(part, str(size), f"{part}: required {world_size}, seen {size}")


def _unequal_values(
    ranks: Sequence[RankPath], field: str, accepted: Collection[str] | None
) -> Iterator[Contradiction]:
    """Compare a field with the first rank that has an accepted value, else with the first rank."""
    showing = [rank for rank in ranks if shown(rank.path, field) is not None]
    values = [_all_values(rank.path, field) for rank in showing]
    if len(set(values)) < 2:
        return
    like = showing[0]
    expected = values[0]
    for rank, value in zip(showing, values, strict=True):
        if value in (accepted or ()):
            like = rank
            expected = value
            break
    for rank, value in zip(showing, values, strict=True):
        if value != expected:
            evidence_field = f"{field}_also" if field in rank.path.also else field
            line = rank.path.evidence.get(evidence_field, "no line")
            part = f"{field} of {rank}"
            yield Contradiction(part, value, f"{part}: {value}, of {like}: {expected} ({line})")


def _all_values(path: KernelPath, field: str) -> str:
    others = sorted(map(str, path.also.get(field, ())))
    return ", ".join([str(shown(path, field)), *others])


def _unequal_arguments(ranks: Sequence[RankPath]) -> Iterator[Contradiction]:
    showing = [rank for rank in ranks if rank.path.log.asked]
    if not showing:
        return
    like = showing[0]
    expected = _arguments(like.path)
    for rank in showing[1:]:
        arguments = _arguments(rank.path)
        for name in sorted({*arguments, *expected}):
            value = arguments.get(name, "not set")
            expected_value = expected.get(name, "not set")
            if value != expected_value:
                part = f"argument {name} of {rank}"
                text = f"{part}: {value}, of {like}: {expected_value}"
                yield Contradiction(part, str(value), text)


def _arguments(path: KernelPath) -> Mapping[str, Any]:
    """Return the arguments that a rank's engine prints, without those that a node has of its own.

    The result is empty if they cannot be parsed.
    """
    values: Any = {}
    of_a_node = data_file.load_key("node-arguments.toml", "of_a_node", frozenset[str])
    with contextlib.suppress(ValueError, SyntaxError):
        values = ast.literal_eval(path.log.asked or "{}")
    return {name: value for name, value in values.items() if name not in of_a_node}


def _unaccepted_fallbacks(
    ranks: Sequence[RankPath], required: KernelPathRequirement
) -> Iterator[Contradiction]:
    """Yield the fallbacks that the first rank, whose path is judged alone, does not have."""
    for rank in ranks:
        for name in rank.path.fallbacks:
            if name not in (*ranks[0].path.fallbacks, *required.accepted_fallbacks):
                line = rank.path.evidence[f"fallbacks.{name}"]
                text = f"fallback {name} of {rank}: {line}"
                yield Contradiction(f"fallback of {rank}", name, text)


def missing(ranks: Sequence[RankPath], world_size: int) -> list[str]:
    """Return what the logs do not prove because they do not show it.

    Args:
        ranks: The paths, by rank.
        world_size: The number of ranks that the server was started with.

    Returns:
        A line for each absent or doubled rank, for logs of several starts, and for each field that
        some ranks do not show.
    """
    return [
        *_missing_numbers(ranks, world_size),
        *_several_starts(ranks),
        *_silent_fields(ranks),
    ]


def _missing_numbers(ranks: Sequence[RankPath], world_size: int) -> Iterator[str]:
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    for number in range(world_size):
        if number not in numbers:
            yield f"rank {number}: no line of the logs is of it; give the log of its node"
    for number in sorted(set(numbers)):
        if numbers.count(number) > 1:
            yield f"rank {number}: two logs show it"


def _several_starts(ranks: Sequence[RankPath]) -> Iterator[str]:
    starts = {rank.path.log.start for rank in ranks if rank.path.log.start}
    # One start may have an id of NCCL's and one of another kind.
    kinds = {start[: len(_NCCL_ID)] for start in starts}
    minutes = [rank.path.log.since for rank in ranks if rank.path.log.since is not None]
    apart = max(minutes) - min(minutes) if minutes else 0
    all_by_nccl = all((rank.path.log.start or "").startswith(_NCCL_ID) for rank in ranks)
    if len(starts) > len(kinds) or (apart in _ANOTHER_DAY and not all_by_nccl):
        listed = ", ".join(f"{rank}: {rank.path.log.start}" for rank in ranks)
        yield f"the logs are not of one start ({listed}; {apart // 60} h apart)"


def _silent_fields(ranks: Sequence[RankPath]) -> Iterator[str]:
    fields = [*_SHOWN_BY_EACH]
    if any(rank.path.cuda_graphs for rank in ranks):
        fields.append("cuda_graphs")
    for field in fields:
        silent = [str(rank) for rank in ranks if getattr(rank.path, field) is None]
        if silent:
            yield f"{field} of {', '.join(silent)}: no line shows it"
