"""Kernel names of a profile: read from a trace, classified, with their shares of time: the Chrome
trace of the torch profiler or the table of Nsight Systems. Without a GPU: operators."""

import codecs
import csv
import gzip
import io
import json
import math
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from sm121.core import data_file, templates, verdict
from sm121.core.data_file import DataTable, Entries, Pattern, Record, Regex
from sm121.core.errors import UsageError

Part = Literal["attention", "moe", "dense", "quantise", "other"]
PARTS: tuple[Part, ...] = get_args(Part)

Proof = Literal["layer_pass", "plain", "requantised", "quantised", "fused", "unfused"]
"""What a kernel shows beside its part: a write into the KV cache (one a layer and pass), a dense
product in BF16, in the checkpoint's MXFP4 or in another format, the experts' variant."""

_BLOCK = 1 << 20
_LONGEST_EVENT = 1 << 22
#: Of a trace without a GPU; beyond these its operators do not fit beside a server.
_MOST_OPERATORS = 5_000_000
"""Characters of one event; a stack in a trace may be long, four million are no event."""

_STEP = re.compile(r"^execute_\S*generation_(?P<requests>\d+)")
_NSYS_COLUMNS = ("Total Time (ns)", "Instances", "Name")
_NSYS_S = 300.0
_RULER = re.compile(r"-{4,}")
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class KernelName(DataTable):
    """What a kernel or operator of that name is for."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    part: Part
    regex: Regex
    #: On the whole name of the backend that alone runs it, in any case; None: several do.
    backend: Pattern | None = None
    #: See `sm121.evidence.kernel_proof`.
    proves: Proof | None = None
    #: What follows the match decides: a name that was cut is not known by it.
    whole: bool = False
    source: str = Field(min_length=3)

    def belongs_to(self, backend: str) -> bool:
        """Whether it is said to be of that backend."""
        return self.backend is not None and bool(re.fullmatch(self.backend, backend, re.I))


class KernelNames(DataTable):
    """All known names; the first that fits counts."""

    name: Entries[KernelName]


def load_names() -> KernelNames:
    """The names that come with the suite. Raises DataFileError when the file is wrong."""
    return data_file.load("kernels/names.toml", KernelNames)


@cache
def entry_of(name: str) -> KernelName | None:
    """What is known of a kernel or operator; None when nothing is."""
    cut = is_cut(name)
    entries = (entry for entry in load_names().name if not (cut and entry.whole))
    return next((entry for entry in entries if entry.regex.search(name)), None)


def part_of(name: str) -> Part:
    """What a kernel or operator is for; ``other`` when nothing is known of its name."""
    entry = entry_of(name)
    return "other" if entry is None else entry.part


def is_cut(name: str) -> bool:
    """Whether the end of a name is missing, as in the table that nsys prints."""
    return name.endswith(("…", "...")) or any(
        name.count(opening) > name.count(right) for opening, right in ("()", "<>")
    )


class KernelTime(Record):
    """All launches of one kernel."""

    name: str
    part: Part
    calls: int
    seconds: float
    share: float


class PartTime(Record):
    """All kernels of one part of the model."""

    calls: int
    seconds: float
    share: float


class KernelProfile(Record):
    """Which kernels ran in some decode steps, and for how long."""

    kind: Literal["gpu", "cpu"]
    """``gpu``: kernels; ``cpu``: operators, each without those that it calls."""
    source: str
    """The trace that it was read from."""
    steps: int | None
    """Decode steps in it; null where the trace does not mark them."""
    decoding: bool = False
    """The suite took it while one request was decoded: there is no prefill in it."""
    seconds: float
    parts: dict[Part, PartTime]
    kernels: list[KernelTime]
    """Longest first."""

    def names(self) -> list[str]:
        """The names of all that ran."""
        return [kernel.name for kernel in self.kernels]

    def cut_names(self) -> list[str]:
        """The names whose end is missing: what they are of may be in it."""
        return [name for name in self.names() if is_cut(name)]


@dataclass
class _Sum:
    calls: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, calls: int = 1) -> None:
        self.calls += calls
        self.seconds += seconds


@dataclass
class _Trace:
    kernels: dict[str, _Sum] = field(default_factory=dict)
    operators: dict[tuple[Any, Any], list[tuple[float, float, str]]] = field(default_factory=dict)

    operator_count: int = 0
    steps: int = 0

    def take(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        category, name, took = event.get("cat"), event.get("name"), event.get("dur")
        if not isinstance(name, str) or not isinstance(took, int | float):
            return
        took = max(took, 0.0) if math.isfinite(took) else 0.0  # it ran, whatever the clock said
        if category == "kernel":
            self.operators.clear()  # nobody asks for those of a GPU's trace
            self.kernels.setdefault(name, _Sum()).add(took / 1e6)
        elif category == "cpu_op" and not self.kernels:
            self.operator_count += 1
            if self.operator_count <= _MOST_OPERATORS:
                where = (event.get("pid"), event.get("tid"))
                start = float(event.get("ts", 0.0))
                self.operators.setdefault(where, []).append((start, float(took), name))
        elif category == "user_annotation" and (match := _STEP.match(name)):
            self.steps += int(match["requests"]) > 0


def read_trace(path: Path) -> KernelProfile:
    """The kernels of a Chrome trace (``.json`` or ``.json.gz``) of the torch profiler, streamed:
    memory grows with the number of different kernels, or of operators without a GPU. Raises
    UsageError: it is no such trace, or shows neither kernels nor operators."""
    trace = _Trace()
    try:
        for event in _events(path):
            trace.take(event)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, TypeError, RecursionError) as error:
        expected = f"{path}: expected a Chrome trace of the torch profiler"
        raise UsageError(f"{expected}: {error}") from error
    if trace.kernels:
        return _profile("gpu", path, trace.steps or None, trace.kernels.items())
    if trace.operator_count > _MOST_OPERATORS:
        raise UsageError(
            f"{path}: expected at most {_MOST_OPERATORS} operators, seen {trace.operator_count}; "
            "profile fewer steps"
        )
    if not trace.operators:
        raise UsageError(f"{path}: expected kernels or operators, the trace has neither")
    # Each operator's time is without that of the operators inside it.
    sums: dict[str, _Sum] = {}
    for events in trace.operators.values():
        events.sort(key=lambda event: (event[0], -event[1]))
        open_: list[tuple[float, str]] = []  # (end, name) of those that enclose the next one
        for start, took, name in events:
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_:
                sums[open_[-1][1]].seconds -= took / 1e6
            sums.setdefault(name, _Sum()).add(took / 1e6)
            open_.append((start + took, name))
    for item in sums.values():
        item.seconds = max(item.seconds, 0.0)
    return _profile("cpu", path, trace.steps or None, sums.items())


def read_nsys(text: str, source: Path) -> KernelProfile:
    """The kernels of ``nsys stats --report cuda_gpu_kern_sum``: as CSV, or as it prints them among
    other lines, names cut at some 100 characters, so that two rows may have one name. Of several
    printed tables the last counts. Raises UsageError: the text has no such table."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if all(c in line for c in _NSYS_COLUMNS)]
    if not heads:
        raise UsageError(
            f"{source}: expected the columns {', '.join(_NSYS_COLUMNS)} of nsys' cuda_gpu_kern_sum"
        )
    columns = [
        match.span() for line in lines[heads[-1] + 1 :][:1] for match in _RULER.finditer(line)
    ]
    try:
        if columns:  # the dashes of the ruler below the head say where each column is
            spans = [*columns[:-1], (columns[-1][0], None)]
            parts = ([x[slice(*span)].strip() for span in spans] for x in lines[heads[-1] :])
            head, _, *printed = parts
            rows = [dict(zip(head, row, strict=True)) for row in printed]
        else:
            rows = list(csv.DictReader(io.StringIO("\n".join(lines[heads[0] :]))))
    except csv.Error as error:
        expected = f"{source}: expected the CSV of nsys' cuda_gpu_kern_sum"
        raise UsageError(f"{expected}: {error}") from error
    kernels = []
    for row in rows:
        try:
            seconds = float(row["Total Time (ns)"].replace(",", "")) / 1e9
            calls = int(row["Instances"].replace(",", ""))
        except (KeyError, ValueError, AttributeError):
            if columns:
                break  # the next table has the same places for other things
            continue  # an empty line, or what nsys says after the table
        if row["Name"] and math.isfinite(seconds):
            kernels.append((row["Name"], _Sum(calls, seconds)))
    if not kernels:
        raise UsageError(f"{source}: expected kernels, the table of nsys is empty")
    return _profile("gpu", source, None, kernels)


