"""Show results side by side: stored runs of this suite, and results of other tools."""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm121.core import metric_name, profile, templates
from sm121.core.errors import UsageError
from sm121.core.files import cause_of
from sm121.core.level_settings import PRICES, Regression
from sm121.core.verdict import Severity
from sm121.regression.change import price_change
from sm121.report import metric_names, other_tools
from sm121.report.source import KERNELS, ComparedRow, Source
from sm121.run import stored_benchmarks, stored_run, trade, verdict_file
from sm121.run.fingerprint import Fingerprint, FingerprintDifference
from sm121.run.verdict_file import VerdictFile

#: The fields of a fingerprint that must be equal if two runs are compared.
_ASKED = {"profile", "plan", "model", "provider", "options", "machine"}
#: A file of pytest-benchmark is named NUMBER_COMMIT_TIME.
_BENCHMARK_NUMBER = re.compile(r"\d{4}(?=_)")
#: The end of an error about runs that are not comparable.
_MIXED_HINT = "--mixed shows them side by side all the same"
_CSV_COLUMNS = (
    "run",
    "engine",
    "model",
    "tool",
    "test",
    "metric",
    "value",
    "unit",
    "ci_low",
    "ci_high",
    "stddev",
    "rounds",
    "clock",
    "verdict",
)


def read_results(path: Path) -> Source:
    """Read a file of results of this suite or another tool, which is recognised by the content.

    Args:
        path: A report directory or its verdict.json, a file of pytest-benchmark, JSON or CSV of
            llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench.

    Raises:
        UsageError: The file cannot be read, or has none of these formats.
    """
    file = path / verdict_file.NAME if path.is_dir() else path
    expected = (
        f"{path}: expected a report directory, verdict.json, a file of pytest-benchmark, JSON or "
        "CSV of llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench"
    )
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{expected}, got: {cause_of(error)}. Check the path.") from error
    name = stored_run.folder_of(path).name if file.name == verdict_file.NAME else path.stem
    try:
        if text.startswith(other_tools.BENCHY_CSV_COLUMNS):
            return other_tools.read_llama_benchy_csv(path.stem, text)
        if text.startswith(f"{other_tools.SPARKRUN_KEY}:"):
            return other_tools.read_sparkrun(path.stem, text)
    except (LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{expected}; the field {error!r} is missing or not valid") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{expected}, got: {cause_of(error)}. Check the path.") from error
    try:
        data = _parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{expected}, got: {cause_of(error)}. Check the path.") from error
    try:
        source = _read_data(name, data)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{expected}; the field {error!r} is missing or not valid") from error
    if source is None:
        raise UsageError(expected)
    return source


def _parse_json(text: str) -> Any:
    """Parse JSON, or JSON lines to a list."""
    try:
        return json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
        if not data:
            raise
        return data


def _read_data(name: str, data: Any) -> Source | None:
    """Return the results of a JSON file; None if no known tool wrote it."""
    if isinstance(data, list) and data and "avg_ts" in data[0]:
        return other_tools.read_llama_bench(name, data)
    if not isinstance(data, dict):
        return None
    if {"metrics", "schema_version"} <= data.keys():
        return _of_report(name, verdict_file.parse(data))
    if {"machine_info", "benchmarks"} <= data.keys():
        number = _BENCHMARK_NUMBER.match(name)
        if number is not None:
            name = number[0]
        stored = stored_benchmarks.of_data(name, data)
        if stored is None:
            raise UsageError(f"{name}: no measurement of this suite among its benchmarks")
        return _of_run(name, stored.file)
    if {"benchmarks", "max_concurrency"} <= data.keys():
        return other_tools.read_llama_benchy(name, data)
    return None


def _of_report(name: str, run: VerdictFile) -> Source:
    notes = [f"{run.verdict}, box {run.box.state}"]
    if run.fingerprint is not None:
        origin = "" if run.fingerprint.profile_shipped else " (not the shipped one)"
        notes.append(f"profile {run.profile}{origin}")
    return _of_run(name, run, notes)


