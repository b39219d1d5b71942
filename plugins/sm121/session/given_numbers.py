"""Reads option values that are numbers."""

from sm121.core.errors import UsageError
from sm121.core.options import Option


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
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        raise UsageError(
            f"{name} {text}: expected numbers of at least {least}, as in {name} {example}"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


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
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} {text}: expected a number, 1 or more")
    return int(text)
