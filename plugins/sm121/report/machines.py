"""Machines that differ from others of their kind, by one metric over many runs.

A value is taken relative to the level of its build over all machines that ran it, which hides a
share of the noise. A machine is apart if the difference passes Welch's test and three floors.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sm121.report.past_run import PastRun

#: Runs that a machine, and the others together, need.
FEWEST = 3
#: The smallest difference of a machine, as a natural logarithm.
_APART = 0.035
#: A machine is apart by so many standard deviations of the others: one of 20 alike in 100 times.
_SPREADS = 3.5
#: The noise of runs that do not differ at all.
_LEAST_NOISE = 1e-9

#: Logarithms of a metric's values, by machine.
_Logs = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class MachineLevel:
    """The level of a metric on one machine, compared with the others.

    Attributes:
        last: The last run of the machine.
        ratio: Its level divided by the level of the others.
        chance: The p-value of the difference by Welch's test; 1 where the difference is not above
            the floors.
    """

    last: PastRun
    ratio: float
    chance: float


def compare_machines(runs: Sequence[PastRun], name: str) -> Iterator[MachineLevel]:
    """Compare the machines of some runs with each other.

    Args:
        runs: Runs of one kind of machine and one question, oldest first. All have the metric.
        name: The metric.

    Yields:
        The level of each machine that has enough runs and others to compare it with.
    """
    relative = _relative_logs(runs, name)
    for machine, logs in relative.items():
        others = {other: its for other, its in relative.items() if other != machine}
        rest = [log for its in others.values() for log in its]
        if min(len(logs), len(rest)) < FEWEST:
            continue
        offset = float(np.mean(logs) - np.mean(rest))
        last = next(past for past in reversed(runs) if past.machine == machine)
        yield MachineLevel(last, float(np.exp(offset)), _chance(logs, rest, others))


def _relative_logs(runs: Sequence[PastRun], name: str) -> _Logs:
    """The logarithms of a metric's values relative to their builds, for builds of two machines."""
    by_build: dict[tuple[str, str], _Logs] = defaultdict(lambda: defaultdict(list))
    for past in runs:
        value = past.run.metrics[name].value
        if value > 0.0:
            by_build[past.engine, past.commit][past.machine].append(float(np.log(value)))
    relative: _Logs = defaultdict(list)
    for machines in by_build.values():
        if len(machines) < 2:
            continue
        level = float(np.mean([np.median(logs) for logs in machines.values()]))
        for machine, logs in machines.items():
            relative[machine] += [log - level for log in logs]
    return relative


def _chance(logs: Sequence[float], rest: Sequence[float], others: _Logs) -> float:
    """The p-value of the difference between one machine's values and those of all others."""
    from scipy import stats  # a second, which every other command need not spend

    # The level of a build has a part of each machine's own noise: that part is put back.
    machines = len(others) + 1
    correction = np.sqrt(machines / (machines - 1))
    noise = (float(np.std(logs, ddof=1)) or _LEAST_NOISE) * correction
    noise_of_rest = (float(np.std(rest, ddof=1)) or _LEAST_NOISE) * correction
    offset = float(np.mean(logs) - np.mean(rest))
    levels = [float(np.mean(its)) for its in others.values()]
    spread = float(np.std(levels, ddof=1)) if len(levels) > 1 else 0.0
    between_runs = np.hypot(noise, noise_of_rest) / np.sqrt(2)
    if abs(offset) <= max(_APART, _SPREADS * spread, between_runs):
        return 1.0
    test = stats.ttest_ind_from_stats(
        offset, noise, len(logs), 0.0, noise_of_rest, len(rest), equal_var=False
    )
    return float(test.pvalue)
