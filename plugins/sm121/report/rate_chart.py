"""The chart of rate by depth: measured values, limits, other engines, and the memory bound."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.report import chart, metric_names, metric_verdicts
from sm121.report.certainty import interval
from sm121.report.chart import Chart, Figure, figure_of, scatter
from sm121.report.references import ReferenceEngine, References
from sm121.run.verdict_file import MetricReport, VerdictFile

#: Metrics with one stream. The outer keys are kinds (``tg32``), the inner keys are depths.
Measured = Mapping[str, Mapping[int, MetricReport]]

_COLUMNS = (
    "depth",
    "metric",
    "measured",
    "interval",
    "minimum",
    "target",
    "stretch",
    "roofline",
    "verdict",
)
_DASHES = ("dot", "dash", "dashdot", "longdash")
#: How often colours and dashes repeat, so that they suffice for many engines.
_REPEATS = 3
#: A roofline that is higher than everything else by this factor is drawn as a label: a line would
#: compress the rest of the plot.
_FAR = 1.6
#: Headroom above the highest value in a plot, as a fraction of that value.
_HEADROOM = 0.12
#: The axis does not begin at 0 if the lowest value exceeds this fraction of the highest one.
_NOT_FROM_ZERO = 0.55
#: If a metric has one of these verdicts, its value is ignored.
_COUNTS_NOT = (Verdict.INVALID, Verdict.INCONCLUSIVE)
#: Height of a label beside a bar, as a fraction of the plot's height.
_LABEL = 0.07
#: Distance in pixels by which a minimum's label is moved away from the measured point.
_AWAY = 9


@dataclass(frozen=True)
class _Grade:
    """The drawing style of a gate's grade."""

    name: str
    #: The grade's name in the legend.
    legend: str
    #: The word beside the grade's first bar.
    word: str
    colour: str

    def limit(self, metric: MetricReport) -> float | None:
        return {
            "minimum": metric.minimum,
            "target": metric.target,
            "stretch": metric.stretch,
        }[self.name]


_GRADES = (
    _Grade("minimum", "minimum required", "required", "var(--fail)"),
    _Grade("target", "target", "target", "var(--pass)"),
    _Grade("stretch", "stretch", "stretch", "var(--muted)"),
)


@dataclass(frozen=True)
class _Limit:
    """The limit that one grade sets at one depth."""

    depth: int
    value: float
    metric: MetricReport


@dataclass(frozen=True)
class _Label:
    """The label of one bar of a gate, before the labels of neighbouring bars are joined."""

    value: float
    text: str
    colour: str
    #: Vertical shift in pixels of a label that is not joined with others.
    shift: int


def rates(run: VerdictFile, references: References, *, decoding: bool) -> Chart | None:
    """Return the chart of the decode or prefill rates with one stream by depth.

    Args:
        run: The verdict file.
        references: Rates of other engines. They are drawn if they were measured on the same
            machine with the same model.
        decoding: Whether the chart shows decode rates; else it shows prefill rates.

    Returns:
        The chart; None if no such rate was measured.
    """
    measured = _rates_of(run, decoding=decoding)
    values = [metric.value for metric in _metrics(measured) if metric.value is not None]
    if not values:
        return None
    depths = sorted({depth for kind in measured.values() for depth in kind})
    names = _names(run)
    traces: list[Figure] = []
    rows: list[list[str]] = []
    for colour, (kind, by_depth) in zip(chart.SERIES, measured.items(), strict=False):
        traces.append(_measured_trace(kind, by_depth, colour))
        for depth, metric in by_depth.items():
            verdict = metric_verdicts.of_run(run, names[kind, depth])
            rows.append(_measured_row(kind, depth, metric, verdict.word))
    traces += _required_traces(measured)
    if references.comparable(run) is None:
        for engine, colour, dash in _with_looks(references.reference):
            trace = _reference_trace(engine, measured, colour, dash)
            if trace is not None:
                traces.append(trace)
                rows += _reference_rows(engine, measured, depths)
    reached: list[float] = []
    for trace in traces:
        reached += _reaches(trace)
    bottom, top = _axis(reached)
    far = ""
    bounds: dict[int, float] = {}
    if decoding:
        bounds = _bounds(measured)
    if bounds and min(bounds.values()) > _FAR * max(reached):
        far = _far_text(list(bounds.values()))
    elif bounds:
        traces.append(_bound_trace(bounds))
        drawn = [min(bound, _FAR * max(reached)) for bound in bounds.values()]
        top = max(top, _axis(drawn)[1])
    figure = _figure(traces, measured, depths, (bottom, top), far)
    title = "Decode" if decoding else "Prefill"
    far_sentence = f"The {far}, off the scale. " if far else ""
    return Chart(
        id=title.lower(),
        title=f"{title} rate by depth",
        text=f"{title} rate in tokens a second at {len(depths)} depths of context, with intervals; "
        f"the highest is {number(max(values))}. {far_sentence}The table below has every number.",
        figure=figure,
        header=_COLUMNS,
        rows=rows,
        note="" if bottom == 0.0 else f"The axis begins at {number(bottom)}, not at 0.",
        marks=_marks(measured),
    )


