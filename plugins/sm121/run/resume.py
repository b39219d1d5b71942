"""``--resume``: takes over the results of the earlier run in the report directory, of the same
fingerprint: tests of kernel numerics and compilation with their verdicts, cells of the matrix
(`sm121.matrix.state`). What shares a server, is about its path or measures runs again."""

from collections.abc import Collection

from sm121.run import verdict_file
from sm121.run.merge import contradiction, differences
from sm121.run.record import RunRecord
from sm121.run.verdict_file import TestReport, VerdictFile

_LEVEL = "kernel"


def take_over(record: RunRecord, may_be_taken: Collection[str]) -> set[str]:
    """Decide the kernel tests that an earlier run has finished; returns their ids. `may_be_taken`:
    ids of the tests that use no server and measure nothing."""
    earlier = earlier_run(record)
    if earlier is None:
        return set()
    ended = [test for test in _ended(earlier) if test.id in record.ledger]
    reusable = [test for test in ended if test.id in may_be_taken and not test.excused]
    for test in reusable:
        record.ledger.decide(test)
    if reusable:
        record.remark(f"--resume: {len(reusable)} kernel tests are taken over from the run before")
    if again := len(ended) - len(reusable):
        record.remark(
            f"--resume: {again} kernel tests run again: they are about the kernel path, a rate or "
            "a running server, or were waived"
        )
    if ended:
        record.save()
    return {test.id for test in reusable}


def earlier_run(record: RunRecord) -> VerdictFile | None:
    """The newest earlier run that is comparable and has finished a kernel test, in the folder to
    which opening this run moved it. When there is none, a remark says why."""
    files = sorted((record.directory / "earlier").glob("*/verdict.json"), reverse=True)
    reasons: list[str] = []
    for file in files:
        try:
            earlier = verdict_file.read(file)
        except (OSError, ValueError) as error:
            reasons.append(f"{file} cannot be read: {type(error).__name__}")
            continue
        if others := differences(earlier, record.file):
            name, before, now = others[0]
            more = f", and {len(others) - 1} more differences" if len(others) > 1 else ""
            reasons.append(f"another {name} ({before}, now {now}){more}")
        elif (why := contradiction(earlier)) is not None:
            reasons.append(f"{file} was changed after it was written: {why}")
        elif _ended(earlier):
            return earlier
    if not files:
        record.remark("--resume: there is no earlier run in the report directory")
    elif reasons:
        record.remark(f"--resume: nothing is taken over: {reasons[0]}")
    return None


def _ended(run: VerdictFile) -> list[TestReport]:
    """Its kernel tests that ran to their end. Skipped ones run again: there may be a server now."""
    return [test for test in run.tests if test.level == _LEVEL and test.executed]
