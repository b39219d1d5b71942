"""The types that several tables of a profile have in common."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from sm121.core.extending import Statement

Level = Literal["smoke", "kernel", "correctness", "stress", "performance", "regression", "matrix"]
LEVELS: tuple[str, ...] = get_args(Level)
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ConfigurationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Sourced(Statement):
    """A number and where it comes from. A number without a source is not accepted."""

    value: Positive


class Gate(Statement):
    """Thresholds of one metric. Higher is better for rates, lower for times (``at_most``)."""

    metric: str = Field(pattern=r"^[a-z0-9_]+(@d?\d+)?$")
    unit: Literal["tok/s", "ms", "µs", "s", "GiB", "%", "tokens", "nats"]
    minimum: float | None = None
    target: float | None = None
    stretch: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_direction(self) -> "Gate":
        if (self.minimum is None) == (self.at_most is None):
            raise ValueError("expected either minimum (a rate) or at_most (a time), not both")
        grades = [g for g in (self.minimum, self.target, self.stretch) if g is not None]
        if grades != sorted(grades):
            raise ValueError("expected minimum <= target <= stretch")
        return self
