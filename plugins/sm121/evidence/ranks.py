"""Read and compare the kernel paths of the ranks of a server that spans machines.

Either one log contains the lines of all ranks, or each node has its own log. The paths of all ranks
must be equal.
"""

import ast
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.core.engine_settings import KernelPathRequirement
from sm121.evidence.kernel_path import KernelPath, LogReader, give, shown
from sm121.evidence.log_message import LoggingWorker
from sm121.evidence.requirement import (
    COMPARED,
    Contradiction,
    accepted_values,
)

#: The fields that must be equal on all ranks.
_EQUAL = (*COMPARED, "native_fp4", "block_size", "graph_sizes", "group", "version")
#: The fields that each rank's own log must show.
_SHOWN_BY_EACH = ("attention", "moe")
#: If the times of the ranks' first lines differ by a number of minutes in this range, they are from
#: different starts. Smaller differences may be due to time zones, larger ones to the turn of a
#: year.
_ANOTHER_DAY = range(15 * 60, 180 * 24 * 60)
#: The sort key for a rank whose number is unknown.
_LAST = 1 << 30
#: The prefix of a start's id that comes from NCCL (``commId``).
_NCCL_ID = "com"


class RankPath(data_file.Record):
    """The path of one rank, from the log of its node."""

    rank: int | None
    """The number of the rank; None if no line contains it."""
    node: str
    """The node's name, or the address in its lines."""
    path: KernelPath

    def __str__(self) -> str:
        number = "?" if self.rank is None else self.rank
        return f"rank {number} on {self.node}"


def read_ranks(
    logs: Sequence[tuple[str, Path]], engine: str, *, one_run: bool = False
) -> list[RankPath]:
    """Read the path of each rank.

    vLLM logs most values once per node. Therefore, the values of a node's first rank also apply to
    the node's other ranks, unless their own lines show other values.

    Args:
        logs: The name and the log of each node. If one log contains the lines of several nodes, the
            address in a line identifies its node.
        engine: The engine.
        one_run: Whether all lines are from one run, whatever their times.

    Returns:
        The paths, sorted by rank.

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
            # Processes that are not ranks may have names that look like a worker's name.
            rank_paths += [rank for rank in ranks if _is_rank(rank.path)]
    return sorted(rank_paths, key=_order)


def _by_node(
    workers: Mapping[LoggingWorker, KernelPath], log_node: str
) -> dict[str, list[RankPath]]:
    """Group the workers of a log by node. Lines without an address belong to `log_node`."""
    nodes: dict[str, list[RankPath]] = {}
    for worker, path in workers.items():
        if _is_copied(worker, workers):
            continue
        node = worker.node or log_node
        nodes.setdefault(node, []).append(RankPath(rank=path.log.rank, node=node, path=path))
    return nodes


def _is_copied(worker: LoggingWorker, workers: Mapping[LoggingWorker, KernelPath]) -> bool:
    """Return whether the lines of a worker are a copy of another worker's lines.

    If two Ray nodes run on one host, each reads the other's files, so that lines occur twice. For
    rank 0, the lines without an address are the original, for other ranks those with an address.
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
    """Copy the values of a node's first rank to its other ranks, where these have no value."""
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
    """Compare the ranks with each other, and the logged world size with the expected one.

    Args:
        ranks: The paths, sorted by rank.
        required: The path that the profile requires.
        world_size: The number of ranks with which the server was started.

    Yields:
        The differences. Each names a rank and its node.
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
            yield Contradiction(part, str(size), f"{part}: expected {world_size}, got {size}")


def _unequal_values(
    ranks: Sequence[RankPath], field: str, accepted: Collection[str] | None
) -> Iterator[Contradiction]:
    """Compare a field of all ranks with the first rank whose value is accepted.

    If no rank has an accepted value, compare with the first rank.
    """
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
    """Return the arguments that a rank printed, except those that may differ between nodes.

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
    """Yield the unaccepted fallbacks of each rank that the first rank does not have.

    `sm121.evidence.requirement` judges the fallbacks of the first rank.
    """
    for rank in ranks:
        for name in rank.path.fallbacks:
            if name not in (*ranks[0].path.fallbacks, *required.accepted_fallbacks):
                line = rank.path.evidence[f"fallbacks.{name}"]
                text = f"fallback {name} of {rank}: {line}"
                yield Contradiction(f"fallback of {rank}", name, text)


def missing(ranks: Sequence[RankPath], world_size: int) -> list[str]:
    """Return what the logs do not show, but must show to prove the kernel path of all ranks.

    Args:
        ranks: The paths, sorted by rank.
        world_size: The number of ranks with which the server was started.

    Returns:
        A line for each missing or duplicate rank, for logs of several starts, and for each field
        that the logs of some ranks do not show.
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
            yield f"rank {number}: expected its lines in a log, got none. Give the log of its node"
    for number in sorted(set(numbers)):
        if numbers.count(number) > 1:
            yield f"rank {number}: expected its lines in one log, got two logs with them"


def _several_starts(ranks: Sequence[RankPath]) -> Iterator[str]:
    starts = {rank.path.log.start for rank in ranks if rank.path.log.start}
    # One start may have two ids: one from NCCL, and one of another kind.
    kinds = {start[: len(_NCCL_ID)] for start in starts}
    minutes = [rank.path.log.since for rank in ranks if rank.path.log.since is not None]
    apart = max(minutes) - min(minutes) if minutes else 0
    all_by_nccl = all((rank.path.log.start or "").startswith(_NCCL_ID) for rank in ranks)
    if len(starts) > len(kinds) or (apart in _ANOTHER_DAY and not all_by_nccl):
        listed = ", ".join(f"{rank}: {rank.path.log.start}" for rank in ranks)
        yield f"the logs are from different starts ({listed}; {apart // 60} h apart)"


def _silent_fields(ranks: Sequence[RankPath]) -> Iterator[str]:
    fields = [*_SHOWN_BY_EACH]
    if any(rank.path.cuda_graphs for rank in ranks):
        fields.append("cuda_graphs")
    for field in fields:
        silent = [str(rank) for rank in ranks if getattr(rank.path, field) is None]
        if silent:
            yield f"{field} of {', '.join(silent)}: no line shows it"
