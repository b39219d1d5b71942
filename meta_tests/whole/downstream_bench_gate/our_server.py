"""A simulated server that has a level (its rate in tok/s), and a simulated clock."""

import itertools
import os

_looks = itertools.count()


def level() -> float:
    return float(os.environ.get("OUR_LEVEL", "60"))


def decode_rates(rounds: int) -> list[float]:
    """Return the rates of some answers, in tok/s."""
    return [level() + 0.1 * (number * 7 % 10 - 4.5) for number in range(rounds)]


def first_token() -> None:
    """Wait for a first token; the clock simulates its time."""


def clock() -> float:
    """The clock for --benchmark-timer: two readings are 600 / level ms apart, with some noise."""
    look = next(_looks)
    return (look + 0.002 * (look * 7 % 10)) * 0.6 / level()
