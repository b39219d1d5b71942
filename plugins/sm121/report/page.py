"""report.html: one file with the results of a run, their reasons and the evidence.

The template escapes all text from models, logs and names. Even unescaped, such text could not run
as a script: the page's content security policy only allows its own scripts, by hash.
"""

import base64
import functools
import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from sm121 import __version__
from sm121.core import templates
from sm121.core.files import write_text
from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.profile_fields import LEVELS
from sm121.matrix import feature_matrix
from sm121.report import (
    certainty,
    charts,
    findings,
    headline,
    junit,
    key_numbers,
    metric_names,
    metric_verdicts,
    rate_chart,
    references,
    short_names,
    stored,
    summary,
    timelines,
)
from sm121.report.chart import Chart, Figure
from sm121.report.rows import counts_shown, shortened
from sm121.report.stored import StoredReport
from sm121.run import details
from sm121.run.details import Details
from sm121.run.fingerprint import profile_label
from sm121.run.verdict_file import VerdictFile

NAME = "report.html"
#: Maximum size of a page in bytes; larger pages are truncated.
_MOST_BYTES = 2_000_000
#: Maximum number of entries of each list on a truncated page.
_FEW = 100
#: Maximum number of characters of each text on a truncated page.
_SHORT = 200


def html(report: StoredReport) -> str:
    """Return the page of a run, of at most 2 MB.

    A larger page is truncated; a note at its beginning names the files with the complete data.

    Args:
        report: The stored report.
    """
    text = _html(report, report)
    if len(text.encode()) > _MOST_BYTES:
        text = _html(_cut(report), report)
    return text


def _html(shown: StoredReport, whole: StoredReport) -> str:
    """Render ``shown``; counts and the verdict come from the whole report."""
    run = shown.run
    figures = _charts(shown)
    groups = findings.grouped(shown)
    cut = None
    if shown is not whole:
        cut = {"entries": _FEW, "characters": _SHORT}
        groups = [replace(group, detail=findings.without_output(group.detail)) for group in groups]
    more = len(findings.grouped(whole)) - len(groups[:_FEW])
    template = environment().get_template("report.html.j2")
    return template.render(
        inlined("report", "ab"),
        report=shown,
        run=run,
        every_test=whole.run.tests,
        figures=_figures_by_id(figures),
        charts=figures,
        levels=dict.fromkeys((*LEVELS, *run.levels)),
        headline=headline.headline_of(whole.run),
        action=headline.action(whole),
        judged=functools.partial(metric_verdicts.of_run, run),
        tiles=key_numbers.rows(run),
        bound_doubt=key_numbers.bound_doubt(whole.run),
        findings=groups[:_FEW],
        more=more,
        cut=cut,
        not_run=findings.not_run(run),
        references=references.load(),
        paths=timelines.read_cells(shown.directory),
        again={group.ids[0]: group.detail.reproduce for group in groups[:_FEW]},
    )


def _figures_by_id(charts: Mapping[str, list[Chart]]) -> dict[str, Figure]:
    figures = {}
    for group in charts.values():
        for chart in group:
            figures[chart.id] = chart.figure
    return figures


def _cut(report: StoredReport) -> StoredReport:
    """Truncate all lists and texts of a report; tests that did not pass come first."""
    run = report.run.model_dump(mode="json")
    bad = {test.id for test in findings.failures(report.run)}
    run["tests"].sort(key=lambda test: test["id"] not in bad)
    samples = dict(itertools.islice(report.details.samples.items(), _FEW))
    matrix = report.matrix
    if matrix is not None:
        matrix = type(matrix).model_validate(_first(matrix.model_dump(mode="json")))
    return replace(
        report,
        run=VerdictFile.model_validate(_first(run)),
        details=report.details.model_copy(update={"samples": samples}),
        crashes=report.crashes[:_FEW],
        matrix=matrix,
    )


