"""Handles pytest-benchmark's options in a run of the levels.

If ``--benchmark-compare`` names no stored run, the run is refused before a server starts. Otherwise
the suite, and not pytest-benchmark, judges the comparison.
"""

import importlib.util
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_bench_gate import requests
from sm121.core.errors import UsageError
from sm121.core.unmet import Fact, Unmet, facts_of
from sm121.core.verdict import NotRun, Undecided, Verdict
from sm121.plugin import compared_run, held_output, selection, shards, workers
from sm121.plugin.benchmarks import HISTORY, history_of
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.regression.measured import MeasuredHistory, NothingComparable
from sm121.run import stored_benchmarks, stored_run
from sm121.run.events import Decided
from sm121.run.verdict_file import TestReport
from sm121.session.session import Session

_COMPARE = "--benchmark-compare"
_FAIL = "--benchmark-compare-fail"
_NOTHING = "nothing was compared"
#: Options that add a run to the storage, by their names in pytest's configuration.
_SAVING = ("benchmark_save", "benchmark_autosave")
#: All options that store a run.
_STORING = (*_SAVING, "benchmark_json")
#: The values by which pytest-benchmark can group; ``param:NAME`` is valid, too.
_GROUPS = frozenset({"group", "name", "func", "fullname", "fullfunc", "param"})
#: The beginning of pytest-benchmark's warning that there is no stored run.
_NOTHING_TO_COMPARE = "Can't compare. No benchmark files"
#: The beginning of pytest-benchmark's warning about a file that it cannot read.
_UNREADABLE = "Failed to load "
#: An error that pytest-benchmark raised while it stored or compared.
_BROKEN = pytest.StashKey[str]()


def is_asked(config: pytest.Config) -> bool:
    """Whether ``--benchmark-compare`` or ``--benchmark-compare-fail`` requests a comparison.

    Args:
        config: The configuration of pytest.
    """
    return _given(config, "benchmark_compare") or _given(config, "benchmark_compare_fail")


def refuse_what_crashes(config: pytest.Config) -> None:
    """Refuse option values with which pytest-benchmark would end with a traceback.

    Args:
        config: The configuration of pytest, before pytest-benchmark has read its options.

    Raises:
        UsageError: The name of the storage or of the run is not valid for pytest-benchmark.
    """
    try:
        requests.refuse_what_crashes(config)
    except pytest.UsageError as error:
        raise UsageError(str(error)) from error
    # Suppress these warnings, because `refuse` reports the problem in one line. For benchmarks
    # outside the levels, a warning is printed after the collection.
    for beginning in (_NOTHING_TO_COMPARE, _UNREADABLE):
        warnings.filterwarnings("ignore", message=beginning)
    named = config.getoption("benchmark_compare", None)
    if isinstance(named, str) and _is_path_of_tests(config.invocation_params.dir, named):
        raise UsageError(requests.no_run(_COMPARE, named))
    held_output.silence_benchmarks(config)


def refuse_beside_workers(config: pytest.Config) -> None:
    """Refuse a comparison with ``-n``.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: An option requests a comparison, and there are workers.
    """
    if workers.is_parallel(config) and is_asked(config):
        asked = _FAIL if _given(config, "benchmark_compare_fail") else _COMPARE
        raise UsageError(
            f"{asked} with -n: the suite measures no times while other workers run. Leave out -n."
        )


