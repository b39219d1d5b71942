"""Samples at positions that may be drafted, compared with the probabilities reported there."""

import math
from typing import NamedTuple

from sm121.answers import promised
from sm121.client.completion_json import Position
from sm121.core.unmet import require

#: The chance of a false alarm by the samples of one run.
ERROR_RATE = 1e-6
#: Texts that can go on in many ways at the first and at the second position of a draft. The first
#: token of an answer is the prefill's, which is never drafted.
OPEN_TEXTS = ("The capital", "The capital of France is Paris. The", "1 + 1 = 2. The capital")
#: The number of likeliest tokens that are counted.
SLICE = 4
#: Positions after which samples of one text are still many enough to be counted together.
_SHARED = 2
_SAMPLES = "samples by the reported probabilities"
_EVERYWHERE = "at all places"


class Kind(NamedTuple):
    """Parameters of a group of samples."""

    #: ``temperature`` or ``top_p``.
    name: str
    value: float
    #: Requests after each text.
    batches: int


KINDS = (Kind("temperature", 1.0, 4), Kind("temperature", 0.6, 1), Kind("top_p", 0.6, 1))


class Group(NamedTuple):
    """Samples that are counted together."""

    where: str
    label: str
    #: Over all positions and texts, else after one text.
    everywhere: bool


class Tallies:
    """The hits of the likeliest tokens, over all positions and after one text.

    Args:
        listed: The number of likeliest tokens that are requested.
    """

    def __init__(self, listed: int) -> None:
        self._listed = listed
        self._tallies: dict[Group, promised.Tally] = {}

    def add(self, text: str, kind: Kind, sample: tuple[Position, ...]) -> None:
        """Count a sample.

        Args:
            text: The prompt.
            kind: The parameters.
            sample: The tokens. The first one is the prefill's, which is not counted.

        Raises:
            Unmet: A token is cut off by the parameters.
        """
        everywhere = f"{_EVERYWHERE} with {kind.name} {kind.value:g}"
        prefix = f"{text} {sample[0].token}"
        for number, position in enumerate(sample[1:], 1):
            shares = _shares(position, self._listed, kind)
            # Equally likely tokens by name: an engine lists the drawn one first.
            ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
            for rank, (token, share) in enumerate(ordered[:SLICE], 1):
                hit = token == position.token
                self._count(Group(everywhere, f"rank {rank}", True), hit, share)
                if number <= _SHARED and kind.value == 1:
                    self._count(Group(f"after {prefix!r}", token, False), hit, share)
            prefix += f" {position.token}"

    def _count(self, group: Group, hit: bool, share: float) -> None:
        self._tallies.setdefault(group, promised.Tally()).add(hit, share)

    def judge(self) -> str:
        """Compare the hits of each group with the sum of its probabilities.

        Returns:
            The number of comparisons, in words.

        Raises:
            Unmet: A token was drawn too often or too seldom.
        """
        over_all = SLICE * len(KINDS)
        for group, tally in self._tallies.items():
            # Half of the error rate is for the groups over all positions.
            alike = over_all if group.everywhere else len(self._tallies)
            allowed = promised.allowed(tally.variance, ERROR_RATE / 2 / alike)
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
    """Return the probabilities of the tokens that may be drawn; none if another one was drawn.

    Raises Unmet if the drawn token is cut off.
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
    remaining, dropped = promised.remaining(top, "top_p", cut)
    required = f"{_SAMPLES}, none cut off"
    require(drawn not in dropped, required, drawn, f"{kind.name} {kind.value:g}")
    if drawn not in remaining or only_drawn:
        return {}
    return promised.shares({token: top[token] for token in remaining}, temperature)
