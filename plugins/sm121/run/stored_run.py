"""A past run as it was stored: in a report directory, or in a file of pytest-benchmark. It is read
here by ``--against``, the regression level, ``sm121 compare`` and ``sm121 trust``."""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm121.core import data_file, lenient
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES
from sm121.core.printable import printable
from sm121.core.profile_fields import LEVELS
from sm121.core.verdict import Verdict
from sm121.measure import machine, statistics
from sm121.measure.box import BoxState
from sm121.measure.measurement import COUNTED
from sm121.run import details, verdict_file
from sm121.run.details import Details, Samples
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint
from sm121.run.merge import contradiction
from sm121.run.verdict_file import MetricReport, TestReport, VerdictFile

#: What two runs of pytest-benchmark must share to be compared, and how it is called.
_CONTEXT = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["stored"]
#: What tells two runs apart that asked for the same on one machine, where both know it.
_SAME = ("gpu_units", "path_requests")


@dataclass(frozen=True)
class StoredMetric:
    """One metric of one run, with its samples in ``unit``."""

    name: str
    unit: str
    higher_is_better: bool
    quantile: float | None
    samples: tuple[float, ...]
    value: float
    #: Tokens of a step while it was measured, where drafts were accepted; None without.
    accepted_length: float | None = None
    texts: tuple[str, ...] = ()
    #: Of a kernel's time: what was timed. The test that measured it, where that is known.
    case: str | None = None
    test: str | None = None
    #: Of a decode rate: its share of what the memory allows, and what a token reads.
    roofline: float | None = None
    bytes_per_token: float | None = None

    @property
    def of_bound(self) -> str:
        """Its share of what the memory allows, behind its value; empty where that is not known."""
        if not self.roofline or not self.bytes_per_token:
            return ""
        return f" ({self.roofline:.0%} of the bound of {self.bytes_per_token / 1e9:.3g} GB a token)"

    @property
    def why_no_number(self) -> str | None:
        """Why nothing can be worse than it; None where something can."""
        is_price = self.name.partition("@")[0] in PRICES
        may_be_0 = is_price or self.unit not in ("tok/s", "ms", "µs", "s", "GiB")
        values = (self.value, *self.samples)
        if all(map(math.isfinite, values)) and (may_be_0 or min(values) > 0.0):
            return None
        return f"its {self.name} holds a 0, or what is no number"

    @property
    def kind(self) -> str:
        """What two values must share to be of one quantity."""
        parts = [*self.texts, self.case] if self.case is not None else self.texts
        of = f", of {', '.join(parts)}" if parts else ""
        return f"{self.unit}, {'higher' if self.higher_is_better else 'lower'} is better{of}"

    @classmethod
    def of(cls, name: str, value: float, metric: MetricReport, samples: Samples) -> "StoredMetric":
        """From its value, what verdict.json has of it, and its samples."""
        return cls(
            name=name,
            unit=metric.unit,
            higher_is_better=samples.higher_is_better,
            quantile=samples.quantile,
            samples=tuple(samples.samples),
            value=value,
            accepted_length=metric.accepted_length,
            texts=tuple(metric.texts or ()),
            case=metric.case,
            roofline=metric.roofline,
            bytes_per_token=metric.bytes_per_token,
        )