def store_nothing(config: pytest.Config) -> None:
    """Keep pytest-benchmark from storing a refused run, which would only print a warning.

    Args:
        config: The configuration of pytest; without pytest-benchmark, nothing is changed.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is not None:
        benchmarks.save = benchmarks.autosave = benchmarks.json = None


def refuse(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Refuse a comparison without a stored run, and paths that cannot be written, before a start.

    Args:
        config: The configuration of pytest, after pytest-benchmark has read its options.
        items: The selected tests. Without a test of a level nothing is refused, because the options
            then belong to benchmarks outside the suite.

    Raises:
        UsageError: An option names a run or path that does not exist, options contradict each
            other, or pytest-benchmark is not loaded.
    """
    has_levels = any(LEVEL in item.stash for item in items)
    is_loaded = hasattr(config.option, "benchmark_storage")
    if has_levels and not is_loaded:
        raise UsageError(
            "pytest-benchmark: expected this plugin, which the levels need, got none. Leave out "
            "-p no:benchmark, and PYTEST_DISABLE_PLUGIN_AUTOLOAD if it is set."
        )
    if not has_levels:
        _warn_of_nothing_to_compare(config)
        compared_run.name_files(config)
        return
    folder = stored_benchmarks.storage_folder(
        config.getoption("benchmark_storage"), config.invocation_params.dir
    )
    _refuse_places(config, folder)
    _refuse_contradictions(config, items)
    if not is_asked(config):
        return
    compared = config.getoption("benchmark_compare")
    if compared == []:
        raise UsageError(f"{requests.FAIL_ALONE}.")
    foreign = any(_is_benchmark(item) and LEVEL not in item.stash for item in items)
    named = None if compared is True else str(compared)
    plan = config.stash[SETTINGS].plan
    if foreign:
        if any(_measures(item) for item in items):
            compared_run.refuse_other_plan(folder, named, plan)
        _warn_of_nothing_to_compare(config)
        if compared is not True:  # otherwise `decide` chooses the files, and names them
            compared_run.name_files(config)
    else:
        compared_run.refuse_missing(folder, named, plan)
    benchmarks = getattr(config, "_benchmarksession", None)
    compares_nothing = not getattr(benchmarks, "compared_mapping", None)
    if _given(config, "benchmark_compare_fail") and compares_nothing:
        raise UsageError(
            f"{_FAIL}: expected a run that pytest-benchmark can read for this Python and machine, "
            f"got none in {folder}. Store one first: {compared_run.FIRST}"
        )


def _warn_of_nothing_to_compare(config: pytest.Config) -> None:
    """Print pytest-benchmark's warnings for other benchmarks, which were held back until now."""
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or not _given(config, "benchmark_compare"):
        return
    named = config.getoption("benchmark_compare")
    runs = () if named is True else (named,)
    list(benchmarks.storage.load(*runs))  # prints a warning for each unreadable file
    if not benchmarks.compared_mapping:
        benchmarks.logger.warning(f"{_NOTHING_TO_COMPARE} in {str(benchmarks.storage)!r}.")


def guard(config: pytest.Config, session: Session) -> None:
    """Catch errors of pytest-benchmark, so that the run is still judged and reported.

    Args:
        config: The configuration of pytest; without pytest-benchmark, nothing is changed.
        session: The run. It shows such an error at once.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None:
        return
    for name in ("finish", "display"):
        setattr(benchmarks, name, _guarded(config, session, getattr(benchmarks, name)))


def _guarded(config: pytest.Config, session: Session, step: Any) -> Any:
    def guarded(*arguments: object) -> None:
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - raised by another plugin; shown and judged
            line = session.run.record.redact(f"pytest-benchmark: {type(error).__name__}: {error}")
            config.stash[_BROKEN] = line
            session.run.record.say("benchmark", line)

    return guarded


def decide(config: pytest.Config, session: Session, items: Sequence[pytest.Item]) -> None:
    """Judge the comparison by ``--benchmark-compare-fail``, and by the checks that no test makes.

    Call this before pytest-benchmark stores the run. A shard without a benchmark of a level judges
    only its other benchmarks, by ``--benchmark-compare-fail``.

    Args:
        config: The configuration of pytest.
        session: The run. Its last test has ended.
        items: The selected tests.
    """
    run = session.run
    if not is_asked(config) or run.target.obstacle is not None:
        return
    is_shard = run.record.file.shard is not None
    is_left_to_others = is_shard and not any(_measures(item) for item in items)
    history = config.stash.setdefault(HISTORY, history_of(config, session))
    has_baseline = True
    if config.getoption("benchmark_compare") is True:
        if is_left_to_others:
            compared_run.compare_other_benchmarks(config, session)
        else:
            has_baseline = compared_run.compare_with_baseline(config, session, history)
    if _given(config, "benchmark_compare_fail"):
        whole = config.stash.get(shards.WHOLE, ())
        is_empty_allowed = is_left_to_others and any(_measures(item) for item in whole)
        _decide_checks(
            config, session, has_baseline=has_baseline, is_empty_allowed=is_empty_allowed
        )
    if is_left_to_others:
        return
    decided = set()
    for item in items:
        if _compares(item) and run.record.ledger[item.stash[ID]].executed:
            decided.add(selection.function_name(item))
    for judged in _judged(history, decided):
        name = f"{_COMPARE}::{judged.name}"
        decision = TestReport.of(name, "regression", *judged.facts, verdict=judged.verdict)
        run.record.emit(Decided(decision))


def decide_what_broke(config: pytest.Config, session: Session) -> None:
    """Judge an error that pytest-benchmark raised while it stored or compared the run.

    The regressions that it found are recorded already, so its summary does not need to raise them.

    Args:
        config: The configuration of pytest.
        session: The run.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    line = config.stash.get(_BROKEN, None)
    if line is not None:
        fact = Fact("a run that pytest-benchmark stores and compares", line)
        decision = TestReport.of("--benchmark::pytest-benchmark", "regression", fact)
        session.run.record.emit(Decided(decision))
    if benchmarks is not None:
        benchmarks.compare_fail = None
        benchmarks.performance_regressions = []


