"""report.html: one file that says what a run found, why, and on what evidence. Everything that
comes from a model, a log or a name is put in by the template's own escaping, and nothing of it can
be run: the page's scripts are the only ones that its policy allows, by hash."""

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
from sm121.report.chart import Chart
from sm121.report.rows import counts_shown, shortened
from sm121.report.stored import StoredReport
from sm121.run import details
from sm121.run.details import Details
from sm121.run.fingerprint import profile_label
from sm121.run.verdict_file import VerdictFile

NAME = "report.html"
#: Bytes of a page. Of a larger one the first entries of each list and the beginning of each text.
_MOST_BYTES = 2_000_000
_FEW, _SHORT = 100, 200


def html(report: StoredReport) -> str:
    """Return the page of a run, of at most 2 MB.

    A page that would be larger is cut, says so at its beginning, and names the files that have all.
    """
    text = _html(report, report)
    if len(text.encode()) > _MOST_BYTES:
        text = _html(_cut(report), report)
    return text


def _html(shown: StoredReport, whole: StoredReport) -> str:
    """Return the page of what is shown of a run; counts and the verdict are those of the whole."""
    run, figures = shown.run, _charts(shown)
    groups = findings.grouped(shown)
    is_cut = shown is not whole
    if is_cut:
        groups = [replace(one, detail=findings.without_output(one.detail)) for one in groups]
    more = len(findings.grouped(whole)) - len(groups[:_FEW])
    template = environment().get_template("report.html.j2")
    return template.render(
        inlined("report", "ab"),
        report=shown,
        run=run,
        every_test=whole.run.tests,
        figures={chart.id: chart.figure for group in figures.values() for chart in group},
        charts=figures,
        levels=dict.fromkeys((*LEVELS, *run.levels)),
        headline=headline.of(whole.run),
        action=headline.action(whole),
        judged=functools.partial(metric_verdicts.of_run, run),
        tiles=key_numbers.rows(run),
        bound_doubt=key_numbers.bound_doubt(whole.run),
        findings=groups[:_FEW],
        more=more,
        cut={"entries": _FEW, "characters": _SHORT} if is_cut else None,
        not_run=findings.not_run(run),
        references=references.load(),
        paths=timelines.read(shown.directory),
        again={one.ids[0]: one.detail.reproduce for one in groups[:_FEW]},
    )


def _cut(report: StoredReport) -> StoredReport:
    """Return the beginning of each list and each text; tests that did not hold come first."""
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
        return value if len(value) <= _SHORT else f"{value[:_SHORT]} [...]"
    if isinstance(value, dict):
        return {key: _first(value[key]) for key in [*value][:_FEW]}
    return [_first(item) for item in value[:_FEW]] if isinstance(value, list) else value


def write_all(directory: Path, known: Details) -> StoredReport:
    """Write details.json and what is made of it and verdict.json. Returns: the whole report."""
    details.write(known, directory)
    report = stored.read(directory)
    write_text(summary.markdown(report.run, report), directory / "summary.md")
    write_text(junit.xml(report), directory / junit.NAME)
    write(report)
    return report


def write(report: StoredReport) -> Path:
    """Write report.html into the report's directory."""
    path = report.directory / NAME
    write_text(html(report), path)
    return path


def _charts(report: StoredReport) -> dict[str, list[Chart]]:
    run, others = report.run, references.load()
    rates = [rate_chart.rates(run, others, decoding=decoding) for decoding in (True, False)]
    memory = charts.memory(report.memory) if report.memory is not None else None
    gated = [name for name, metric in run.metrics.items() if metric.gated]
    return {
        "rates": [chart for chart in rates if chart is not None],
        "latency": charts.distributions(report.details),
        "memory": [memory] if memory is not None else [],
        "history": charts.histories(report.details, gated),
    }


@cache
def asset(name: str) -> str:
    return (files("sm121.report") / name).read_text("utf-8")


def inlined(*styles: str) -> dict[str, str]:
    """Return our own styles and scripts, and the policy of a page that allows nothing but them.

    Plotly draws by styles of attributes, so the policy allows these. Nothing is loaded.
    """
    style = "".join(asset(f"templates/{name}.css") for name in styles)
    # plotly.js in its own words; only what would end the script element is written otherwise.
    bundle = re.sub(r"</(?=script)", r"<\\/", asset("vendor/plotly-basic.min.js"), flags=re.I)
    scripts = (bundle, asset("templates/report.js"))
    texts = (
        "default-src 'none'",
        f"script-src {hashes(*scripts)}",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    values = {"style": style, "plotly": scripts[0], "script": scripts[1]}
    marked = {name: Markup(value) for name, value in values.items()}  # noqa: S704  # our own
    return {"policy": "; ".join(texts), **marked}


@cache
def hashes(*texts: str) -> str:
    """Scripts or styles of our own, as a policy names them."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _shown(value: object) -> object:
    """Text without anything that a screen obeys: lines and tabs stay, the rest is written out."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if value.isprintable():
        return value
    lines = value.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(printable(part) for part in line.split("\t")) for line in lines)


@cache
def environment() -> Environment:
    """The templates of pages."""
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
    environment.tests["table"] = lambda value: isinstance(value, Mapping)
    environment.tests["listing"] = lambda value: isinstance(value, (list, tuple))
    return environment
