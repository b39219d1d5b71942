"""Types that several tables of a profile use."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from sm121.core.extending import Statement
from sm121.core.measuring_settings import Positive

Level = Literal["smoke", "kernel", "correctness", "stress", "performance", "regression", "matrix"]
#: The levels in the order in which they run.
LEVELS: tuple[str, ...] = get_args(Level)
#: The name of the predefined plan that runs everything.
FULL = "full"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
#: The name of a configuration or of a plan.
ConfigurationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Sourced(Statement):
    """A number with its source. A number without a source is an error."""

    value: Positive


class Gate(Statement):
    """The thresholds of one metric, in its unit."""

    #: The metric's name. The depth or the number of streams follows after an ``@``.
    metric: str = Field(pattern=r"^[a-z0-9_]+(@d?\d+)?$")
    unit: Literal["tok/s", "ms", "µs", "s", "GiB", "%", "tokens", "nats"]
    #: For a metric where higher is better, for example a rate: below this value, the gate fails.
    minimum: float | None = None
    #: A goal above the minimum. The report shows whether it was reached.
    target: float | None = None
    #: A goal above the target. The report shows whether it was reached.
    stretch: float | None = None
    #: For a metric where lower is better, for example a time: above this value, the gate fails.
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_direction(self) -> "Gate":
        if (self.minimum is None) == (self.at_most is None):
            raise ValueError("expected either minimum (a rate) or at_most (a time), not both")
        thresholds = (self.minimum, self.target, self.stretch)
        given = [threshold for threshold in thresholds if threshold is not None]
        if given != sorted(given):
            raise ValueError("expected minimum <= target <= stretch")
        return self
