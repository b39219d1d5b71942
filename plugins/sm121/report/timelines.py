"""The timelines of single requests: the send time, each chunk, and the longest gaps.

They are made from the records that a run stores beside its verdict.
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import TypeAdapter

from sm121.client.timed_answer import TimedAnswer
from sm121.measure import timing

#: Maximum total size in bytes of the records on a page. A soak can write gigabytes of records.
_MOST_BYTES = 48 * 2**20
_MOST_CELLS = 32
#: Number of gaps that are marked, in an answer with more gaps than that.
_MARKED = 3
#: Validates a record, also one with the fields of another version.
_ANSWER = TypeAdapter(TimedAnswer)
_RECORDS = ("records/*.jsonl", "shards/*/records/*.jsonl")
_FILE = re.compile(r"d(?P<depth>\d+)-c(?P<streams>\d+)(?:-\d+)?\.jsonl")


class Gap(NamedTuple):
    """A wait between two chunks.

    Its fields are its begin in ms since the sending, its length in ms, and the tokens before it.
    """

    begins_ms: float
    ms: float
    after: int


@dataclass(frozen=True)
class RequestPath:
    """One request. All times are in milliseconds since it was sent."""

    #: ``median`` or ``slowest``, by the time to the end of the answer; ``only`` for a single one.
    which: str
    chunks_ms: tuple[float, ...]
    end_ms: float
    tokens: int
    #: The median gap between chunks; None with fewer than two chunks.
    gap_ms: float | None
    gaps: tuple[Gap, ...]
    error: str | None = None

    @property
    def first_ms(self) -> float:
        """The time of the first chunk; the end of the request if none arrived."""
        if self.chunks_ms:
            return self.chunks_ms[0]
        return self.end_ms


@dataclass(frozen=True)
class CellPaths:
    """The median and the slowest request of one measured cell."""

    name: str
    requests: int
    paths: tuple[RequestPath, ...]


class RequestPaths(NamedTuple):
    """The cells of a report directory, and one line per file that is not shown."""

    cells: list[CellPaths]
    left_out: list[str]


def read_cells(directory: Path) -> RequestPaths:
    """Read the cells whose records are in a report directory.

    Args:
        directory: The report directory of a run or of merged shards.

    Returns:
        The cells, sorted by depth and number of streams: at most 32 cells, with at most 48 MiB of
        records together.
    """
    room = _MOST_BYTES
    cells: list[CellPaths] = []
    left_out: list[str] = []
    for depth, streams, file in _record_files(directory):
        name = file.relative_to(directory).as_posix()
        room -= file.stat().st_size
        if room < 0 or len(cells) == _MOST_CELLS:
            left_out.append(f"{name} is not shown: the page's limit of cells or bytes is reached")
            continue
        try:
            cell = _cell(file, depth, streams)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            left_out.append(f"{name} cannot be read: {type(error).__name__}: {error}")
            continue
        if cell is not None:
            cells.append(cell)
    return RequestPaths(cells, left_out)


def _record_files(directory: Path) -> list[tuple[int, int, Path]]:
    """Return the depth, the number of streams and the path of each file with records."""
    files = []
    for pattern in _RECORDS:
        for file in directory.glob(pattern):
            match = _FILE.fullmatch(file.name)
            if match is not None and file.is_file() and not file.is_symlink():
                files.append((int(match["depth"]), int(match["streams"]), file))
    return sorted(files)


def _cell(file: Path, depth: int, streams: int) -> CellPaths | None:
    """Return the requests of a file with records; None without a long answer."""
    with file.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    long_records = [record for record in records if record["kind"] == "long"]
    answers = [_ANSWER.validate_python(record) for record in long_records]
    if not answers:
        return None
    first = answers[0]
    name = f"pp{first.asked_prompt - depth} tg{first.asked_tokens} at depth {depth}"
    if streams > 1:
        name += f", {streams} streams"
    if file.stem != f"d{depth}-c{streams}":  # the cell was measured again
        name += f" ({file.stem})"
    ordered = sorted(answers, key=timing.e2e_ms)
    chosen = [("median", ordered[(len(ordered) - 1) // 2]), ("slowest", ordered[-1])]
    if len(ordered) == 1:
        chosen = [("only", ordered[0])]
    paths = tuple(_path(which, answer) for which, answer in chosen)
    return CellPaths(name, len(answers), paths)


def _path(which: str, answer: TimedAnswer) -> RequestPath:
    came = timing.arrivals(answer, answer.clock() or "chunks")
    times = [(arrival.at_ns - answer.sent_ns) / 1e6 for arrival in came]
    gaps = []
    for (before, after), arrival in zip(pairwise(times), came, strict=False):
        gaps.append(Gap(before, after - before, arrival.tokens))
    longest: list[Gap] = []
    if len(gaps) > _MARKED:
        longest = sorted(gaps, key=lambda gap: -gap.ms)[:_MARKED]
    end_ms = (answer.ended_ns - answer.sent_ns) / 1e6
    if times:
        end_ms = max(end_ms, times[-1])
    return RequestPath(
        which=which,
        chunks_ms=tuple(times),
        end_ms=max(end_ms, 0.0),
        tokens=came[-1].tokens if came else 0,
        gap_ms=median(gap.ms for gap in gaps) if gaps else None,
        gaps=tuple(sorted(longest)),
        error=answer.error,
    )
