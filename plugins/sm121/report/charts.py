"""The charts of report.html: latencies, memory, and metrics over the stored runs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sm121.core import templates
from sm121.core.numbers import number
from sm121.machine.timeline import TimelineSample
from sm121.regression import metric_levels
from sm121.report import metric_names
from sm121.report.chart import LOOKS, SERIES, Chart, Figure, escaped, figure_of, scatter
from sm121.run.details import Details, Samples, Series, SeriesPoint
from sm121.stress.memory import MemoryFile

#: Maximum number of points of a distribution; with more samples, it is drawn by its quantiles.
_MOST_POINTS = 201
#: A distribution of more samples than this is drawn as a line without points.
_MOST_MARKED = 60
#: Minimum number of requests for a distribution, including failed ones.
_FEWEST_SAMPLES = 3
#: Maximum number of memory samples that are drawn; more would only make the file larger.
_MOST_MOMENTS = 1500
_MOST_HISTORIES = 6
_MOST_RUN_TICKS = 12
#: A distribution has a logarithmic axis if its longest sample is more than this many medians.
_WIDE = 20.0
#: The quantiles in the table below a distribution, and the names of some of them.
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_QUANTILE_NAMES = {0.0: "least", 0.5: "median", 1.0: "most"}
_GIB = 2**30
_MEMORY_COLUMNS = ("level", "at the start", "least", "most", "at the end", "growth")
_AT_END = _MEMORY_COLUMNS.index("at the end")


def _server_bytes(sample: TimelineSample) -> float | None:
    # Prefer PSS, which divides shared pages among processes: its sum over processes is correct.
    return sample.pss_bytes or sample.rss_bytes


def _device_bytes(sample: TimelineSample) -> float | None:
    return sample.device_bytes


def _available_bytes(sample: TimelineSample) -> float | None:
    return sample.available_bytes


#: Functions that return a size in bytes from a memory sample, by the name of the size.
_LEVELS: dict[str, Callable[[TimelineSample], float | None]] = {
    "server's processes": _server_bytes,
    "GPU memory in use": _device_bytes,
    "host memory available": _available_bytes,
}


def distributions(details: Details) -> list[Chart]:
    """Return one chart per time quantity (TTFT, ...) with its distribution over the requests.

    Args:
        details: The run's details, with the raw samples of its metrics.
    """
    by_quantity: dict[str, Samples] = {}
    for name, samples in details.samples.items():
        quantity = metric_names.quantity(name)
        if quantity is None or not samples.samples:
            continue
        known = by_quantity.get(quantity)
        if known is None or len(samples.samples) > len(known.samples):
            by_quantity[quantity] = samples
    charts: list[Chart] = []
    for quantity, samples in by_quantity.items():
        if samples.taken + samples.failures >= _FEWEST_SAMPLES:
            charts.append(_distribution(quantity, samples, len(charts) + 1))
    return charts


def _distribution(quantity: str, samples: Samples, place: int) -> Chart:
    finite = np.sort(np.asarray(samples.samples, dtype=np.float64))
    reached = samples.taken / (samples.taken + samples.failures)
    title = _distribution_title(quantity)
    unit = escaped(samples.unit)
    median = number(float(np.quantile(finite, 0.5)))
    # On a linear axis, one gap of seconds would hide thousands of gaps of milliseconds.
    is_wide = bool(finite[0] > 0 and finite[-1] > _WIDE * float(np.median(finite)))
    note = f"{samples.taken} samples"
    if is_wide:
        note += "; a logarithmic axis"
    if samples.failures:
        note += f"; {samples.failures} requests failed, which counts as infinitely late"
    return Chart(
        id=f"latency-{place}",
        title=title[0].upper() + title[1:],
        text=f"Distribution of the {title}: median {median} {unit}; {note}.",
        figure=figure_of(
            [_distribution_trace(finite, reached, unit)],
            x=unit,
            y="% of samples",
            y_range=(0.0, 102.0),
            small=True,
            logarithmic=is_wide,
        ),
        header=("quantile", unit),
        rows=_quantile_rows(finite, reached),
        note=note,
    )


def _distribution_title(quantity: str) -> str:
    return metric_names.quantity_words(quantity)


def _distribution_trace(finite: np.ndarray[Any, Any], reached: float, unit: str) -> Figure:
    """Draw the cumulative distribution of a time over the requests.

    ``reached`` is the fraction of requests that did not fail.
    """
    if len(finite) > _MOST_POINTS:
        shares = np.linspace(0.0, 1.0, _MOST_POINTS)
        values = np.quantile(finite, shares)
    else:
        shares = (np.arange(len(finite)) + 1) / len(finite)
        values = finite
    return scatter(
        "lines" if len(finite) > _MOST_MARKED else "lines+markers",
        [round(float(value), 4) for value in values],
        [round(float(share) * reached * 100, 3) for share in shares],
        "%{y:.0f} % within %{x:.5~r} " + unit,
        **LOOKS["distribution"],
    )


def _quantile_rows(finite: np.ndarray[Any, Any], reached: float) -> list[tuple[str, str]]:
    rows = []
    for quantile in _QUANTILES:
        label = _QUANTILE_NAMES.get(quantile, f"p{quantile * 100:.0f}")
        value = "failed"
        if quantile <= reached:
            value = number(float(np.quantile(finite, quantile / reached)))
        rows.append((label, value))
    return rows


def memory_levels(samples: Sequence[TimelineSample]) -> dict[str, list[float | None]]:
    """Return the sizes of memory over some samples.

    Args:
        samples: Samples in the order of time.

    Returns:
        The sizes in GiB, one per sample, by name. A size is None if the sample lacks it; a name
        that all samples lack is omitted.
    """
    levels = {}
    for name, size_of in _LEVELS.items():
        sizes = _scaled([size_of(sample) for sample in samples], 1 / _GIB)
        if _known(sizes):
            levels[name] = sizes
    return levels


def _scaled(values: Iterable[float | None], factor: float) -> list[float | None]:
    return [None if value is None else value * factor for value in values]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def memory(file: MemoryFile) -> Chart | None:
    """Return the chart of memory over the run.

    Args:
        file: The content of memory.json. At most about 1,500 evenly chosen samples are drawn.

    Returns:
        The chart; None if the file has no samples.
    """
    samples = file.samples[:: max(1, len(file.samples) // _MOST_MOMENTS)]
    if not samples:
        return None
    seconds = [round(sample.at_s - samples[0].at_s, 2) for sample in samples]
    traces: list[Figure] = []
    rows: list[list[str]] = []
    for colour, (name, sizes) in zip(SERIES, memory_levels(samples).items(), strict=False):
        hover = f"{name}: %{{y:.4~r}} GiB after %{{x:.0f}} s"
        line = {"color": colour, "width": 2}
        traces.append(
            scatter("lines", seconds, _rounded(sizes, 4), hover, name=name, line=line),
        )
        rows.append(_level_row(name, _known(sizes), "GiB", "GiB"))
    shares = _scaled([sample.cache_usage for sample in samples], 100)
    has_cache = bool(_known(shares))
    if has_cache:
        hover = "KV cache: %{y:.1f} % after %{x:.0f} s"
        traces.append(scatter("lines", seconds, _rounded(shares, 2), hover, **LOOKS["cache"]))
        rows.append(_level_row("KV cache in use", _known(shares), "%", "points"))
    figure = figure_of(traces, x="seconds", y="GiB")
    if has_cache:
        figure["layout"] |= LOOKS["with_cache"]
    at_end = "; ".join(f"{row[0]} {row[_AT_END]}" for row in rows)
    return Chart(
        id="memory",
        title="Memory over the run",
        text=f"Memory in GiB over the seconds of the run: {at_end}",
        figure=figure,
        header=_MEMORY_COLUMNS,
        rows=rows,
    )


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]


def _level_row(name: str, values: Sequence[float], unit: str, unit_of_growth: str) -> list[str]:
    first = values[0]
    last = values[-1]
    row = [name]
    for value in (first, min(values), max(values), last):
        row.append(f"{number(value)} {unit}")
    sign = "+" if last > first else ""
    row.append(f"{sign}{number(last - first)} {unit_of_growth}")
    return row


def histories(details: Details, gated: Iterable[str]) -> list[Chart]:
    """Return the charts of metrics over the stored runs, at most six.

    Metrics whose level changed come first, then those with a gate, then the rates of one stream in
    an empty context.

    Args:
        details: The run's details, with its metrics over the stored runs.
        gated: The names of the metrics that have a gate.
    """
    long_enough = {name: s for name, s in details.history.items() if len(s.points) >= 2}
    gates = set(gated)

    def rank(name: str) -> tuple[bool, bool, bool]:
        rate = metric_names.rate(name)
        has_one_level = len(_levels(long_enough[name].points)) < 2
        is_plain_rate = rate is not None and rate.plain
        return has_one_level, name not in gates, not is_plain_rate

    chosen = sorted(long_enough, key=rank)[:_MOST_HISTORIES]
    return [_history(name, long_enough[name], position) for position, name in enumerate(chosen, 1)]


def _history(name: str, series: Series, place: int) -> Chart:
    count = len(series.points)
    # This run is compared with the last level of the earlier ones.
    levels = _levels(series.points[:-1])
    changes = [start for start, _, _ in levels[1:]]
    last_start, last_end, last_level = levels[-1]
    comparison = templates.rendered(
        "against_level.j2",
        series=series,
        runs=last_end - last_start,
        level=last_level,
        changes=[series.points[start].run for start in changes],
        number=number,
    )
    return Chart(
        id=f"history-{place}",
        title=f"{name} over {count} runs",
        text=f"{metric_names.words(name)} over {count} runs: {comparison}.",
        figure=_history_figure(series, levels),
        header=("run", "when", series.unit, "level"),
        rows=_history_rows(series.points, levels),
        note=f"{comparison[0].upper()}{comparison[1:]}.",
    )


def _history_figure(series: Series, levels: Sequence[tuple[int, int, float]]) -> Figure:
    unit = escaped(series.unit)
    count = len(series.points)
    marker = {}
    for key, (usual, last) in LOOKS["runs"].items():
        marker[key] = [usual] * (count - 1) + [last]
    runs = scatter(
        "lines+markers",
        list(range(1, count + 1)),
        [point.value for point in series.points],
        f"%{{text}}: %{{y:.5~r}} {unit}",
        text=[escaped(point.run) for point in series.points],
        line={"color": SERIES[0], "width": 1},
        marker=marker,
    )
    traces = [runs]
    for start, end, level in levels:
        ends = [start + 0.6, end + 0.4]
        traces.append(scatter("lines", ends, [level, level], None, **LOOKS["level"]))
    figure = figure_of(traces, x="run (the star is this one)", y=unit, small=True)
    figure["layout"]["xaxis"] |= {
        "range": [0.5, count + 0.5],
        "tick0": 1,
        "dtick": -(-count // _MOST_RUN_TICKS),  # a tick is at a whole run
    }
    shapes = []
    for start, _, _ in levels[1:]:
        shapes.append({**LOOKS["change"], "x0": start + 0.5, "x1": start + 0.5})
    figure["layout"]["shapes"] = shapes
    return figure


def _history_rows(
    points: Sequence[SeriesPoint], levels: Sequence[tuple[int, int, float]]
) -> list[tuple[str, str, str, str]]:
    level_texts = [""] * len(points)
    for start, end, level in levels:
        for index in range(start, end):
            level_texts[index] = number(level)
    for start, _, _ in levels[1:]:
        level_texts[start] += " (changes here)"
    rows = []
    for point, level_text in zip(points, level_texts, strict=True):
        rows.append((point.run, point.when, number(point.value), level_text))
    return rows


def _levels(points: Sequence[SeriesPoint]) -> list[tuple[int, int, float]]:
    """Return the levels of a series as (start, end, median)."""
    values = [point.value for point in points]
    parts = [metric_levels.Segment(0, len(values))]
    if len(values) > 1 and min(values) > 0:
        parts = metric_levels.segments(values)
    return [(start, end, float(np.median(values[start:end]))) for start, end in parts]
