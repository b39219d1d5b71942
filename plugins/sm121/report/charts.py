"""The charts of report.html: figures as plotly's own JSON, each with its data as a table.

Colours are names of CSS variables, which the page's script looks up: one figure for light, dark and
paper.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.report import metric_names
from sm121.report.details import Details, Samples, Series
from sm121.report.references import References
from sm121.report.stored import MemoryTimeline
from sm121.run.verdict_file import MetricReport, VerdictFile

_OWN = ("var(--series-1)", "var(--series-2)", "var(--series-3)")
_OTHERS = ("var(--series-4)", "var(--series-5)", "var(--series-6)", "var(--series-7)",
           "var(--series-8)")  # fmt: skip
_RATE_COLUMNS = ("depth", "metric", "measured", "interval", "minimum", "target", "stretch",
                 "roofline", "verdict")  # fmt: skip
_DASHES = ("dot", "dash", "dashdot", "longdash")
_MOST_POINTS = 201  # of a distribution
_MOST_HISTORIES = 6
#: A distribution whose longest sample is so many times the median has a logarithmic axis.
_WIDE = 20.0

Figure = dict[str, Any]
#: Parts of plotly's layout that are the same in every figure.
_LOOKS: dict[str, Figure] = json.loads(
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

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Name, colour and shape of each line or kind of point that has a name."""
        found = []
        for trace in self.figure["data"]:
            if len(self.figure["data"]) > 1 and trace.get("name"):
                line = trace.get("line") or {}
                shape = "point" if trace["mode"] == "markers" else line.get("dash") or "solid"
                colour = line.get("color") or trace["marker"]["color"]
                found.append((trace["name"], colour, shape))
        return found


def interval(metric: MetricReport) -> str:
    """The interval of a metric's value for people, with its confidence; empty for none. A quantile
    that a bound was held against has the confidence alone with which its rounds show it."""
    surely = "" if metric.confidence is None else f"{metric.confidence:.0%}"
    if metric.ci_low is None and metric.ci_high is None:
        return f"{surely} sure" if surely and metric.gated else ""
    low, high = number(metric.ci_low) or "?", number(metric.ci_high) or "unbounded"
    return f"{low} to {high}, {surely} sure" if surely else f"{low} to {high}"


def rates(run: VerdictFile, references: References, *, decoding: bool) -> Chart | None:
    """Decode or prefill by depth: measured, required, of other engines, and the memory's bound."""
    measured: dict[str, dict[int, MetricReport]] = {}
    for name, metric in run.metrics.items():
        rate = metric_names.rate(name)
        if rate is not None and rate.decoding is decoding and rate.streams == 1:
            measured.setdefault(rate.kind, {})[rate.depth] = metric
    # What has a gate comes first: it is what other engines are held beside.
    kinds = sorted(
        measured,
        key=lambda k: (all(m.minimum is None for m in measured[k].values()), len(k), k),
    )
    measured = {kind: dict(sorted(measured[kind].items())) for kind in kinds}
    values = [m.value for d in measured.values() for m in d.values() if m.value is not None]
    if not values:
        return None
    others = references.reference if references.comparable(run) is None else ()
    depths = sorted({depth for kind in measured.values() for depth in kind})
    what = "Decode" if decoding else "Prefill"
    traces: list[Figure] = []
    rows: list[list[str]] = []
    for colour, (kind, by_depth) in zip(_OWN, measured.items(), strict=False):
        traces.append(_measured(kind, by_depth, colour))
        rows += [
            [f"{depth}", kind, number(m.value), interval(m), number(m.minimum), number(m.target),
             number(m.stretch), number(_ceiling(m)), m.verdict.value]
            for depth, m in by_depth.items()
        ]  # fmt: skip
    traces += _required(measured)
    for colour, dash, reference in zip(_OTHERS * 3, _DASHES * 3, others, strict=False):
        trace = _reference(reference.name, reference.values, measured, colour, dash)
        if trace is None:
            continue
        traces.append(trace)
        rows += [
            [f"{depth}", f"{kind}, {reference.name}", number(value), *[""] * 5, "as documented"]
            for kind in measured
            for depth in depths
            if (value := reference.values.get(f"{kind}@d{depth}")) is not None
        ]
    if decoding and (trace := _roofline(measured)) is not None:
        traces.append(trace)
    return Chart(
        id="decode" if decoding else "prefill",
        title=f"{what} rate by depth",
        text=f"{what} rate in tokens a second at {len(depths)} depths of context, with intervals; "
        f"the highest is {number(max(values))}. The table below has every number.",
        figure=_figure(traces, x="context before the request, tokens", y="tok/s", category=True),
        header=_RATE_COLUMNS,
        rows=rows,
    )


def _scatter(
    mode: str, x: Sequence[Any], y: Sequence[Any], hover: str | None, **more: Any
) -> Figure:
    """A trace; ``hover`` is what stands at a point, None where it says nothing."""
    said = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **said, **more}


