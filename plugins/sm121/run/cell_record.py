"""A cell of the matrix and its outcome, as run.jsonl and matrix.json contain them."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field

from sm121.core.data_file import Record

#: The checks of a cell.
StepName = Literal[
    "start", "path", "answers", "equivalence", "stress", "oracle", "drafts", "alive", "performance"
]


class CellOutcome(StrEnum):
    """The outcome of a cell, the worst first."""

    #: The server did not start, or died. The crash bundle has its log, its command and the cause.
    CRASH = "CRASH"
    #: The server runs on another kernel path than was requested.
    FALLBACK = "FALLBACK"
    #: The answers are wrong or differ from the baseline's, or the server refused to start with a
    #: reason.
    FAIL = "FAIL"
    #: The whole interval of the rate is below the allowed rate.
    SLOWER = "SLOWER"
    #: The rate is not valid, or another check was undecided.
    INVALID = "INVALID"
    NOT_RUN = "NOT_RUN"
    #: The cell was not run, since its values are known not to work together.
    INCOMPATIBLE = "INCOMPATIBLE"
    PASS = "PASS"  # noqa: S105

    @property
    def broken(self) -> bool:
        """Whether the outcome is a failure.

        The suite then searches for the smallest set of values that causes it.
        """
        return self in ("CRASH", "FALLBACK", "FAIL", "SLOWER")


class CellStep(Record):
    """One check of a cell."""

    name: StepName
    outcome: CellOutcome
    message: str = ""
    #: The name of a file or a folder of the report.
    evidence: str | None = None
    #: The duration in seconds.
    took_s: float = 0.0


class CellRate(Record):
    """The decode rate of a cell, and its ratio to the baseline's."""

    metric: str
    unit: str = "tok/s"
    #: The rate of each round.
    samples: list[float]
    #: The estimate of all rounds.
    value: float | None
    #: The rate over the baseline's rate.
    ratio: float | None = None
    #: The lower end of the ratio's confidence interval.
    ci_low: float | None = None
    #: The upper end of the ratio's confidence interval.
    ci_high: float | None = None
    #: How much slower than the baseline the cell may be, as a fraction.
    allowed: float | None = None


class AnswerDifference(Record):
    """The differences of a cell's answers from the baseline's, token by token."""

    #: The largest difference of a log-probability; None if infinite, because a token is not listed.
    worst_nats: float | None
    #: The mean KL divergence, in nats; None if infinite or unknown.
    mean_divergence: float | None
    #: The fraction of equal tokens.
    top1: float


class CellRecord(Record):
    """A finished cell, as ``matrix/matrix.json`` contains it. Times are in seconds."""

    id: str
    #: The value of each axis.
    values: dict[str, str]
    #: The reasons why the cell was in the plan.
    why: list[str]
    #: The key of the server configuration. Cells with the same key share a start.
    configuration: str
    arguments: list[str]
    environment: dict[str, str] = Field(default_factory=dict)
    outcome: CellOutcome
    #: The class of the failure (``sm121.evidence.failure``) if the server did not start, or died.
    kind: str | None = None
    reason: str = ""
    steps: list[CellStep] = Field(default_factory=list)
    rate: CellRate | None = None
    agreement: AnswerDifference | None = None
    #: Fields of the kernel path, and results of other checks.
    path: dict[str, str | bool | None] = Field(default_factory=dict)
    #: The duration of the start; None if the server was already running.
    boot_s: float | None = None
    #: The duration of the start and of all checks.
    took_s: float = 0.0
    #: The name of the server's log.
    log: str | None = None
    #: The folder of the crash bundle.
    bundle: str | None = None
    #: Whether the cell ran to find a smallest failing set, and not as part of the covering array.
    isolating: bool = False

    def has(self, choice: Iterable[tuple[str, str]]) -> bool:
        """Check whether the cell has these values, as (axis, value) pairs.

        Args:
            choice: The pairs. The cell must have all of them; every cell has an empty choice.
        """
        return all(self.values.get(axis) == value for axis, value in choice)

    @property
    def ended(self) -> bool:
        """Whether the cell has a result. A cell that could not run has none."""
        return self.outcome is not CellOutcome.NOT_RUN

    @property
    def works(self) -> bool:
        """Whether all checks passed; an invalid rate is tolerated."""
        if self.outcome is CellOutcome.INVALID:
            not_passed = {step.name for step in self.steps if step.outcome is not CellOutcome.PASS}
            return not_passed == {"performance"}
        return self.outcome is CellOutcome.PASS


def worst(steps: Sequence[CellStep]) -> CellStep | None:
    """Return the step with the worst outcome.

    Args:
        steps: The checks of one cell.

    Returns:
        The first step with the worst outcome in the order of `CellOutcome`; None if all steps
        passed.
    """
    order = list(CellOutcome)
    broken = [step for step in steps if step.outcome is not CellOutcome.PASS]
    return min(broken, key=lambda step: order.index(step.outcome), default=None)
