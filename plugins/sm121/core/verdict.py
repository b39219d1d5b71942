"""The words in which everything is judged: verdicts, how they combine, and their exit status."""

from collections.abc import Iterable
from enum import StrEnum

from sm121.core.errors import Sm121Error


class Verdict(StrEnum):
    """Verdict of a test, a level or a run (design: "Words")."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT_RUN"

    @property
    def exit_status(self) -> int:
        """Process exit status of a run with this verdict: 0, 1 or 5."""
        return {Verdict.PASS: 0, Verdict.NOT_RUN: 5}.get(self, 1)


# Worst first. What failed outweighs what could not be decided, and that what did not run.
_SEVERITY = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole from those of its parts; nothing at all is NOT_RUN, never PASS."""
    present = set(verdicts)
    return next((verdict for verdict in _SEVERITY if verdict in present), Verdict.NOT_RUN)


class Undecided(Sm121Error):
    """Base of what a check raises when it can say neither PASS nor FAIL."""

    verdict: Verdict


class Invalid(Undecided):
    """A number was measured on the wrong path, a dirty cache or a lying clock."""

    verdict = Verdict.INVALID


class Inconclusive(Undecided):
    """The machine or the noise does not allow a decision."""

    verdict = Verdict.INCONCLUSIVE


class NotRun(Undecided):
    """The check could not run here. The message names what is missing and how to get it."""

    verdict = Verdict.NOT_RUN


class Inapplicable(NotRun):
    """About something that the target does not claim to have: no certificate asks for it."""


class Severity(StrEnum):
    """How bad it is that a check does not hold. A profile says which of these its verdict needs."""

    BLOCKER = "blocker"
    """A crash, garbage, wrong mathematics, the wrong path, lost or doubled tokens, a leak."""
    CONTRACT = "contract"
    """The published API, accounting, structured output."""
    COURTESY = "courtesy"
    """Texts and shapes of errors, optional fields."""
