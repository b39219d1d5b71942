"""The charts of report.html: figures as plotly's own JSON, each with its data as a table.

Colours are names of CSS variables, which the page's script looks up: one figure for light, dark and
paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sm121.core.printable import printable
from sm121.report import metric_names
from sm121.report.details import Details, Samples, Series
from sm121.report.memory_timeline import MemoryTimeline
from sm121.report.references import References
from sm121.run.verdict_file import MetricReport, VerdictFile

_OWN = ("var(--series-1)", "var(--series-2)", "var(--series-3)")
_OTHERS = ("var(--series-4)", "var(--series-5)", "var(--series-6)", "var(--series-7)",
           "var(--series-8)")  # fmt: skip
_DASHES = ("dot", "dash", "dashdot", "longdash")
_MOST_POINTS = 201  # of a distribution
_MOST_HISTORIES = 6
#: A distribution whose longest sample is so many times the median has a logarithmic axis.
_WIDE = 20.0

Figure = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A figure, what it shows in a sentence, and its data."""

    id: str
    title: str
    text: str
    figure: Figure
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
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


@dataclass
class _Table:
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def done(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        return tuple(self.header), tuple(tuple(row) for row in self.rows)


def number(value: float | None) -> str:
    """A measured number for people; empty for none."""
    if value is None:
        return ""
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.0f}" if size >= 1000 else f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def interval(metric: MetricReport) -> str:
    """The interval of a metric's value for people; empty for none."""
    if metric.ci_low is None and metric.ci_high is None:
        return ""
    low, high = number(metric.ci_low) or "?", number(metric.ci_high) or "unbounded"
    return f"{low} to {high}"


def rates(run: VerdictFile, references: References, *, decoding: bool) -> Chart | None:
    """Decode or prefill by depth: measured, required, of other engines, and the memory's bound."""
    measured: dict[str, dict[int, MetricReport]] = {}
    for name, metric in run.metrics.items():
        rate = metric_names.rate(name)
        if rate is not None and rate.decoding is decoding and rate.streams == 1:
            measured.setdefault(rate.kind, {})[rate.depth] = metric
    # What has a gate comes first: it is what other engines are held beside.
    kinds = sorted(measured, key=lambda kind: (not _gated(measured[kind]), len(kind), kind))
    measured = {kind: dict(sorted(measured[kind].items())) for kind in kinds}
    if not any(metric.value is not None for d in measured.values() for metric in d.values()):
        return None
    others = references.reference if references.comparable(run) is None else ()
    depths = sorted({depth for kind in measured.values() for depth in kind})
    what = "Decode" if decoding else "Prefill"
    traces: list[Figure] = []
    table = _Table(
        ["depth", "metric", "measured", "interval", "minimum", "target", "stretch", "roofline",
         "verdict"]
    )  # fmt: skip
    for colour, (kind, by_depth) in zip(_OWN, measured.items(), strict=False):
        traces.append(_measured(kind, by_depth, colour))
        for depth, metric in by_depth.items():
            table.rows.append(
                [f"{depth}", kind, number(metric.value), interval(metric), number(metric.minimum),
                 number(metric.target), number(metric.stretch), number(_ceiling(metric)),
                 metric.verdict.value]
            )  # fmt: skip
    traces += _required(measured)
    for colour, dash, reference in zip(_OTHERS * 3, _DASHES * 3, others, strict=False):
        trace = _reference(reference.name, reference.values, measured, colour, dash)
        if trace is None:
            continue
        traces.append(trace)
        for kind in measured:
            for depth in depths:
                if (value := reference.values.get(f"{kind}@d{depth}")) is not None:
                    table.rows.append(
                        [f"{depth}", f"{kind}, {reference.name}", number(value), "", "", "", "",
                         "", "as documented"]
                    )  # fmt: skip
    if decoding and (trace := _roofline(measured)) is not None:
        traces.append(trace)
    header, rows = table.done()
    best = max(
        (m for d in measured.values() for m in d.values() if m.value is not None),
        key=lambda m: m.value or 0.0,
    )
    return Chart(
        id="decode" if decoding else "prefill",
        title=f"{what} rate by depth",
        text=f"{what} rate in tokens a second at {len(depths)} depths of context, with intervals; "
        f"the highest is {number(best.value)}. The table below has every number.",
        figure=_figure(traces, x="context before the request, tokens", y="tok/s", category=True),
        header=header,
        rows=rows,
    )


def _gated(by_depth: Mapping[int, MetricReport]) -> bool:
    return any(metric.minimum is not None for metric in by_depth.values())


