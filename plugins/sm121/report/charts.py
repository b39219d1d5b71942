"""The charts of report.html: figures as plotly's own JSON, each with its data as a table. Colours
are CSS variables, which the page's script looks up for light, dark and paper."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from sm121.core import templates
from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.measure.timeline import Sample
from sm121.regression import trend
from sm121.report import metric_names
from sm121.run.details import Details, Samples, Series, SeriesPoint
from sm121.run.verdict_file import MetricReport
from sm121.stress.memory import MemoryFile

SERIES = ("var(--series-1)", "var(--series-2)", "var(--series-3)")
OTHERS = ("var(--series-4)", "var(--series-5)", "var(--series-6)", "var(--series-7)",
           "var(--series-8)")  # fmt: skip
_MOST_POINTS = 201  # of a distribution
_MOST_MOMENTS = 1500  # more only make the file larger
_MOST_HISTORIES = 6
_MOST_RUN_TICKS = 12
#: A distribution whose longest sample is so many times the median has a logarithmic axis.
_WIDE = 20.0

#: What is shown of a sample of memory, in bytes.
_LEVELS: dict[str, Callable[[Sample], float | None]] = {
    # Shared pages by their share first: the better sum over a tree of processes.
    "server's processes": lambda sample: sample.pss_bytes or sample.rss_bytes,
    "GPU memory in use": lambda sample: sample.device_bytes,
    "host memory available": lambda sample: sample.available_bytes,
}

Figure = dict[str, Any]
LOOKS: dict[str, Figure] = json.loads(
    (files("sm121.report") / "templates" / "figure.json").read_text("utf-8")
)


@dataclass(frozen=True)
class Chart:
    """A figure, what it shows in a sentence, and its data."""

    id: str
    title: str
    text: str
    figure: Figure
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    marks: Sequence[tuple[str, str, str]] = ()
    """What else stands for something, as in the legend."""

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Name, colour and shape of each line or kind of point that has a name."""
        entries = []
        for trace in self.figure["data"]:
            if len(self.figure["data"]) > 1 and trace.get("name"):
                line = trace.get("line") or {}
                shape = (
                    "point" if trace["mode"].startswith("markers") else line.get("dash") or "solid"
                )
                colour = line.get("color") or trace["marker"]["color"]
                entries.append((trace["name"], colour, shape))
        return [*entries, *self.marks]


def interval(metric: MetricReport) -> str:
    """The interval of a metric's value for people, with its confidence; empty for none. A quantile
    that a bound was compared with has the confidence alone with which its rounds show it."""
    surely = "" if metric.confidence is None else f"{metric.confidence:.0%}"
    if metric.ci_low is None and metric.ci_high is None:
        return f"{surely} sure" if surely and metric.gated else ""
    low, high = number(metric.ci_low) or "?", number(metric.ci_high) or "unbounded"
    return f"{low} to {high}, {surely} sure" if surely else f"{low} to {high}"


def certainty(metric: MetricReport) -> str:
    """The interval, what was accepted of the drafts, and of how many starts it is."""
    parts = [interval(metric)]
    if metric.accepted_length is not None and metric.acceptance_rate is not None:
        share = f"{metric.acceptance_rate:.0%} of drafts accepted"
        parts[0] += f" ({share}, {metric.accepted_length:.2f} tokens a step)"
    if metric.starts is not None:
        parts.append("of one start" if metric.starts == 1 else f"of {metric.starts} starts")
    return ", ".join(filter(None, parts))


def scatter(
    mode: str, x: Sequence[Any], y: Sequence[Any], hover: str | None, **more: Any
) -> Figure:
    """A trace; ``hover`` is what stands at a point, None where it says nothing."""
    label = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **label, **more}


def distributions(details: Details) -> list[Chart]:
    """How each time is distributed over the requests: one chart for each quantity."""
    by_quantity: dict[str, Samples] = {}
    for name, samples in details.samples.items():
        if (base := metric_names.quantity(name)) is not None and samples.samples:
            longest = by_quantity.get(base, samples)
            by_quantity[base] = max(longest, samples, key=lambda each: len(each.samples))
    enough = [(base, s) for base, s in by_quantity.items() if s.taken + s.failures >= 3]
    return [_distribution(base, s, position) for position, (base, s) in enumerate(enough, 1)]


