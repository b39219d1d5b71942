"""Reads option values that are numbers."""

from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.measure.plan import MOST_ROUNDS

#: The largest number of an option, and what the option counts. Lengths in tokens are bounded by the
#: context of the server (`sm121.plugin.performance`).
_MOST = {
    "--rounds": (MOST_ROUNDS, "rounds of each measurement"),
    # The largest default of vLLM's --max-num-seqs.
    "--concurrency": (1024, "streams at the same time"),
    "--crowd": (1024, "requests at the same time"),
    # A GB10 needs half a day for this many short requests.
    "--requests": (100_000, "requests of the load"),
    # Each start takes minutes.
    "--ab-pairs": (100, "starts of each side"),
}
#: The largest number of digits. Python converts no text of thousands of digits.
_DIGITS = 18
#: How many characters of a wrong value a message shows.
_SHOWN = 40


def numbers(option: Option, name: str, example: str, least: int = 0) -> tuple[int, ...] | None:
    """Return the distinct numbers of a comma-separated list; None without the option.

    Args:
        option: A function that returns the value of an option.
        name: The option.
        example: A correct value, for the message.
        least: The smallest number that is accepted.

    Raises:
        UsageError: The text is not such a list.
    """
    text = option(name)
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and _value(part) >= least for part in parts):
        raise UsageError(
            f"{name} {text}: expected numbers of at least {least}, as in {name} {example}"
        )
    values = tuple(dict.fromkeys(_value(part) for part in parts))
    _refuse_above(name, text, max(values))
    return values


def number(name: str, text: str | None) -> int | None:
    """Return the number, 1 or more, that an option gives; None without the option.

    Args:
        name: The option.
        text: Its value; None without one.

    Raises:
        UsageError: The text is not such a number.
    """
    if text is None:
        return None
    if not text.isdecimal() or _value(text) < 1:
        raise UsageError(f"{name} {text}: expected a number, 1 or more")
    _refuse_above(name, text, _value(text))
    return _value(text)


def _value(text: str) -> int:
    return int(text.strip()[:_DIGITS])


def _refuse_above(name: str, text: str, value: int) -> None:
    """Raise UsageError if a number is above the bound of its option."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    most, counted = _MOST.get(name, (value, ""))
    if value > most:
        raise UsageError(f"{name} {shown}: expected at most {most} {counted}")
    if any(len(part.strip()) > _DIGITS for part in text.split(",")):
        raise UsageError(f"{name} {shown}: expected numbers of at most {_DIGITS} digits")
