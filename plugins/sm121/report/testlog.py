"""Write a feature's test log and its row in BENCHMARK_RESULTS.md, from the plan's templates."""

import datetime
import re
from pathlib import Path

from sm121.core import templates
from sm121.core.errors import UsageError
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.report import charts, feature_table, findings, metric_names, metric_verdicts
from sm121.report.feature_table import LinkedFiles
from sm121.report.stored import StoredReport
from sm121.report.summary import plain
from sm121.run.verdict_file import MetricReport, VerdictFile

RESULTS = "BENCHMARK_RESULTS.md"
_TEMPLATE = "testlog.md.j2"
#: The last line of the table's header. New rows are inserted directly below it.
_MARK = "|--------|------|--------|------|-------|--------|----------|----------|---------|-------|"
_HEAD = f"""# Benchmark results

Each row is one conformance run, added by `sm121 testlog RUN --output DIR`. Rates are tok/s with
their 95 % interval; times are ms; "-" is not measured. A run that is not PASS is no result.

| Run ID | Date | Config | tg32 | tg128 | pp2048 | TTFT p50 | TTFT p99 | Verdict | Notes |
{_MARK}
"""


def log(
    report: StoredReport,
    *,
    feature: str,
    branch: str | None = None,
    baseline: StoredReport | None = None,
) -> str:
    """Return the text of FEATURE_<name>_<date>.md.

    Args:
        report: The run.
        feature: The name of the feature.
        branch: The name of the branch. None for the engine's commit or version.
        baseline: The run with which the values are compared. Its values get a separate column.
    """
    run = report.run
    return templates.rendered(
        _TEMPLATE,
        plain,
        feature=feature,
        branch=branch or _branch(run),
        date=run.started[:10],
        run_id=_run_id(run, feature),
        run=run,
        report=report,
        seconds=lambda name: _duration(run, name),
        notes=lambda name: _notes(report, name),
        baseline=_baseline(baseline.run) if baseline is not None else None,
        no_delta=_no_delta(run, baseline.run) if baseline is not None else "",
        rows=_rows(run, baseline.run if baseline is not None else None),
        memory=_memory(report),
        result=_result(run),
        failures=findings.failures(run),
    )


def entry(report: StoredReport, *, feature: str, evidence: LinkedFiles | None = None) -> str:
    """Return the run's row for BENCHMARK_RESULTS.md.

    Args:
        report: The run.
        feature: The name of the feature.
        evidence: The run's files to which the row links.
    """
    run = report.run
    path = run.engine.path
    config = f"{path.attention or 'attention not proven'} + {path.moe or 'MoE not proven'}"
    cells = [
        _run_id(run, feature),
        run.started[:10],
        config,
        *(
            _cell(_metric(run, name))
            for name in ("tg32", "tg128", "pp2048", "ttft_p50", "ttft_p99")
        ),
        run.verdict.value,
        f"{run.engine.name} {run.engine.version or 'unknown'}, {run.profile}, box {run.box.state}",
    ]
    row = " | ".join(plain(cell) for cell in cells)
    if evidence is not None:
        row += f"; {evidence.text}"
    return f"| {row} |"


def write(report: StoredReport, text: str, folder: Path, *, feature: str) -> list[Path]:
    """Write the test log to ``TEST_LOGS/``, and add the run to both tables of the plan.

    The tables are BENCHMARK_RESULTS.md and FEATURE_MATRIX.md. A run is added only once. The log of
    another run of the same day is kept: the file then has a number behind the date.

    Args:
        report: The run.
        text: The test log.
        folder: The output folder.
        feature: The name of the feature.

    Returns:
        The paths of the written files.

    Raises:
        UsageError: BENCHMARK_RESULTS.md exists, but does not contain the table.
    """
    name = re.sub(r"\W+", "-", feature).strip("-") or "run"
    run_id = _run_id(report.run, feature)
    logs = folder / "TEST_LOGS"
    logs.mkdir(parents=True, exist_ok=True)
    file = _free_file(logs, f"FEATURE_{name}_{report.run.started[:10]}", run_id)
    link = f"[{RESULTS}](../{RESULTS}), run {plain(run_id)}"
    file.write_text(f"{text}\n## Benchmark Results\n\n{link}\n", "utf-8")
    results = folder / RESULTS
    rows = results.read_text("utf-8") if results.is_file() else _HEAD
    if _MARK not in rows:
        raise UsageError(f"{results}: expected the table of `sm121 testlog`")
    evidence = feature_table.keep_evidence(report, folder, run_id)
    links = LinkedFiles({"log": str(file.relative_to(folder)), **evidence.links})
    row = entry(report, feature=feature, evidence=links)
    if row not in rows:
        results.write_text(rows.replace(_MARK, f"{_MARK}\n{row}", 1), "utf-8")
    return [file, results, feature_table.add(report, folder, run_id, evidence)]