def _measured(kind: str, by_depth: Mapping[int, MetricReport], colour: str) -> Figure:
    known = [(depth, m, m.value) for depth, m in by_depth.items() if m.value is not None]
    return _scatter(
        "lines+markers",
        [f"{depth}" for depth, _, _ in known],
        [value for _, _, value in known],
        f"{kind} at depth %{{x}}: %{{y:.5~r}} tok/s",
        name=f"{kind}, this run",
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [m.ci_high - v if m.ci_high is not None else 0.0 for _, m, v in known],
            "arrayminus": [v - m.ci_low if m.ci_low is not None else 0.0 for _, m, v in known],
            "thickness": 2,
            "width": 6,
            "color": colour,
        },
        line={"color": colour, "width": 3},
        marker={"size": 9, "color": colour},
    )


def _required(measured: Mapping[str, Mapping[int, MetricReport]]) -> list[Figure]:
    """A short bar at each depth for the minimum, the target and the stretch goal."""
    looks = (
        ("minimum", "var(--fail)", 26),
        ("target", "var(--pass)", 22),
        ("stretch", "var(--muted)", 18),
    )
    found = []
    for grade, colour, size in looks:
        points = [
            (f"{depth}", limit)
            for by_depth in measured.values()
            for depth, metric in by_depth.items()
            if (limit := getattr(metric, grade)) is not None
        ]
        if points:
            found.append(
                _scatter(
                    "markers",
                    [x for x, _ in points],
                    [y for _, y in points],
                    f"{grade} at depth %{{x}}: %{{y:.5~r}} tok/s",
                    name=f"{grade} required" if grade == "minimum" else grade,
                    marker={
                        "symbol": "line-ew-open",
                        "size": size,
                        "color": colour,
                        "line": {"width": 3, "color": colour},
                    },
                )
            )
    return found


def _reference(
    name: str, values: Mapping[str, float], measured: Iterable[str], colour: str, dash: str
) -> Figure | None:
    for kind in measured:  # the first kind that it has: one line for each engine
        points = sorted(
            (rate.depth, value)
            for metric, value in values.items()
            if (rate := metric_names.rate(metric)) is not None and rate.kind == kind
        )
        if points:
            return _scatter(
                "lines+markers",
                [f"{depth}" for depth, _ in points],
                [value for _, value in points],
                f"{_label(name)} %{{x}}: %{{y:.5~r}} tok/s",
                name=f"{_label(name)} ({kind})",
                line={"color": colour, "width": 1.5, "dash": dash},
                marker={"size": 6, "color": colour, "symbol": "diamond"},
            )
    return None


def _ceiling(metric: MetricReport) -> float | None:
    return metric.value / metric.roofline if metric.value and metric.roofline else None


def _roofline(measured: Mapping[str, Mapping[int, MetricReport]]) -> Figure | None:
    bound: dict[int, float] = {}
    for by_depth in measured.values():
        for depth, metric in by_depth.items():
            if (ceiling := _ceiling(metric)) is not None:
                bound.setdefault(depth, ceiling)
    if not bound:
        return None
    return _scatter(
        "lines",
        [f"{depth}" for depth in sorted(bound)],
        [bound[depth] for depth in sorted(bound)],
        "the memory allows %{y:.5~r} tok/s",
        name="roofline (memory)",
        line={"color": "var(--muted)", "width": 2, "dash": "dash"},
    )


def distributions(details: Details) -> list[Chart]:
    """How each time is distributed over the requests: one chart for each quantity."""
    by_quantity: dict[str, Samples] = {}
    for name, samples in details.samples.items():
        base = metric_names.quantity(name)
        if base is not None and samples.samples:
            known = by_quantity.get(base)
            if known is None or len(samples.samples) > len(known.samples):
                by_quantity[base] = samples
    enough = [(base, s) for base, s in by_quantity.items() if s.taken + s.failures >= 3]
    return [_distribution(base, s, place) for place, (base, s) in enumerate(enough, 1)]