def _of_run(name: str, run: VerdictFile, notes: Sequence[str] = ()) -> Source:
    rows = []
    for metric, report in run.metrics.items():
        if not metric_name.is_of_ab(metric):
            rows.append(ComparedRow(metric, report, verdict=report.verdict.value))
    engine = f"{run.engine.name} {run.engine.version or ''}".strip()
    return Source(
        name=name,
        engine=engine,
        model=run.engine.model,
        tool="sm121",
        rows=tuple(rows),
        notes=tuple(notes),
        run=run,
    )


def named(given: Path) -> tuple[str | None, Path]:
    """Split an argument ``NAME=PATH``.

    Args:
        given: The argument.

    Returns:
        The name, or None for a path without a name; and the path.
    """
    name, separator, path = str(given).partition("=")
    if separator and not given.exists():
        return name, Path(path)
    return None, given


def limits_of(name: str) -> Regression:
    """Return how much worse a metric of a run may be.

    Args:
        name: The profile of the run. For a profile that is not shipped, the suite's defaults apply.
    """
    if name in profile.shipped():
        return profile.load(name).regression
    return Regression()


def refuse_mixed(sources: Sequence[Source]) -> None:
    """Reject runs with different profiles, plans, models, options or machines.

    Args:
        sources: The results. Only runs of this suite are compared.

    Raises:
        UsageError: Two runs differ in a field, or some have no fingerprint.
    """
    newer: list[tuple[str, VerdictFile]] = []
    older: list[str] = []
    for source in sources:
        if source.run is None:
            continue
        if source.run.fingerprint is None:
            older.append(source.name)
        else:
            newer.append((source.name, source.run))
    if newer and older:
        raise UsageError(
            f"{older[0]} has no record of its settings (an older version wrote it, without a "
            f"fingerprint), but {newer[0][0]} does; {_MIXED_HINT}"
        )
    for (one, first), (other, second) in itertools.combinations(newer, 2):
        found = differences(first, second)
        if found:
            field = _by_configuration(first, second) or found[0]
            raise UsageError(
                f"{one} and {other} differ in {field.name}: {field.one or 'none'} and "
                f"{field.other or 'none'}; {_MIXED_HINT}"
            )


def _by_configuration(one: VerdictFile, other: VerdictFile) -> FingerprintDifference | None:
    """Return the difference if two runs used two configurations of one profile, else None."""
    first = one.fingerprint or Fingerprint()
    second = other.fingerprint or Fingerprint()
    if one.profile != other.profile or first.profile == second.profile:
        return None
    if first.configuration == second.configuration:
        return None
    name = f"the configuration of profile {one.profile}"
    return FingerprintDifference(name, first.configuration, second.configuration)


def differences(one: VerdictFile, other: VerdictFile) -> list[FingerprintDifference]:
    """Return the fields that must be equal to compare two runs, but differ.

    Engine, version, configuration and arguments may differ: they are the subject of a comparison.
    The contents of two profiles are only compared if the profiles have the same name.

    Args:
        one: A run.
        other: Another run. A missing fingerprint counts as empty.
    """
    fields = set(_ASKED)
    if one.profile != other.profile:
        fields.remove("profile")
    return _asked(one, fields).differences(_asked(other, fields))


def _asked(run: VerdictFile, fields: set[str]) -> Fingerprint:
    fingerprint = run.fingerprint or Fingerprint()
    return Fingerprint(**fingerprint.model_dump(include=fields))


def label(metric: str) -> str:
    """Return a metric's name as llama-bench writes it, for example ``pp2048 @ d4096``.

    Args:
        metric: The metric's name, for example ``pp2048@d4096``.
    """
    return metric.replace("@d0", "").replace("@d", " @ d")


