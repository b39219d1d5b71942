"""Reads an earlier run from its report directory.

``--against``, the regression level, ``sm121 compare`` and ``sm121 trust`` use this module.
`sm121.run.stored_benchmarks` reads the runs that pytest-benchmark has stored.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.core.errors import UsageError
from sm121.core.files import cause_of
from sm121.core.level_settings import PRICES
from sm121.core.metric_name import without_depth
from sm121.core.printable import printable
from sm121.core.profile_fields import FULL, LEVELS
from sm121.core.verdict import Verdict
from sm121.machine import this_machine
from sm121.machine.box import BoxState
from sm121.measure.measurement import COUNTED
from sm121.run import details, events, fold, verdict_file
from sm121.run.details import Details, Samples
from sm121.run.fold import Fold
from sm121.run.merge import contradiction, merge_shards
from sm121.run.verdict_file import MetricReport, TestReport, VerdictFile

#: The folder with the parts of a run that had several processes.
WORKERS = "workers"
#: The fields of pytest-benchmark's machine info that must be equal to compare two runs, with the
#: names that messages use.
CONTEXT = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["stored"]
#: Fields that must be equal only if both runs have them.
SAME_REQUESTS = ("gpu_units", "path_requests")


#: The name of a file of pytest-benchmark: its number and the commit.
_NUMBERED = re.compile(r"(?P<number>\d+)_")


def short_name(name: str) -> str:
    """Return the number of a stored file of pytest-benchmark, such as ``0001``.

    Args:
        name: The name of the file.

    Returns:
        The number; the whole name if it begins with no number.
    """
    numbered = _NUMBERED.match(name)
    return name if numbered is None else numbered["number"]


@dataclass(frozen=True)
class StoredMetric:
    """One metric of one run. ``unit`` is the unit of its samples."""

    name: str
    unit: str
    higher_is_better: bool
    #: The quantile of a percentile; None for a median.
    quantile: float | None
    samples: tuple[float, ...]
    value: float
    #: The tokens per step with speculative decoding; None without it.
    accepted_length: float | None = None
    #: The fixed prompts for a server with speculative decoding; empty if prompts were random.
    texts: tuple[str, ...] = ()
    #: The kernel case with its sizes, if the metric is a kernel's time; None for other metrics.
    case: str | None = None
    #: The id of the test that measured the metric; None if it is not known.
    test: str | None = None
    #: The decode rate as a fraction of the bound by memory bandwidth; None if it is not known.
    roofline: float | None = None
    #: The number of bytes that the engine reads for one token; None if it is not known.
    bytes_per_token: float | None = None

    @property
    def of_bound(self) -> str:
        """Text to append to a rate: its fraction of the bandwidth bound; empty if unknown."""
        if not self.roofline or not self.bytes_per_token:
            return ""
        return f" ({self.roofline:.0%} of the bound of {self.bytes_per_token / 1e9:.3g} GB a token)"

    @property
    def why_no_number(self) -> str | None:
        """Why the metric cannot be a baseline (a value is 0, or not finite); None if it can."""
        is_price = without_depth(self.name) in PRICES
        may_be_0 = is_price or self.unit not in ("tok/s", "ms", "µs", "s", "GiB")
        values = (self.value, *self.samples)
        are_finite = all(math.isfinite(value) for value in values)
        if are_finite and (may_be_0 or min(values) > 0.0):
            return None
        return f"its {self.name} contains a 0, or a value that is not a number"

    @property
    def kind(self) -> str:
        """The measured quantity in words. Values of different quantities are not comparable."""
        parts = list(self.texts)
        if self.case is not None:
            parts.append(self.case)
        direction = "higher" if self.higher_is_better else "lower"
        kind = f"{self.unit}, {direction} is better"
        return f"{kind}, of {', '.join(parts)}" if parts else kind

    @classmethod
    def of(cls, name: str, value: float, metric: MetricReport, samples: Samples) -> "StoredMetric":
        """Make a metric from its entry in verdict.json and its samples.

        Args:
            name: The name of the metric.
            value: The value in the metric's unit.
            metric: The metric's entry in verdict.json.
            samples: The samples of the metric.
        """
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
    """One run with its metrics."""

    name: str
    #: The verdict file of the run. For a file of pytest-benchmark, it has only the fields that this
    #: file contains.
    file: VerdictFile
    #: The valid metrics with samples, by name.
    metrics: Mapping[str, StoredMetric]
    #: The machine info in a file of pytest-benchmark; comparable runs have the same.
    context: Mapping[str, Any] = field(default_factory=dict)
    #: The reasons why the run cannot be a baseline, one phrase each; empty if it can.
    unfit: tuple[str, ...] = ()
    #: The reason why the run's rates and times (but not its answers) cannot be a baseline; None if
    #: they can.
    rates_unfit: str | None = None

    @property
    def short_name(self) -> str:
        """The number of a file of pytest-benchmark, such as ``0001``, or the whole name."""
        return short_name(self.name)

    @property
    def plan(self) -> str:
        """The name of the plan of the run."""
        return _plan_of(self.context)

    def find(self, metric: StoredMetric) -> StoredMetric | None:
        """Return the same metric of this run.

        Args:
            metric: A metric of another run.

        Returns:
            The metric of this run. None if it was not measured, or if it is the time of a kernel
            with other sizes.
        """
        stored = self.metrics.get(metric.name)
        if stored is None or stored.case != metric.case:
            return None
        return stored

    def unlike(self, context: Mapping[str, Any]) -> list[str]:
        """Return why this run cannot be the baseline of another run.

        Args:
            context: The machine info of the other run.

        Returns:
            The reasons, one phrase each.
        """
        reasons = list(self.unfit)
        apart = this_machine.differences(
            self.context.get("machine") or {}, context.get("machine") or {}
        )
        units_here = _gpu_units(self.context)
        units_there = _gpu_units(context)
        if any(units_here) and any(units_there) and units_here != units_there:
            apart.append(f"GPU {units_here} and {units_there}")
        if apart:
            reasons.append(f"another machine ({'; '.join(apart)})")
        for key, name in CONTEXT.items():
            here = self.context.get(key)
            there = context.get(key)
            if here == there:
                continue
            now = _plan_of(context)
            if key == "plan" and self.plan != now:  # another plan also has other sizes
                reasons.append(f"the plan was {self.plan}, now {now}; add --plan {self.plan}")
            else:
                reasons.append(f"{name} was {_difference(here, there)}")
        return reasons

    def changed(self, context: Mapping[str, Any]) -> dict[str, str]:
        """Return how a later run differs, if only the machine's state and the kernel path differ.

        Args:
            context: The machine info of the later run.

        Returns:
            The differences by name: ``machine's state`` and ``kernel path``. Empty if anything else
            differs.
        """
        for key in SAME_REQUESTS:
            if self.context.get(key) not in (None, context.get(key)):
                return {}
        alike = dict(context)
        differences = {}
        parts = {
            "machine's state": ("machine", self._state_fields),
            "kernel path": ("path", list(self.context.get("path") or ())),
        }
        for name, (part, fields) in parts.items():
            before = self.context.get(part) or {}
            now = context.get(part) or {}
            alike[part] = {**now, **{key: before.get(key) for key in fields}}
            proven = {key: before[key] for key in fields if before.get(key) is not None}
            text = _difference(proven, {key: now.get(key) for key in proven})
            if text:
                differences[name] = text
        return {} if self.unlike(alike) else differences

    @property
    def _state_fields(self) -> list[str]:
        """The fields of the machine info that an update of the machine may change.

        Two runs with the same GPU are from the same machine, even if these fields differ.
        """
        if not any(_gpu_units(self.context)):
            return list(this_machine.STATE)
        fields = {*(self.context.get("machine") or ()), *this_machine.STATE}
        return sorted(fields - {"attached_to"})

    @property
    def baseline(self) -> "StoredRun":
        """This run without the metrics that cannot be a baseline."""
        if self.rates_unfit is None:
            return self
        counted = {name: metric for name, metric in self.metrics.items() if metric.unit in COUNTED}
        return replace(self, metrics=counted)

    @functools.cached_property
    def failures(self) -> Mapping[str, TestReport]:
        """The failed tests by id, without failures that a waiver or the profile excuses."""
        failures = {}
        for test in self.file.tests:
            is_excused = test.skipped or test.waived or test.tolerated == "listed"
            is_of_test = not (test.has_no_test or test.is_of_option)
            if test.verdict is Verdict.FAIL and is_of_test and not is_excused:
                failures[test.id] = test
        return failures


def folder_of(path: Path) -> Path:
    """Return the report directory that a path names.

    Args:
        path: A report directory, or its verdict.json.
    """
    if path.name == verdict_file.NAME and not path.is_dir():
        return path.parent
    return path


def of_report(run: VerdictFile, known: Details) -> StoredRun:
    """Make a stored run from its verdict.json and its details.json.

    Metrics without samples are left out. So are metrics with a verdict other than PASS and FAIL.

    Args:
        run: The run's verdict.json.
        known: The run's details.json.
    """
    metrics = {}
    for name, metric in run.metrics.items():
        samples = known.samples.get(name)
        if samples is None or not samples.samples or metric.value is None:
            continue
        if metric.verdict in (Verdict.PASS, Verdict.FAIL):
            metrics[name] = StoredMetric.of(name, metric.value, metric, samples)
    rates_unfit = None
    if run.box.state == BoxState.DEGRADED:
        rates_unfit = printable(f"its machine was DEGRADED: {run.box.reason}")
    stored = StoredRun(
        name=printable(f"the run of {run.started}"),
        file=run,
        metrics=metrics,
        rates_unfit=rates_unfit,
    )
    return replace(stored, unfit=tuple(_unfit(stored)))


def _unfit(stored: StoredRun) -> Iterator[str]:
    """Yield the reasons why a run cannot be a baseline, the most important one first."""
    run = stored.file
    if run.schema_version > verdict_file.SCHEMA_VERSION:
        yield f"its schema {run.schema_version} is of a later version of the suite"
    if not run.finished:
        yield f"it has not finished ({run.reason})"
    changed = contradiction(run)
    if changed is not None:
        yield f"it was changed after it was written: {changed}"
    has_any = any(test.executed for test in run.tests)
    if not has_any:
        yield "no test of a level was executed in it"
    if run.fingerprint is None and has_any:
        yield "it has no record of its settings (an earlier version wrote it)"
    if run.shard is not None:
        yield f"it is shard {run.shard.index} of {run.shard.of}"
    if run.crashes:
        yield f"a process crashed in it: {run.crashes[0].summary}"
    yield from _unfit_tests(run)
    yield from _unfit_metrics(stored)


def _unfit_tests(run: VerdictFile) -> Iterator[str]:
    """Yield the reasons in a run's tests why it cannot be a baseline."""
    for test in run.tests:
        if test.has_no_test and test.counted is Verdict.FAIL:
            yield f"{test.id}: {test.message}"
    smoke = [test for test in run.tests if test.level == LEVELS[0]]
    others = [test for test in run.tests if test.level != LEVELS[0]]
    failed = [test.id for test in smoke if test.counted is Verdict.FAIL]
    if failed and others and not any(test.executed for test in others):
        yield f"its smoke level failed ({failed[0]}), so nothing else was judged"


