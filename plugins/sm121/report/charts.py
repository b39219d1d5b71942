"""The charts of report.html: figures as plotly's own JSON, each with its data as a table.

Colours are names of CSS variables, which the page's script looks up: one figure for light, dark and
paper.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.regression import trend
from sm121.report import metric_names
from sm121.report.references import References
from sm121.report.stored import MemoryTimeline
from sm121.run.details import Details, Samples, Series
from sm121.run.verdict_file import MetricReport, VerdictFile

_OWN = ("var(--series-1)", "var(--series-2)", "var(--series-3)")
_OTHERS = ("var(--series-4)", "var(--series-5)", "var(--series-6)", "var(--series-7)",
           "var(--series-8)")  # fmt: skip
_RATE_COLUMNS = ("depth", "metric", "measured", "interval", "minimum", "target", "stretch",
                 "roofline", "verdict")  # fmt: skip
_DASHES = ("dot", "dash", "dashdot", "longdash")
_MOST_POINTS = 201  # of a distribution
_MOST_HISTORIES = 6
_MOST_RUN_TICKS = 12
#: Percent within which a run is at a level.
_SAME = 0.05
#: A roofline so many times above everything else is a label, not a line that squeezes the rest.
_FAR = 1.6
#: Empty above the highest thing in a plot, as a share of it; a plot whose lowest thing is above
#: this share of the highest does not begin at 0.
_HEADROOM, _NOT_FROM_ZERO = 0.12, 0.55
#: Verdicts with which a number counts neither way.
_COUNTS_NOT = (Verdict.INVALID, Verdict.INCONCLUSIVE)
#: A distribution whose longest sample is so many times the median has a logarithmic axis.
_WIDE = 20.0

#: Grade of a gate, its word beside a bar, its colour; and how wide a bar is, in pixels.
_GRADES = (
    ("minimum", "required", "var(--fail)"),
    ("target", "target", "var(--pass)"),
    ("stretch", "stretch", "var(--muted)"),
)
_BAR = 28
#: Height of a label beside a bar, as a share of a plot's.
_LABEL = 0.07

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
    title = "Decode" if decoding else "Prefill"
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
    limits = [y for trace in traces for y in _reaches(trace)]
    bottom, top = _limits(limits)
    bounds = _bounds(measured) if decoding else {}
    note = "" if bottom == 0.0 else f"The axis begins at {number(bottom)}, not at 0."
    far = ""
    if bounds and min(bounds.values()) > _FAR * max(limits):
        least, most = number(min(bounds.values())), number(max(bounds.values()))
        far = f"memory allows {least if least == most else f'{least} to {most}'} tok/s"
    elif bounds:
        traces.append(_roofline(bounds))
        top = max(top, _limits([min(y, _FAR * max(limits)) for y in bounds.values()])[1])
    figure = _figure(traces, x="context before the request, tokens", y="tok/s", category=True)
    figure["layout"]["yaxis"]["range"] = [bottom, top]
    figure["layout"]["xaxis"]["range"] = [-0.5, len(depths) - 0.5]
    figure["layout"]["annotations"] = _gate_labels(measured, depths, top - bottom)
    if far:
        figure["layout"]["annotations"].append(
            {**_LOOKS["far"], "text": f"\u2191 {far}, off the scale"}
        )
    return Chart(
        id="decode" if decoding else "prefill",
        title=f"{title} rate by depth",
        text=f"{title} rate in tokens a second at {len(depths)} depths of context, with intervals; "
        f"the highest is {number(max(values))}. "
        + (f"The {far}, off the scale. " if far else "")
        + "The table below has every number.",
        figure=figure,
        header=_RATE_COLUMNS,
        rows=rows,
        note=note,
        marks=_marks(measured),
    )


def _reaches(trace: Figure) -> Iterable[float]:
    """What of a trace its axis must hold: its points and their intervals."""
    error = trace.get("error_y", {})
    none = [0.0] * len(trace["y"])
    for y, more, less in zip(
        trace["y"], error.get("array", none), error.get("arrayminus", none), strict=True
    ):
        yield y + more
        yield y - less


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis that holds these and little else."""
    low, high = min(values), max(values)
    top = high * (1 + _HEADROOM)
    if low < _NOT_FROM_ZERO * high:
        return 0.0, top
    spread = max(high - low, high * _HEADROOM)
    return max(low - spread / 2, 0.0), high + spread / 4


def _hollow(metric: MetricReport) -> str | None:
    """What a point that decides nothing is called; None for one that was held against a gate."""
    if metric.verdict in _COUNTS_NOT:
        return f"{metric.verdict.value}: counts neither way"
    return None if metric.gated else "no gate"


