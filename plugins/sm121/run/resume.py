"""``--resume``: which earlier run in the report directory counts, and what is taken over from it.

Kernel tests are taken over with their verdicts; cells of the matrix with their records
(`sm121.matrix.state`). Tests of the other levels share one running server, and are run again.
"""

from __future__ import annotations

from sm121.run import verdict_file
from sm121.run.harness import Harness
from sm121.run.merge import differences
from sm121.run.verdict_file import TestReport, VerdictFile

_LEVEL = "kernel"


def take_over(harness: Harness) -> set[str]:
    """Decide the kernel tests that an earlier run has ended; returns their ids.

    The metrics of the earlier run are taken over where this one has none of the name.
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
    """The newest earlier run that was the same one and has ended a kernel test; it lies where
    opening this run has moved it. Where there is none, a remark says why."""
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
    """Its kernel tests that came to their end; what was skipped may have a server now."""
    return [test for test in run.tests if test.level == _LEVEL and test.executed]
