"""Choose which values of ``top_p``, ``top_k`` and ``min_p`` to check, and after which texts."""

import math
import random
from collections.abc import Mapping
from typing import NamedTuple

from sm121.answers import expected_samples
from sm121.answers.expected_samples import CHANCE, Cut, Top
from sm121.api import sample_source
from sm121.core.verdict import NotRun

#: The run draws its case at random from the cheapest case and the cases that need at most this many
#: samples.
_CHEAP = 200
#: The samples are so many that a server with a value that is too loose is expected to draw this
#: many tokens which the right value removes. The probability that it draws none is then below about
#: exp(-5).
_LOOSE_FACTOR = 5


class CutValues(NamedTuple):
    """The values of ``top_p``, ``top_k`` or ``min_p`` that may be checked."""

    middle: float
    #: The values from which each run draws one.
    drawn_from: list[float]


CUTS: dict[Cut, CutValues] = {
    "top_p": CutValues(0.5, [n / 100 for n in range(20, 91)]),
    "top_k": CutValues(5, [*range(2, 16)]),
    "min_p": CutValues(0.2, [n / 200 for n in range(4, 121)]),
}


class CutCase(NamedTuple):
    """A value of a parameter, and a text.

    The samples after this text show whether the server uses a value that is wrong by a tenth.
    """

    #: The number of samples that show whether the server's value is off by a tenth.
    samples: int
    value: float
    text: str
    #: The tokens that a slightly tighter value would remove.
    edge: list[str]


def find_cuts(tops: Mapping[str, Top], cut: Cut, seed: int) -> dict[str, CutCase]:
    """Choose the values of a parameter to check, and for each value the text to sample after.

    Args:
        tops: The likeliest tokens after each text.
        cut: The parameter.
        seed: The seed with which the case ``drawn`` is drawn.

    Returns:
        ``middle``, the case whose value is nearest to the parameter's middle value, and ``drawn``,
        one of the other suitable cases.

    Raises:
        NotRun: Every value and text would need more than the maximum number of samples.
    """
    middle, values = CUTS[cut]
    cases = []
    for value in values:
        for text, top in tops.items():
            case = _find_case(text, top, cut, value)
            if case is not None:
                cases.append(case)
    fewest = min((case.samples for case in cases), default=sample_source.MOST + 1)
    if fewest > sample_source.MOST:
        raise NotRun(f"no prompt of the suite can detect a {cut} that is wrong by 10 %")
    cases = [case for case in cases if case.samples <= max(fewest, _CHEAP)]
    drawn = random.Random(f"{seed} {cut}").choice(cases)
    nearest = min(cases, key=lambda case: abs(case.value - middle))
    return {"middle": nearest, "drawn": drawn}


def _find_case(text: str, top: Top, cut: Cut, value: float) -> CutCase | None:
    """Return the case of a value and a text; None if its samples cannot show an error."""
    error = 1.0 if cut == "top_k" else expected_samples.ERROR * value
    remaining, dropped = expected_samples.remaining(top, cut, value)
    at_smaller = expected_samples.remaining(top, cut, value - error)
    at_larger = expected_samples.remaining(top, cut, value + error)
    edge = remaining & (at_smaller.dropped | at_larger.dropped)
    beyond = dropped & (at_smaller.remaining | at_larger.remaining)
    whole = _probability(top, remaining)
    tight = _probability(top, edge)
    loose = _probability(top, beyond)
    all_are_decided = len(remaining | dropped) == len(top)
    if not (all_are_decided and tight and loose):
        return None
    count_tight = math.log(4 / CHANCE) * whole / tight
    count_loose = _LOOSE_FACTOR * (whole + loose) / loose
    return CutCase(math.ceil(max(count_tight, count_loose)), value, text, sorted(edge))


def _probability(top: Top, tokens: set[str]) -> float:
    return sum(math.exp(top[token]) for token in tokens)
