"""Verdicts: how they are combined, their exit statuses, and the exceptions that lead to them."""

from collections.abc import Iterable
from enum import StrEnum

from sm121.core.errors import Sm121Error

#: The exit status of a run that a signal has interrupted (the same as pytest's).
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


#: The verdicts, the worst one first.
_SEVERITY = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts.

    Args:
        verdicts: The verdicts. If there are none, the result is NOT_RUN.
    """
    present = set(verdicts)
    for verdict in _SEVERITY:
        if verdict in present:
            return verdict
    return Verdict.NOT_RUN


class Undecided(Sm121Error):
    """The base class of exceptions that mean that a check neither passed nor failed.

    Attributes:
        verdict: The verdict of the check.
    """

    verdict: Verdict


class Invalid(Undecided):
    """A number is not valid, because the kernel path, a cache or the timing was wrong."""

    verdict = Verdict.INVALID


class Inconclusive(Undecided):
    """The machine's state or the noise does not allow a decision."""

    verdict = Verdict.INCONCLUSIVE


class NotRun(Undecided):
    """The check could not run. The message names what is missing and how to get it."""

    verdict = Verdict.NOT_RUN


class Inapplicable(NotRun):
    """The target does not claim to have the checked feature. No certificate requires the check."""


class Severity(StrEnum):
    """The severity of a failed check. A profile lists the severities that affect its verdict."""

    BLOCKER = "blocker"
    """Crashes, garbage, wrong mathematics, a wrong kernel path, lost or doubled tokens, leaks."""
    CONTRACT = "contract"
    """Violations of the published API, wrong token counts, wrong structured output."""
    COURTESY = "courtesy"
    """Wrong texts or shapes of error messages, wrong optional fields."""
