"""``--resume``: finds the earlier run in the report directory, and takes over its results.

Kernel tests are taken over with their verdicts; cells of the matrix with their records
(`sm121.matrix.state`). Tests of the other levels share one running server, and run again.
"""

from __future__ import annotations

from sm121.run import verdict_file
from sm121.run.harness import Harness
from sm121.run.merge import differences
from sm121.run.verdict_file import TestReport, VerdictFile

_LEVEL = "kernel"


def take_over(harness: Harness) -> set[str]:
    """Decide the kernel tests that an earlier run has finished; returns their ids.

    Metrics of the earlier run are taken over too, unless this run has one of the same name.
    """
    earlier = earlier_run(harness)
    if earlier is None:
        return set()
    taken = [test for test in _ended(earlier) if test.id in harness.ledger]
    if taken:
        for test in taken:
            harness.ledger.decide(test)
        harness.file.metrics = earlier.metrics | harness.file.metrics
        harness.remark(f"--resume: {len(taken)} kernel tests are taken over from the run before")
        harness.save()
    return {test.id for test in taken}


def earlier_run(harness: Harness) -> VerdictFile | None:
    """The newest earlier run that is comparable and has finished a kernel test, in the folder to
    which opening this run moved it. When there is none, a remark says why."""
    found = sorted((harness.directory / "earlier").glob("*/verdict.json"), reverse=True)
    reasons: list[str] = []
    for file in found:
        try:
            earlier = verdict_file.read(file)
        except (OSError, ValueError) as error:
            reasons.append(f"{file} cannot be read: {type(error).__name__}")
            continue
        if others := differences(earlier, harness.file):
            what, theirs, ours = others[0]
            reasons.append(f"another {what} ({theirs}, now {ours})")
        elif _ended(earlier):
            return earlier
    if not found:
        harness.remark("--resume: there is no earlier run in the report directory")
    elif reasons:
        harness.remark(f"--resume: nothing is taken over: {reasons[0]}")
    return None


def _ended(run: VerdictFile) -> list[TestReport]:
    """Its kernel tests that ran to their end. Skipped ones run again: there may be a server now."""
    return [test for test in run.tests if test.level == _LEVEL and test.executed]