@dataclass(frozen=True)
class StoredRun:
    """One run: when, where, of what, and its metrics."""

    name: str
    #: Its verdict.json; of a file of pytest-benchmark, what that has of one.
    file: VerdictFile
    #: The metrics that count and have samples.
    metrics: Mapping[str, StoredMetric]
    #: Of pytest-benchmark: what another run must share with it.
    context: Mapping[str, Any] = field(default_factory=dict)
    #: Why no other run can be held against it, a phrase each; empty where one can.
    unfit: tuple[str, ...] = ()
    #: Why its rates and times are no baseline, though its answers are; None where they are one.
    rates_unfit: str | None = None

    def find(self, metric: StoredMetric) -> StoredMetric | None:
        """Return what this run measured of the same quantity.

        Args:
            metric: A metric of another run. A kernel's time must be of the same sizes.

        Returns:
            The metric of this run; None if it was not measured.
        """
        stored = self.metrics.get(metric.name)
        if stored is None or stored.case != metric.case:
            return None
        return stored

    def unlike(self, context: Mapping[str, Any]) -> list[str]:
        """Why this run is no baseline for one of that context, a phrase each."""
        reasons = [*self.unfit]
        apart = machine.differences(self.context.get("machine") or {}, context.get("machine") or {})
        units = [tuple(each.get("gpu_units") or ()) for each in (self.context, context)]
        if all(map(any, units)) and units[0] != units[1]:
            apart.append(f"GPU {units[0]} and {units[1]}")
        if apart:
            reasons.append(f"another machine ({'; '.join(apart)})")
        for key, name in _CONTEXT.items():
            one, other = self.context.get(key), context.get(key)
            if one != other:
                reasons.append(f"{name} was {_short(one, other)}")
        return reasons

    def changed(self, context: Mapping[str, Any]) -> dict[str, str]:
        """What alone tells this run from a later one of that context, which asked for the same on
        the same machine, by its name: its state and its kernel path. Else empty."""
        if any(self.context.get(key) not in (None, context.get(key)) for key in _SAME):
            return {}
        units = any(self.context.get("gpu_units") or ())
        of_machine = {*(self.context.get("machine") or ()), *machine.STATE} - {"attached_to"}
        parts = {
            # Where the GPU is the same, so is the machine, whatever else an update tells of it.
            "machine's state": ("machine", sorted(of_machine) if units else machine.STATE),
            "kernel path": ("path", self.context.get("path") or ()),
        }
        alike, differences = {**context}, {}
        for name, (part, fields) in parts.items():
            before, now = (each.get(part) or {} for each in (self.context, context))
            alike[part] = {**now, **{key: before.get(key) for key in fields}}
            proven = {key: before[key] for key in fields if before.get(key) is not None}
            if text := _short(proven, {key: now.get(key) for key in proven}):
                differences[name] = text
        return {} if self.unlike(alike) else differences

    @property
    def baseline(self) -> "StoredRun":
        """The run with the metrics that others can be compared with."""
        if self.rates_unfit is None:
            return self
        counted = {n: metric for n, metric in self.metrics.items() if metric.unit in COUNTED}
        return replace(self, metrics=counted)

    @functools.cached_property
    def failures(self) -> Mapping[str, TestReport]:
        """What may be known of it: failures of tests that nothing else excused."""
        return {
            test.id: test
            for test in self.file.tests
            if test.verdict is Verdict.FAIL
            and not (test.skipped or test.waived or test.tolerated == "listed")
            and not (test.is_beside or test.is_of_option)
        }


def folder_of(path: Path) -> Path:
    """The report directory that a path names, which may be its verdict.json."""
    return path.parent if path.name == verdict_file.NAME and not path.is_dir() else path


def of_report(run: VerdictFile, known: Details) -> StoredRun:
    """A run from its verdict.json and the samples of its details.json. A metric that counts neither
    way, or that has no samples, is left out."""
    metrics = {
        name: StoredMetric.of(name, metric.value, metric, known.samples[name])
        for name, metric in run.metrics.items()
        if metric.value is not None
        and metric.verdict in (Verdict.PASS, Verdict.FAIL)
        and name in known.samples
        and known.samples[name].samples
    }
    rates_unfit = None
    if run.box.state == BoxState.DEGRADED:
        rates_unfit = printable(f"its box was DEGRADED: {run.box.reason}")
    stored = StoredRun(
        name=printable(f"the run of {run.started}"),
        file=run,
        metrics=metrics,
        rates_unfit=rates_unfit,
    )
    return replace(stored, unfit=tuple(_unfit(stored)))


def _unfit(stored: StoredRun) -> Iterator[str]:
    """Why no run can be compared with this one, the most telling first."""
    run, metrics = stored.file, stored.baseline.metrics
    if run.schema_version > verdict_file.SCHEMA_VERSION:
        yield f"its schema {run.schema_version} is of a later version of the suite"
    if not run.finished:
        yield f"it has not finished ({run.reason})"
    if (changed := contradiction(run)) is not None:
        yield f"it was changed after it was written: {changed}"
    if run.fingerprint is None:
        yield "it does not say what was asked (it is of an earlier version)"
    if run.shard is not None:
        yield f"it is shard {run.shard.index} of {run.shard.of}"
    if run.crashes:
        yield f"something crashed in it: {run.crashes[0].summary}"
    for test in run.tests:
        if test.is_beside and test.counted is Verdict.FAIL:
            yield f"{test.id}: {test.message}"
    if not any(test.executed for test in run.tests):
        yield "no test of a level was executed in it"
    smoke = [test for test in run.tests if test.level == LEVELS[0]]
    failed = [test.id for test in smoke if test.counted is Verdict.FAIL]
    others = [test for test in run.tests if test.level != LEVELS[0]]
    if failed and others and not any(test.executed for test in others):
        yield f"its smoke level failed ({failed[0]}), and so nothing else was judged"
    yield from filter(None, (metric.why_no_number for metric in metrics.values()))
    for name, metric in run.metrics.items():
        if metric.value is None and metric.verdict is Verdict.PASS:
            yield f"its {name} has no value"
        counts = metric.value is not None and metric.verdict in (Verdict.PASS, Verdict.FAIL)
        is_baseline = stored.rates_unfit is None or metric.unit in COUNTED
        if counts and is_baseline and name not in metrics:
            yield f"{details.NAME} next to it has no samples of {name}"


def file_of(path: Path) -> VerdictFile:
    """Read the verdict.json of a stored run; every module reads it here.

    Args:
        path: A report directory, or its verdict.json.

    Returns:
        What the file has, of any version of the suite.

    Raises:
        UsageError: There is no verdict.json, or not a sound one.
    """
    directory = folder_of(path)
    try:
        return verdict_file.read(directory / verdict_file.NAME)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{directory}: expected a report directory with {verdict_file.NAME} ({error})"
        ) from error