def read(path: Path) -> KernelProfile:
    """Any profile that is read here, or a log with nsys' table. Raises UsageError: it is none;
    NotRun: nsys, which reads its own reports, is not here, or does not read this one."""
    if not path.name.endswith(".nsys-rep"):
        with path.open("rb") as file:
            begins = file.read(2)
        if ".json" in path.name or begins[:1] == b"{" or begins == b"\x1f\x8b":
            return read_trace(path)
        return read_nsys(path.read_text("utf-8", errors="replace"), path)
    nsys = shutil.which("nsys")
    if nsys is None:
        raise verdict.NotRun(
            f"{path}: nsys is not on PATH; it comes with CUDA, or as the package nsight-systems"
        )
    options = ["--report", "cuda_gpu_kern_sum", "--format", "csv", "--force-export", "true"]
    command = [nsys, "stats", *options, str(path)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_NSYS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise verdict.NotRun(f"{path}: nsys stats did not answer ({error})") from error
    if run.returncode != 0:
        last = ((run.stderr or run.stdout).strip().splitlines() or ["no message"])[-1]
        raise verdict.NotRun(f"{path}: nsys stats ended with {run.returncode}: {last[:300]}")
    return read_nsys(run.stdout, path)


def shortened(profile: KernelProfile, kernels: int = 40) -> KernelProfile:
    """The profile for verdict.json: its longest kernels, and all whose part is known."""
    kernels_shown = [k for n, k in enumerate(profile.kernels) if n < kernels or k.part != "other"]
    return profile.model_copy(update={"kernels": kernels_shown})


def table(profile: KernelProfile, rows: int = 25) -> str:
    """The profile as Markdown: the parts, then the longest kernels."""
    return templates.rendered("kernels.md.j2", profile=profile, rows=rows)


def _profile(
    kind: Literal["gpu", "cpu"], source: Path, steps: int | None, sums: Iterable[tuple[str, _Sum]]
) -> KernelProfile:
    longest = sorted(sums, key=lambda pair: -pair[1].seconds)
    total = sum(item.seconds for _, item in longest)
    parts = {part: _Sum() for part in PARTS}
    for name, item in longest:
        parts[part_of(name)].add(item.seconds, item.calls)

    def figures(item: _Sum) -> dict[str, Any]:
        share = round(item.seconds / total, 6) if total > 0 else 0.0
        return {"calls": item.calls, "seconds": round(item.seconds, 9), "share": share}

    return KernelProfile(
        kind=kind,
        source=source.name,
        steps=steps,
        seconds=round(total, 9),
        parts={part: PartTime(**figures(item)) for part, item in parts.items()},
        kernels=[
            KernelTime(name=name, part=part_of(name), **figures(item)) for name, item in longest
        ],
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    opener = gzip.open if path.name.endswith(".gz") else open
    buffer, inside, at_end = "", False, False
    with opener(path, "rb") as stream:
        while not at_end:
            block = stream.read(_BLOCK)
            at_end = not block
            buffer += utf8.decode(block, final=at_end)
            if not inside:
                start = re.search(r'"traceEvents"\s*:\s*\[|^\s*\[', buffer)
                if start is None:
                    if len(buffer) > _LONGEST_EVENT:
                        raise json.JSONDecodeError("no traceEvents", "", 0)
                    continue
                buffer, inside = buffer[start.end() :], True
            position = 0
            while True:
                position += len(_BETWEEN.match(buffer, position)[0])  # type: ignore[index]
                if buffer.startswith("]", position):
                    return
                if position >= len(buffer):
                    break
                try:
                    event, end = decoder.raw_decode(buffer, position)
                except json.JSONDecodeError:
                    # Cut in the middle by the end of the block, unless it is no event at all.
                    if at_end or len(buffer) - position > _LONGEST_EVENT:
                        raise
                    break
                if isinstance(event, dict):
                    yield event
                position = end
            buffer = buffer[position:]
    raise json.JSONDecodeError("the trace ends before its last event", "", 0)
