"""The chart of the rates by depth: measured, required, of other engines, and the memory's bound."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.report import charts, metric_names
from sm121.report.charts import Chart, Figure, figure_of, interval, scatter
from sm121.report.references import ReferenceEngine, References
from sm121.run.verdict_file import MetricReport, VerdictFile

#: Metrics of one stream: by kind (``tg32``), then by depth.
Measured = Mapping[str, Mapping[int, MetricReport]]

_RATE_COLUMNS = ("depth", "metric", "measured", "interval", "minimum", "target", "stretch",
                 "roofline", "verdict")  # fmt: skip
_DASHES = ("dot", "dash", "dashdot", "longdash")
#: A roofline so many times above everything else is a label, not a line that squeezes the rest.
_FAR = 1.6
#: Empty above the highest thing in a plot, as a share of it; a plot whose lowest thing is above
#: this share of the highest does not begin at 0.
_HEADROOM, _NOT_FROM_ZERO = 0.12, 0.55
#: Verdicts with which a number counts neither way.
_COUNTS_NOT = (Verdict.INVALID, Verdict.INCONCLUSIVE)
#: Grade of a gate, its word beside a bar, its colour.
_GRADES = (
    ("minimum", "required", "var(--fail)"),
    ("target", "target", "var(--pass)"),
    ("stretch", "stretch", "var(--muted)"),
)
#: Height of a label beside a bar, as a share of a plot's.
_LABEL = 0.07


def rates(run: VerdictFile, references: References, *, decoding: bool) -> Chart | None:
    """Decode or prefill by depth: measured, required, of other engines, and the memory's bound."""
    measured = _rates_of(run, decoding=decoding)
    values = [m.value for d in measured.values() for m in d.values() if m.value is not None]
    if not values:
        return None
    others = references.reference if references.comparable(run) is None else ()
    depths = sorted({depth for kind in measured.values() for depth in kind})
    title = "Decode" if decoding else "Prefill"
    traces: list[Figure] = []
    rows: list[list[str]] = []
    for colour, (kind, by_depth) in zip(charts.SERIES, measured.items(), strict=False):
        traces.append(_measured(kind, by_depth, colour))
        rows += [
            [f"{depth}", kind, number(m.value), interval(m), number(m.minimum), number(m.target),
             number(m.stretch), number(_ceiling(m)), m.verdict.value]
            for depth, m in by_depth.items()
        ]  # fmt: skip
    traces += _required(measured)
    for trace, more_rows in _of_others(measured, depths, others):
        traces.append(trace)
        rows += more_rows
    limits = [y for trace in traces for y in _reaches(trace)]
    bottom, top = _limits(limits)
    bounds = _bounds(measured) if decoding else {}
    note = "" if bottom == 0.0 else f"The axis begins at {number(bottom)}, not at 0."
    far = ""
    if bounds and min(bounds.values()) > _FAR * max(limits):
        least, most = number(min(bounds.values())), number(max(bounds.values()))
        far = f"memory allows {least if least == most else f'{least} to {most}'} tok/s"
    elif bounds:
        depths_of, rates_of = [f"{depth}" for depth in bounds], [*bounds.values()]
        hover = "the memory allows %{y:.5~r} tok/s"
        traces.append(scatter("lines", depths_of, rates_of, hover, **charts.LOOKS["roofline"]))
        top = max(top, _limits([min(y, _FAR * max(limits)) for y in bounds.values()])[1])
    figure = figure_of(traces, x="depth, tokens", y="tok/s", category=True)
    figure["layout"]["yaxis"]["range"] = [bottom, top]
    figure["layout"]["xaxis"]["range"] = [-0.5, len(depths) - 0.5]
    figure["layout"]["annotations"] = _gate_labels(measured, depths, top - bottom)
    if far:
        figure["layout"]["annotations"].append(
            {**charts.LOOKS["far"], "text": f"\u2191 {far}, off the scale"}
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


def _rates_of(run: VerdictFile, *, decoding: bool) -> Measured:
    measured: dict[str, dict[int, MetricReport]] = {}
    for name, metric in run.metrics.items():
        rate = metric_names.rate(name)
        if rate is not None and rate.decoding is decoding and rate.streams == 1:
            measured.setdefault(rate.kind, {})[rate.depth] = metric
    kinds = sorted(
        measured, key=lambda k: (all(m.minimum is None for m in measured[k].values()), len(k), k)
    )
    return {kind: dict(sorted(measured[kind].items())) for kind in kinds}


def _of_others(
    measured: Measured, depths: Sequence[int], others: Sequence[ReferenceEngine]
) -> Iterable[tuple[Figure, list[list[str]]]]:
    for colour, dash, other in zip(charts.OTHERS * 3, _DASHES * 3, others, strict=False):
        named = {metric_names.rate(metric): value for metric, value in other.values.items()}
        rates = [(rate, value) for rate, value in named.items() if rate is not None]
        kinds = [kind for kind in measured if any(rate.kind == kind for rate, _ in rates)]
        if not kinds:
            continue
        # The first kind that it has: one line for each engine.
        points = sorted((rate.depth, value) for rate, value in rates if rate.kind == kinds[0])
        rows = [
            [f"{depth}", f"{kind}, {other.name}", number(value), *[""] * 5, "as documented"]
            for kind in measured
            for depth in depths
            if (value := other.values.get(f"{kind}@d{depth}")) is not None
        ]
        trace = scatter(
            "lines+markers",
            [f"{depth}" for depth, _ in points],
            [value for _, value in points],
            f"{charts.escaped(other.name)} %{{x}}: %{{y:.5~r}} tok/s",
            name=f"{charts.escaped(other.name)} ({kinds[0]})",
            line={"color": colour, "width": 1.5, "dash": dash},
            marker={"size": 6, "color": colour, "symbol": "diamond"},
        )
        yield trace, rows


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
    low, high = min(values), max(values)
    top = high * (1 + _HEADROOM)
    if low < _NOT_FROM_ZERO * high:
        return 0.0, top
    spread = max(high - low, high * _HEADROOM)
    return max(low - spread / 2, 0.0), high + spread / 4


def _hollow(metric: MetricReport) -> str | None:
    """What a point that decides nothing is called; None for one that was compared with a gate."""
    if metric.verdict in _COUNTS_NOT:
        return f"{metric.verdict.value}: counts neither way"
    return None if metric.gated else "no gate"


def _marks(measured: Measured) -> list[tuple[str, str, str]]:
    every = [metric for by_depth in measured.values() for metric in by_depth.values()]
    looks = {name: metric.verdict in _COUNTS_NOT for metric in every if (name := _hollow(metric))}
    return [
        (name, "var(--text)", "crossed" if crossed else "hollow") for name, crossed in looks.items()
    ]


def _measured(kind: str, by_depth: Mapping[int, MetricReport], colour: str) -> Figure:
    points = [(depth, m, m.value) for depth, m in by_depth.items() if m.value is not None]
    return scatter(
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
        error_y=charts.LOOKS["interval"]
        | {
            "array": [m.ci_high - v if m.ci_high is not None else 0.0 for _, m, v in points],
            "arrayminus": [v - m.ci_low if m.ci_low is not None else 0.0 for _, m, v in points],
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


def _required(measured: Measured) -> list[Figure]:
    traces, looks = [], charts.LOOKS["bar"]
    for grade, _, colour in _GRADES:
        points = [(depth, limit) for depth, limit, _ in _limits_of(measured, grade)]
        if points:
            traces.append(
                scatter(
                    "markers",
                    [x for x, _ in points],
                    [y for _, y in points],
                    f"{grade} at depth %{{x}}: %{{y:.5~r}} tok/s",
                    name=f"{grade} required" if grade == "minimum" else grade,
                    marker=looks | {"color": colour, "line": {"color": colour, "width": 3}},
                )
            )
    return traces


def _limits_of(measured: Measured, grade: str) -> list[tuple[str, float, MetricReport]]:
    return [
        (f"{depth}", limit, metric)
        for by_depth in measured.values()
        for depth, metric in by_depth.items()
        if (limit := getattr(metric, grade)) is not None
    ]


def _gate_labels(measured: Measured, depths: Sequence[int], span: float) -> list[Figure]:
    """The number of each bar beside it, the first one of a kind in words; that of a minimum on the
    side on which the measured point is not. Bars that are near each other share a label. `span`:
    how much of the axis is shown, in tok/s."""
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
                    **charts.LOOKS["gate"],
                    "x": [f"{label}" for label in depths].index(depth),  # not its name: a number
                    "y": statistics.fmean(limit for limit, *_ in together),
                    "xshift": charts.LOOKS["bar"]["size"] // 2 + 3,
                    "yshift": away if len(together) == 1 else 0,
                    "text": ", ".join(text for _, text, _, _ in together),
                    "font": {"color": colour, "size": 12},
                }
            )
    return labels


def _ceiling(metric: MetricReport) -> float | None:
    return metric.value / metric.roofline if metric.value and metric.roofline else None


def _bounds(measured: Measured) -> dict[int, float]:
    bounds: dict[int, float] = {}
    for by_depth in measured.values():
        for depth, metric in by_depth.items():
            if (ceiling := _ceiling(metric)) is not None:
                bounds.setdefault(depth, ceiling)
    return dict(sorted(bounds.items()))
