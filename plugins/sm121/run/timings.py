"""Stores how long each check and each start took on this machine, for forecasts of later runs.

The file is in the folder of ``--benchmark-storage`` and not in the report directory, because CI
uses a new report directory for each run. Its name does not end with ``.json``, because
pytest-benchmark reads all ``.json`` files of that folder as its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sm121.core import files
from sm121.core.data_file import Record

NAME = "sm121-durations"
#: How many targets (machine, profile, configuration) the file contains; older ones are removed.
_MOST_TARGETS = 20
#: How many checks of one target the file contains; older ones are removed. A full run has about
#: 600 checks.
_MOST_CHECKS = 2000
#: How many plans of one target the file contains; older ones are removed.
_MOST_PLANS = 10
#: The maximum size of the file. This module never writes a larger file.
_MOST_BYTES = 16 * 2**20

Seconds = Annotated[float, Field(ge=0, le=7 * 86400)]


@dataclass(frozen=True)
class TimedTarget:
    """A target. The durations of a run are a forecast for later runs with the same target.

    Attributes:
        machine: The `this_machine.identity` of the machine with the server.
        profile: The name of the profile.
        configuration: The name of the configuration under test.
        plan: The plan of the run. Plans differ in the number of rounds, so the durations of the
            performance level are stored separately for each plan.
    """

    machine: Mapping[str, Any]
    profile: str
    configuration: str
    plan: str


class _Kept(Record):
    """The durations of one target."""

    machine: dict[str, Any]
    profile: str
    configuration: str
    #: The durations of server starts. The keys are the names of configurations.
    starts: dict[str, Seconds] = Field(default_factory=dict)
    #: The durations of checks outside the performance level. The keys are the ids of the checks.
    checks: dict[str, Seconds] = Field(default_factory=dict)
    #: The durations of checks of the performance level. The outer keys are plans, the inner keys
    #: are the ids of the checks.
    rates: dict[str, dict[str, Seconds]] = Field(default_factory=dict)

    def is_of(self, target: TimedTarget) -> bool:
        """Return whether the durations belong to a target."""
        return (
            self.machine == dict(target.machine)
            and self.profile == target.profile
            and self.configuration == target.configuration
        )


class _File(Record):
    """The durations of all targets; the most recent target is last."""

    schema_version: Literal[1] = 1
    targets: list[_Kept] = Field(default_factory=list)


@dataclass
class CheckDurations:
    """The durations of checks and starts in seconds, of earlier runs or of this run."""

    #: The durations of server starts with warm caches. The keys are the names of configurations.
    starts: dict[str, float] = field(default_factory=dict)
    #: The durations of checks. The keys are the ids of the checks. The start of a server does not
    #: count for the test that needed it first.
    checks: dict[str, float] = field(default_factory=dict)
    #: The durations of checks of the performance level. The keys are the ids of the checks.
    rates: dict[str, float] = field(default_factory=dict)

    def of(self, check: str) -> float | None:
        """Return the duration of a check.

        Args:
            check: The id of the check.

        Returns:
            The duration in seconds; None if the check was not timed.
        """
        return self.checks.get(check, self.rates.get(check))


def read_durations(folder: Path, target: TimedTarget) -> CheckDurations:
    """Read the most recent durations of a target's checks and starts.

    Args:
        folder: The folder of the stored benchmarks.
        target: The target.

    Returns:
        The durations; empty if none are stored.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file was not written by this module.
    """
    for kept in _read(folder / NAME).targets:
        if kept.is_of(target):
            return CheckDurations(kept.starts, kept.checks, kept.rates.get(target.plan, {}))
    return CheckDurations()


def store_durations(folder: Path, target: TimedTarget, taken: CheckDurations) -> None:
    """Write the durations of a run to the file; the durations of other targets remain.

    Args:
        folder: The folder of the stored benchmarks. It is created if it does not exist.
        target: The target.
        taken: The durations of this run. A check that did not run keeps its earlier duration.

    Raises:
        OSError: The file cannot be written. The previous file remains.
    """
    try:
        file = _read(folder / NAME)
    except ValueError:
        file = _File()  # `read_durations` has reported the error
    kept = _Kept(
        machine=dict(target.machine), profile=target.profile, configuration=target.configuration
    )
    others = []
    for stored in file.targets:
        if stored.is_of(target):
            kept = stored
        else:
            others.append(stored)
    kept.starts = _latest(kept.starts, taken.starts)
    kept.checks = _latest(kept.checks, taken.checks)
    kept.rates[target.plan] = _latest(kept.rates.pop(target.plan, {}), taken.rates)
    kept.rates = dict(list(kept.rates.items())[-_MOST_PLANS:])
    file = _File(targets=[*others, kept][-_MOST_TARGETS:])
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(file.model_dump_json(indent=1) + "\n", folder / NAME)


def _latest(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the most recent durations by name, oldest first, and no more than the limit."""
    earlier = {name: seconds for name, seconds in before.items() if name not in now}
    return dict([*earlier.items(), *now.items()][-_MOST_CHECKS:])


def _read(path: Path) -> _File:
    if not path.exists():
        return _File()
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes")
    return _File.model_validate_json(path.read_bytes())
