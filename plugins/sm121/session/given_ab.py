"""Reads the options of ``--ab A B``: its two sides, the number of pairs, and the hypothesis."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.engines import registry
from sm121.regression import hypothesis
from sm121.regression.ab import Side, parse_sides
from sm121.regression.hypothesis import Hypothesis
from sm121.session import given_attached, given_numbers, own_options
from sm121.session.given_engine import DEFAULT


@dataclass(frozen=True)
class GivenAb:
    """A comparison of two sides."""

    sides: tuple[Side, Side]
    #: The number of pairs of starts.
    pairs: int = 3
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
    both = sides(option, given_attached.base_url(option))
    file = option("--hypothesis")
    if both is None:
        if file is not None:
            raise UsageError(
                "--hypothesis: expected --ab A B as well, because the comparison of A and B "
                "decides on the hypothesis"
            )
        return None
    return GivenAb(
        sides=both,
        pairs=given_numbers.number("--ab-pairs", option("--ab-pairs")) or 3,
        hypothesis=hypothesis.load(started_in / file) if file is not None else None,
    )


def sides(option: Option, attached: str | None) -> tuple[Side, Side] | None:
    """Return the sides of ``--ab``; None without it.

    Args:
        option: A function that returns the value of an option.
        attached: The URL of ``--base-url``; None without it.

    Raises:
        UsageError: A side is wrong, or other options contradict it.
    """
    texts = option("--ab")
    if texts is None:
        if option("--ab-pairs"):
            raise UsageError("--ab-pairs: expected --ab A B as well, got none")
        return None
    parsed = parse_sides(texts, own_options.every())
    if parsed[0].url is not None:
        return parsed
    if attached:
        raise UsageError(
            "--ab with --base-url: expected two URLs, because the suite starts no "
            "server in such a run"
        )
    engine = option("--engine") or DEFAULT
    for side in parsed:
        reserved = registry.reserved(engine, side.arguments, dict(side.environment))
        if reserved is not None:
            raise UsageError(f"--ab {side.text!r}: {reserved.name} is set by the suite itself")
    return parsed