def _measured(kind: str, by_depth: Mapping[int, MetricReport], colour: str) -> Figure:
    known = {d: m for d, m in by_depth.items() if m.value is not None}
    values = [m.value or 0.0 for m in known.values()]
    highs = [(m.ci_high - v) if m.ci_high is not None else 0.0 for m, v in _with(known, values)]
    lows = [(v - m.ci_low) if m.ci_low is not None else 0.0 for m, v in _with(known, values)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{kind}, this run",
        "x": [f"{depth}" for depth in known],
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": highs,
            "arrayminus": lows,
            "thickness": 2,
            "width": 6,
            "color": colour,
        },
        "line": {"color": colour, "width": 3},
        "marker": {"size": 9, "color": colour},
        "hovertemplate": f"{kind} at depth %{{x}}: %{{y:.4g}} tok/s<extra></extra>",
    }


def _with(
    known: Mapping[int, MetricReport], values: Sequence[float]
) -> list[tuple[MetricReport, float]]:
    return list(zip(known.values(), values, strict=True))


def _required(measured: Mapping[str, Mapping[int, MetricReport]]) -> list[Figure]:
    """A short bar at each depth for the minimum, the target and the stretch goal."""
    looks = (
        ("minimum", "var(--fail)", "line-ew-open", 26),
        ("target", "var(--pass)", "line-ew-open", 22),
        ("stretch", "var(--muted)", "line-ew-open", 18),
    )
    found = []
    for grade, colour, symbol, size in looks:
        points = [
            (f"{depth}", limit)
            for by_depth in measured.values()
            for depth, metric in by_depth.items()
            if (limit := getattr(metric, grade)) is not None
        ]
        if points:
            found.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{grade} required" if grade == "minimum" else grade,
                    "x": [x for x, _ in points],
                    "y": [y for _, y in points],
                    "marker": {
                        "symbol": symbol,
                        "size": size,
                        "color": colour,
                        "line": {"width": 3, "color": colour},
                    },
                    "hovertemplate": f"{grade} at depth %{{x}}: %{{y:.4g}} tok/s<extra></extra>",
                }
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
            return {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{_label(name)} ({kind})",
                "x": [f"{depth}" for depth, _ in points],
                "y": [value for _, value in points],
                "line": {"color": colour, "width": 1.5, "dash": dash},
                "marker": {"size": 6, "color": colour, "symbol": "diamond"},
                "hovertemplate": f"{_label(name)} %{{x}}: %{{y:.4g}} tok/s<extra></extra>",
            }
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
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "roofline (memory)",
        "x": [f"{depth}" for depth in sorted(bound)],
        "y": [bound[depth] for depth in sorted(bound)],
        "line": {"color": "var(--muted)", "width": 2, "dash": "dash"},
        "hovertemplate": "the memory allows %{y:.4g} tok/s<extra></extra>",
    }


def distributions(details: Details) -> list[Chart]:
    """How each time is distributed over the requests: one chart for each quantity."""
    by_quantity: dict[str, Samples] = {}
    for name, samples in details.samples.items():
        base = metric_names.quantity(name)
        if base is not None and samples.samples:
            known = by_quantity.get(base)
            if known is None or len(samples.samples) > len(known.samples):
                by_quantity[base] = samples
    found: list[Chart] = []
    for base, samples in by_quantity.items():
        if samples.taken + samples.failures < 3:
            continue
        found.append(_distribution(base, samples, len(found) + 1))
    return found


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
    table = _Table(["quantile", unit])
    for quantile in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        infinite = quantile > reached
        at = (
            "failed"
            if infinite
            else number(float(np.quantile(finite, min(1.0, quantile / reached))))
        )
        table.rows.append([_quantile_name(quantile), at])
    header, rows = table.done()
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
                {
                    "type": "scatter",
                    "mode": "lines" if len(finite) > 60 else "lines+markers",
                    "line": {"shape": "hv", "color": _OWN[0], "width": 2.5},
                    "marker": {"size": 5, "color": _OWN[0]},
                    "x": [round(float(value), 4) for value in values],
                    "y": [round(float(share) * reached * 100, 3) for share in shares],
                    "hovertemplate": "%{y:.0f} % within %{x:.4g} " + unit + "<extra></extra>",
                }
            ],
            x=unit,
            y="% of samples",
            y_range=(0.0, 102.0),
            small=True,
            logarithmic=bool(wide),
        ),
        header=header,
        rows=rows,
        note=note,
    )


def _quantile_name(quantile: float) -> str:
    return {0.0: "least", 0.5: "median", 1.0: "most"}.get(quantile, f"p{quantile * 100:.0f}")