def _figure(
    traces: list[Figure],
    measured: Measured,
    depths: Sequence[int],
    ends: tuple[float, float],
    far: str,
) -> Figure:
    """Return the figure with axes and labels. ``ends``: range of the vertical axis, in tok/s."""
    bottom, top = ends
    figure = figure_of(traces, x="depth, tokens", y="tok/s", category=True)
    layout = figure["layout"]
    layout["yaxis"]["range"] = [bottom, top]
    layout["xaxis"]["range"] = [-0.5, len(depths) - 0.5]
    layout["annotations"] = _gate_labels(measured, depths, top - bottom)
    if far:
        text = f"\u2191 {far}, off the scale"
        layout["annotations"].append({**chart.LOOKS["far"], "text": text})
    return figure


def _rates_of(run: VerdictFile, *, decoding: bool) -> Measured:
    """Return the rates with one stream; kinds with a gate first, then sorted by length of name."""
    measured: dict[str, dict[int, MetricReport]] = {}
    for name, metric in run.metrics.items():
        rate = metric_names.rate(name)
        if rate is not None and rate.decoding is decoding and rate.streams == 1:
            measured.setdefault(rate.kind, {})[rate.depth] = metric

    def order(kind: str) -> tuple[bool, int, str]:
        has_no_gate = all(metric.minimum is None for metric in measured[kind].values())
        return has_no_gate, len(kind), kind

    return {kind: dict(sorted(measured[kind].items())) for kind in sorted(measured, key=order)}


def _names(run: VerdictFile) -> dict[tuple[str, int], str]:
    """Return the names of the rates with one stream, by their kind and depth."""
    names = {}
    for name in run.metrics:
        rate = metric_names.rate(name)
        if rate is not None and rate.streams == 1:
            names[rate.kind, rate.depth] = name
    return names


def _metrics(measured: Measured) -> Iterator[MetricReport]:
    for by_depth in measured.values():
        yield from by_depth.values()


def _measured_row(kind: str, depth: int, metric: MetricReport, word: str) -> list[str]:
    return [
        str(depth),
        kind,
        number(metric.value),
        interval(metric),
        number(metric.minimum),
        number(metric.target),
        number(metric.stretch),
        number(_ceiling(metric)),
        word,
    ]


def _measured_trace(kind: str, by_depth: Mapping[int, MetricReport], colour: str) -> Figure:
    depths: list[str] = []
    values: list[float] = []
    texts: list[str] = []
    above: list[float] = []
    below: list[float] = []
    symbols: list[str] = []
    fills: list[str] = []
    for depth, metric in by_depth.items():
        value = metric.value
        if value is None:
            continue
        depths.append(str(depth))
        values.append(value)
        texts.append(_point_text(kind, depth, metric))
        above.append(_distance(value, metric.ci_high))
        below.append(_distance(metric.ci_low, value))
        symbols.append("circle-x" if metric.verdict in _COUNTS_NOT else "circle")
        fills.append("var(--card)" if _hollow(metric) else colour)
    error = {"array": above, "arrayminus": below, "color": colour}
    return scatter(
        "lines+markers",
        depths,
        values,
        "%{hovertext}",
        name=f"{kind}, this run",
        hovertext=texts,
        error_y=chart.LOOKS["interval"] | error,
        line={"color": colour, "width": 3},
        marker={
            "size": 11,
            "symbol": symbols,
            "color": fills,
            "line": {"color": colour, "width": 2},
        },
    )


