"""One line on why a finished run has its verdict."""

from __future__ import annotations

from sm121.core.verdict import Verdict
from sm121.run.verdict_file import VerdictFile


def reason(file: VerdictFile) -> str:
    """The reason, for a run that has finished."""
    if file.verdict is Verdict.NOT_RUN:
        return "no test of a level was executed: all were skipped or deselected"
    decisive = [
        t for t in file.tests if t.verdict is file.verdict and not t.skipped and not t.waived
    ]
    if file.verdict is Verdict.PASS:
        held = sum(test.verdict is Verdict.PASS for test in file.tests)
        waived = sum(test.waived for test in file.tests)
        tolerated = f"; {waived} failed and are waived" if waived else ""
        left = len(file.tests) - held - waived
        missing = f"; {left} did not run" if left else ""
        return f"{held} check{'' if held == 1 else 's'} ran and held{tolerated}{missing}"
    first = decisive[0]
    more = f" (and {len(decisive) - 1} more)" if len(decisive) > 1 else ""
    return f"{first.id}: {first.message}{more}"