def rates(sources: Iterable[Source]) -> tuple[list[str], list[int]]:
    """Return the rates of one stream that were measured.

    Args:
        sources: The results.

    Returns:
        The kinds of rates (``pp2048``, ``tg32``, ...), and the depths.
    """
    kinds: set[str] = set()
    depths: set[int] = set()
    for source in sources:
        for row in source.rows:
            rate = metric_names.rate(row.metric)
            if rate is not None and rate.streams == 1:
                kinds.add(rate.kind)
                depths.add(rate.depth)
    return sorted(kinds, key=lambda kind: (kind[:2], int(kind[2:]))), sorted(depths)


def markdown(sources: Sequence[Source]) -> str:
    """Return the comparison as Markdown: rates by engine and depth, all metrics, and the runs.

    Args:
        sources: The results, in the order of the columns.
    """
    kinds, depths = rates(sources)
    metrics: list[str] = []
    clocks: set[str] = set()
    for source in sources:
        for row in source.rows:
            metrics.append(row.metric)
            if row.report.clock:
                clocks.add(row.report.clock)
    proven = [source for source in sources if source.kernels]
    return templates.rendered(
        "compare.md.j2",
        sources=sources,
        kinds=kinds,
        depths=depths,
        metrics=dict.fromkeys(metrics),
        label=label,
        grades=[severity.value for severity in Severity],
        proven=proven,
        parts=[part for part in KERNELS if any(part in source.kernels for source in proven)],
        trades=trades(sources),
        clocks=sorted(clocks),
    )


def trades(sources: Sequence[Source]) -> list[str]:
    """Compare the speed and the accuracy cost (price) of each run with those of the first run.

    Args:
        sources: The results. Only runs of this suite are compared.

    Returns:
        One line per later run, with the verdict on its price. A run without a rate or a price has
        no line.
    """
    runs = [(source.name, source.run) for source in sources if source.run is not None]
    if not runs:
        return []
    first_name, first_run = runs[0]
    before = trade.values(first_run.metrics)
    lines = []
    for name, run in runs[1:]:
        now = trade.values(run.metrics)
        text = trade.trade(before, now)
        if text:
            worse = _worse_prices(before, now, run)
            word = f"FAIL ({', '.join(worse)})" if worse else "PASS"
            lines.append(f"{name} compared with {first_name}: {text}: {word}")
    return lines


def _worse_prices(
    before: dict[str, float | None], now: dict[str, float | None], run: VerdictFile
) -> list[str]:
    """Return the accuracy costs (prices) that rose by more than the profile of a run allows."""
    is_allowed = {"price_allowed": run.engine.price_allowed}
    limits = limits_of(run.profile).model_copy(update=is_allowed)
    worse = []
    for metric in PRICES:
        price_before = before.get(metric)
        price_now = now.get(metric)
        if price_before is None or price_now is None:
            continue
        if not price_change(metric, price_before, price_now, limits.of_price(metric)).holds:
            worse.append(metric)
    return worse


def csv_text(sources: Sequence[Source]) -> str:
    """Return every row of the results as CSV, with a header.

    Args:
        sources: The results.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for source in sources:
        for row in source.rows:
            writer.writerow(_csv_row(source, row))
    return stream.getvalue()


def _csv_row(source: Source, row: ComparedRow) -> list[object]:
    return [
        source.name,
        source.engine,
        source.model,
        source.tool,
        label(row.metric),
        row.metric,
        row.report.value,
        row.report.unit,
        row.report.ci_low,
        row.report.ci_high,
        row.deviation,
        row.report.rounds,
        row.report.clock,
        row.verdict,
    ]


def distinct(sources: Sequence[Source]) -> list[Source]:
    """Return the same sources with unique names.

    Args:
        sources: The results. The second source with a name gets the suffix `` (2)``, and so on.
    """
    counts: dict[str, int] = {}
    renamed = []
    for source in sources:
        number = counts.get(source.name, 0) + 1
        counts[source.name] = number
        if number > 1:
            renamed.append(replace(source, name=f"{source.name} ({number})"))
        else:
            renamed.append(source)
    return renamed