def _free_file(logs: Path, stem: str, run_id: str) -> Path:
    """Return the first file of this name that does not exist, or that is the log of the run."""
    file = logs / f"{stem}.md"
    number = 2
    while file.is_file() and f"Run: {plain(run_id)}\n" not in file.read_text("utf-8"):
        file = logs / f"{stem}_{number}.md"
        number += 1
    return file


def _run_id(run: VerdictFile, feature: str) -> str:
    stamp = re.sub(r"\D", "", run.started)[:14]
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', feature).strip('_')}_{stamp}"


def _metric(run: VerdictFile, kind: str) -> MetricReport | None:
    """Return a metric by its name; ``tg32`` without a depth means the smallest measured depth."""
    if kind in run.metrics:
        return run.metrics[kind]
    depths = {}
    for name, metric in run.metrics.items():
        if (
            (rate := metric_names.rate(name)) is not None
            and rate.kind == kind
            and rate.streams == 1
        ):
            depths[rate.depth] = metric
    if depths:
        return depths[min(depths)]
    return None


def _cell(metric: MetricReport | None) -> str:
    if metric is None or metric.value is None:
        return "-"
    shown = number(metric.value)
    if metric.ci_low is not None and metric.ci_high is not None:
        shown += f" ({number(metric.ci_low)} to {number(metric.ci_high)})"
    if metric.verdict in (Verdict.PASS, Verdict.FAIL):
        return shown
    return f"{shown} {metric_verdicts.of_metric('', metric).word}"


def _baseline(run: VerdictFile) -> str:
    """Return the baseline's run, with the properties that decide whether it is comparable."""
    configuration = run.engine.configuration or "unknown"
    return (
        f"{_run_id(run, run.engine.configuration or run.engine.name)}, profile {run.profile}, "
        f"configuration {configuration}, verdict {run.verdict.value}"
    )


def _no_delta(run: VerdictFile, baseline: VerdictFile) -> str:
    """Return the reason why no value of two runs may be compared, or an empty text."""
    if baseline.verdict in (Verdict.INVALID, Verdict.NOT_RUN):
        return f"the baseline is {baseline.verdict.value}"
    pairs = [("architecture", run.arch, baseline.arch)]
    if run.fingerprint is not None and baseline.fingerprint is not None:
        for item in run.fingerprint.differences(baseline.fingerprint):
            if item.field in ("model", "machine"):
                pairs.append((item.name, item.one, item.other))
    for name, here, there in pairs:
        if here != there:
            values = f"{here or 'unknown'}, baseline {there or 'unknown'}"
            return f"the runs differ in the {name}: {values}"
    return ""


def _rows(run: VerdictFile, baseline: VerdictFile | None) -> list[tuple[str, str, str, str]]:
    """Return per metric: its name, the baseline's value, this run's value, and the change."""
    comparable = baseline is not None and not _no_delta(run, baseline)
    rows = []
    for name, metric in run.metrics.items():
        before = None
        if baseline is not None:
            before = baseline.metrics.get(name)
        delta = ""
        if before is not None and before.value and metric.value:
            invalid = Verdict.INVALID in (before.verdict, metric.verdict)
            delta = "-"
            if comparable and not invalid:
                delta = f"{metric.value / before.value - 1:+.1%}"
        rows.append((name, _cell(before) if before else "", _cell(metric), delta))
    return rows


def _duration(run: VerdictFile, level: str) -> str:
    seconds = sum(test.seconds for test in run.tests if test.level == level)
    return str(datetime.timedelta(seconds=round(seconds)))


def _notes(report: StoredReport, level: str) -> list[str]:
    bad = []
    for test in findings.failures(report.run):
        if test.level == level:
            bad.append(test)
    notes = [f"{test.verdict.value} {test.name}: {test.message}" for test in bad]
    reasons = set()
    for test in report.run.tests:
        if test.level == level and test.skipped and not test.waived:
            reasons.add(test.message)
    return notes or [f"not run: {reason}" for reason in sorted(reasons)][:3]


def _memory(report: StoredReport) -> list[tuple[str, str, str]]:
    if report.memory is None:
        return []
    found = []
    for what, values in charts.memory_levels(report.memory.samples).items():
        known = [value for value in values if value is not None]
        found.append((what, f"{known[0]:.2f} GiB", f"{known[-1]:.2f} GiB"))
    return found


def _branch(run: VerdictFile) -> str:
    shas = run.environment.get("git_shas") or {}
    engine = shas.get(run.engine.name) or {}
    sha = engine.get("sha")
    if sha:
        return f"{run.engine.name} {sha[:12]}"
    return f"{run.engine.name} {run.engine.version}"


def _result(run: VerdictFile) -> str:
    if run.verdict is Verdict.PASS and run.certified:
        return "READY TO MERGE: certified"
    if run.verdict is Verdict.PASS:
        return "PASS, and no certificate: only a run with --certify is READY TO MERGE"
    if run.verdict is Verdict.FAIL:
        return "NEEDS FIXES"
    return f"BLOCKED: {run.verdict.value}"
