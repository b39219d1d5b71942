"""What became of a cell."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field

from sm121.core.data_file import Record
from sm121.matrix.axes import Choice

StepName = Literal[
    "start", "path", "answers", "equivalence", "stress", "oracle", "drafts", "alive", "performance"
]


class CellOutcome(StrEnum):
    """What a cell came to, the worst first where several apply."""

    CRASH = "CRASH"
    """It did not start, or died; the bundle has its log, its command and the cause."""
    FALLBACK = "FALLBACK"
    """It ran something else than was asked for."""
    FAIL = "FAIL"
    """It answers otherwise than the baseline, or wrongly, or refused to start with its reason."""
    SLOWER = "SLOWER"
    """The whole interval of its rate is below what is allowed against the baseline."""
    INVALID = "INVALID"
    """Its rate counts neither way; or another check came to no decision."""
    NOT_RUN = "NOT_RUN"
    INCOMPATIBLE = "INCOMPATIBLE"
    """Known not to go together, with the reason."""
    PASS = "PASS"  # noqa: S105

    @property
    def broken(self) -> bool:
        """Whether it is a finding that has a smallest set of values."""
        return self in ("CRASH", "FALLBACK", "FAIL", "SLOWER")


class Step(Record):
    """One check of a cell. ``took_s`` is null for what costs nothing."""

    name: StepName
    outcome: CellOutcome
    message: str = ""
    evidence: str | None = None
    took_s: float = 0.0


class CellRate(Record):
    """The decode rate of a cell, and against the baseline's."""

    metric: str
    unit: str = "tok/s"
    samples: list[float]
    value: float | None
    ratio: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    allowed: float | None = None


class AnswerDifference(Record):
    """How a cell's answers agree with the baseline's, token by token."""

    worst_nats: float
    mean_divergence: float
    top1: float


class CellRecord(Record):
    """A cell that has ended, as it is kept in ``matrix/matrix.json``."""

    id: str
    values: dict[str, str]
    why: list[str]
    configuration: str
    """Key of the server configuration: cells of one key share a boot."""
    arguments: list[str]
    environment: dict[str, str] = Field(default_factory=dict)
    outcome: CellOutcome
    kind: str | None = None
    """Class of the failure (``sm121.evidence.failure``), of a cell that did not start or died."""
    reason: str = ""
    steps: list[Step] = Field(default_factory=list)
    rate: CellRate | None = None
    agreement: AnswerDifference | None = None
    path: dict[str, str | bool | None] = Field(default_factory=dict)
    boot_s: float | None = None
    """Null when the server ran already."""
    took_s: float = 0.0
    """All of it, the boot too."""
    log: str | None = None
    bundle: str | None = None
    isolating: bool = False
    """It was run to find a smallest set, not as part of the array."""

    def has(self, choice: Choice) -> bool:
        """Whether it has these values."""
        return all(self.values.get(axis) == value for axis, value in choice)

    @property
    def works(self) -> bool:
        """Whether its values work together: all passed, but for a rate that counts neither way."""
        if self.outcome is CellOutcome.INVALID:
            wrong = [step.name for step in self.steps if step.outcome is not CellOutcome.PASS]
            return bool(wrong) and set(wrong) == {"performance"}
        return self.outcome is CellOutcome.PASS


def worst(steps: Sequence[Step]) -> Step | None:
    """The step that decides; None when all of them passed."""
    order = list(CellOutcome)
    broken = [step for step in steps if step.outcome is not CellOutcome.PASS]
    return min(broken, key=lambda step: order.index(step.outcome), default=None)
