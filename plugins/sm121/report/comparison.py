"""Results side by side: stored runs of this suite, and of llama-benchy and llama-bench. Each
source keeps the clock that it was measured with, since a number is only as good as that:
``token_ids`` and ``usage`` count tokens, ``chunks`` counts events, ``in-process`` is the engine's
own loop without server and network."""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm121.core import profile, templates
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES, Regression
from sm121.core.verdict import Severity, Verdict
from sm121.regression.change import price_change, trade
from sm121.report import metric_names, metric_verdicts
from sm121.report.rows import shown
from sm121.run import stored_run, verdict_file
from sm121.run.fingerprint import Difference, Fingerprint
from sm121.run.verdict_file import MetricReport, TestReport, VerdictFile

#: The first columns of llama-benchy's CSV, its names of tests, and the key of sparkrun's YAML.
_CSV = "model,test_name,"
_CSV_TEST = re.compile(r"((?:pp|tg)\d+)(?: @ d(\d+))?(?: \(c(\d+)\))?")
_SPARKRUN = "sparkrun_benchmark"
#: What must be the same for two runs' numbers to be compared: fields of a fingerprint.
_ASKED = {"profile", "plan", "model", "provider", "options", "machine"}
#: What of a kernel path is compared, in this order.
KERNELS = (
    "attention", "moe", "quantization", "weights", "dtype", "kv_cache_dtype", "kv_layout",
    "native_fp4", "cuda_graphs", "speculative", "prefix_caching", "load_format",
)  # fmt: skip


@dataclass(frozen=True)
class ComparedRow:
    """One measured quantity of one source."""

    metric: str
    report: MetricReport
    #: The source's own figure of its scatter, where it has no interval: a standard deviation.
    deviation: float | None = None
    verdict: str | None = None

    @property
    def word(self) -> str | None:
        """Its verdict, ``measured`` without a gate; None from a tool that has no verdicts."""
        if self.verdict is None:
            return None
        return metric_verdicts.of_metric(self.metric, self.report).word

    @property
    def counts(self) -> bool:
        """Whether nothing is known that speaks against its number."""
        return self.report.value is not None and self.verdict in (None, "PASS", "FAIL")


@dataclass(frozen=True)
class Source:
    """A file of results: who measured what."""

    name: str
    engine: str
    model: str
    tool: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    #: Of a run of this suite: its verdict.json, as far as the file has one.
    run: VerdictFile | None = None
    #: When it was measured, as its file says it; empty where it does not.
    started: str = ""

    def row(self, metric: str) -> ComparedRow | None:
        """The row of a metric."""
        return next((row for row in self.rows if row.metric == metric), None)

    @property
    def failed(self) -> list[TestReport]:
        """What failed and was not excused, the gravest first."""
        tests = self.run.tests if self.run is not None else []
        failed = [test for test in tests if test.counted is Verdict.FAIL]
        return sorted(failed, key=lambda test: [*Severity].index(test.severity))

    @property
    def kernels(self) -> Mapping[str, str]:
        """What its log proves of the kernel path."""
        if self.run is None:
            return {}
        path = self.run.engine.path
        return {
            part: shown(value, path.also.get(part, ()))
            for part in KERNELS
            if (value := getattr(path, part)) not in (None, [])
        }


def read(path: Path) -> Source:
    """A report directory or its verdict.json, a file of pytest-benchmark, JSON or CSV of
    llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench, told apart by what is in
    it. Raises UsageError: it is none of these."""
    file = path / verdict_file.NAME if path.is_dir() else path
    expected = (
        f"{path}: expected a report directory, verdict.json, a file of pytest-benchmark, JSON or "
        "CSV of llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench"
    )
    try:
        text = file.read_text("utf-8")
        try:
            if text.startswith(_CSV):
                return _llama_benchy_csv(path.stem, text)
            if text.startswith(f"{_SPARKRUN}:"):
                return _sparkrun(path.stem, text)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UsageError(f"{expected}; it has no sound {error!r}") from error
        try:
            data = json.loads(text)
        except ValueError:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]  # JSON lines
            if not data:
                raise
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{expected} ({error})") from error
    name = stored_run.folder_of(path).name if file.name == verdict_file.NAME else path.stem
    try:
        if isinstance(data, list) and data and "avg_ts" in data[0]:
            return _llama_bench(name, data)
        keys = set(data) if isinstance(data, dict) else set()
        if {"metrics", "schema_version"} <= keys:
            run = verdict_file.parse(data)
            return _own(name, run, f"{run.verdict}, box {run.box.state}")
        if {"machine_info", "benchmarks"} <= keys:
            if number := re.match(r"\d{4}(?=_)", name):
                name = number[0]  # the rest is the commit and the time
            stored = stored_run.of_data(name, data)
            if stored is None:
                raise UsageError(f"{name}: no measurement of this suite among its benchmarks")
            return _own(name, stored.file)
        if {"benchmarks", "max_concurrency"} <= keys:
            return _llama_benchy(name, data)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{expected}; it has no sound {error!r}") from error
    raise UsageError(expected)


