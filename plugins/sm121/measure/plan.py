"""What is measured, and how far measurements of one thing may disagree."""

from dataclasses import dataclass

from sm121.core.level_settings import Measuring
from sm121.core.profile import FULL, Profile


@dataclass(frozen=True)
class Sizes:
    """What the user asks for: `only_depths` and rounds in place of the profile's, the others beside
    them, so that each gate keeps its number. None: as in the profile."""

    generated_tokens: tuple[int, ...] = ()
    only_depths: tuple[int, ...] | None = None
    depths: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    rounds: int | None = None


@dataclass(frozen=True)
class Plan:
    """The plan in force: the profile's, with what the user asked for on top."""

    prompt_tokens: int
    generated_tokens: tuple[int, ...]
    depths: tuple[int, ...]
    measuring: Measuring

    @classmethod
    def of(cls, profile: Profile, *, plan: str = FULL, sizes: "Sizes | None" = None) -> "Plan":
        """What a plan of the profile measures, with the user's sizes on top; their rounds also
        raise the bound. Raises UsageError: the profile has no such plan."""
        performance, row, sizes = profile.performance, profile.plan(plan), sizes or Sizes()
        measuring, streams = performance.measuring, row.concurrency
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
            performance.prompt_tokens,
            tuple(sorted({*tokens, *sizes.generated_tokens})),
            tuple(dict.fromkeys((*depths, *sizes.depths))),  # the first one is what loads use
            measuring.model_copy(update=changes),
        )

    @property
    def longest(self) -> int:
        """Tokens of the long requests: the rates of fewer tokens are read from their beginning."""
        return max(self.generated_tokens)

    @property
    def shortest(self) -> int:
        """Tokens of the short requests of the second clock, which warm up too."""
        return max(2, min(self.generated_tokens) // 4)
