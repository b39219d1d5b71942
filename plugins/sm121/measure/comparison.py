"""Results beside each other: stored runs of this suite, and of llama-benchy and llama-bench.

Each source keeps the clock that it was measured with, since a number is only as good as that:
``token_ids`` and ``usage`` count tokens, ``chunks`` counts events, ``in-process`` is the engine's
own loop without server and network.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError
from sm121.core.profile import FULL
from sm121.core.verdict import Severity
from sm121.measure import statistics

_RATE = re.compile(r"(?P<kind>pp|tg)(?P<tokens>\d+)(?:_c(?P<streams>\d+))?(?:@d(?P<depth>\d+))?$")
_NOTHING = "-"
#: What of a kernel path is compared, in this order.
KERNELS = (
    "attention", "moe", "quantization", "weights", "dtype", "kv_cache_dtype", "kv_layout",
    "native_fp4", "cuda_graphs", "speculative", "prefix_caching", "load_format",
)  # fmt: skip
_SHORT = 160


@dataclass(frozen=True)
class ComparedRow:
    """One measured quantity of one source."""

    metric: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    #: The source's own figure of its scatter, where it has no interval: a standard deviation.
    deviation: float | None = None
    rounds: int = 0
    clock: str | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class ComparedFailure:
    """A check that did not hold in one source."""

    test: str
    severity: str
    message: str


@dataclass(frozen=True)
class Source:
    """A file of results: who measured what."""

    name: str
    engine: str
    model: str
    tool: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    #: What must be the same for its numbers to stand beside others of this suite, by name; empty
    #: where the file does not say.
    asked: Mapping[str, str | None] = field(default_factory=dict)
    #: The levels that it ran; empty where the file does not say.
    levels: tuple[str, ...] = ()
    #: What failed in them and was not excused.
    failed: tuple[ComparedFailure, ...] = ()
    #: What its log proves of the kernel path.
    kernels: Mapping[str, str] = field(default_factory=dict)

    def row(self, metric: str) -> ComparedRow | None:
        """The row of a metric."""
        return next((row for row in self.rows if row.metric == metric), None)


def read(path: Path) -> Source:
    """A report directory or its verdict.json, a file of pytest-benchmark, or JSON of llama-benchy
    or llama-bench, told apart by what is in it.

    Raises:
        UsageError: it is none of these.
    """
    file = path / "verdict.json" if path.is_dir() else path
    expected = (
        f"{path}: expected a report directory, verdict.json, a file of pytest-benchmark, or JSON "
        "of llama-benchy or llama-bench"
    )
    try:
        text = file.read_text("utf-8")
        try:
            data = json.loads(text)
        except ValueError:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]  # JSON lines
            if not data:
                raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{expected} ({error})") from error
    name = path.name if path.is_dir() else path.stem
    if path.is_file() and path.name == "verdict.json":
        name = path.parent.name
    try:
        if isinstance(data, list) and data and "avg_ts" in data[0]:
            return _llama_bench(name, data)
        keys = set(data) if isinstance(data, dict) else set()
        for reader, needed in (
            (_verdict, {"metrics", "schema_version"}),
            (_pytest_benchmark, {"machine_info", "benchmarks"}),
            (_llama_benchy, {"latency_mode", "benchmarks"}),
        ):
            if needed <= keys:
                return reader(name, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{expected}; it has no sound {error!r}") from error
    raise UsageError(expected)


def _verdict(name: str, data: dict[str, Any]) -> Source:
    # By hand, not by the model: files of older schema versions lack what came later, and have all
    # that is read here.
    engine = data.get("engine") or {}
    rows = tuple(
        ComparedRow(
            metric=metric,
            unit=str(item.get("unit", "")),
            value=item.get("value"),
            low=item.get("ci_low"),
            high=item.get("ci_high"),
            rounds=int(item.get("rounds") or 0),
            clock=item.get("clock"),
            verdict=item.get("verdict"),
        )
        for metric, item in data["metrics"].items()
        if not metric.startswith("ab:")
    )
    box = (data.get("box") or {}).get("state", "UNKNOWN")
    path = engine.get("path") or {}
    notes = [f"{data.get('verdict', 'no verdict')}, box {box}"]
    also = path.get("also") or {}
    kernels = {
        what: ", ".join(
            map(str, found if isinstance(found, list) else [found, *also.get(what, ())])
        )
        for what in KERNELS
        if (found := path.get(what)) not in (None, [])
    }
    failed = tuple(
        ComparedFailure(
            str(test["id"]).rpartition("::")[2],
            str(test.get("severity", Severity.BLOCKER)),
            str(test.get("message", "")),
        )
        for test in data.get("tests") or ()
        if test.get("verdict") == "FAIL" and not (test.get("waived") or test.get("tolerated"))
    )
    levels = tuple(
        f"{level} {found['verdict']}"
        for level, found in (data.get("levels") or {}).items()
        if found.get("passed") or found["verdict"] not in ("PASS", "NOT_RUN")
    )
    version = engine.get("version")
    described = f"{engine.get('name', 'unknown')}{f' {version}' if version else ''}"
    asked = _asked(data.get("fingerprint") or {}, str(data.get("profile")))
    if asked:
        own = "" if data["fingerprint"].get("profile_shipped") else " (not the shipped one)"
        notes.append(f"profile {data.get('profile')}{own}")
    model = str(engine.get("model", ""))
    return Source(
        name, described, model, "sm121", rows, tuple(notes), asked, levels, failed, kernels
    )


def _asked(fingerprint: Mapping[str, Any], profile: str) -> dict[str, str | None]:
    """What of a fingerprint decides whether numbers can stand beside each other.

    Engine, version, configuration and arguments are what is compared. A profile is held against
    the one of its own name.
    """
    if not fingerprint:
        return {}
    known = {
        f"profile {profile}": fingerprint.get("profile"),
        "plan": fingerprint.get("plan", FULL),
        "model": fingerprint.get("model"),
        "kernel provider": fingerprint.get("provider"),
    }
    for table, shown in (("options", "option"), ("machine", "machine's")):
        for key, value in (fingerprint.get(table) or {}).items():
            known[f"{shown} {key}"] = None if value is None else str(value)
    return known


def refuse_mixed(sources: Sequence[Source]) -> None:
    """Refuse results that were not asked in one way, or not on one machine.

    Raises:
        UsageError: names the first field in which two differ.
    """
    own = [source for source in sources if source.tool == "sm121"]
    told = [source for source in own if source.asked]
    if told and (mute := next((source for source in own if not source.asked), None)):
        raise UsageError(
            f"{mute.name} does not say what it asked (an older version wrote it, without a "
            f"fingerprint), and {told[0].name} does; --mixed shows them beside each other all the "
            "same"
        )
    for one, other in itertools.combinations(told, 2):
        for what, a, b in differences(one, other):
            raise UsageError(
                f"{one.name} and {other.name} differ in {what}: {a or 'none'} and "
                f"{b or 'none'}; --mixed shows them beside each other all the same"
            )


def differences(one: Source, other: Source) -> Iterator[tuple[str, str | None, str | None]]:
    """What two results did not ask in one way, or of one machine, with the value of each."""
    for what in dict.fromkeys([*one.asked, *other.asked]):
        if what.startswith("profile ") and not (what in one.asked and what in other.asked):
            continue
        if (a := one.asked.get(what)) != (b := other.asked.get(what)):
            yield what, a, b


def _pytest_benchmark(name: str, data: dict[str, Any]) -> Source:
    rows = []
    engine, model = "unknown", ""
    asked: dict[str, str | None] = {}
    if number := re.match(r"\d{4}(?=_)", name):
        name = number[0]  # the rest is the commit and the time
    for benchmark in data["benchmarks"]:
        extra = benchmark["extra_info"]
        if "sm121" not in extra:
            continue
        engine = " ".join(filter(None, (extra["engine"]["name"], extra["engine"]["version"])))
        model = str(extra.get("model", ""))
        asked |= _asked(extra.get("fingerprint") or {}, str(extra.get("profile")))
        low = high = None
        if extra.get("quantile") is None and extra["samples"]:
            found = statistics.estimate(extra["samples"])
            low, high = found.ci_low, found.ci_high
        rows.append(
            ComparedRow(
                metric=extra["metric"],
                unit=extra["unit"],
                value=extra["value"],
                low=low,
                high=high,
                rounds=len(extra["samples"]),
                clock=extra["clock"],
                verdict=extra["verdict"],
            )
        )
    if not rows:
        raise UsageError(f"{name}: no measurement of this suite among its benchmarks")
    return Source(name, engine, model, "sm121", tuple(rows), asked=asked)


def _llama_benchy(name: str, data: dict[str, Any]) -> Source:
    rows: dict[str, ComparedRow] = {}
    for run in data["benchmarks"]:
        if run.get("is_context_prefill_phase"):
            continue  # the prefix itself, not the prompt at that depth
        streams, depth = int(run["concurrency"]), int(run["context_size"])
        suffix = f"_c{streams}" if streams > 1 else ""
        for kind, size, key in (
            ("pp", run["prompt_size"], "pp_throughput"),
            ("tg", run["response_size"], "tg_throughput"),
        ):
            metric = f"{kind}{size}{suffix}@d{depth}"
            # pp is measured again with every response size: the first one stands.
            if size and run.get(key):
                rows.setdefault(metric, _benchy_row(metric, "tok/s", run[key]))
        if run.get("e2e_ttft") and depth == 0:
            rows.setdefault("ttft_p50", _benchy_row("ttft_p50", "ms", run["e2e_ttft"]))
    notes = [f"latency mode {data['latency_mode']}, {data['latency_ms']:.3g} ms taken off pp"]
    if data.get("prefix_caching_enabled"):
        notes.append("prefix caching was on: pp at a depth is warm")
    tool = f"llama-benchy {data.get('version', '')}".strip()
    return Source(name, "unknown", str(data["model"]), tool, (*rows.values(),), tuple(notes))


def _benchy_row(metric: str, unit: str, item: dict[str, Any]) -> ComparedRow:
    values = item.get("values") or []
    return ComparedRow(
        metric=metric,
        unit=unit,
        value=float(item["mean"]),
        deviation=float(item["std"]),
        rounds=len(values),
        # Which of the two it used, its file does not say: 1.6 % apart and more.
        clock="llama-benchy (token ids or evenly spread usage)",
    )


def _llama_bench(name: str, data: Sequence[dict[str, Any]]) -> Source:
    rows = []
    for test in data:
        prompt, generated = int(test["n_prompt"]), int(test["n_gen"])
        depth = int(test.get("n_depth", 0))
        if prompt and generated:
            metric = f"pp{prompt}+tg{generated}@d{depth}"  # both in one rate, as -pg gives it
        else:
            metric = f"pp{prompt}@d{depth}" if prompt else f"tg{generated}@d{depth}"
        rows.append(
            ComparedRow(
                metric=metric,
                unit="tok/s",
                value=float(test["avg_ts"]),
                deviation=float(test.get("stddev_ts", 0.0)),
                rounds=len(test.get("samples_ts") or []),
                clock="in-process",
            )
        )
    first = data[0]
    build = first.get("build_commit", "")
    model = str(first.get("model_type") or first.get("model_filename") or "")
    notes = ("the engine's own loop: no server, no network, no sampling",)
    return Source(name, f"llama.cpp {build}".strip(), model, "llama-bench", tuple(rows), notes)


def label(metric: str) -> str:
    """As llama-bench writes it: ``pp2048 @ d4096``."""
    return metric.replace("@d0", "").replace("@d", " @ d")


def rates(sources: Iterable[Source]) -> tuple[list[str], list[int]]:
    """The rates of one stream that were measured (pp2048, tg32, ...), and at which depths."""
    found = [
        match
        for source in sources
        for row in source.rows
        if (match := _RATE.match(row.metric)) and match["streams"] is None
    ]
    kinds = sorted({(match["kind"], int(match["tokens"])) for match in found})
    depths = sorted({int(match["depth"] or 0) for match in found})
    return [f"{kind}{tokens}" for kind, tokens in kinds], depths


def markdown(sources: Sequence[Source]) -> str:
    """Engine by depth, as the documents have it; then every row; then who measured how."""
    kinds, depths = rates(sources)
    header = ["Depth", *(f"{source.name} {kind}" for kind in kinds for source in sources)]
    by_depth = [
        [
            f"d{depth}",
            *(
                cell
                for kind in kinds
                for cell in _cells([source.row(f"{kind}@d{depth}") for source in sources])
            ),
        ]
        for depth in depths
    ]
    lines = ["## By depth", "", *_table(header, by_depth)]
    lines += ["", "Rates in tok/s. **Bold**: the best of its row and kind.", "", "## All rows", ""]
    metrics = dict.fromkeys(row.metric for source in sources for row in source.rows)
    body = [
        [label(metric), source.name, _spread(row), row.unit, str(row.rounds),
         row.clock or _NOTHING, row.verdict or _NOTHING]
        for metric in metrics
        for source in sources
        if (row := source.row(metric)) is not None
    ]  # fmt: skip
    lines += _table(["test", "run", "value", "unit", "rounds", "clock", "verdict"], body)
    if judged := [source for source in sources if source.levels]:
        lines += ["", "## What failed", "", *_failures(judged)]
    if shown := [source for source in sources if source.kernels]:
        lines += ["", "## Kernels, as the log proves them", ""]
        lines += _table(
            ["", *(source.name for source in shown)],
            [
                [what, *(source.kernels.get(what, _NOTHING) for source in shown)]
                for what in KERNELS
                if any(what in source.kernels for source in shown)
            ],
        )
    lines += ["", "## Runs", ""]
    lines += _table(
        ["run", "engine", "model", "measured by", "notes"],
        [[s.name, s.engine, s.model, s.tool, "; ".join(s.notes) or _NOTHING] for s in sources],
    )
    clocks = {row.clock for source in sources for row in source.rows if row.clock}
    if len(clocks) > 1:
        lines += ["", f"Not one clock: {', '.join(sorted(clocks))}. Differences of a few per cent "
                  "between them may be those of the clocks."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _failures(sources: Sequence[Source]) -> list[str]:
    """How many checks failed of each severity, then each of them."""
    grades = [severity.value for severity in Severity]
    lines = _table(
        ["run", *grades, "levels"],
        [
            [
                source.name,
                *(str(sum(one.severity == grade for one in source.failed)) for grade in grades),
                ", ".join(source.levels),
            ]
            for source in sources
        ],
    )
    rows = [
        [source.name, one.severity, one.test, one.message[:_SHORT]]
        for source in sources
        for one in sorted(source.failed, key=lambda one: grades.index(one.severity))
    ]
    return [*lines, "", *_table(["run", "severity", "check", "seen"], rows)] if rows else lines


def csv_text(sources: Sequence[Source]) -> str:
    """Every row, one line each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["run", "engine", "model", "tool", "test", "metric", "value", "unit", "ci_low", "ci_high",
         "stddev", "rounds", "clock", "verdict"]
    )  # fmt: skip
    for source in sources:
        for row in source.rows:
            writer.writerow(
                [source.name, source.engine, source.model, source.tool, label(row.metric),
                 row.metric, row.value, row.unit, row.low, row.high, row.deviation, row.rounds,
                 row.clock, row.verdict]
            )  # fmt: skip
    return stream.getvalue()


