"""The rounds and bounds of a measurement, and the bounds of numbers in data files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


class Bounds:
    """The bounds of a number in a data file, without pydantic.

    Args:
        **bounds: ``gt``, ``ge`` and ``lt``, as pydantic's ``Field`` has them.
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

    #: The rounds of each cell, before a gate needs more.
    rounds: Count = 5
    #: The most rounds of a gate.
    maximum_rounds: Count = 80
    #: Requests of the shortest length beside the long ones, for the second clock.
    short_rounds: Count = 3
    #: Numbers of concurrent streams, measured at the first depth, beside one stream. They lie on
    #: both sides of the captured graphs (1, 2, 4, 8), and above the number that is served at once.
    concurrency: tuple[Count, ...] = (2, 5, 8, 10)
    concurrency_rounds: Count = 3
    #: Positions of a draft whose acceptance is measured, if the engine speculates.
    draft_positions: tuple[Count, ...] = (1, 2, 3)
    #: The most requests of ``--percentiles`` for a percentile.
    tail_requests: Count = 473
    #: Smaller ids are plain tokens; the special tokens of o200k_harmony begin there.
    vocabulary: Count = 199_998
    #: The largest difference of the second clock from the first, as a fraction.
    second_clock_bound: Fraction = 0.02
    #: The largest share of a measured time that may be delays of the client.
    client_lag_bound: Fraction = 0.01
    #: The largest change of the rate during its measurement, as a fraction.
    drift_bound: Fraction = 0.05
    #: The largest difference of the last warm-up requests, as a fraction.
    warm_bound: Fraction = 0.10
    warm_up_requests: Count = 6
    #: The time limit of a request.
    request_within_s: Positive = 600.0
    #: The longest time without a token.
    silent_within_s: Positive = 60.0