def _distribution(base: str, samples: Samples, place: int) -> Chart:
    finite = np.sort(np.asarray(samples.samples, dtype=np.float64))
    reached = samples.taken / (samples.taken + samples.failures)
    if len(finite) > _MOST_POINTS:
        shares = np.linspace(0.0, 1.0, _MOST_POINTS)
        values = np.quantile(finite, shares)
    else:
        shares = (np.arange(len(finite)) + 1) / len(finite)
        values = finite
    title = metric_names.words(f"{base}_p50").removesuffix(", p50").replace(", p50,", ",")
    unit = escaped(samples.unit)
    rows = []
    for quantile in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        label = {0.0: "least", 0.5: "median", 1.0: "most"}.get(quantile, f"p{quantile * 100:.0f}")
        at = number(float(np.quantile(finite, min(1.0, quantile / reached))))
        rows.append((label, at if quantile <= reached else "failed"))
    middle = number(float(np.quantile(finite, 0.5)))
    # One gap of seconds among thousands of milliseconds would leave nothing else to be seen.
    wide = finite[0] > 0 and finite[-1] > _WIDE * float(np.median(finite))
    note = f"{samples.taken} samples"
    if wide:
        note += "; a logarithmic axis"
    if samples.failures:
        note += f"; {samples.failures} requests failed, which counts as infinitely late"
    return Chart(
        id=f"latency-{place}",
        title=title[0].upper() + title[1:],
        text=f"Distribution of the {title}: median {middle} {unit}; {note}.",
        figure=figure_of(
            [
                scatter(
                    "lines" if len(finite) > 60 else "lines+markers",
                    [round(float(value), 4) for value in values],
                    [round(float(share) * reached * 100, 3) for share in shares],
                    "%{y:.0f} % within %{x:.5~r} " + unit,
                    **LOOKS["distribution"],
                )
            ],
            x=unit,
            y="% of samples",
            y_range=(0.0, 102.0),
            small=True,
            logarithmic=bool(wide),
        ),
        header=("quantile", unit),
        rows=rows,
        note=note,
    )


