"""Chooses the stored runs that pytest-benchmark compares with, and refuses missing ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_bench_gate import requests
from sm121.core.errors import UsageError
from sm121.core.unmet import Unmet
from sm121.core.verdict import Undecided
from sm121.regression.measured import MeasuredHistory
from sm121.run import stored_benchmarks, stored_run
from sm121.run.stored_run import StoredRun
from sm121.session.session import Session

_COMPARE = "--benchmark-compare"
#: The command that stores the first run.
FIRST = "pytest --benchmark-autosave"
#: How many stored runs a message lists; the newest ones.
_NAMED_RUNS = 3


def refuse_missing(folder: Path, named: str | None, plan: str) -> None:
    """Refuse a stored run that does not exist, or that has another plan.

    Args:
        folder: The storage of pytest-benchmark.
        named: The number or the file of the stored run. If None, any stored run may be compared.
        plan: The plan of the run.

    Raises:
        UsageError: No such run can be compared.
    """
    if named is None:
        runs = stored_benchmarks.load_benchmarks(folder)
        if not runs:
            raise UsageError(
                f"{_COMPARE}: expected a stored run in {folder}, got none. Store one of a build "
                f"that you trust first: {FIRST}"
            )
        _require_plan(runs, plan)
        return
    if Path(named).is_file():
        try:
            run = stored_benchmarks.read_benchmarks(Path(named))
        except UsageError as error:
            raise UsageError(requests.no_run(_COMPARE, named)) from error
        if run is None:
            raise UsageError(
                f"{_COMPARE} {named}: expected a run with measurements of this suite, got none in "
                f"the file. Store one: {FIRST}"
            )
        _require_plan([run], plan)
        return
    if not named.strip() or Path(named).exists():
        raise UsageError(requests.no_run(_COMPARE, named))
    found = stored_benchmarks.load_benchmarks(folder, named)
    if not found:
        known = [run.name for run in stored_benchmarks.load_benchmarks(folder)]
        there = "it has none"
        if known:
            there = f"the latest are {', '.join(known[-_NAMED_RUNS:])}"
        remedy = f"Store one with {FIRST}"
        number = named.zfill(4)
        if named.isdecimal() and number in map(stored_run.short_name, known):
            remedy = f"Write {_COMPARE}={number}"
        raise UsageError(
            f"{_COMPARE} {named}: expected the number of a run in {folder}, {there}. {remedy}"
        )
    _require_plan(found, plan)


def refuse_other_plan(folder: Path, named: str | None, plan: str) -> None:
    """Refuse stored runs if all of them have another plan.

    Args:
        folder: The storage of pytest-benchmark. It may be empty.
        named: The number or the file of the stored run. If None, any stored run may be compared.
        plan: The plan of the run.

    Raises:
        UsageError: There are stored runs with measurements of levels, but none of the plan.
    """
    runs = stored_benchmarks.load_benchmarks(folder, "*" if named is None else named)
    if runs:
        _require_plan(runs, plan)


def _require_plan(runs: Sequence[StoredRun], plan: str) -> None:
    """Raise UsageError if no run has the plan, because runs of two plans are never compared."""
    if any(run.plan == plan for run in runs):
        return
    latest = runs[-1]
    raise UsageError(
        f"{_COMPARE}: expected a stored run of plan {plan}, got plan {latest.plan} "
        f"({latest.short_name}). Add --plan {latest.plan}, or store one first: "
        f"{FIRST} --plan {plan}"
    )


def name_files(config: pytest.Config) -> None:
    """Print which stored files pytest-benchmark has chosen; these lines were held back until now.

    Args:
        config: The configuration of pytest.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or benchmarks.verbose:  # if verbose, pytest-benchmark has printed them
        return
    for path in benchmarks.compared_mapping or ():
        benchmarks.logger.info(f"Comparing against benchmarks from: {path}", newline=False)