def _marks(measured: Mapping[str, Mapping[int, MetricReport]]) -> list[tuple[str, str, str]]:
    """The legend of the points that are not filled."""
    every = [metric for by_depth in measured.values() for metric in by_depth.values()]
    looks = {name: metric.verdict in _COUNTS_NOT for metric in every if (name := _hollow(metric))}
    return [
        (name, "var(--text)", "crossed" if crossed else "hollow") for name, crossed in looks.items()
    ]


def _scatter(
    mode: str, x: Sequence[Any], y: Sequence[Any], hover: str | None, **more: Any
) -> Figure:
    """A trace; ``hover`` is what stands at a point, None where it says nothing."""
    label = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **label, **more}


def _measured(kind: str, by_depth: Mapping[int, MetricReport], colour: str) -> Figure:
    points = [(depth, m, m.value) for depth, m in by_depth.items() if m.value is not None]
    return _scatter(
        "lines+markers",
        [f"{depth}" for depth, _, _ in points],
        [value for _, _, value in points],
        "%{hovertext}",
        name=f"{kind}, this run",
        hovertext=[
            f"{kind} at depth {depth}: {number(m.value)} tok/s"
            + (f" ({bounds})" if (bounds := interval(m)) else "")
            + f", {_hollow(m) or m.verdict.value}"
            for depth, m, _ in points
        ],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [m.ci_high - v if m.ci_high is not None else 0.0 for _, m, v in points],
            "arrayminus": [v - m.ci_low if m.ci_low is not None else 0.0 for _, m, v in points],
            "thickness": 2,
            "width": 6,
            "color": colour,
        },
        line={"color": colour, "width": 3},
        marker={
            "size": 11,
            "symbol": ["circle-x" if m.verdict in _COUNTS_NOT else "circle" for _, m, _ in points],
            "color": ["var(--card)" if _hollow(m) else colour for _, m, _ in points],
            "line": {"color": colour, "width": 2},
        },
    )


def _required(measured: Mapping[str, Mapping[int, MetricReport]]) -> list[Figure]:
    """A short bar at each depth for the minimum, the target and the stretch goal."""
    traces = []
    for grade, _, colour in _GRADES:
        points = [(depth, limit) for depth, limit, _ in _limits_of(measured, grade)]
        if points:
            traces.append(
                _scatter(
                    "markers",
                    [x for x, _ in points],
                    [y for _, y in points],
                    f"{grade} at depth %{{x}}: %{{y:.5~r}} tok/s",
                    name=f"{grade} required" if grade == "minimum" else grade,
                    marker={
                        "symbol": "line-ew-open",
                        "size": _BAR,
                        "color": colour,
                        "line": {"width": 3, "color": colour},
                    },
                )
            )
    return traces


def _limits_of(
    measured: Mapping[str, Mapping[int, MetricReport]], grade: str
) -> list[tuple[str, float, MetricReport]]:
    return [
        (f"{depth}", limit, metric)
        for by_depth in measured.values()
        for depth, metric in by_depth.items()
        if (limit := getattr(metric, grade)) is not None
    ]


def _gate_labels(
    measured: Mapping[str, Mapping[int, MetricReport]], depths: Sequence[int], span: float
) -> list[Figure]:
    """The number of each bar beside it, the first one of a kind in words; that of a minimum on the
    side on which the measured point is not. Bars that are near each other share a label.

    Args:
        span: how much of the axis is shown, in tok/s.
    """
    by_depth: dict[str, list[tuple[float, str, str, int]]] = {}
    for grade, word, colour in _GRADES:
        for position, (depth, limit, metric) in enumerate(_limits_of(measured, grade)):
            away = 0
            if grade == "minimum":
                away = 9 if metric.value is not None and metric.value < limit else -9
            text = number(limit) if position else f"{number(limit)} {word}"
            by_depth.setdefault(depth, []).append((limit, text, colour, away))
    labels = []
    for depth, limits in by_depth.items():
        near: list[list[tuple[float, str, str, int]]] = []
        for one in sorted(limits):
            if near and one[0] - near[-1][-1][0] < _LABEL * span:
                near[-1].append(one)
            else:
                near.append([one])
        for together in near:
            _, _, colour, away = together[0]
            labels.append(
                {
                    **_LOOKS["gate"],
                    "x": [f"{label}" for label in depths].index(depth),  # not its name: a number
                    "y": statistics.fmean(limit for limit, *_ in together),
                    "xshift": _BAR // 2 + 3,
                    "yshift": away if len(together) == 1 else 0,
                    "text": ", ".join(text for _, text, _, _ in together),
                    "font": {"color": colour, "size": 12},
                }
            )
    return labels


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


def _bounds(measured: Mapping[str, Mapping[int, MetricReport]]) -> dict[int, float]:
    """What the memory allows at each depth."""
    bounds: dict[int, float] = {}
    for by_depth in measured.values():
        for depth, metric in by_depth.items():
            if (ceiling := _ceiling(metric)) is not None:
                bounds.setdefault(depth, ceiling)
    return dict(sorted(bounds.items()))