def memory_levels(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    """What was read of the memory, in GiB at each sample; None where a sample lacks it."""
    levels = {}
    for name, level in _LEVELS.items():
        sizes = [None if (size := level(each)) is None else size / 2**30 for each in samples]
        if any(size is not None for size in sizes):
            levels[name] = sizes
    return levels


def memory(file: MemoryFile) -> Chart | None:
    """Memory over the run, by at most 1,500 of the samples, evenly; None when there is none."""
    samples = file.samples[:: max(1, len(file.samples) // _MOST_MOMENTS)]
    if not samples:
        return None
    seconds = [round(sample.at_s - samples[0].at_s, 2) for sample in samples]
    traces: list[Figure] = []
    quantities = []
    for colour, (name, sizes) in zip(SERIES, memory_levels(samples).items(), strict=False):
        traces.append(
            scatter(
                "lines",
                seconds,
                [None if size is None else round(size, 4) for size in sizes],
                f"{name}: %{{y:.4~r}} GiB after %{{x:.0f}} s",
                name=name,
                line={"color": colour, "width": 2},
            )
        )
        quantities.append((name, [size for size in sizes if size is not None], "GiB", "GiB"))
    cache = [None if (share := each.cache_usage) is None else share * 100 for each in samples]
    if shares := [share for share in cache if share is not None]:
        traces.append(
            scatter(
                "lines",
                seconds,
                [None if share is None else round(share, 2) for share in cache],
                "KV cache: %{y:.1f} % after %{x:.0f} s",
                **LOOKS["cache"],
            )
        )
        quantities.append(("KV cache in use", shares, "%", "points"))
    figure = figure_of(traces, x="seconds", y="GiB")
    if shares:
        figure["layout"] |= LOOKS["with_cache"]
    rows = [
        [level, *(f"{number(v)} {unit}" for v in (values[0], min(values), max(values), values[-1])),
         f"{'+' * (values[-1] > values[0])}{number(values[-1] - values[0])} {difference}"]
        for level, values, unit, difference in quantities
    ]  # fmt: skip
    return Chart(
        id="memory",
        title="Memory over the run",
        text="Memory in GiB over the seconds of the run: "
        + "; ".join(f"{r[0]} {r[4]}" for r in rows),
        figure=figure,
        header=("level", "at the start", "least", "most", "at the end", "growth"),
        rows=rows,
    )


def histories(details: Details, gated: Iterable[str]) -> list[Chart]:
    """Metrics over the stored runs: those with a changed level, a gate, the first rates."""
    long_enough = {name: s for name, s in details.history.items() if len(s.points) >= 2}
    gates = set(gated)

    def rank(name: str) -> tuple[bool, bool, bool]:
        rate = metric_names.rate(name)
        return (
            len(_levels(long_enough[name].points)) < 2,
            name not in gates,
            not (rate and rate.plain),
        )

    chosen = sorted(long_enough, key=rank)[:_MOST_HISTORIES]
    return [_history(name, long_enough[name], position) for position, name in enumerate(chosen, 1)]


def _history(name: str, series: Series, place: int) -> Chart:
    unit = escaped(series.unit)
    count = len(series.points)
    levels = _levels(series.points[:-1])  # this run is compared with the last of them
    traces = [
        scatter(
            "lines+markers",
            list(range(1, count + 1)),
            [point.value for point in series.points],
            f"%{{text}}: %{{y:.5~r}} {unit}",
            text=[escaped(point.run) for point in series.points],
            line={"color": SERIES[0], "width": 1},
            marker={
                name: [usual] * (count - 1) + [last]
                for name, (usual, last) in LOOKS["runs"].items()
            },
        )
    ]
    traces += [
        scatter(
            "lines",
            [start + 0.6, end + 0.4],
            [level, level],
            None,
            **LOOKS["level"],
        )
        for start, end, level in levels
    ]
    figure = figure_of(traces, x="run (the star is this one)", y=unit, small=True)
    figure["layout"]["xaxis"] |= {
        "range": [0.5, count + 0.5],
        "tick0": 1,
        "dtick": -(-count // _MOST_RUN_TICKS),  # whole runs
    }
    changes = [start for start, _, _ in levels[1:]]
    figure["layout"]["shapes"] = [
        {**LOOKS["change"], "x0": start + 0.5, "x1": start + 0.5} for start in changes
    ]
    rows = []
    for index, point in enumerate(series.points):
        at = next((v for start, end, v in levels if start <= index < end), None)
        mark = " (changes here)" if index in changes else ""
        rows.append((point.run, point.when, number(point.value), number(at) + mark))
    comparison = templates.rendered(
        "against_level.j2",
        series=series,
        runs=levels[-1][1] - levels[-1][0],
        level=levels[-1][2],
        changes=[series.points[start].run for start in changes],
        number=number,
    )
    return Chart(
        id=f"history-{place}",
        title=f"{name} over {count} runs",
        text=f"{metric_names.words(name)} over {count} runs: {comparison}.",
        figure=figure,
        header=("run", "when", series.unit, "level"),
        rows=rows,
        note=f"{comparison[0].upper()}{comparison[1:]}.",
    )


def _levels(points: Sequence[SeriesPoint]) -> list[tuple[int, int, float]]:
    """The levels of some runs: first run, one past the last, and the median of these."""
    values = [point.value for point in points]
    parts = trend.segments(values) if values[1:] and min(values) > 0 else [(0, len(values))]
    return [(start, end, float(np.median(values[start:end]))) for start, end in parts]


def figure_of(
    traces: list[Figure],
    *,
    x: str,
    y: str,
    category: bool = False,
    y_range: tuple[float, float] | None = None,
    small: bool = False,
    logarithmic: bool = False,
) -> Figure:
    kind = {"type": "category"} if category else {"type": "log"} if logarithmic else {}
    limits = {"range": list(y_range)} if y_range else {"rangemode": "tozero"} if category else {}
    layout: Figure = {
        **LOOKS["layout"],  # no legend: the page has its own, which is text and takes no room here
        "height": 260 if small else 420,
        "xaxis": {**LOOKS["axis"], "title": {"text": x}, **kind},
        "yaxis": {**LOOKS["axis"], "title": {"text": y}, **limits},
    }
    return {"data": traces, "layout": layout}


def escaped(text: str) -> str:
    """Text for plotly, which takes some HTML for formatting: none is left in it."""
    return printable(text).replace("<", "\u2039").replace(">", "\u203a")[:80]
