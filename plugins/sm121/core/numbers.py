"""Write measured numbers for people, as digits that any program can read."""

from decimal import Decimal

#: Enough to tell any two floats of the usual size apart.
_MOST_DECIMALS = 17


def number(value: float | None) -> str:
    """Write a number with four significant digits, or with all digits before the point.

    There is never an exponent or a separator: ``17280``, ``52.39``, ``0.0003``. None is empty.
    """
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return format(Decimal(text), "f") if "e" in text else text


def apart(value: float, limit: float | None) -> str:
    """Write a number with enough digits to tell it from its limit.

    Args:
        value: The number.
        limit: The number that it is compared with. None: no limit.

    Returns:
        The text of `number`, or up to 17 decimals where that is also the text of the limit.
    """
    if limit is None or value == limit or number(value) != number(limit):
        return number(value)
    shown_limit = float(number(limit))
    text = ""
    for decimals in range(1, _MOST_DECIMALS + 1):
        text = f"{value:.{decimals}f}"
        if float(text) != shown_limit:
            break
    return text