def compare_with_baseline(
    config: pytest.Config, session: Session, history: MeasuredHistory
) -> bool:
    """Let pytest-benchmark compare with the baselines of the regression level.

    By default, pytest-benchmark compares with the latest file, even if that run failed or used
    another profile. Each benchmark of a level is instead compared with the latest baseline that
    has it, and each other benchmark with the latest run that has it and passed.

    Args:
        config: The configuration of pytest. ``--benchmark-compare`` has no number.
        session: The run. Its last test has ended.
        history: The stored runs with which the run is compared.

    Returns:
        Whether the history has a baseline, even if it lacks all benchmarks of this run. If it has
        none, the regression level reports the reason.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None:
        return False
    mapping = _of_other_benchmarks(benchmarks, session)
    try:
        runs = history.runs
    except (Unmet, Undecided):  # the level reports the reason, so the run does not pass
        benchmarks.compared_mapping = mapping
        return False
    files: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}
    for path, data in benchmarks.storage.load("*/*"):
        files[path.name, str(data.get("datetime", ""))] = (path, data)
    measured = {each.fullname for each in benchmarks.benchmarks if each and is_of_suite(each)}
    missing = set(measured)
    for run in reversed(runs):
        stored = files.get((run.name, run.file.started))
        if stored is None:  # pytest-benchmark cannot read this file
            continue
        path, data = stored
        entries = {each["fullname"]: each for each in data["benchmarks"] if is_of_suite(each)}
        found = {name: each for name, each in entries.items() if name in missing}
        if not found:
            continue
        counts = f"{len(found)} of {len(measured)} metrics"
        line = f"--benchmark-compare: {counts} compared with {run.short_name}, a baseline"
        session.run.record.say("benchmark", line)
        mapping[path] = mapping.get(path, {}) | found
        missing -= found.keys()
    benchmarks.compared_mapping = mapping
    return True


def compare_other_benchmarks(config: pytest.Config, session: Session) -> None:
    """Let pytest-benchmark compare only benchmarks outside the levels.

    Each of them is compared with the latest run that has it and passed.

    Args:
        config: The configuration of pytest. ``--benchmark-compare`` has no number.
        session: The run. Its last test has ended.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is not None:
        benchmarks.compared_mapping = _of_other_benchmarks(benchmarks, session)


def _of_other_benchmarks(benchmarks: Any, session: Session) -> dict[Any, dict[str, Any]]:
    """Return the stored entries of the benchmarks outside the levels, by file.

    Lines name the run with which each benchmark is compared, and the benchmarks that are in no run
    that passed.
    """
    missing = {each.fullname for each in benchmarks.benchmarks if each and not is_of_suite(each)}
    mapping: dict[Any, dict[str, Any]] = {}
    for path, data in reversed(list(benchmarks.storage.load())):
        if _has_not_passed(data):
            continue
        entries = {each["fullname"]: each for each in data["benchmarks"]}
        found = {name: each for name, each in entries.items() if name in missing}
        if not found:
            continue
        mapping[path] = found
        missing -= found.keys()
        run = stored_run.short_name(path.name)
        line = f"--benchmark-compare: compared with {run}: {', '.join(sorted(found))}"
        session.run.record.say("benchmark", line)
    if missing:
        names = ", ".join(sorted(missing))
        line = f"--benchmark-compare: not compared, because in no run that passed: {names}"
        session.run.record.say("benchmark", line)
    return mapping


def _has_not_passed(data: Any) -> bool:
    """Whether the run of a stored file has not passed.

    Files of earlier versions of the suite have the verdict only in the entries of levels.
    """
    described = [data.get("sm121", {})]
    described += [each["extra_info"] for each in data["benchmarks"] if is_of_suite(each)]
    return any(each.get("run", "PASS") != "PASS" for each in described)


def is_of_suite(entry: Any) -> bool:
    """Whether a benchmark, or its entry in a stored file, is a measurement of a level.

    Args:
        entry: The benchmark, or its entry.
    """
    return "sm121" in entry["extra_info"]
