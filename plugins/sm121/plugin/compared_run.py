"""Chooses the stored run that pytest-benchmark compares with."""

from typing import Any

import pytest

from sm121.core.unmet import Unmet
from sm121.core.verdict import Undecided
from sm121.regression.measured import MeasuredHistory
from sm121.session.session import Session


def compare_with_baseline(
    config: pytest.Config, session: Session, history: MeasuredHistory
) -> bool:
    """Let pytest-benchmark compare with the baseline of the regression level.

    By default, pytest-benchmark compares with the latest file, even if that run failed or used
    another profile. Benchmarks outside the levels are still compared with that file.

    Args:
        config: The configuration of pytest. ``--benchmark-compare`` has no number.
        session: The run. Its last test has ended.
        history: The stored runs with which the run is compared.

    Returns:
        Whether there is a baseline. If not, the regression level reports the reason.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None:
        return False
    mapping: dict[Any, dict[str, Any]] = {}
    for path, entries in (benchmarks.compared_mapping or {}).items():
        mapping[path] = {name: each for name, each in entries.items() if not is_of_suite(each)}
    try:
        run = history.runs[-1]
    except (Unmet, Undecided):  # the level reports the reason, so the run does not pass
        benchmarks.compared_mapping = mapping
        return False
    for path, data in benchmarks.storage.load("*/*"):
        is_baseline = path.name == run.name and str(data.get("datetime", "")) == run.file.started
        if is_baseline:
            if path not in mapping:
                line = f"--benchmark-compare: compared with {run.short_name}, the latest baseline"
                session.run.record.say("benchmark", line)
            entries = {each["fullname"]: each for each in data["benchmarks"] if is_of_suite(each)}
            mapping[path] = mapping.get(path, {}) | entries
            break
    benchmarks.compared_mapping = mapping
    return True


def is_of_suite(entry: Any) -> bool:
    """Whether a benchmark, or its entry in a stored file, is a measurement of a level.

    Args:
        entry: The benchmark, or its entry.
    """
    return "sm121" in entry["extra_info"]
