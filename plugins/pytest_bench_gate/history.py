"""Read the stored runs with which a run is compared from the storage of pytest-benchmark."""

import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: The key of a metric in the ``extra_info`` of a benchmark.
KEY = "bench_gate"
#: The version of the format that is stored under that key.
VERSION = 1
OPTION = "--benchmark-compare"
_STORE = "Store one first, of a build that you trust: pytest --benchmark-autosave"
#: The keys of ``machine_info`` that are not compared, because they can change on one machine, or
#: because the run measures the effect of this difference.
_NOT_THE_MACHINE = ("node", "release", "processor")
#: Keys of the CPU's description in ``machine_info`` that are constant on one machine.
_OF_THE_PROCESSOR = ("arch", "brand_raw", "count")
#: The option that names the stored run, if it is not `OPTION`.
OPTION_OF = pytest.StashKey[str]()
#: Ids of the tests that ``-k``, ``-m`` and other options deselected.
DESELECTED = pytest.StashKey[set[str]]()
#: Whether ``--lf`` deselected tests. pytest does not report which tests.
LAST_FAILED = pytest.StashKey[bool]()
#: The ``machine_info`` of this run, kept because pytest-benchmark takes a second to collect it.
MACHINE = pytest.StashKey[Mapping[str, Any]]()


@dataclass(frozen=True)
class StoredMetric:
    """A metric in a stored run."""

    #: The name of the run.
    run: str
    metric: str
    unit: str
    higher_is_better: bool
    value: float
    ci_low: float
    ci_high: float
    #: The id of the metric's test.
    test: str

    @property
    def kind(self) -> str:
        """The unit and the better direction, as text."""
        return kind(self.unit, self.higher_is_better)


@dataclass(frozen=True)
class StoredRun:
    """A stored run with metrics that were judged by gates."""

    #: The run's number. If the file name has no number, its stem.
    name: str
    file: str
    #: The run's metrics; the keys are their names.
    metrics: Mapping[str, StoredMetric]
    #: The selection of the run: its paths, ``-k`` and ``-m``.
    asked: tuple[str, ...]
    #: The properties of the machine that two comparable runs must share.
    machine: Mapping[str, Any]
    #: Why this run must not be used for comparisons; None if it may be used.
    unfit: str | None = None

    def why_not(self, machine: Mapping[str, Any]) -> str | None:
        """Return why a run on another machine cannot be compared with this one; None if it can.

        Args:
            machine: The properties of the other run's machine.
        """
        if self.unfit is not None:
            return self.unfit
        for name in dict.fromkeys([*self.machine, *machine]):
            before = self.machine.get(name)
            now = machine.get(name)
            if before != now:
                return f"it was made on another machine ({name} {before!r}, now {now!r})"
        return None


@dataclass(frozen=True)
class History:
    """The stored runs with which this run is compared (at least one), the oldest one first."""

    runs: Sequence[StoredRun]

    def find(self, metric: str) -> StoredMetric | None:
        """Return a metric from the latest stored run that has it; None if none has it.

        Args:
            metric: The metric's name.
        """
        for run in reversed(self.runs):
            if metric in run.metrics:
                return run.metrics[metric]
        return None

    def missing(self, config: pytest.Config, measured: Mapping[str, object]) -> list[StoredMetric]:
        """Return the metrics of an earlier run that this run should have measured, but did not.

        The earlier run is the latest stored run with the same paths, ``-k`` and ``-m``. If there is
        none, it is the latest run. Metrics of deselected tests do not count as missing. With
        ``--lf``, metrics count as missing only if no test had failed before, because all tests run
        in this case.

        Args:
            config: The configuration of the run.
            measured: This run's metrics; the keys are their names.
        """
        same = [run for run in self.runs if run.asked == asked(config)]
        latest = (same or self.runs)[-1]
        missing = []
        for name, metric in latest.metrics.items():
            if name not in measured and _is_selected(config, metric.test):
                missing.append(metric)
        return missing


def kind(unit: str, higher_is_better: bool) -> str:
    """Return the unit and the better direction as text.

    Args:
        unit: The unit; empty if the metric has none.
        higher_is_better: Whether higher is better.
    """
    direction = "higher" if higher_is_better else "lower"
    return f"{unit or 'no unit'}, {direction} is better"


def load(config: pytest.Config) -> History | None:
    """Read the stored runs that ``--benchmark-compare`` selects.

    Args:
        config: The configuration of the run.

    Returns:
        The runs; None if the option is not given, or if no stored run has a metric with a gate.

    Raises:
        pytest.UsageError: None of the runs is comparable with this one.
    """
    named = config.getoption("benchmark_compare", None)
    session = getattr(config, "_benchmarksession", None)
    if session is None or named in (None, [], ""):
        return None
    stored = session.storage.load() if named is True else session.storage.load(str(named))
    runs = []
    for path, data in stored:
        run = _run(str(path), data)
        if run is not None:
            runs.append(run)
    if not runs:
        return None
    machine = machine_of(config.stash.get(MACHINE, {}) or session.get_machine_info())
    comparable = [run for run in runs if run.why_not(machine) is None]
    if not comparable:
        latest = runs[-1]
        raise pytest.UsageError(
            f"{option(config)}: expected a comparable stored run, got none of {len(runs)}; "
            f"{latest.file}: {latest.why_not(machine)}. {_STORE}"
        )
    return History(comparable if named is True else comparable[-1:])