def _roofline(bounds: Mapping[int, float]) -> Figure:
    return _scatter(
        "lines",
        [f"{depth}" for depth in bounds],
        [*bounds.values()],
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
            longest = by_quantity.get(base)
            if longest is None or len(samples.samples) > len(longest.samples):
                by_quantity[base] = samples
    enough = [(base, s) for base, s in by_quantity.items() if s.taken + s.failures >= 3]
    return [_distribution(base, s, position) for position, (base, s) in enumerate(enough, 1)]


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
        label = {0.0: "least", 0.5: "median", 1.0: "most"}.get(quantile, f"p{quantile * 100:.0f}")
        at = "failed"
        if quantile <= reached:
            at = number(float(np.quantile(finite, min(1.0, quantile / reached))))
        rows.append((label, at))
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
            f"{level}: %{{y:.4~r}} GiB after %{{x:.0f}} s",
            name=level,
            line={"color": colour, "width": 2},
        )
        for colour, (level, values) in zip(colours, timeline.levels.items(), strict=False)
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
        (level, [v for v in values if v is not None], "GiB", "GiB")
        for level, values in timeline.levels.items()
    ]
    shares = [share * 100 for share in timeline.cache if share is not None]
    if shares:
        quantities.append(("KV cache in use", shares, "%", "points"))
    rows = [
        [level, *(f"{number(v)} {unit}" for v in (values[0], min(values), max(values), values[-1])),
         f"{_signed(values[-1] - values[0])} {difference}"]
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


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def histories(details: Details, gated: Iterable[str]) -> list[Chart]:
    """Metrics over the stored runs: those whose level changed, those with a gate, the first
    rates."""
    long_enough = {name: s for name, s in details.history.items() if len(s.points) >= 2}
    gates = set(gated)

    def rank(name: str) -> tuple[bool, bool, bool]:
        rate = metric_names.rate(name)
        return (len(long_enough[name].levels) < 2, name not in gates, not (rate and rate.plain))

    chosen = sorted(long_enough, key=rank)[:_MOST_HISTORIES]
    return [_history(name, long_enough[name], position) for position, name in enumerate(chosen, 1)]


def _history(name: str, series: Series, place: int) -> Chart:
    unit = _label(series.unit)
    count = len(series.points)
    levels = _levels_before(series)
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
        for start, end, level in levels
    ]
    figure = _figure(traces, x="run, oldest first; the star is this one", y=unit, small=True)
    figure["layout"]["xaxis"] |= {
        "range": [0.5, count + 0.5],
        "tick0": 1,
        "dtick": -(-count // _MOST_RUN_TICKS),  # whole runs
    }
    changes = [start for start, _, _ in levels[1:]]
    figure["layout"]["shapes"] = [
        {**_LOOKS["change"], "x0": start + 0.5, "x1": start + 0.5} for start in changes
    ]
    rows = []
    for index, point in enumerate(series.points):
        at = next((v for start, end, v in levels if start <= index < end), None)
        mark = " (changes here)" if index in changes else ""
        rows.append((point.run, point.when, number(point.value), number(at) + mark))
    comparison = _last_against_level(series, levels)
    if changes:
        comparison += f"; the level changes with {', '.join(series.points[c].run for c in changes)}"
    return Chart(
        id=f"history-{place}",
        title=f"{name} over {count} runs",
        text=f"{metric_names.words(name)} over {count} runs: {comparison}.",
        figure=figure,
        header=("run", "when", series.unit, "level"),
        rows=rows,
        note=f"{comparison[0].upper()}{comparison[1:]}.",
    )


def _levels_before(series: Series) -> list[tuple[int, int, float]]:
    """The levels of the stored runs: this one is what is held against the last of them."""
    values = [point.value for point in series.points[:-1]]
    if len(values) < 2 or min(values) <= 0:
        return [(0, len(values), float(np.median(values)))]
    return [
        (start, end, float(np.median(values[start:end]))) for start, end in trend.segments(values)
    ]


def _last_against_level(series: Series, levels: Sequence[tuple[int, int, float]]) -> str:
    """How this run lies against the level of the runs before it."""
    last = series.points[-1].value
    start, end, level = levels[-1]
    runs = end - start
    of = f"the level of the {f'{runs} runs' if runs > 1 else 'run'} before it"
    subject = f"this run, {number(last)} {series.unit},"
    if level <= 0:
        return f"{subject} beside {number(level)} {series.unit}, {of}"
    off = (last / level - 1) * 100
    if abs(off) < _SAME:
        return f"{subject} is at {of} ({number(level)})"
    better = (off > 0) == series.higher_is_better
    return (
        f"{subject} is {abs(off):.1f} % {'above' if off > 0 else 'below'} {of} ({number(level)}), "
        f"which is {'better' if better else 'worse'}"
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