def _own(name: str, run: VerdictFile, *notes: str) -> Source:
    rows = tuple(
        ComparedRow(metric, report, verdict=report.verdict.value)
        for metric, report in run.metrics.items()
        if not metric.startswith("ab:")
    )
    if notes and run.fingerprint is not None:
        origin = "" if run.fingerprint.profile_shipped else " (not the shipped one)"
        notes = (*notes, f"profile {run.profile}{origin}")
    engine = " ".join(filter(None, (run.engine.name, run.engine.version)))
    return Source(name, engine, run.engine.model, "sm121", rows, notes, run)


def named(given: Path) -> tuple[str | None, Path]:
    """An argument ``NAME=PATH``; of a path alone the name is None."""
    name, separator, path = str(given).partition("=")
    return (name, Path(path)) if separator and not given.exists() else (None, given)


def limits_of(name: str) -> Regression:
    """Return how much worse a metric of a run of that profile may be.

    A profile that is not a shipped one has the suite's default.
    """
    return profile.load(name).regression if name in profile.shipped() else Regression()


def refuse_mixed(sources: Sequence[Source]) -> None:
    """Refuse results that were not asked in one way, or not on one machine. Raises UsageError:
    names the first field in which two differ."""
    runs = [(source.name, source.run) for source in sources if source.run is not None]
    newer = [(name, run) for name, run in runs if run.fingerprint is not None]
    older = [name for name, run in runs if run.fingerprint is None]
    if newer and older:
        raise UsageError(
            f"{older[0]} does not say what it asked (an older version wrote it, without a "
            f"fingerprint), and {newer[0][0]} does; --mixed shows them side by side all the "
            "same"
        )
    for (one, first), (other, second) in itertools.combinations(newer, 2):
        for difference in differences(first, second):
            raise UsageError(
                f"{one} and {other} differ in {difference.name}: {difference.one or 'none'} and "
                f"{difference.other or 'none'}; --mixed shows them side by side all the same"
            )


def differences(one: VerdictFile, other: VerdictFile) -> list[Difference]:
    """What two runs did not ask in one way, or of one machine. Engine, version, configuration and
    arguments are what is compared. A profile is compared with the one of its own name."""
    fields = _ASKED - ({"profile"} if one.profile != other.profile else set())
    runs = ((run.fingerprint or Fingerprint()).model_dump(include=fields) for run in (one, other))
    a, b = (Fingerprint(**asked) for asked in runs)
    return a.differences(b)


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
    notes = []  # sparkrun joins files of several calls, and leaves the mode out
    if "latency_mode" in data:
        notes = [f"latency mode {data['latency_mode']}, {data['latency_ms']:.3g} ms taken off pp"]
    if data.get("prefix_caching_enabled"):
        notes.append("prefix caching was on: pp at a depth is warm")
    tool = f"llama-benchy {data.get('version', '')}".strip()
    started = str(data.get("timestamp", ""))
    return Source(
        name, "unknown", str(data["model"]), tool, (*rows.values(),), tuple(notes), started=started
    )


def _llama_benchy_csv(name: str, text: str) -> Source:
    lines = [*csv.DictReader(io.StringIO(text))]
    rows: dict[str, ComparedRow] = {}
    for line in lines:
        if (match := _CSV_TEST.fullmatch(line["test_name"])) is None:
            continue  # the prefix itself, as above
        kind, depth, streams = match[1], match[2] or "0", int(match[3] or 1)
        for metric, unit, key in (
            (f"{kind}_c{streams}@d{depth}" if streams > 1 else f"{kind}@d{depth}", "tok/s", "t_s"),
            ("ttft_p50" if depth == "0" and streams == 1 else "", "ms", "e2e_ttft"),
        ):
            if metric and line[f"{key}_mean"]:
                item = {"mean": line[f"{key}_mean"], "std": line[f"{key}_std"]}
                rows.setdefault(metric, _benchy_row(metric, unit, item))
    return Source(name, "unknown", lines[0]["model"], "llama-benchy", (*rows.values(),))


