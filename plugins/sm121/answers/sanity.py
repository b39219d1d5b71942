"""Signs of a broken engine in a text, without knowledge of the right one.

Each detector returns a description of its sign, or None. The detectors are made for texts that
should go on (a list, an answer): none of the signs occurs in a right one.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

#: Output of broken kernels: cutlass-dsl 4.5.0 on sm_121a `!!!!`, llama.cpp on GB10 `????`.
_JUNK = "!?"
#: Characters of junk in a row.
_JUNK_RUN = 8
#: Repetitions of one token.
_TOKEN_RUN = 12
#: Repetitions of a cycle at the end of a text.
_CYCLE_REPEATS = 6
#: Tokens of a cycle at most.
_LONGEST_CYCLE = 16
#: Tokens of a text that is judged by its variety.
_ENOUGH = 24
#: Different tokens in proportion to all.
_LEAST_VARIETY = 0.12
#: Mean log-probability of greedy tokens in nats, and the tokens that it needs.
_LEAST_LIKELIHOOD = math.log(0.02)
_ENOUGH_LIKELIHOODS = 4


def junk(text: str) -> str | None:
    """Detect `!!!!!!!!` or `????????`, the output if all logits are equal or NaN."""
    for sign in _JUNK:
        if sign * _JUNK_RUN in text:
            return f"{_JUNK_RUN} times {sign!r} in a row"
    return None


def single_token_loop(tokens: Sequence[Hashable]) -> str | None:
    """Detect one token over and over."""
    for token, run in itertools.groupby(tokens):
        length = len(list(run))
        if length >= _TOKEN_RUN:
            return f"token {token!r} {length} times in a row"
    return None


def cycle(tokens: Sequence[Hashable]) -> str | None:
    """Detect a few tokens over and over at the end."""
    for period in range(2, _LONGEST_CYCLE + 1):
        end = tokens[-period * _CYCLE_REPEATS :]
        if len(end) == period * _CYCLE_REPEATS and end[period:] == end[:-period]:
            return f"the last {period} tokens {_CYCLE_REPEATS} times and more"
    return None


def collapse(tokens: Sequence[Hashable]) -> str | None:
    """Detect a text with few different tokens."""
    if len(tokens) < _ENOUGH:
        return None
    different = len(set(tokens))
    if different / len(tokens) >= _LEAST_VARIETY:
        return None
    token, count = Counter(tokens).most_common(1)[0]
    return f"{different} different tokens of {len(tokens)}, {token!r} {count} times"


def noise(log_probabilities: Sequence[float]) -> str | None:
    """Detect a flat distribution: the model's likeliest tokens are unlikely.

    Args:
        log_probabilities: Those of greedy tokens, in nats.
    """
    if len(log_probabilities) < _ENOUGH_LIKELIHOODS:
        return None
    mean = math.fsum(log_probabilities) / len(log_probabilities)
    if mean < _LEAST_LIKELIHOOD:
        return f"greedy tokens with a mean probability of {math.exp(mean):.2g}"
    return None


def signs(
    text: str,
    tokens: Sequence[Hashable] | None = None,
    log_probabilities: Sequence[float] | None = None,
) -> list[str]:
    """Run all detectors.

    Args:
        text: The text.
        tokens: Its tokens; None if the engine sends none: then the words are used.
        log_probabilities: Those of the tokens, in nats; None if the engine sends none.

    Returns:
        The detected signs.
    """
    units: Sequence[Hashable] = tokens if tokens is not None else text.split()
    detected = [junk(text), single_token_loop(units), cycle(units), collapse(units)]
    if log_probabilities is not None:
        detected.append(noise(log_probabilities))
    return [sign for sign in detected if sign is not None]
