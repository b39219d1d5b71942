"""Reads earlier runs from the storage of pytest-benchmark."""

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
        root: The folder to which a relative path refers.

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
    """Read those runs of a storage folder that contain measurements.

    Args:
        storage: The storage folder. It has one subfolder for each Python version.
        pattern: The run: a number such as ``0003``, ``FOLDER/0003``, or the path of a file.

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
        The run; None if the file contains no measurement of this suite.

    Raises:
        UsageError: The file was not written by pytest-benchmark.
    """
    try:
        return of_data(file.name, json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file}: expected a file of pytest-benchmark ({error!r})") from error


def of_data(name: str, data: Mapping[str, Any]) -> StoredRun | None:
    """Return the run that the data of a file of pytest-benchmark describe.

    Args:
        name: The name of the run.
        data: The parsed file.

    Returns:
        The run; None if the data contain no measurement of this suite.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has another type.
        ValueError: A field has an impossible value.
    """
    benchmarks = [benchmark["extra_info"] for benchmark in data["benchmarks"]]
    return of_benchmarks(name, str(data.get("datetime", "")), benchmarks)


def of_benchmarks(run: str, when: str, benchmarks: Iterable[Mapping[str, Any]]) -> StoredRun | None:
    """Make a run from benchmarks.

    Args:
        run: The name of the run.
        when: The start of the run (ISO 8601).
        benchmarks: The ``extra_info`` of each benchmark.

    Returns:
        The run; None if no benchmark is of this suite.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has another type.
        ValueError: A field has an impossible value.
    """
    extras = [extra for extra in benchmarks if "sm121" in extra]
    reasons: dict[str, None] = {}
    not_passed: dict[Verdict, list[str]] = {}
    if any((extra.get("box") or {}).get("state") == BoxState.DEGRADED for extra in extras):
        reasons["its machine was DEGRADED"] = None
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
    """Return a sentence which says that metrics have a verdict other than PASS."""
    if len(names) == 1:
        return f"its {names[0]} was {verdict}"
    return f"{len(names)} of its metrics were {verdict}, the first of them {names[0]}"


def _file(extra: Mapping[str, Any], when: str, metrics: dict[str, MetricReport]) -> VerdictFile:
    """Return a verdict file with the fields that a benchmark's ``extra_info`` contains."""
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
    """Return a metric's entry of verdict.json, made from a benchmark's ``extra_info``."""
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
