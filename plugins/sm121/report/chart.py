"""A chart of report.html: a figure as plotly's JSON, and its data as a table.

Colours are CSS variables, which the page's script resolves for light mode, dark mode and paper.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sm121.core.printable import printable

#: Colours of the lines of this run.
SERIES = ("var(--series-1)", "var(--series-2)", "var(--series-3)")
#: Colours of the lines of other engines and runs.
OTHERS = (
    "var(--series-4)",
    "var(--series-5)",
    "var(--series-6)",
    "var(--series-7)",
    "var(--series-8)",
)
#: Height in pixels of a chart that stands alone, and of a small chart beside others.
_HEIGHT = 420
_SMALL_HEIGHT = 260
#: Maximum number of characters of a label in a plot.
_LONGEST_LABEL = 80

#: Plotly's JSON of a figure, a trace or an annotation.
Figure = dict[str, Any]
#: Styles of traces and layouts, by name.
LOOKS: dict[str, Figure] = json.loads(
    (files("sm121.report") / "templates" / "figure.json").read_text("utf-8")
)


@dataclass(frozen=True)
class Chart:
    """A figure, a one-sentence description, and its data as a table."""

    id: str
    title: str
    #: The description, for readers who cannot see the figure.
    text: str
    figure: Figure
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    #: Additional entries of the legend: name, colour and shape.
    marks: Sequence[tuple[str, str, str]] = ()

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Name, colour and shape of each line or kind of point that has a name."""
        entries = []
        traces = self.figure["data"]
        if len(traces) > 1:
            for trace in traces:
                if trace.get("name"):
                    entries.append(_legend_entry(trace))
        return [*entries, *self.marks]


def _legend_entry(trace: Figure) -> tuple[str, str, str]:
    line = trace.get("line") or {}
    shape = line.get("dash") or "solid"
    if trace["mode"] == "markers":
        shape = "point"
    colour = line.get("color") or trace["marker"]["color"]
    return trace["name"], colour, shape


def scatter(
    mode: str, x: Sequence[Any], y: Sequence[Any], hover: str | None, **more: Any
) -> Figure:
    """Return a trace of plotly's type ``scatter``.

    Args:
        mode: ``lines``, ``markers`` or ``lines+markers``.
        x: The positions of the points.
        y: The values of the points.
        hover: The hover text of a point, as a plotly template; None for no text.
        **more: Other keys of the trace.
    """
    trace: Figure = {"type": "scatter", "mode": mode, "x": x, "y": y}
    if hover is None:
        trace["hoverinfo"] = "skip"
    else:
        trace["hovertemplate"] = f"{hover}<extra></extra>"
    trace.update(more)
    return trace


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
    """Return a figure with one pair of axes.

    Args:
        traces: The traces to draw.
        x: The title of the horizontal axis.
        y: The title of the vertical axis.
        category: Whether the positions are names; the vertical axis then begins at 0.
        y_range: The range of the vertical axis; None to let plotly choose it.
        small: Whether the chart is shown beside others.
        logarithmic: Whether the horizontal axis is logarithmic.
    """
    x_axis: Figure = {**LOOKS["axis"], "title": {"text": x}}
    y_axis: Figure = {**LOOKS["axis"], "title": {"text": y}}
    if category:
        x_axis["type"] = "category"
    elif logarithmic:
        x_axis["type"] = "log"
    if y_range:
        y_axis["range"] = list(y_range)
    elif category:
        y_axis["rangemode"] = "tozero"
    layout: Figure = {
        **LOOKS["layout"],  # no legend: the page has its own below the plot
        "height": _SMALL_HEIGHT if small else _HEIGHT,
        "xaxis": x_axis,
        "yaxis": y_axis,
    }
    return {"data": traces, "layout": layout}


def escaped(text: str) -> str:
    """Return a label of at most 80 characters, without HTML that plotly would interpret.

    Args:
        text: Any text, such as a name from a file.
    """
    label = printable(text).replace("<", "\u2039").replace(">", "\u203a")
    return label[:_LONGEST_LABEL]
