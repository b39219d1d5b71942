"""``sm121 history``: many runs as a page without a network, as summary.json, as a table."""

import os
from pathlib import Path

from sm121.core import templates
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.numbers import number
from sm121.regression import trend
from sm121.report import charts, metric_names, page
from sm121.report.history import History

#: Written beside the page.
SUMMARY = "summary.json"
_MOST_CHARTS = 12


def write(history: History, target: Path) -> list[Path]:
    """Write the page, and summary.json beside it. Raises UsageError: there is no such folder."""
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--html {target}: expected a file in a folder that is there")
    links = {
        past.path: os.path.relpath(past.path / page.NAME, target.parent)
        for past in history.runs
        if (past.path / page.NAME).is_file()
    }
    values = page.inlined("report", "history", plotted=True) | _values(history)
    template = page.environment().get_template("history.html.j2")
    write_text(template.render(values, links=links), target)
    beside = target.with_name(SUMMARY)
    write_text(text(history, "json"), beside)
    return [target, beside]


def text(history: History, kind: str) -> str:
    """The runs as ``json``, which is the content of summary.json, or ``txt``, for a terminal."""
    text = templates.rendered(f"history.{kind}.j2", templates.one_line, **_values(history))
    return text.rstrip() + "\n"


def _values(history: History) -> dict[str, object]:
    """What every template shows."""
    reports = [past.run.file.metrics for past in history.runs]
    gated = [name for metrics in reports for name, metric in metrics.items() if metric.gated]
    names = [*history.columns.values(), *(step.metric.name for step in history.steps), *gated]
    return {
        "history": history,
        "names": [*dict.fromkeys(names)][:_MOST_CHARTS],
        "places": {past.path: number for number, past in enumerate(history.runs, 1)},
        "fewest": trend.SERIES,
        "colours": (*charts.SERIES, *charts.OTHERS),
        "figure_of": charts.figure_of,
        "looks": charts.LOOKS,
        "escaped": charts.escaped,
        "words": metric_names.words,
        "number": number,
    }
