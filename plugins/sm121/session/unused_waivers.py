"""Waivers that matched no failure of a run."""

from collections.abc import Iterable, Sequence

from sm121.core.verdict import Verdict
from sm121.core.waivers import Waiver
from sm121.run.verdict_file import TestReport


def unused(waivers: Iterable[Waiver], tests: Sequence[TestReport]) -> list[Waiver]:
    """Return the waivers that name no failure.

    A waiver that names a failure counts as used even if the failure is not tolerated, for example
    because the waiver has expired: the message of the test then contains the reason.

    Args:
        waivers: The waivers of the run.
        tests: The tests of the run.
    """
    return [waiver for waiver in waivers if not _is_used(waiver, tests)]


def remarks(waivers: Iterable[Waiver], tests: Sequence[TestReport]) -> list[str]:
    """Return a remark for each waiver whose test ran and that matched no failure of it.

    Args:
        waivers: The waivers of the run.
        tests: The tests of the run.
    """
    executed = {test.id for test in tests if test.executed}
    lines = []
    for waiver in unused(waivers, tests):
        if waiver.test in executed:
            lines.append(f"waiver that matched no failure: {waiver.name}")
    return lines


def _is_used(waiver: Waiver, tests: Sequence[TestReport]) -> bool:
    for test in tests:
        if test.id != waiver.test or test.verdict in (Verdict.PASS, Verdict.NOT_RUN):
            continue
        if any(waiver.names(fact, test.facts) for fact in test.facts):
            return True
    return False