def read(directory: Path) -> StoredRun:
    """The run of a report directory. Raises UsageError: it has no sound verdict.json."""
    return of_report(file_of(directory), details.read(directory))


def storage_folder(storage: str, root: Path) -> Path:
    """The folder of ``--benchmark-storage``. Raises UsageError: a database cannot be read."""
    scheme, separator, rest = storage.partition("://")
    if separator and scheme != "file":
        raise UsageError(
            f"--benchmark-storage {storage}: the regression level reads files; expected file://PATH"
        )
    return (root / (rest if separator else storage)).resolve()


def load_benchmarks(storage: Path, pattern: str = "*") -> list[StoredRun]:
    """The runs of a storage folder that hold measurements, oldest first, of each Python's folder.
    `pattern`: ``0003`` for one run, ``FOLDER/0003``, or a file. Raises UsageError: none of
    pytest-benchmark's."""
    named, files = Path(pattern), f"{pattern.rstrip('*')}*.json"
    matches = storage.glob(files if "/" in pattern else f"*/{files}")
    runs = map(read_benchmarks, [named] if named.is_file() else matches)
    return sorted(filter(None, runs), key=lambda run: (run.file.started, run.name))


def read_benchmarks(file: Path) -> StoredRun | None:
    """One file of pytest-benchmark; None when it holds no measurement of this suite. Raises
    UsageError: it is not a file of pytest-benchmark."""
    try:
        return of_data(file.name, json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file}: expected a file of pytest-benchmark ({error!r})") from error


def of_data(name: str, data: Mapping[str, Any]) -> StoredRun | None:
    """The same of such a file's data. Raises KeyError, TypeError, ValueError: it is none."""
    benchmarks = [benchmark["extra_info"] for benchmark in data["benchmarks"]]
    return of_benchmarks(name, str(data.get("datetime", "")), benchmarks)


def of_benchmarks(run: str, when: str, benchmarks: Iterable[Mapping[str, Any]]) -> StoredRun | None:
    """A run from the ``extra_info`` of its benchmarks; None without a value of this suite. Raises
    KeyError, TypeError, ValueError: a benchmark says too little, or what is no value."""
    extras = [extra for extra in benchmarks if "sm121" in extra]
    boxes = [(extra.get("box") or {}).get("state") for extra in extras]
    reasons = ["its box was DEGRADED"] if BoxState.DEGRADED in boxes else []
    reports: dict[str, MetricReport] = {}
    metrics: dict[str, StoredMetric] = {}
    for extra in extras:
        name = str(extra["metric"])
        report = reports[name] = _report(extra)
        if (ended := extra.get("run", "PASS")) != "PASS":
            reasons.append(f"the run was {ended}")
        if report.value is None:
            reasons.append(f"its {name} has no value")
            continue
        metric = StoredMetric.of(name, report.value, report, details.samples_of(extra))
        metrics[name] = replace(metric, test=extra.get("test"))
        if report.verdict is not Verdict.PASS:
            reasons.append(f"its {name} was {report.verdict}")
        if why := metrics[name].why_no_number:
            reasons.append(why)
    if not metrics:
        return None
    last = extras[-1]
    context = {key: last.get(key) for key in ("machine", *_SAME, *_CONTEXT)}
    engine, fingerprint = last.get("engine") or {}, last.get("fingerprint")
    file = VerdictFile(
        arch=None,
        profile=str(last.get("profile")),
        started=when,
        engine=EngineReport(
            name=str(engine.get("name", "unknown")),
            version=engine.get("version"),
            managed=False,
            model=str(last.get("model", "")),
        ),
        metrics=reports,
        fingerprint=lenient.validate(Fingerprint, fingerprint) if fingerprint else None,
    )
    return StoredRun(run, file, metrics, context, tuple(dict.fromkeys(reasons)))


def _report(extra: Mapping[str, Any]) -> MetricReport:
    samples = extra["samples"]
    low = high = None
    if extra.get("quantile") is None and samples and not any(map(math.isnan, samples)):
        estimate = statistics.estimate(samples)
        low, high = estimate.ci_low, estimate.ci_high
    return MetricReport(
        value=extra.get("value"),
        unit=str(extra["unit"]),
        ci_low=low,
        ci_high=high,
        rounds=len(samples),
        starts=1,
        clock=extra.get("clock"),
        case=extra.get("case"),
        accepted_length=(extra.get("extra") or {}).get("mean_accepted_length"),
        texts=(extra.get("extra") or {}).get("texts"),
        roofline=extra.get("roofline"),
        bytes_per_token=extra.get("bytes_per_token"),
        verdict=Verdict(extra.get("verdict", Verdict.NOT_RUN)),
    )


def _short(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
        return ", ".join(f"{key} {one.get(key)!r}, now {other.get(key)!r}" for key in keys)
    return f"{one!r}, now {other!r}"
