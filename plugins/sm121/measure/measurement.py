"""One measured quantity: its raw samples, how tokens were counted, and why it may be invalid."""

import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sm121.client.timed_answer import Clock

Unit = Literal["tok/s", "ms", "µs", "s", "GiB", "%", "tokens", "nats"]
UNITS: tuple[Unit, ...] = get_args(Unit)
#: Units of values that do not depend on the state of the machine.
COUNTED = ("%", "tokens", "nats")
#: Units of values that exist only once in a run and have one sample, for example the time of a
#: start, a peak of memory or an acceptance rate.
EXISTS_ONCE = ("s", "GiB", *COUNTED)
#: Reasons of invalidity that other work on the machine can cause.
_OF_THE_MACHINE = frozenset({"drift", "client_lag"})


@dataclass(frozen=True)
class Invalidity:
    """A reason why a number is invalid, with a name and evidence."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


@dataclass(kw_only=True)
class Measurement:
    """One quantity, with its name in verdict.json (for example ``tg32@d0`` or ``ttft_p99``)."""

    name: str
    unit: Unit
    #: One sample per round; for a percentile, one per request. The time of a failed request is
    #: infinite.
    samples: list[float]
    higher_is_better: bool
    clock: Clock | None = None
    #: The timed kernel case with its sizes; None for a measurement of a server.
    case: str | None = None
    #: The quantile of the samples that is the value; None for the median.
    quantile: float | None = None
    #: Whether the value is the mean of the samples (one per fixed text).
    is_mean: bool = False
    invalid: list[Invalidity] = field(default_factory=list)
    #: Checks that were not possible. They do not make the measurement INVALID.
    unproven: list[str] = field(default_factory=list)
    #: Remarks for the report, which do not change a verdict.
    remarks: list[str] = field(default_factory=list)
    #: Related numbers, and values by other definitions of the quantity; the keys are their names.
    extra: dict[str, Any] = field(default_factory=dict)
    #: The samples and the rates of the cell's other answers, in the order of sending. The rates of
    #: other answers are scaled to the samples' median, so that they show how the level changes, but
    #: not how high it is.
    track: list[float] = field(default_factory=list)
    #: For each round that a delay of the client disturbed, the bounds of its value.
    left_out: list[tuple[float, float]] = field(default_factory=list)
    #: The file of the raw answers.
    records: Path | None = None

    def __post_init__(self) -> None:
        """Reject invalid fields, because tests outside the suite may also create measurements.

        Raises:
            ValueError: The unit is unknown, a sample is not a number, or the quantile is not in (0,
                1).
        """
        if self.unit not in UNITS:
            expected = ", ".join(UNITS)
            raise ValueError(f"{self.name}: unit: expected one of {expected}, got {self.unit!r}")
        given: list[object] = [*self.samples]  # callers may pass values of other types
        for sample in given:
            if not isinstance(sample, numbers.Real):
                raise ValueError(f"{self.name}: samples: expected numbers, got {sample!r}")
        if self.quantile is not None and not 0.0 < self.quantile < 1.0:
            raise ValueError(f"{self.name}: quantile: expected 0 to 1, got {self.quantile!r}")

    @property
    def rounds(self) -> int:
        """The number of rounds: that of the samples, or of `track` if it has more."""
        return max(len(self.samples), len(self.track))

    @property
    def is_tail(self) -> bool:
        """Whether the value is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    @property
    def valid(self) -> bool:
        """Whether the samples are valid."""
        return not self.invalid

    @property
    def unsteady(self) -> bool:
        """Whether other work on the machine is the only reason why the samples are invalid."""
        return bool(self.invalid) and {item.reason for item in self.invalid} <= _OF_THE_MACHINE