@dataclass(frozen=True)
class _Judged:
    """One check of the comparison, and its verdict."""

    name: str
    verdict: Verdict
    facts: list[Fact] = field(default_factory=list)


def _judged(history: MeasuredHistory, decided: Collection[str]) -> Iterator[_Judged]:
    """Make the checks of the comparison whose tests are not in `decided`; yield their results."""
    checks = {
        "test_no_metric_is_worse": history.compared,
        "test_no_level_came_down": history.levels_held,
    }
    for test, check in checks.items():
        if test in decided:
            continue
        name = test.removeprefix("test_").replace("_", " ")
        try:
            check()
        except NothingComparable as nothing:
            yield _Judged("compared", Verdict.INCONCLUSIVE, [nothing.fact])
            return
        except NotRun as reason:
            fact = Fact("a comparison with a stored run", str(reason))
            yield _Judged("compared", Verdict.INCONCLUSIVE, [fact])
            return
        except Undecided as error:
            yield _Judged(name, error.verdict, facts_of(error))
        except Unmet as error:
            yield _Judged(name, Verdict.FAIL, facts_of(error))
        else:
            yield _Judged(name, Verdict.PASS)


def _decide_checks(
    config: pytest.Config, session: Session, *, has_baseline: bool, is_empty_allowed: bool
) -> None:
    """Record a failure for each benchmark that ``--benchmark-compare-fail`` rejects.

    If nothing could be compared, this is a failure, too, unless `is_empty_allowed` is true because
    other shards have the benchmarks. `has_baseline` is false if there is no stored run; the
    regression level then reports this.
    """
    for number, regression in enumerate(_regressions(config, has_baseline=has_baseline)):
        if is_empty_allowed and regression.subject == _NOTHING:
            continue
        name = f"{_FAIL}::{regression.subject[:80]}"
        if name in session.run.record.ledger:  # two checks of the same benchmark
            name += f" #{number}"
        decision = TestReport.of(name, "regression", regression.fact)
        decision.metrics.extend(regression.metrics)
        session.run.record.emit(Decided(decision))


@dataclass(frozen=True)
class _Regression:
    """The failure of a benchmark that is worse, or the failure that nothing was compared."""

    subject: str
    fact: Fact
    #: The judged metric, if the benchmark is a measurement of the suite.
    metrics: tuple[str, ...] = ()


def _regressions(config: pytest.Config, *, has_baseline: bool) -> list[_Regression]:
    """Judge each benchmark by ``--benchmark-compare-fail``."""
    session = getattr(config, "_benchmarksession", None)
    ran = [each for each in session.benchmarks if each] if session is not None else []
    if session is None or not ran:
        line = f"{_FAIL} was given, but no benchmark ran, so nothing was compared"
        return [_Regression(_NOTHING, Fact("", line))]
    found = []
    compared = set()
    for benchmark in ran:
        for path, entries in session.compared_mapping.items():
            stored = entries.get(benchmark.fullname)
            if stored is None:
                continue
            compared.add(benchmark.fullname)
            for check in session.compare_fail:
                if check.fails(benchmark, stored["stats"]):
                    found.append(_regression(benchmark, stored, check, Path(str(path))))
    # A compared benchmark outside the levels does not replace those of the levels.
    required = [each for each in ran if compared_run.is_of_suite(each)] or ran
    if has_baseline and not any(each.fullname in compared for each in required):
        line = f"{_FAIL} was given, but the stored run has none of the {len(required)} benchmarks"
        found.append(_Regression(_NOTHING, Fact("", line)))
    return found


