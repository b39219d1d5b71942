"""The speculative decoding of the simulated server: its log text, its steps and its counters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sm121.core.engine_arguments import parse_options


@dataclass(frozen=True)
class Drafts:
    """The speculative decoding that a command line requests."""

    method: str
    model: str
    #: The tokens of a draft.
    length: int
    #: The share of the drafts whose token is accepted, by the token's position in the draft.
    accepted: Sequence[float]

    @classmethod
    def of(cls, arguments: Sequence[str], accepted: Sequence[float]) -> "Drafts | None":
        """Return the requested drafts; None without speculative decoding."""
        given = parse_options(arguments)
        if "speculative_config.method" not in given:
            return None
        length = int(given["speculative_config.num_speculative_tokens"])
        method = given["speculative_config.method"]
        return cls(method, given["speculative_config.model"], length, accepted[:length])

    def __str__(self) -> str:
        names = f"method='{self.method}', model='{self.model}'"
        return f"SpeculativeConfig({names}, num_spec_tokens={self.length})"

    @property
    def step_tokens(self) -> float:
        """The mean number of tokens of a step."""
        return 1.0 + sum(self.accepted)

    def sizes(self, tokens: int) -> Iterator[int]:
        """Yield the number of tokens of each step, for this many tokens in all."""
        total = 0.0
        made = 0
        while made < tokens:
            total += self.step_tokens
            size = min(round(total), tokens) - made
            made += size
            yield size

    def counters(self, steps: int, tokens: int) -> dict[str, int]:
        """Return vLLM's counters after this many steps and tokens."""
        prefix = "vllm:spec_decode_num_"
        accepted = tokens - steps
        values = {
            f"{prefix}drafts_total": steps,
            f"{prefix}draft_tokens_total": self.length * steps,
            f"{prefix}accepted_tokens_total": accepted,
        }
        remaining = sum(self.accepted) or 1.0
        for position, share in enumerate(self.accepted):
            name = f'{prefix}accepted_tokens_per_pos_total{{position="{position}"}}'
            values[name] = round(accepted * share / remaining)
            accepted -= values[name]
            remaining = (remaining - share) or 1.0
        return values
