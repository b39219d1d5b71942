"""The measuring plan: lengths, depths, streams and bounds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm121.core.measuring_settings import MeasuringSettings

if TYPE_CHECKING:
    from sm121.core.profile import Profile

#: The largest number of rounds that a user can request: a round takes seconds.
MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Sizes:
    """The sizes that a user requests.

    Attributes:
        generated_tokens: Answer lengths, in addition to those of the profile.
        only_depths: Depths that replace those of the profile; None to keep the profile's.
        depths: Depths, in addition to `only_depths` or to those of the profile.
        concurrency: Numbers of streams, in addition to those of the profile.
        rounds: The number of rounds; None for the profile's.
    """

    generated_tokens: tuple[int, ...] = ()
    only_depths: tuple[int, ...] | None = None
    depths: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    rounds: int | None = None


@dataclass(frozen=True)
class Plan:
    """The measuring plan of a run: the profile's plan with the user's sizes.

    Attributes:
        prompt_tokens: The length of the prompt that follows the depth, in tokens.
        generated_tokens: The lengths of answers in tokens, in ascending order.
        depths: Numbers of tokens in front of the prompt. Loads use the first one.
        measuring: The numbers of rounds and the bounds.
    """

    prompt_tokens: int
    generated_tokens: tuple[int, ...]
    depths: tuple[int, ...]
    measuring: MeasuringSettings

    @classmethod
    def of(cls, profile: "Profile", *, plan: str, sizes: "Sizes | None" = None) -> "Plan":
        """Return a plan of the profile with the user's sizes.

        Args:
            profile: The profile.
            plan: The name of the plan: quick, merge or full.
            sizes: The user's sizes. Their ``rounds`` also raises the maximum number of rounds.

        Raises:
            UsageError: The profile has no plan of this name.
        """
        performance = profile.performance
        measuring = performance.measuring
        row = profile.plan(plan)
        sizes = sizes or Sizes()
        streams = row.concurrency
        if sizes.concurrency:
            streams = tuple(sorted({*(streams or measuring.concurrency), *sizes.concurrency}))
        tokens = row.generated_tokens or performance.generated_tokens
        depths = sizes.only_depths or row.depths or performance.depths
        changes = {
            "rounds": sizes.rounds or row.rounds,
            "concurrency": streams,
            "maximum_rounds": max(sizes.rounds or 0, measuring.maximum_rounds),
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        return cls(
            prompt_tokens=performance.prompt_tokens,
            generated_tokens=tuple(sorted({*tokens, *sizes.generated_tokens})),
            depths=tuple(dict.fromkeys((*depths, *sizes.depths))),
            measuring=measuring.model_copy(update=changes),
        )

    @property
    def longest(self) -> int:
        """The length of the long answers, in tokens.

        Rates of fewer tokens use the answers' beginning.
        """
        return max(self.generated_tokens)

    @property
    def shortest(self) -> int:
        """The length of the short answers, in tokens. They serve for checks and the warm-up."""
        return max(2, min(self.generated_tokens) // 4)
