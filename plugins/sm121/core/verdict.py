"""Verdicts: how they combine, their exit status, and the exceptions that stand for them."""

from collections.abc import Iterable
from enum import StrEnum

from sm121.core.errors import Sm121Error

#: The exit status of a run that was interrupted by a signal, as of pytest.
INTERRUPTED = 2


class Verdict(StrEnum):
    """The verdict of a test, a level or a run."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT_RUN"

    @property
    def exit_status(self) -> int:
        """The process exit status of a run with this verdict: 0, 1 or 5."""
        return {Verdict.PASS: 0, Verdict.NOT_RUN: 5}.get(self, 1)


#: Worst first: failed, then undecided, then not run.
_SEVERITY = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts; without verdicts NOT_RUN, never PASS."""
    present = set(verdicts)
    for verdict in _SEVERITY:
        if verdict in present:
            return verdict
    return Verdict.NOT_RUN


class Undecided(Sm121Error):
    """The base of the exceptions with which a check neither passes nor fails.

    Attributes:
        verdict: The verdict of the check.
    """

    verdict: Verdict


class Invalid(Undecided):
    """A number was measured on a wrong kernel path, a cold cache or a wrong clock."""

    verdict = Verdict.INVALID


class Inconclusive(Undecided):
    """The machine's state or the noise does not allow a decision."""

    verdict = Verdict.INCONCLUSIVE


class NotRun(Undecided):
    """The check could not run. The message names what is missing and how to get it."""

    verdict = Verdict.NOT_RUN


class Inapplicable(NotRun):
    """The target does not claim the checked feature: no certificate requires the check."""


class Severity(StrEnum):
    """The severity of a failed check. A profile lists the severities that affect its verdict."""

    BLOCKER = "blocker"
    """A crash, garbage, wrong mathematics, the wrong path, lost or doubled tokens, a leak."""
    CONTRACT = "contract"
    """The published API, accounting, structured output."""
    COURTESY = "courtesy"
    """Texts and shapes of errors, optional fields."""