def _distribution(base: str, samples: Samples, place: int) -> Chart:
    finite = np.sort(np.asarray(samples.samples, dtype=np.float64))
    all_of_them = samples.taken + samples.failures
    reached = samples.taken / all_of_them
    if len(finite) > _MOST_POINTS:
        shares = np.linspace(0.0, 1.0, _MOST_POINTS)
        values = np.quantile(finite, shares)
    else:
        shares = (np.arange(len(finite)) + 1) / len(finite)
        values = finite
    title = metric_names.words(f"{base}_p50").removesuffix(", p50").replace(", p50,", ",")
    unit = _label(samples.unit)
    rows = []
    for quantile in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        what = {0.0: "least", 0.5: "median", 1.0: "most"}.get(quantile, f"p{quantile * 100:.0f}")
        at = "failed"
        if quantile <= reached:
            at = number(float(np.quantile(finite, min(1.0, quantile / reached))))
        rows.append((what, at))
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
        figure=_figure(
            [
                _scatter(
                    "lines" if len(finite) > 60 else "lines+markers",
                    [round(float(value), 4) for value in values],
                    [round(float(share) * reached * 100, 3) for share in shares],
                    "%{y:.0f} % within %{x:.5~r} " + unit,
                    line={"shape": "hv", "color": _OWN[0], "width": 2.5},
                    marker={"size": 5, "color": _OWN[0]},
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


def memory(timeline: MemoryTimeline) -> Chart:
    """Memory over the run."""
    colours = (*_OWN, *_OTHERS)
    seconds = [round(second, 2) for second in timeline.seconds]
    traces = [
        _scatter(
            "lines",
            seconds,
            [None if value is None else round(value, 4) for value in values],
            f"{what}: %{{y:.3g}} GiB after %{{x:.0f}} s",
            name=what,
            line={"color": colour, "width": 2},
        )
        for colour, (what, values) in zip(colours, timeline.levels.items(), strict=False)
    ]
    if timeline.cache:
        traces.append(
            _scatter(
                "lines",
                seconds,
                [None if share is None else round(share * 100, 2) for share in timeline.cache],
                "KV cache: %{y:.1f} % after %{x:.0f} s",
                name="KV cache in use (right)",
                yaxis="y2",
                line={"color": "var(--muted)", "width": 1, "dash": "dot"},
            )
        )
    figure = _figure(traces, x="seconds", y="GiB")
    if timeline.cache:
        figure["layout"]["yaxis2"] = _LOOKS["right_axis"]
    quantities = [
        (what, [v for v in values if v is not None], "GiB", "GiB")
        for what, values in timeline.levels.items()
    ]
    shares = [share * 100 for share in timeline.cache if share is not None]
    if shares:
        quantities.append(("KV cache in use", shares, "%", "points"))
    rows = [
        [what, *(f"{number(v)} {unit}" for v in (known[0], min(known), max(known), known[-1])),
         f"{known[-1] - known[0]:+.3g} {difference}"]
        for what, known, unit, difference in quantities
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
    """Metrics over the stored runs: those whose level changed, those with a gate, the first
    rates."""
    long_enough = {name: s for name, s in details.history.items() if len(s.points) >= 2}
    gates = set(gated)

    def rank(name: str) -> tuple[bool, bool, bool]:
        rate = metric_names.rate(name)
        return (len(long_enough[name].levels) < 2, name not in gates, not (rate and rate.plain))

    chosen = sorted(long_enough, key=rank)[:_MOST_HISTORIES]
    return [_history(name, long_enough[name], place) for place, name in enumerate(chosen, 1)]


def _history(name: str, series: Series, place: int) -> Chart:
    unit = _label(series.unit)
    count = len(series.points)
    traces = [
        _scatter(
            "lines+markers",
            list(range(1, count + 1)),
            [point.value for point in series.points],
            f"%{{text}}: %{{y:.5~r}} {unit}",
            text=[_label(point.run) for point in series.points],
            line={"color": _OWN[0], "width": 1},
            marker={
                "size": [7] * (count - 1) + [12],
                "color": [_OWN[0]] * (count - 1) + [_OWN[1]],
                "symbol": ["circle"] * (count - 1) + ["star"],
            },
        )
    ]
    traces += [
        _scatter(
            "lines",
            [start + 0.6, end + 0.4],
            [level, level],
            None,
            line={"color": "var(--muted)", "width": 4},
            opacity=0.6,
        )
        for start, end, level in series.levels
    ]
    figure = _figure(traces, x="run, oldest first; the star is this one", y=unit, small=True)
    changes = [start for start, _, _ in series.levels[1:]]
    figure["layout"]["shapes"] = [
        {**_LOOKS["change"], "x0": start + 0.5, "x1": start + 0.5} for start in changes
    ]
    rows = []
    for index, point in enumerate(series.points):
        at = next((v for start, end, v in series.levels if start <= index < end), None)
        mark = " (changes here)" if index in changes else ""
        rows.append((point.run, point.when, number(point.value), number(at) + mark))
    said = (
        f"the level changes {len(changes)} times, last with {series.points[changes[-1]].run}"
        if changes
        else "no change of level"
    )
    return Chart(
        id=f"history-{place}",
        title=f"{name} over {count} runs",
        text=f"{metric_names.words(name)} over {count} runs, {said}; this run "
        f"{number(series.points[-1].value)} {series.unit}.",
        figure=figure,
        header=("run", "when", series.unit, "level"),
        rows=rows,
        note=said[0].upper() + said[1:],
    )


def _figure(
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
        **_LOOKS["layout"],  # no legend: the page has its own, which is text and takes no room here
        "height": 260 if small else 420,
        "xaxis": {**_LOOKS["axis"], "title": {"text": x}, **kind},
        "yaxis": {**_LOOKS["axis"], "title": {"text": y}, **limits},
    }
    return {"data": traces, "layout": layout}


def _label(text: str) -> str:
    """Text for plotly, which takes some HTML for formatting: none is left in it."""
    return printable(text).replace("<", "\u2039").replace(">", "\u203a")[:80]
