"""Past runs in the storage of pytest-benchmark."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm121.core import lenient
from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict
from sm121.machine.box import BoxState
from sm121.measure import statistics
from sm121.run import details, stored_run
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import MetricReport, VerdictFile


def storage_folder(storage: str, root: Path) -> Path:
    """Return the folder of ``--benchmark-storage``.

    Args:
        storage: The value of the option: a folder, or ``file://PATH``.
        root: The folder that it is relative to.

    Raises:
        UsageError: The storage is a database.
    """
    scheme, separator, rest = storage.partition("://")
    if not separator:
        return (root / storage).resolve()
    if scheme != "file":
        raise UsageError(
            f"--benchmark-storage {storage}: the regression level reads files; expected file://PATH"
        )
    return (root / rest).resolve()


def load_benchmarks(storage: Path, pattern: str = "*") -> list[StoredRun]:
    """Read the runs of a storage folder that have measurements.

    Args:
        storage: The folder, with a folder for each Python.
        pattern: ``0003`` for one run, ``FOLDER/0003``, or a file.

    Returns:
        The runs, oldest first.

    Raises:
        UsageError: A file was not written by pytest-benchmark.
    """
    if Path(pattern).is_file():
        files = [Path(pattern)]
    else:
        names = f"{pattern.rstrip('*')}*.json"
        if "/" not in pattern:
            names = f"*/{names}"
        files = list(storage.glob(names))
    runs = []
    for file in files:
        run = read_benchmarks(file)
        if run is not None:
            runs.append(run)
    return sorted(runs, key=lambda run: (run.file.started, run.name))


def read_benchmarks(file: Path) -> StoredRun | None:
    """Read one file of pytest-benchmark.

    Args:
        file: The file.

    Returns:
        The run; None if it has no measurement of this suite.

    Raises:
        UsageError: The file was not written by pytest-benchmark.
    """
    try:
        return of_data(file.name, json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file}: expected a file of pytest-benchmark ({error!r})") from error


def of_data(name: str, data: Mapping[str, Any]) -> StoredRun | None:
    """Return the run in the data of a file of pytest-benchmark.

    Args:
        name: The name of the run.
        data: The parsed file.

    Returns:
        The run; None if it has no measurement of this suite.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has another type.
        ValueError: A field has an impossible value.
    """
    benchmarks = [benchmark["extra_info"] for benchmark in data["benchmarks"]]
    return of_benchmarks(name, str(data.get("datetime", "")), benchmarks)


def of_benchmarks(run: str, when: str, benchmarks: Iterable[Mapping[str, Any]]) -> StoredRun | None:
    """Return the run of some benchmarks.

    Args:
        run: The name of the run.
        when: When it started (ISO 8601).
        benchmarks: The ``extra_info`` of each benchmark.

    Returns:
        The run; None without a value of this suite.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has another type.
        ValueError: A field has an impossible value.
    """
    extras = [extra for extra in benchmarks if "sm121" in extra]
    reasons: dict[str, None] = {}
    not_passed: dict[Verdict, list[str]] = {}
    if any((extra.get("box") or {}).get("state") == BoxState.DEGRADED for extra in extras):
        reasons["its box was DEGRADED"] = None
    reports: dict[str, MetricReport] = {}
    metrics: dict[str, StoredMetric] = {}
    for extra in extras:
        name = str(extra["metric"])
        report = _report(extra)
        reports[name] = report
        ended = extra.get("run", "PASS")
        if ended != "PASS":
            reasons[f"the run was {ended}"] = None
        if report.value is None:
            reasons[f"its {name} has no value"] = None
            continue
        metric = StoredMetric.of(name, report.value, report, details.samples_of(extra))
        metrics[name] = replace(metric, test=extra.get("test"))
        if report.verdict is not Verdict.PASS:
            not_passed.setdefault(report.verdict, []).append(name)
        if metric.why_no_number is not None:
            reasons[metric.why_no_number] = None
    if not metrics:
        return None
    for verdict, names in not_passed.items():
        reasons[_not_passed(names, verdict)] = None
    last = extras[-1]
    keys = ("machine", *stored_run.SAME_REQUESTS, *stored_run.CONTEXT)
    context = {key: last.get(key) for key in keys}
    return StoredRun(run, _file(last, when, reports), metrics, context, tuple(reasons))


def _not_passed(names: list[str], verdict: Verdict) -> str:
    """Return that metrics have a verdict other than PASS."""
    if len(names) == 1:
        return f"its {names[0]} was {verdict}"
    return f"{len(names)} of its metrics were {verdict}, the first of them {names[0]}"


def _file(extra: Mapping[str, Any], when: str, metrics: dict[str, MetricReport]) -> VerdictFile:
    """Return the part of a verdict.json that a benchmark's ``extra_info`` has."""
    engine = extra.get("engine") or {}
    fingerprint = None
    if extra.get("fingerprint"):
        fingerprint = lenient.validate(Fingerprint, extra["fingerprint"])
    return VerdictFile(
        arch=None,
        profile=str(extra.get("profile")),
        started=when,
        engine=EngineReport(
            name=str(engine.get("name", "unknown")),
            version=engine.get("version"),
            managed=False,
            model=str(extra.get("model", "")),
        ),
        metrics=metrics,
        fingerprint=fingerprint,
    )


def _report(extra: Mapping[str, Any]) -> MetricReport:
    """Return the entry of a metric in verdict.json, from a benchmark's ``extra_info``."""
    samples = extra["samples"]
    measured = extra.get("extra") or {}
    report = MetricReport(
        value=extra.get("value"),
        unit=str(extra["unit"]),
        rounds=len(samples),
        starts=1,
        clock=extra.get("clock"),
        case=extra.get("case"),
        accepted_length=measured.get("mean_accepted_length"),
        texts=measured.get("texts"),
        roofline=extra.get("roofline"),
        bytes_per_token=extra.get("bytes_per_token"),
        verdict=Verdict(extra.get("verdict", Verdict.NOT_RUN)),
    )
    are_numbers = not any(math.isnan(sample) for sample in samples)
    if extra.get("quantile") is None and samples and are_numbers:
        estimate = statistics.estimate(samples)
        report.ci_low = estimate.ci_low
        report.ci_high = estimate.ci_high
    return report
