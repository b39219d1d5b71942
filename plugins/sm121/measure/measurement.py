"""One measured quantity: raw samples, their clock, and the reasons against them."""

import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sm121.client.timed_answer import Clock

Unit = Literal["tok/s", "ms", "µs", "s", "GiB", "%", "tokens", "nats"]
UNITS: tuple[Unit, ...] = get_args(Unit)
#: Units of counts. They do not depend on the state of the machine.
COUNTED = ("%", "tokens", "nats")
#: Units of values that exist once in a run (a start, a peak, an acceptance rate) and have one
#: sample.
EXISTS_ONCE = ("s", "GiB", *COUNTED)
#: Reasons that other work on the machine can cause.
_OF_THE_MACHINE = frozenset({"drift", "client_lag"})


@dataclass(frozen=True)
class Invalidity:
    """A named reason why a number does not count, with its evidence."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


@dataclass(kw_only=True)
class Measurement:
    """One quantity by its name in verdict.json (``tg32@d0``, ``ttft_p99``)."""

    name: str
    unit: Unit
    #: One per round. A tail has one per request, and a failed request is infinite.
    samples: list[float]
    higher_is_better: bool
    clock: Clock | None = None
    #: The timed kernel case with its sizes; None for a measurement of a server.
    case: str | None = None
    #: The quantile of the samples that is the value; None for the median.
    quantile: float | None = None
    #: Whether the value is the mean of the samples (one of each fixed text), without an interval.
    is_mean: bool = False
    invalid: list[Invalidity] = field(default_factory=list)
    #: Checks that could not be made. They make nothing INVALID.
    unproven: list[str] = field(default_factory=list)
    #: Notes for the reader. They change no verdict.
    remarks: list[str] = field(default_factory=list)
    #: Other definitions of the same quantity and related numbers, by name.
    extra: dict[str, Any] = field(default_factory=dict)
    #: The samples and the cell's other answers, in the order of sending. The other answers are
    #: scaled by the median of their own kind: they show changes of the level, and not the level.
    track: list[float] = field(default_factory=list)
    #: The bounds of each round that a delay of the client disturbed.
    left_out: list[tuple[float, float]] = field(default_factory=list)
    #: The file of the raw answers.
    records: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what is no measurement, as tests of others may make one by mistake.

        Raises:
            ValueError: The unit is not known, a sample is no number, or the quantile is no share.
        """
        if self.unit not in UNITS:
            expected = ", ".join(UNITS)
            raise ValueError(f"{self.name}: unit: expected one of {expected}, got {self.unit!r}")
        given: list[object] = [*self.samples]  # whatever the type says
        for sample in given:
            if not isinstance(sample, numbers.Real):
                raise ValueError(f"{self.name}: samples: expected numbers, got {sample!r}")
        if self.quantile is not None and not 0.0 < self.quantile < 1.0:
            raise ValueError(f"{self.name}: quantile: expected 0 to 1, got {self.quantile!r}")

    @property
    def rounds(self) -> int:
        """The number of answers that show changes of the level."""
        return max(len(self.samples), len(self.track))

    @property
    def is_tail(self) -> bool:
        """Whether the value is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    @property
    def valid(self) -> bool:
        """Whether there is no reason against the samples."""
        return not self.invalid

    @property
    def unsteady(self) -> bool:
        """Whether an unsteady machine is the only reason against the samples."""
        return bool(self.invalid) and {item.reason for item in self.invalid} <= _OF_THE_MACHINE
