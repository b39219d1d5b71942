"""One measured quantity: raw samples, their clock, and what speaks against them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sm121.client.timed_answer import Clock
from sm121.core.data_file import DataTable, Record

Unit = Literal["tok/s", "ms", "µs", "s", "GiB", "%", "tokens", "nats"]
#: Units of what is counted: how fit the machine is changes nothing of it.
COUNTED = ("%", "tokens", "nats")
#: Units of values that exist once in a run (a start, a peak, what was accepted of all drafts). They
#: have one sample.
EXISTS_ONCE = ("s", "GiB", *COUNTED)
#: Reasons that other work on the machine alone can give.
_OF_THE_MACHINE = frozenset({"drift", "client_lag"})


class Invalidity(DataTable):
    """A named reason why a number counts neither way, with the evidence for it."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


class Measurement(Record):
    """One quantity by its name in verdict.json (``tg32@d0``, ``ttft_p99``)."""

    name: str
    unit: Unit
    #: One per round; of a tail, one per request, a failed request being infinite.
    samples: list[float]
    higher_is_better: bool
    clock: Clock | None = None
    #: Of a kernel's time: what was timed, with its sizes. None of what a server was measured for.
    case: str | None = None
    #: The quantile that is asked of the samples; None: the samples' median is the value.
    quantile: float | None = None
    #: Its value is the mean of the samples, one of each fixed text, and decides as it is.
    is_mean: bool = False
    invalid: list[Invalidity] = Field(default_factory=list)
    #: What there was no means to check. It makes nothing INVALID.
    unproven: list[str] = Field(default_factory=list)
    #: What a reader of the run should know beside the number; it speaks for and against nothing.
    remarks: list[str] = Field(default_factory=list)
    #: Other definitions of the same quantity and what belongs beside it, by name.
    extra: dict[str, Any] = Field(default_factory=dict)
    #: The samples with the cell's other answers between them, in the order of their sending: these
    #: are by the median of their own kind. They say how the level moved, and not what it is.
    track: list[float] = Field(default_factory=list)
    #: Of each round that the client was late for, between what its value was.
    left_out: list[tuple[float, float]] = Field(default_factory=list)
    #: Raw records of the requests that it was computed from.
    records: Path | None = None

    @property
    def rounds(self) -> int:
        """How many answers say how the quantity moved."""
        return max(len(self.samples), len(self.track))

    @property
    def is_tail(self) -> bool:
        """Whether its value is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    @property
    def valid(self) -> bool:
        """Whether nothing speaks against the samples."""
        return not self.invalid

    @property
    def unsteady(self) -> bool:
        """Whether nothing but an unsteady machine speaks against the samples."""
        return bool(self.invalid) and {item.reason for item in self.invalid} <= _OF_THE_MACHINE