def _first(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= _SHORT:
            return value
        return f"{value[:_SHORT]} [...]"
    if isinstance(value, dict):
        return {key: _first(item) for key, item in itertools.islice(value.items(), _FEW)}
    if isinstance(value, list):
        return [_first(item) for item in value[:_FEW]]
    return value


def write_all(directory: Path, known: Details) -> StoredReport:
    """Write details.json, summary.md, junit.xml and report.html.

    Args:
        directory: A report directory with a verdict.json.
        known: The details of the run.

    Returns:
        The complete report.

    Raises:
        UsageError: There is no valid verdict.json.
    """
    details.write_details(known, directory)
    report = stored.read(directory)
    write_text(summary.markdown(report.run, report), directory / "summary.md")
    write_text(junit.xml(report), directory / junit.NAME)
    write(report)
    return report


def write(report: StoredReport) -> Path:
    """Write report.html to the report's directory.

    Args:
        report: The stored report.

    Returns:
        The path of the page.
    """
    path = report.directory / NAME
    write_text(html(report), path)
    return path


def _charts(report: StoredReport) -> dict[str, list[Chart]]:
    """Return the charts of a report, by section of the page."""
    run = report.run
    others = references.load()
    rates = []
    for decoding in (True, False):
        chart = rate_chart.rates(run, others, decoding=decoding)
        if chart is not None:
            rates.append(chart)
    memory = []
    if report.memory is not None:
        chart = charts.memory(report.memory)
        if chart is not None:
            memory.append(chart)
    gated = [name for name, metric in run.metrics.items() if metric.gated]
    return {
        "rates": rates,
        "latency": charts.distributions(report.details),
        "memory": memory,
        "history": charts.histories(report.details, gated),
    }


@cache
def asset(name: str) -> str:
    """Return the text of a file of this package.

    Args:
        name: The path of the file in the package, such as ``templates/report.css``.
    """
    return (files("sm121.report") / name).read_text("utf-8")


def inlined(*styles: str) -> dict[str, str]:
    """Return the styles and scripts of a page, and a content security policy for them.

    Plotly sets style attributes, so the policy allows inline styles. It allows no loading of files.

    Args:
        *styles: The names of the page's style sheets.

    Returns:
        The values ``style``, ``plotly``, ``script`` and ``policy`` of a template.
    """
    style = "".join(asset(f"templates/{name}.css") for name in styles)
    # plotly.js is unchanged, except that texts which would end the script element are escaped.
    plotly = re.sub(r"</(?=script)", r"<\\/", asset("vendor/plotly-basic.min.js"), flags=re.I)
    script = asset("templates/report.js")
    policy = (
        "default-src 'none'",
        f"script-src {hashes(plotly, script)}",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return {
        "policy": "; ".join(policy),
        "style": Markup(style),  # noqa: S704  # our own
        "plotly": Markup(plotly),  # noqa: S704  # our own
        "script": Markup(script),  # noqa: S704  # our own
    }


@cache
def hashes(*texts: str) -> str:
    """Return the hashes with which a policy allows scripts or styles.

    Args:
        *texts: The contents of the elements.
    """
    sources = []
    for text in texts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources.append(f"'sha256-{digest}'")
    return " ".join(sources)


def _shown(value: object) -> object:
    """Escape control characters in texts, except for newlines and tabs."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if value.isprintable():
        return value
    lines = []
    for line in value.replace("\r\n", "\n").split("\n"):
        lines.append("\t".join(printable(part) for part in line.split("\t")))
    return "\n".join(lines)


@cache
def environment() -> Environment:
    """Return the template environment of pages."""
    environment = templates.environment(_shown, escapes=True)
    environment.globals.update(
        number=number,
        words=metric_names.words,
        rate_of=metric_names.rate,
        interval=certainty.certainty,
        share=key_numbers.share,
        label=profile_label,
        short=shortened,
        counts_shown=counts_shown,
        anchors_of=short_names.anchors,
        short_kernel=short_names.kernel,
        feature_matrix=feature_matrix,
        version=__version__,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.tests["table"] = _is_table
    environment.tests["listing"] = _is_listing
    return environment


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_listing(value: object) -> bool:
    return isinstance(value, list | tuple)