def _distance(low: float | None, high: float | None) -> float:
    """Return the distance between a value and an end of its interval; 0 without an interval."""
    if low is None or high is None:
        return 0.0
    return high - low


def _point_text(kind: str, depth: int, metric: MetricReport) -> str:
    text = f"{kind} at depth {depth}: {number(metric.value)} tok/s"
    bounds = interval(metric)
    if bounds:
        text += f" ({bounds})"
    return f"{text}, {_hollow(metric) or metric_verdicts.of_metric(kind, metric).text}"


def _hollow(metric: MetricReport) -> str | None:
    """Return why a point is drawn hollow; None if its value was compared with a gate."""
    if metric.verdict in _COUNTS_NOT:
        return f"{metric.verdict.value}: counts neither as PASS nor as FAIL"
    if metric.gated:
        return None
    return "no gate"


def _marks(measured: Measured) -> list[tuple[str, str, str]]:
    shapes: dict[str, str] = {}
    for metric in _metrics(measured):
        name = _hollow(metric)
        if name is not None:
            is_crossed = metric.verdict in _COUNTS_NOT
            shapes[name] = "crossed" if is_crossed else "hollow"
    return [(name, "var(--text)", shape) for name, shape in shapes.items()]


def _required_traces(measured: Measured) -> list[Figure]:
    traces = []
    for grade in _GRADES:
        limits = _limits(measured, grade)
        if not limits:
            continue
        line = {"color": grade.colour, "width": 3}
        traces.append(
            scatter(
                "markers",
                [str(limit.depth) for limit in limits],
                [limit.value for limit in limits],
                f"{grade.name} at depth %{{x}}: %{{y:.5~r}} tok/s",
                name=grade.legend,
                marker=chart.LOOKS["bar"] | {"color": grade.colour, "line": line},
            )
        )
    return traces


def _limits(measured: Measured, grade: _Grade) -> list[_Limit]:
    limits = []
    for by_depth in measured.values():
        for depth, metric in by_depth.items():
            value = grade.limit(metric)
            if value is not None:
                limits.append(_Limit(depth, value, metric))
    return limits


def _gate_labels(measured: Measured, depths: Sequence[int], span: float) -> list[Figure]:
    """Return a label with the limit beside each bar; a grade's first label also has its name.

    The label of a minimum is on the side of the bar that faces away from the measured point. Bars
    that are close to each other share a label with one line of text for each bar.
    ``span``: length of the visible axis, in tok/s.
    """
    by_depth: dict[int, list[_Label]] = {}
    for grade in _GRADES:
        for position, limit in enumerate(_limits(measured, grade)):
            text = number(limit.value)
            if position == 0:
                text = f"{text} {grade.word}"
            label = _Label(limit.value, text, grade.colour, _label_shift(grade, limit))
            by_depth.setdefault(limit.depth, []).append(label)
    annotations = []
    for depth, labels in by_depth.items():
        for together in _near(labels, _LABEL * span):
            annotations.append(
                {
                    **chart.LOOKS["gate"],
                    "x": depths.index(depth),  # a number is a position here
                    "y": statistics.fmean(label.value for label in together),
                    "xshift": chart.LOOKS["bar"]["size"] // 2 + 3,
                    "yshift": together[0].shift if len(together) == 1 else 0,
                    "text": "<br>".join(label.text for label in reversed(together)),
                    "font": {"color": together[0].colour, "size": 12},
                }
            )
    return annotations


def _label_shift(grade: _Grade, limit: _Limit) -> int:
    if grade.name != "minimum":
        return 0
    value = limit.metric.value
    if value is not None and value < limit.value:
        return _AWAY
    return -_AWAY


