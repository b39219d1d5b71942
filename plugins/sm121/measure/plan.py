"""What is measured, and how far measurements of one thing may disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Fraction = Annotated[float, Field(gt=0, lt=1)]
_Seconds = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]


class Measuring(BaseModel):
    """The part of a profile's ``[performance]`` that says how it is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    #: Rounds of each cell, before a gate asks for more, and the most that it may ask for.
    rounds: _Count = 5
    maximum_rounds: _Count = 40
    #: Requests of the shortest length beside the long ones: the second clock needs both.
    short_rounds: _Count = 3
    #: Streams at the same time, measured at the first depth.
    concurrency: tuple[_Count, ...] = (2, 4, 8)
    concurrency_rounds: _Count = 3
    #: Requests that ``--tails`` gathers at most for a percentile.
    tail_requests: _Count = 473
    #: Ids below this one are plain tokens: o200k_harmony has its special tokens from there on.
    vocabulary: _Count = 199_998
    #: How far the second clock may be from the first.
    second_clock_bound: _Fraction = 0.02
    #: How much of a measured time may be delays of the client itself.
    client_lag_bound: _Fraction = 0.01
    #: How far the rate may move while it is measured.
    drift_bound: _Fraction = 0.05
    #: How far the last warm-up requests may be apart.
    warm_bound: _Fraction = 0.10
    warm_up_requests: _Count = 6
    request_within_s: _Seconds = 600.0
    silent_within_s: _Seconds = 60.0


@dataclass(frozen=True)
class Plan:
    """The plan in force: the profile's, with what the user asked for on top."""

    prompt_tokens: int
    generated_tokens: tuple[int, ...]
    depths: tuple[int, ...]
    measuring: Measuring

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        generated_tokens: tuple[int, ...],
        depths: tuple[int, ...],
        measuring: Measuring,
        *,
        rounds: int | None = None,
    ) -> Plan:
        """The profile's plan with the user's rounds, which also raise the bound."""
        if rounds is not None:
            bound = max(rounds, measuring.maximum_rounds)
            measuring = measuring.model_copy(update={"rounds": rounds, "maximum_rounds": bound})
        return cls(prompt_tokens, generated_tokens, depths, measuring)

    @property
    def longest(self) -> int:
        """Tokens of the long requests: the rates of fewer tokens are read from their beginning."""
        return max(self.generated_tokens)

    @property
    def shortest(self) -> int:
        """Tokens of the short requests of the second clock, which warm up too."""
        return max(2, min(self.generated_tokens) // 4)
