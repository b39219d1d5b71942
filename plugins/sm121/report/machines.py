"""Machines that differ from others of their kind in one metric, over many runs.

Each value is taken relative to the level of its build over all machines that ran the build; this
removes a part of the noise. A machine is reported if the difference is significant by Welch's test
and exceeds three minimums.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sm121.report.past_run import PastRun

#: Minimum number of runs of a machine, and of all other machines together.
FEWEST = 3
#: Minimum difference of a machine that is reported, as a natural logarithm.
_APART = 0.035
#: Minimum difference in standard deviations of the other machines' levels: with 20 equal machines,
#: the probability that one exceeds it is 1 in 100.
_SPREADS = 3.5
#: The assumed noise of runs that do not differ at all.
_LEAST_NOISE = 1e-9

#: Logarithms of a metric's values, by machine.
_Logs = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class MachineLevel:
    """The level of a metric on one machine, compared with the other machines.

    Attributes:
        last: The last run of the machine.
        ratio: The level of the machine divided by the level of the other machines.
        chance: The p-value of the difference by Welch's test; 1 if the difference does not exceed
            the minimums.
    """

    last: PastRun
    ratio: float
    chance: float


def compare_machines(runs: Sequence[PastRun], name: str) -> Iterator[MachineLevel]:
    """Compare the machines of some runs with each other.

    Args:
        runs: Runs of one series (`PastRun.question`) on one kind of machine, oldest first. All
            contain the metric.
        name: The metric.

    Yields:
        The level of each machine for which it and the other machines have enough runs.
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
    """Return the logarithms of a metric's values, each relative to the level of its build.

    Only builds that ran on several machines are used.
    """
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
    """Return the p-value of the difference between one machine's values and all others'."""
    from scipy import stats  # imported here: it takes a second, which other commands save

    # A build's level contains a part of each machine's own noise; correct for that.
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