def _unfit_metrics(stored: StoredRun) -> Iterator[str]:
    """Yield the reasons in a run's metrics why it cannot be a baseline."""
    metrics = stored.baseline.metrics
    for metric in metrics.values():
        if metric.why_no_number is not None:
            yield metric.why_no_number
    for name, report in stored.file.metrics.items():
        if report.value is None and report.verdict is Verdict.PASS:
            yield f"its {name} has no value"
        counts = report.value is not None and report.verdict in (Verdict.PASS, Verdict.FAIL)
        is_baseline = stored.rates_unfit is None or report.unit in COUNTED
        if counts and is_baseline and name not in metrics:
            yield f"{details.NAME} next to it has no samples of {name}"


def file_of(path: Path) -> VerdictFile:
    """Read the verdict file of a stored run. All modules use this function.

    verdict.json is complete only after the end of a run. For a run that is in progress or was
    killed, the file is computed from the events. If a run with several processes was killed, it
    has no verdict.json, and its parts are merged.

    Args:
        path: A report directory, or its verdict.json.

    Returns:
        The file. It may have been written by any version of the suite.

    Raises:
        UsageError: There is no verdict.json, or it is damaged, or the events of an unfinished run
            cannot be read.
    """
    directory = folder_of(path)
    stream = directory / events.NAME
    try:
        file = verdict_file.read(directory / verdict_file.NAME)
        if file.finished or not stream.is_file():
            return file
    except (OSError, ValueError, RecursionError) as error:
        parts = parts_of(directory)
        if parts:
            return _unjoined(parts)
        if not stream.is_file():
            raise UsageError(
                f"{directory}: expected a report directory with {verdict_file.NAME}, got: "
                f"{cause_of(error)}. Name the folder of a run's --report-dir."
            ) from error
    state = _replayed(directory)
    state.settle()
    return state.file


