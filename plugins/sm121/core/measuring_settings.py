"""The settings of a measurement, and a type for the bounds of numbers in data files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


class Bounds:
    """The bounds of a number in a data file, without pydantic.

    Args:
        **bounds: ``gt``, ``ge`` and ``lt``, which mean the same as in pydantic's ``Field``.
    """

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the schema of the number with its bounds. Pydantic calls this."""
        return {**handler(source), **self._bounds}


Positive = Annotated[float, Bounds(gt=0)]
Count = Annotated[int, Bounds(ge=1)]
Fraction = Annotated[float, Bounds(gt=0, lt=1)]


@dataclass(frozen=True)
class MeasuringSettings:
    """Rounds and bounds of a measurement. Times are in seconds."""

    #: The number of rounds of each cell, if no gate needs more.
    rounds: Count = 5
    #: The maximum number of rounds for a gate.
    maximum_rounds: Count = 80
    #: The number of requests with the shortest answers. The rate is computed a second time, from
    #: the difference between the times of long requests and of these requests.
    short_rounds: Count = 3
    #: The numbers of concurrent streams that are measured at the first depth, in addition to one
    #: stream. Some are above and some below the batch sizes of captured CUDA graphs (1, 2, 4, 8),
    #: and one is larger than the number of requests that are served at once.
    concurrency: tuple[Count, ...] = (2, 5, 8, 10)
    concurrency_rounds: Count = 3
    #: With speculative decoding, the draft positions whose acceptance rates are measured.
    draft_positions: tuple[Count, ...] = (1, 2, 3)
    #: The maximum number of requests that ``--percentiles`` sends for a percentile.
    tail_requests: Count = 473
    #: Token ids below this number are ordinary tokens. The special tokens of o200k_harmony begin at
    #: this id.
    vocabulary: Count = 199_998
    #: The largest difference between the rate of a stream and the rate from the difference between
    #: long and short requests, as a fraction.
    second_clock_bound: Fraction = 0.02
    #: The largest accepted share of the client's delays in a measured time.
    client_lag_bound: Fraction = 0.01
    #: The largest accepted change of the rate during its measurement, as a fraction.
    drift_bound: Fraction = 0.05
    #: The largest accepted difference between the times of the last warm-up requests, as a
    #: fraction.
    warm_bound: Fraction = 0.10
    warm_up_requests: Count = 6
    #: The time limit of a request.
    request_within_s: Positive = 600.0
    #: The longest time without a token.
    silent_within_s: Positive = 60.0