def require(config: pytest.Config) -> None:
    """Before any test runs, reject the requested comparison, because no stored run has gates.

    Args:
        config: The configuration of a run that has a test with a gate.

    Raises:
        pytest.UsageError: Always. The message explains how to store a run.
    """
    named = config.getoption("benchmark_compare", None)
    storage = config._benchmarksession.storage  # type: ignore[attr-defined]
    if named is True:
        raise pytest.UsageError(
            f"{option(config)}: expected a stored run with gates in {storage}, got none. {_STORE}"
        )
    known = [run.name for run in map(_of_pair, storage.load()) if run is not None]
    there = f"the latest is {known[-1]}" if known else "it has none"
    name = option(config)
    raise pytest.UsageError(
        f"{name} {str(named)!r}: expected the number of a stored run with gates in {storage}, "
        f"{there}. The option takes the next word as its value: write paths first, or {name}=0001"
    )


def option(config: pytest.Config) -> str:
    """Return the option with which the user requested a comparison.

    Args:
        config: The configuration of the run.
    """
    return config.stash.get(OPTION_OF, OPTION)


def asked(config: pytest.Config) -> tuple[str, ...]:
    """Return the selection of a run: its paths relative to the root folder, ``-k`` and ``-m``.

    Args:
        config: The configuration of the run.
    """
    paths = []
    for argument in config.args:
        path, separator, name = argument.partition("::")
        relative = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
        paths.append(f"{relative}{separator}{name}")
    words = (config.getoption("keyword", ""), config.getoption("markexpr", ""))
    return (*sorted(paths), *words)


def machine_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a machine that two comparable runs must share.

    Args:
        info: The ``machine_info`` of pytest-benchmark, including keys that a project added.
    """
    machine = {}
    for name, value in info.items():
        if name == "cpu":
            for part in _OF_THE_PROCESSOR:
                machine[f"cpu {part}"] = (value or {}).get(part)
        elif name not in _NOT_THE_MACHINE and not name.startswith("python_"):
            machine[name] = value
    return machine


def _of_pair(pair: tuple[object, Mapping[str, Any]]) -> StoredRun | None:
    path, data = pair
    return _run(str(path), data)


def _run(path: str, data: Mapping[str, Any]) -> StoredRun | None:
    """Return a stored run; None if it has no metric with a gate."""
    stem = Path(path).stem
    number = stem.partition("_")[0]
    name = number if number.isdecimal() else stem
    try:
        stored = [
            benchmark["extra_info"][KEY]
            for benchmark in data["benchmarks"]
            if KEY in benchmark.get("extra_info", ())
        ]
        if not stored:
            return None
        metrics, unfit = _metrics(name, stored)
        asked_for = tuple(stored[-1]["asked"])
        return StoredRun(name, path, metrics, asked_for, machine_of(data["machine_info"]), unfit)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise pytest.UsageError(
            f"{path}: expected what pytest_bench_gate stores, got {error!r}. "
            "Remove the file, or name another one"
        ) from error


def _metrics(
    name: str, stored: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, StoredMetric], str | None]:
    """Return a run's metrics, and why the run must not be used for comparisons (None: it may)."""
    metrics = {}
    unfit: str | None = None
    for entry in stored:
        if entry["version"] != VERSION:
            raise ValueError(f"version {entry['version']}")
        if not entry["passed"]:
            unfit = "it did not pass"
        numbers = [entry[each] for each in ("value", "ci_low", "ci_high")]
        if any(number is None or not 0.0 < number < math.inf for number in numbers):
            unfit = unfit or f"its {entry['metric']} has no interval of positive numbers"
            numbers = [math.nan] * 3
        value, low, high = map(float, numbers)
        metrics[str(entry["metric"])] = StoredMetric(
            run=name,
            metric=str(entry["metric"]),
            unit=str(entry["unit"]),
            higher_is_better=bool(entry["higher_is_better"]),
            value=value,
            ci_low=low,
            ci_high=high,
            test=str(entry["test"]),
        )
    return metrics, unfit


def _is_selected(config: pytest.Config, test: str) -> bool:
    """Whether the selection of this run includes a test. The test may no longer exist."""
    if test in config.stash.get(DESELECTED, ()):
        return False
    if config.stash.get(LAST_FAILED, False):
        return False
    if _is_ignored(config, test):
        return False
    if config.getoption("pyargs", False):
        return True
    return any(_covers(config, argument, test) for argument in config.args)


def _is_ignored(config: pytest.Config, test: str) -> bool:
    """Whether ``--ignore`` or ``--ignore-glob`` excludes the file of a test."""
    folder = config.invocation_params.dir
    ignored = [(folder / path).resolve() for path in config.getoption("ignore") or ()]
    patterns = [str(folder / pattern) for pattern in config.getoption("ignore_glob") or ()]
    file = (config.rootpath / test.partition("::")[0]).resolve()
    for path in (file, *file.parents):
        if path in ignored or any(fnmatch.fnmatch(str(path), pattern) for pattern in patterns):
            return True
    return False


def _covers(config: pytest.Config, argument: str, test: str) -> bool:
    path, _, name = argument.partition("::")
    file, _, function = test.partition("::")
    wanted = (config.invocation_params.dir / path).resolve()
    if not (config.rootpath / file).resolve().is_relative_to(wanted):
        return False
    return not name or function == name or function.startswith((f"{name}::", f"{name}["))