def memory(timeline: MemoryTimeline) -> Chart:
    """Memory over the run."""
    colours = (*_OWN, *_OTHERS)
    traces: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": what,
            "x": [round(second, 2) for second in timeline.seconds],
            "y": [None if value is None else round(value, 4) for value in values],
            "line": {"color": colour, "width": 2},
            "hovertemplate": f"{what}: %{{y:.3g}} GiB after %{{x:.0f}} s<extra></extra>",
        }
        for colour, (what, values) in zip(colours, timeline.levels.items(), strict=False)
    ]
    if timeline.cache:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "KV cache in use (right)",
                "x": [round(second, 2) for second in timeline.seconds],
                "y": [None if share is None else round(share * 100, 2) for share in timeline.cache],
                "yaxis": "y2",
                "line": {"color": "var(--muted)", "width": 1, "dash": "dot"},
                "hovertemplate": "KV cache: %{y:.1f} % after %{x:.0f} s<extra></extra>",
            }
        )
    figure = _figure(traces, x="seconds", y="GiB")
    if timeline.cache:
        figure["layout"]["yaxis2"] = {
            "automargin": True,
            "title": {"text": "% of the KV cache"},
            "overlaying": "y",
            "side": "right",
            "range": [0, 102],
            "tick0": 0,
            "dtick": 25,
            "showgrid": False,
        }
    table = _Table(["level", "at the start", "least", "most", "at the end", "growth"])
    for what, values in timeline.levels.items():
        known = [value for value in values if value is not None]
        table.rows.append(
            [what, *(f"{number(v)} GiB" for v in (known[0], min(known), max(known), known[-1])),
             f"{known[-1] - known[0]:+.3g} GiB"]
        )  # fmt: skip
    shares = [share * 100 for share in timeline.cache if share is not None]
    if shares:
        ends = (shares[0], min(shares), max(shares), shares[-1])
        table.rows.append(
            ["KV cache in use", *(f"{number(v)} %" for v in ends),
             f"{shares[-1] - shares[0]:+.3g} points"]
        )  # fmt: skip
    header, rows = table.done()
    return Chart(
        id="memory",
        title="Memory over the run",
        text="Memory in GiB over the seconds of the run: "
        + "; ".join(f"{r[0]} {r[4]}" for r in rows),
        figure=figure,
        header=header,
        rows=rows,
    )


def histories(details: Details, gated: Iterable[str]) -> list[Chart]:
    """Metrics over the stored runs: those whose level changed, those with a gate, the first
    rates."""
    long_enough = {name: s for name, s in details.history.items() if len(s.points) >= 2}
    gates = set(gated)

    def rank(name: str) -> tuple[bool, bool, bool]:
        rate = metric_names.rate(name)
        first = rate is not None and rate.depth == 0 and rate.streams == 1
        return (len(long_enough[name].levels) < 2, name not in gates, not first)

    chosen = sorted(long_enough, key=rank)[:_MOST_HISTORIES]
    return [_history(name, long_enough[name], place) for place, name in enumerate(chosen, 1)]


def _history(name: str, series: Series, place: int) -> Chart:
    unit = _label(series.unit)
    count = len(series.points)
    places = list(range(1, count + 1))
    traces: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": places,
            "y": [point.value for point in series.points],
            "text": [_label(point.run) for point in series.points],
            "line": {"color": _OWN[0], "width": 1},
            "marker": {
                "size": [7] * (count - 1) + [12],
                "color": [_OWN[0]] * (count - 1) + [_OWN[1]],
                "symbol": ["circle"] * (count - 1) + ["star"],
            },
            "hovertemplate": f"%{{text}}: %{{y:.4g}} {unit}<extra></extra>",
        }
    ]
    for start, end, level in series.levels:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [start + 0.6, end + 0.4],
                "y": [level, level],
                "line": {"color": "var(--muted)", "width": 4},
                "opacity": 0.6,
                "hoverinfo": "skip",
            }
        )
    figure = _figure(traces, x="run, oldest first; the star is this one", y=unit, small=True)
    changes = [start for start, _, _ in series.levels[1:]]
    figure["layout"]["shapes"] = [
        {
            "type": "line",
            "x0": start + 0.5,
            "x1": start + 0.5,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": "var(--fail)", "width": 1.5, "dash": "dash"},
        }
        for start in changes
    ]
    table = _Table(["run", "when", series.unit, "level"])
    for index, point in enumerate(series.points):
        at = next((v for start, end, v in series.levels if start <= index < end), None)
        mark = " (changes here)" if index in changes else ""
        table.rows.append([point.run, point.when, number(point.value), number(at) + mark])
    header, rows = table.done()
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
        header=header,
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
    axis: Figure = {
        "automargin": True,
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
    }
    return {
        "data": traces,
        "layout": {
            "height": 260 if small else 420,
            "margin": {"l": 48, "r": 12, "t": 12, "b": 44},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": "var(--text)", "family": "system-ui, sans-serif", "size": 13},
            "hoverlabel": {"bgcolor": "var(--card)", "font": {"color": "var(--text)"}},
            "xaxis": {**axis, "title": {"text": x}, **kind},
            "yaxis": {
                **axis,
                "title": {"text": y},
                **(
                    {"range": list(y_range)}
                    if y_range
                    else {"rangemode": "tozero"}
                    if category
                    else {}
                ),
            },
            "showlegend": False,  # the page has its own, which is text and takes no room here
        },
    }


def _label(text: str) -> str:
    """Text for plotly, which takes some HTML for formatting: none is left in it."""
    return printable(text).replace("<", "\u2039").replace(">", "\u203a")[:80]
