"""What is measured, and how far measurements of one thing may disagree."""

from dataclasses import dataclass

from sm121.core.level_settings import Measuring
from sm121.core.profile import FULL, Profile


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
        profile: Profile,
        *,
        plan: str = FULL,
        depths: tuple[int, ...] | None = None,
        rounds: int | None = None,
    ) -> "Plan":
        """What a plan of the profile measures, with the user's depths and rounds on top; these also
        raise the bound. Raises UsageError: the profile has no such plan."""
        performance, row = profile.performance, profile.plan(plan)
        measuring = performance.measuring.model_copy(
            update={
                name: value
                for name, value in (("rounds", row.rounds), ("concurrency", row.concurrency))
                if value is not None
            }
        )
        if rounds is not None:
            bound = max(rounds, measuring.maximum_rounds)
            measuring = measuring.model_copy(update={"rounds": rounds, "maximum_rounds": bound})
        return cls(
            performance.prompt_tokens,
            row.generated_tokens or performance.generated_tokens,
            depths or row.depths or performance.depths,
            measuring,
        )

    @property
    def longest(self) -> int:
        """Tokens of the long requests: the rates of fewer tokens are read from their beginning."""
        return max(self.generated_tokens)

    @property
    def shortest(self) -> int:
        """Tokens of the short requests of the second clock, which warm up too."""
        return max(2, min(self.generated_tokens) // 4)