def distinct(sources: Sequence[Source]) -> list[Source]:
    """The same sources, with names that tell them apart."""
    seen: dict[str, int] = {}
    found = []
    for source in sources:
        seen[source.name] = number = seen.get(source.name, 0) + 1
        found.append(source if number == 1 else replace(source, name=f"{source.name} ({number})"))
    return found


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]


def _cells(rows: Sequence[ComparedRow | None]) -> list[str]:
    """One rate of each source. The best is bold; what does not count cannot be the best."""
    counted = [
        (row.value, place)
        for place, row in enumerate(rows)
        if row is not None and row.value is not None and row.verdict in (None, "PASS", "FAIL")
    ]
    cells = []
    for row in rows:
        if row is None or row.value is None:
            cells.append(_NOTHING)
        else:
            mark = "" if row.verdict in (None, "PASS", "FAIL") else f" ({row.verdict})"
            cells.append(f"{_number(row.value)}{mark}")
    if len(counted) > 1:
        _, best = max(counted)
        cells[best] = f"**{cells[best]}**"
    return cells


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def _spread(row: ComparedRow) -> str:
    if row.value is None:
        return _NOTHING
    if row.low is not None and row.high is not None:
        return f"{_number(row.value)} [{_number(row.low)}, {_number(row.high)}]"
    if row.deviation is not None:
        return f"{_number(row.value)} ± {_number(row.deviation)}"
    return _number(row.value)