def _near(labels: Sequence[_Label], distance: float) -> list[list[_Label]]:
    """Return the labels in ascending order, grouped where neighbours are closer than a distance."""
    groups: list[list[_Label]] = []
    ordered = sorted(labels, key=lambda label: (label.value, label.text, label.colour))
    for label in ordered:
        if groups and label.value - groups[-1][-1].value < distance:
            groups[-1].append(label)
        else:
            groups.append([label])
    return groups


def _with_looks(
    engines: Sequence[ReferenceEngine],
) -> Iterator[tuple[ReferenceEngine, str, str]]:
    """Yield each engine with the colour and the dash style of its line."""
    yield from zip(engines, chart.OTHERS * _REPEATS, _DASHES * _REPEATS, strict=False)


def _reference_trace(
    engine: ReferenceEngine, measured: Measured, colour: str, dash: str
) -> Figure | None:
    """Return an engine's line for the first measured kind that it has; None if it has none."""
    by_kind: dict[str, list[tuple[int, float]]] = {}
    for metric, value in engine.values.items():
        rate = metric_names.rate(metric)
        if rate is not None:
            by_kind.setdefault(rate.kind, []).append((rate.depth, value))
    kind = next((kind for kind in measured if kind in by_kind), None)
    if kind is None:
        return None
    points = sorted(by_kind[kind])
    name = chart.escaped(engine.name)
    return scatter(
        "lines+markers",
        [str(depth) for depth, _ in points],
        [value for _, value in points],
        f"{name} %{{x}}: %{{y:.5~r}} tok/s",
        name=f"{name} ({kind})",
        line={"color": colour, "width": 1.5, "dash": dash},
        marker={"size": 6, "color": colour, "symbol": "diamond"},
    )


def _reference_rows(
    engine: ReferenceEngine, measured: Measured, depths: Sequence[int]
) -> list[list[str]]:
    rows = []
    for kind in measured:
        for depth in depths:
            value = engine.values.get(f"{kind}@d{depth}")
            if value is not None:
                row = [str(depth), f"{kind}, {engine.name}", number(value)]
                rows.append([*row, "", "", "", "", "", "as documented"])
    return rows


def _reaches(trace: Figure) -> list[float]:
    """Return the values that the axis must include for a trace: the ends of its intervals."""
    values = trace["y"]
    error = trace.get("error_y", {})
    none = [0.0] * len(values)
    above = error.get("array", none)
    below = error.get("arrayminus", none)
    ends = []
    for value, more, less in zip(values, above, below, strict=True):
        ends.append(value + more)
        ends.append(value - less)
    return ends


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """Return the two ends of an axis that shows some values."""
    low = min(values)
    high = max(values)
    if low < _NOT_FROM_ZERO * high:
        return 0.0, high * (1 + _HEADROOM)
    spread = max(high - low, high * _HEADROOM)
    return max(low - spread / 2, 0.0), high + spread / 4


def _ceiling(metric: MetricReport) -> float | None:
    if metric.value and metric.roofline:
        return metric.value / metric.roofline
    return None


def _bounds(measured: Measured) -> dict[int, float]:
    """Return the maximum rate that the memory bandwidth allows, by depth."""
    bounds: dict[int, float] = {}
    for by_depth in measured.values():
        for depth, metric in by_depth.items():
            ceiling = _ceiling(metric)
            if ceiling is not None:
                bounds.setdefault(depth, ceiling)
    return dict(sorted(bounds.items()))


def _bound_trace(bounds: Mapping[int, float]) -> Figure:
    depths = [str(depth) for depth in bounds]
    hover = "the memory allows %{y:.5~r} tok/s"
    return scatter("lines", depths, list(bounds.values()), hover, **chart.LOOKS["roofline"])


def _far_text(bounds: Sequence[float]) -> str:
    least = number(min(bounds))
    most = number(max(bounds))
    if least == most:
        return f"memory allows {least} tok/s"
    return f"memory allows {least} to {most} tok/s"