def has_its_verdict(directory: Path) -> bool:
    """Whether the verdict.json of a run contains the end of the run.

    A process may be killed between the last event of its run and the writing of verdict.json.

    Args:
        directory: The report directory.
    """
    try:
        return verdict_file.read(directory / verdict_file.NAME).finished
    except (OSError, ValueError, RecursionError):
        return False


def _unjoined(parts: dict[str, VerdictFile]) -> VerdictFile:
    """Merge the parts of a run whose first process ended before it merged them.

    Such a run has no verdict on the machine and its kernel messages, and no comparison with other
    runs.
    """
    whole = merge_shards(parts)
    whole.finished = False
    whole.judge()
    whole.reason = whole.why()
    return whole


def parts_of(directory: Path) -> dict[str, VerdictFile]:
    """Read the parts of a run with several processes.

    Args:
        directory: The report directory of the whole run.

    Returns:
        The verdict files by their folders in the directory. A process that died before it opened
        its part has no file.
    """
    parts = {}
    for folder in sorted((directory / WORKERS).glob("*")):
        with contextlib.suppress(UsageError):
            parts[f"{WORKERS}/{folder.name}"] = file_of(folder)
    return parts


def details_of(path: Path) -> Details:
    """Read details.json of a stored run, or compute it from the events.

    Args:
        path: A report directory, or its verdict.json.

    Returns:
        The content of details.json, which is written at the end of a run. Without this file, the
        content is computed from the events. Empty without both.
    """
    directory = folder_of(path)
    if not (directory / details.NAME).is_file() and (directory / events.NAME).is_file():
        try:
            return _replayed(directory).details
        except UsageError:
            return Details()
    return details.read_details(directory)


def _replayed(directory: Path) -> Fold:
    """Compute the state of a run from the events in its report directory."""
    try:
        return fold.replay(events.read_events(directory / events.NAME).events)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{directory}: expected the events of a run, got: {cause_of(error)}"
        ) from error


def read_run(directory: Path) -> StoredRun:
    """Read the run of a report directory.

    Args:
        directory: The report directory.

    Raises:
        UsageError: There is no verdict.json, or it is damaged.
    """
    return of_report(file_of(directory), details_of(directory))


def _plan_of(context: Mapping[str, Any]) -> str:
    """Return the name of the plan in the machine info of a run; it contains no full plan."""
    plan: str = (context.get("plan") or {}).get("plan", FULL)
    return plan


def _gpu_units(context: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the serial numbers of the GPUs in a machine info."""
    return tuple(context.get("gpu_units") or ())


def _difference(before: Any, now: Any) -> str:
    """Return the difference of two values as text; for tables, the keys that differ."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"{before!r}, now {now!r}"
    parts = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            parts.append(f"{key} {before.get(key)!r}, now {now.get(key)!r}")
    return ", ".join(parts)
