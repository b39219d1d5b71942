"""Detect signs of a broken engine in a text, without knowledge of the correct text.

Each detector returns a description of its sign, or None. The detectors are for texts that should
not repeat themselves, for example a list or an answer. A correct text of this kind shows none of
the signs.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

#: Characters that broken kernels output: `!!!!` (cutlass-dsl 4.5.0 on sm_121a), `????` (llama.cpp
#: on GB10).
_JUNK = "!?"
#: This many consecutive junk characters are a sign.
_JUNK_RUN = 8
#: This many consecutive repetitions of one token are a sign.
_TOKEN_RUN = 12
#: This many repetitions of a cycle at the end of a text are a sign.
_CYCLE_REPEATS = 6
#: Maximum number of tokens of a cycle.
_LONGEST_CYCLE = 16
#: The number of different tokens is judged only in texts of at least this many tokens.
_ENOUGH = 24
#: A smaller number of different tokens, as a fraction of all tokens, is a sign.
_LEAST_VARIETY = 0.12
#: A lower mean log-probability of greedy tokens, in nats, is a sign. The second number is the
#: minimum number of tokens for this check.
_LEAST_LIKELIHOOD = math.log(0.02)
_ENOUGH_LIKELIHOODS = 4


def junk(text: str) -> str | None:
    """Detect `!!!!!!!!` or `????????`, which engines output if all logits are equal or NaN.

    Args:
        text: The text.
    """
    for sign in _JUNK:
        if sign * _JUNK_RUN in text:
            return f"{_JUNK_RUN} times {sign!r} in a row"
    return None


def single_token_loop(tokens: Sequence[Hashable]) -> str | None:
    """Detect many consecutive repetitions of one token.

    Args:
        tokens: The tokens or the words of the text.
    """
    for token, run in itertools.groupby(tokens):
        length = len(list(run))
        if length >= _TOKEN_RUN:
            return f"token {token!r} {length} times in a row"
    return None


def cycle(tokens: Sequence[Hashable]) -> str | None:
    """Detect a repeated sequence of a few tokens at the end.

    Args:
        tokens: The tokens or the words of the text.
    """
    for period in range(2, _LONGEST_CYCLE + 1):
        end = tokens[-period * _CYCLE_REPEATS :]
        if len(end) == period * _CYCLE_REPEATS and end[period:] == end[:-period]:
            return f"the last {period} tokens {_CYCLE_REPEATS} times and more"
    return None


def collapse(tokens: Sequence[Hashable]) -> str | None:
    """Detect a text with few different tokens.

    Args:
        tokens: The tokens or the words of the text. A text with few tokens is not judged.
    """
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
        log_probabilities: The log-probabilities of greedy tokens, in nats.
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
        tokens: The tokens of the text; None if the engine sends none, so that words are used.
        log_probabilities: The tokens' log-probabilities in nats; None if the engine sends none.

    Returns:
        The detected signs.
    """
    units: Sequence[Hashable] = tokens if tokens is not None else text.split()
    detected = [junk(text), single_token_loop(units), cycle(units), collapse(units)]
    if log_probabilities is not None:
        detected.append(noise(log_probabilities))
    return [sign for sign in detected if sign is not None]