def _regression(benchmark: Any, stored: Any, check: Any, path: Path) -> _Regression:
    """Return the regression of a benchmark that a check of pytest-benchmark found."""
    about = benchmark.extra_info
    subject = benchmark.name
    metrics: tuple[str, ...] = ()
    if compared_run.is_of_suite(stored) and "metric" in about:
        subject = str(about["metric"])
        metrics = (subject,)
    is_time = about.get("unit", "s") in ("tok/s", "ms", "µs", "s")
    worse = "slower" if is_time else "worse"
    unit = "%" if type(check).__name__ == "PercentageRegressionCheck" else "s"
    run = stored_run.short_name(path.name)
    required = f"at most {check.threshold:g} {unit} {worse} than {run}"
    change = check.compute(benchmark, stored["stats"])
    fact = Fact(required, value=change, unit=unit, evidence=f"the {check.field}")
    return _Regression(subject, fact, metrics)


def _refuse_places(config: pytest.Config, folder: Path) -> None:
    """Raise UsageError for a folder or a file that cannot be written."""
    storage = config.getoption("benchmark_storage")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--benchmark-storage {storage}: expected a folder, got a file.")
    written = folder if folder.is_dir() else folder.parent
    if _given(config, *_SAVING) and not os.access(written, os.W_OK):
        raise UsageError(
            f"--benchmark-storage {storage}: expected a folder that can be written, got none at "
            f"{folder}. Name another one."
        )
    file = config.getoption("benchmark_json", None)
    if file is not None:
        _refuse_place_of_json(config.invocation_params.dir / file, file)
    if config.getoption("benchmark_histogram", []) and not importlib.util.find_spec("pygal"):
        raise UsageError(
            "--benchmark-histogram: expected pygal, which is not installed. "
            "Install pytest-benchmark[histogram]."
        )


def _refuse_place_of_json(path: Path, named: str) -> None:
    got: str | None = None
    if path.is_dir():
        got = "a folder"
    elif not path.parent.is_dir():
        got = f"no folder {path.parent}"
    if got is not None:
        raise UsageError(
            f"--benchmark-json {named}: expected a file in a folder that exists, got {got}."
        )


def _refuse_contradictions(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Raise UsageError if one option makes another option useless."""
    grouped = config.getoption("benchmark_group_by", "group").split(",")
    wrong = [each for each in grouped if each not in _GROUPS]
    if wrong:
        raise UsageError(
            f"--benchmark-group-by {wrong[0]}: expected one of {', '.join(sorted(_GROUPS))}: the "
            "tests of the levels have no parameter in common."
        )
    refuse_beside_workers(config)
    asked = _FAIL if _given(config, "benchmark_compare_fail") else _COMPARE
    is_parallel = workers.is_parallel(config)  # the suite itself has disabled the timing
    is_disabled = config.getoption("benchmark_disable", False) and not is_parallel
    if is_disabled and not config.getoption("benchmark_enable", False):
        for name in ("benchmark_compare", "benchmark_compare_fail", *_STORING):
            if _given(config, name):
                raise UsageError(
                    f"--benchmark-disable with --{name.replace('_', '-')}: expected one of them, "
                    "got both, and nothing would be timed. Leave out --benchmark-disable."
                )
    if not is_asked(config):
        return
    if config.getoption("benchmark_skip", False) and not config.getoption("benchmark_only", False):
        raise UsageError(
            f"--benchmark-skip with {asked}: expected one of them, got both, and nothing would be "
            "measured. "
            "Leave out --benchmark-skip."
        )
    if not any(_is_benchmark(item) for item in config.stash.get(shards.WHOLE, items)):
        raise UsageError(
            f"{asked}: expected a test that measures, none is selected. Add "
            "tests/test_performance.py, or leave out the option."
        )


def _is_path_of_tests(folder: Path, named: str) -> bool:
    """Return whether an option's value is a path of tests, which was not meant for the option."""
    path = Path(named.partition("::")[0])
    return "::" in named or path.suffix == ".py" or (folder / path).is_dir()


def _given(config: pytest.Config, *names: str) -> bool:
    return any(config.getoption(name, None) not in (None, [], False) for name in names)


def _is_benchmark(item: pytest.Item) -> bool:
    return "benchmark" in getattr(item, "fixturenames", ())


def _measures(item: pytest.Item) -> bool:
    """Whether a test belongs to a level and is a benchmark."""
    return LEVEL in item.stash and _is_benchmark(item)


def _compares(item: pytest.Item) -> bool:
    return "measured_history" in getattr(item, "fixturenames", ()) and ID in item.stash