def _sparkrun(name: str, text: str) -> Source:
    """What ``sparkrun benchmark`` writes: a recipe, and llama-benchy's JSON (``export_results`` of
    spark-arena/sparkrun, src/sparkrun/benchmarking/base.py)."""
    try:
        import yaml  # type: ignore[import-untyped]

        data = yaml.safe_load(text)[_SPARKRUN]
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: YAML needs PyYAML: pip install pyyaml") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: no sound YAML: {' '.join(str(error).split())}") from error
    recipe = data["recipe"]
    engine = " ".join(str(recipe[key]) for key in ("runtime", "container") if recipe.get(key))
    source = _llama_benchy(name, data["results"]["json"])
    notes = (*source.notes, f"recipe {recipe.get('qualified_name') or recipe['name']}")
    return replace(source, engine=engine, notes=notes, started=str(data["timestamp"]))


def _benchy_row(metric: str, unit: str, item: dict[str, Any]) -> ComparedRow:
    values = item.get("values") or []
    # Which of the two it used, its file does not say: 1.6 % apart and more.
    clock = "llama-benchy (token ids or evenly spread usage)"
    report = MetricReport(value=float(item["mean"]), unit=unit, rounds=len(values), clock=clock)
    return ComparedRow(metric, report, float(item["std"]))


def _llama_bench(name: str, data: Sequence[dict[str, Any]]) -> Source:
    rows = []
    for test in data:
        prompt, generated = int(test["n_prompt"]), int(test["n_gen"])
        depth = int(test.get("n_depth", 0))
        if prompt and generated:
            metric = f"pp{prompt}+tg{generated}@d{depth}"  # both in one rate, as -pg gives it
        else:
            metric = f"pp{prompt}@d{depth}" if prompt else f"tg{generated}@d{depth}"
        report = MetricReport(
            value=float(test["avg_ts"]), unit="tok/s", clock="in-process",
            rounds=len(test.get("samples_ts") or []),
        )  # fmt: skip
        rows.append(ComparedRow(metric, report, float(test.get("stddev_ts", 0.0))))
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
    names = [metric_names.rate(row.metric) for source in sources for row in source.rows]
    rates = [rate for rate in names if rate is not None and rate.streams == 1]
    kinds = sorted({rate.kind for rate in rates}, key=lambda kind: (kind[:2], int(kind[2:])))
    return kinds, sorted({rate.depth for rate in rates})


def markdown(sources: Sequence[Source]) -> str:
    """Engine by depth, as the documents have it; then every row; then who measured how."""
    kinds, depths = rates(sources)
    proven = [source for source in sources if source.kernels]
    return templates.rendered(
        "compare.md.j2",
        sources=sources,
        kinds=kinds,
        depths=depths,
        metrics=dict.fromkeys(row.metric for source in sources for row in source.rows),
        label=label,
        grades=[severity.value for severity in Severity],
        proven=proven,
        parts=[part for part in KERNELS if any(part in source.kernels for source in proven)],
        trades=trades(sources),
        clocks=sorted({r.report.clock for s in sources for r in s.rows if r.report.clock}),
    )


def trades(sources: Sequence[Source]) -> list[str]:
    """What each later run is faster or slower than the first, what its rounding costs beside that
    one's, and whether that is a regression: a line each, of those that have both."""
    lines = []
    runs = [(source.name, source.run) for source in sources if source.run is not None]
    values = [{name: metric.value for name, metric in run.metrics.items()} for _, run in runs]
    for (name, run), now in list(zip(runs, values, strict=True))[1:]:
        is_allowed = {"price_allowed": run.engine.price_allowed}
        limits = limits_of(run.profile).model_copy(update=is_allowed)
        worse = [
            metric
            for metric in PRICES
            if (a := values[0].get(metric)) is not None and (b := now.get(metric)) is not None
            if not price_change(metric, a, b, limits.of_price(metric)).holds
        ]
        if text := trade(values[0], now):
            word = f"FAIL ({', '.join(worse)})" if worse else "PASS"
            lines.append(f"{name} compared with {runs[0][0]}: {text}: {word}")
    return lines


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
                 row.metric, row.report.value, row.report.unit, row.report.ci_low,
                 row.report.ci_high, row.deviation, row.report.rounds, row.report.clock,
                 row.verdict]
            )  # fmt: skip
    return stream.getvalue()


def distinct(sources: Sequence[Source]) -> list[Source]:
    """The same sources, with names that tell them apart."""
    counts: dict[str, int] = {}
    named = []
    for source in sources:
        counts[source.name] = number = counts.get(source.name, 0) + 1
        named.append(source if number == 1 else replace(source, name=f"{source.name} ({number})"))
    return named
