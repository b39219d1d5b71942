"""Compare sampled tokens, which may come from drafts, with their reported probabilities."""

import math
from typing import NamedTuple

from sm121.answers import expected_samples
from sm121.client.completion_json import Position
from sm121.core.unmet import require

#: The probability of a false alarm in one run.
ERROR_RATE = 1e-6
#: Texts that have many plausible continuations at the first and at the second position of a draft.
#: (The first token of an answer is not drafted, because it comes from the prefill.)
OPEN_TEXTS = ("The capital", "The capital of France is Paris. The", "1 + 1 = 2. The capital")
#: The number of likeliest tokens whose frequencies are compared.
SLICE = 4
#: Up to this position, samples are counted per prefix, because enough samples have the same
#: preceding tokens.
_SHARED = 2
_SAMPLES = "samples that follow the reported probabilities"
_EVERYWHERE = "at all positions"


class Kind(NamedTuple):
    """The sampling parameters of a group of samples."""

    #: The name of the parameter: ``temperature`` or ``top_p``.
    name: str
    value: float
    #: The number of requests per text.
    batches: int


KINDS = (Kind("temperature", 1.0, 4), Kind("temperature", 0.6, 1), Kind("top_p", 0.6, 1))


class SampleGroup(NamedTuple):
    """Samples that are counted together."""

    where: str
    label: str
    #: Whether the group covers all positions and texts. If false, it covers only the position after
    #: one prefix.
    everywhere: bool


class Tallies:
    """How often the likeliest tokens were drawn, over all positions and per prefix.

    Args:
        listed: The number of likeliest tokens that are requested.
    """

    def __init__(self, listed: int) -> None:
        self._listed = listed
        self._tallies: dict[SampleGroup, expected_samples.Tally] = {}

    def add(self, text: str, kind: Kind, sample: tuple[Position, ...]) -> None:
        """Count a sample.

        Args:
            text: The prompt.
            kind: The parameters.
            sample: The tokens. The first token comes from the prefill, and is not counted.

        Raises:
            Unmet: A token was drawn that the parameters exclude.
        """
        everywhere = f"{_EVERYWHERE} with {kind.name} {kind.value:g}"
        prefix = f"{text} {sample[0].token}"
        for number, position in enumerate(sample[1:], 1):
            shares = _shares(position, self._listed, kind)
            # Sort equally likely tokens by name, because engines list the drawn one first.
            ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
            for rank, (token, share) in enumerate(ordered[:SLICE], 1):
                hit = token == position.token
                self._count(SampleGroup(everywhere, f"rank {rank}", True), hit, share)
                if number <= _SHARED and kind.value == 1:
                    self._count(SampleGroup(f"after {prefix!r}", token, False), hit, share)
            prefix += f" {position.token}"

    def _count(self, group: SampleGroup, hit: bool, share: float) -> None:
        self._tallies.setdefault(group, expected_samples.Tally()).add(hit, share)

    def judge(self) -> str:
        """Compare the hits of each group with the sum of its probabilities.

        Returns:
            A text with the number of comparisons.

        Raises:
            Unmet: A token was drawn too often or too seldom.
        """
        over_all = SLICE * len(KINDS)
        for group, tally in self._tallies.items():
            # Half of the error rate is reserved for the groups over all positions.
            alike = over_all if group.everywhere else len(self._tallies)
            allowed = expected_samples.allowed(tally.variance, ERROR_RATE / 2 / alike)
            difference = abs(tally.hits - tally.expected)
            require(
                difference <= allowed,
                f"{_SAMPLES}, off by at most",
                "",
                f"{group.where}, {group.label}",
                value=difference,
                limit=allowed,
                evidence=f"{tally}; chance of a false alarm {ERROR_RATE:g}",
            )
        return f"sampled tokens follow the target in {len(self._tallies)} comparisons"


def _shares(position: Position, listed: int, kind: Kind) -> dict[str, float]:
    """Return the probabilities of the allowed tokens; empty if the sample cannot be counted.

    Raises Unmet if the parameters exclude the drawn token.
    """
    top = position.top
    drawn = position.token
    only_drawn = len(top) > listed  # the drawn token is listed in addition to the likeliest
    if kind.value == 1:
        probabilities = {token: math.exp(log) for token, log in top.items()}
        if only_drawn:
            probabilities.pop(drawn, None)
        return probabilities
    if kind.name == "top_p":
        cut = kind.value
        temperature = 1.0
    else:
        cut = 1.0
        temperature = kind.value
    remaining, dropped = expected_samples.remaining(top, "top_p", cut)
    required = f"{_SAMPLES}, none cut off"
    require(drawn not in dropped, required, drawn, f"{kind.name} {kind.value:g}")
    if drawn not in remaining or only_drawn:
        return {}
    return expected_samples.shares({token: top[token] for token in remaining}, temperature)
