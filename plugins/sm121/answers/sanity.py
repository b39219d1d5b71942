"""Signs of a broken engine in a text, without knowing the right one. Each detector returns what it
saw, in words, or None. They are made for texts that should go on (a list, an answer), where none of
this happens in a right answer."""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

#: What broken kernels put out: cutlass-dsl 4.5.0 on sm_121a `!!!!`, llama.cpp on GB10 `????`.
_JUNK = "!?"
_JUNK_RUN = 8
_TOKEN_RUN = 12
_CYCLE_REPEATS = 6
_LONGEST_CYCLE = 16
#: A text of this many tokens and more is judged by its variety.
_ENOUGH = 24
_LEAST_VARIETY = 0.12
_LEAST_LIKELIHOOD = math.log(0.02)


def junk(text: str) -> str | None:
    """`!!!!!!!!` or `????????`: what is left when every logit is the same, or NaN."""
    for sign in _JUNK:
        if sign * _JUNK_RUN in text:
            return f"{_JUNK_RUN} times {sign!r} in a row"
    return None


def single_token_loop(tokens: Sequence[Hashable]) -> str | None:
    """One token over and over."""
    for token, run in itertools.groupby(tokens):
        length = sum(1 for _ in run)
        if length >= _TOKEN_RUN:
            return f"token {token!r} {length} times in a row"
    return None


def cycle(tokens: Sequence[Hashable]) -> str | None:
    """The same few tokens over and over at the end: a text that does not get away from itself."""
    for period in range(2, _LONGEST_CYCLE + 1):
        end = tokens[-period * _CYCLE_REPEATS :]
        if len(end) == period * _CYCLE_REPEATS and end[period:] == end[:-period]:
            return f"the last {period} tokens {_CYCLE_REPEATS} times and more"
    return None


def collapse(tokens: Sequence[Hashable]) -> str | None:
    """Hardly any different tokens."""
    if len(tokens) < _ENOUGH:
        return None
    variety = len(set(tokens)) / len(tokens)
    if variety < _LEAST_VARIETY:
        most = Counter(tokens).most_common(1)[0]
        return f"{len(set(tokens))} different tokens of {len(tokens)}, {most[0]!r} {most[1]} times"
    return None


def noise(log_probabilities: Sequence[float]) -> str | None:
    """The model holds its own best tokens for unlikely: its distribution has become flat."""
    if len(log_probabilities) < 4:
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
    """What all detectors see. Tokens are words of the text where the engine gives none."""
    units: Sequence[Hashable] = tokens if tokens is not None else text.split()
    observations = [junk(text), single_token_loop(units), cycle(units), collapse(units)]
    if log_probabilities is not None:
        observations.append(noise(log_probabilities))
    return [sign for sign in observations if sign is not None]
