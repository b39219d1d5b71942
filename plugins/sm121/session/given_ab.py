"""Checks ``--ab A B`` and its options: the two sides, the number of pairs, and the hypothesis."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core import options
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.engines import registry
from sm121.engines.options import DEFAULT
from sm121.regression import hypothesis
from sm121.regression.ab import Side, parse_sides
from sm121.regression.hypothesis import Hypothesis
from sm121.regression.options import ComparingOptions
from sm121.session import given_attached, own_options

#: The number of pairs of starts without ``--ab-pairs``.
PAIRS = 3


@dataclass(frozen=True)
class GivenAb:
    """A comparison of two sides."""

    sides: tuple[Side, Side]
    #: The number of pairs of starts.
    pairs: int = PAIRS
    hypothesis: Hypothesis | None = None


def read_options(option: Option, started_in: Path) -> GivenAb | None:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        started_in: The folder to which paths of options are relative.

    Returns:
        The comparison; None without ``--ab``.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    given = options.read(ComparingOptions, option)
    both = _sides(given, option("--engine") or DEFAULT, given_attached.base_url(option))
    if both is None:
        if given.hypothesis is not None:
            raise UsageError(
                "--hypothesis: expected --ab A B as well, because the comparison of A and B "
                "decides on the hypothesis"
            )
        return None
    expected = None
    if given.hypothesis is not None:
        expected = hypothesis.load(started_in / given.hypothesis)
    return GivenAb(sides=both, pairs=given.ab_pairs or PAIRS, hypothesis=expected)


def _sides(given: ComparingOptions, engine: str, attached: str | None) -> tuple[Side, Side] | None:
    """Return the sides of ``--ab``; None without it.

    Raises UsageError if a side is wrong, or if ``--base-url`` (`attached`) contradicts it.
    """
    if given.ab is None:
        if given.ab_pairs is not None:
            raise UsageError("--ab-pairs: expected --ab A B as well, got none")
        return None
    parsed = parse_sides(given.ab, own_options.every())
    if parsed[0].url is not None:
        return parsed
    if attached:
        raise UsageError(
            "--ab with --base-url: expected two URLs, because the suite starts no "
            "server in such a run"
        )
    for side in parsed:
        reserved = registry.reserved(engine, side.arguments, dict(side.environment))
        if reserved is not None:
            raise UsageError(f"--ab {side.text!r}: {reserved.name} is set by the suite itself")
    return parsed
