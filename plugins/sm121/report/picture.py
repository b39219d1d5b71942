"""Compared results as a picture: one panel a quantity, a point and its interval for each run."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from sm121.core.numbers import number
from sm121.measure.comparison import ComparedRow, Source, label, rates

_COLOURS = ("#0f766e", "#b45309", "#6d28d9", "#be123c", "#1d4ed8", "#4d7c0f")
_TIMES = ("ttft_p50", "ttft_p99", "memory_peak_gib", "startup_s")
_LEFT, _WIDE = 150.0, 350.0
_ROW, _HEAD, _LETTER = 18.0, 30.0, 6.5


def svg(sources: Sequence[Source]) -> str:
    """The rates of one stream by depth, times to the first token, memory and start-up."""
    kinds, depths = rates(sources)
    panels = [(kind, [f"{kind}@d{depth}" for depth in depths]) for kind in kinds]
    panels += [(metric, [metric]) for metric in _TIMES]
    longest_name = max((len(f"{s.name} @ d{max(depths, default=0)}") for s in sources), default=0)
    left = max(_LEFT, longest_name * _LETTER + 12)
    shown, top = [], _HEAD
    for title, metrics in panels:
        found = [
            (metric, place, source.name, row)
            for metric in metrics
            for place, source in enumerate(sources)
            if (row := source.row(metric)) is not None and row.value is not None
        ]
        if not found:
            continue
        longest = max(_ends(row)[1] for *_, row in found) or 1.0
        marks = []
        for line, (metric, place, name, row) in enumerate(found):
            low, high = _ends(row)
            counts = row.verdict in (None, "PASS", "FAIL")
            marks.append({
                "y": top + _HEAD + line * _ROW,
                "name": f"{name}{metric.partition('@')[2] and ' @ ' + metric.partition('@')[2]}",
                "colour": _COLOURS[place % len(_COLOURS)],
                **{
                    key: round(left + _WIDE * max(at, 0.0) / longest, 1)
                    for key, at in (("x", row.value or 0.0), ("low", low), ("high", high))
                },
                "filled": counts,
                "said": f"{number(row.value)}{'' if counts else f' ({row.verdict})'}",
            })  # fmt: skip
        unit = found[0][3].unit
        shown.append({"y": top, "title": f"{label(title)}, {unit}", "marks": marks})
        top += _HEAD + len(found) * _ROW + 12
    templates = Environment(
        loader=PackageLoader("sm121.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return templates.get_template("comparison.svg.j2").render(
        panels=shown, height=top, left=left, right=left + _WIDE
    )


def _ends(row: ComparedRow) -> tuple[float, float]:
    """The interval, by its own bounds or its scatter; a point where there is neither."""
    value, by = row.value or 0.0, row.deviation or 0.0
    low, high = value - by, value + by
    return (low if row.low is None else row.low, high if row.high is None else row.high)
