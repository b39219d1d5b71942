"""Format measured numbers for people, in digits that programs can also parse."""

from decimal import Decimal

#: The maximum number of decimals; it distinguishes any two floats that are not very small.
_MOST_DECIMALS = 17


def number(value: float | None) -> str:
    """Format a number with four significant digits, but with all digits before the point.

    Args:
        value: The number. None becomes an empty text.

    Returns:
        The digits, without an exponent or separators: ``17280``, ``52.39``, ``0.0003``.
    """
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return format(Decimal(text), "f") if "e" in text else text


def apart(value: float, limit: float | None) -> str:
    """Format a number with enough digits to distinguish it from its limit.

    Args:
        value: The number.
        limit: The number that it is compared with. None: no limit.

    Returns:
        The text of `number`; if that is also the text of the limit, a text with up to 17 decimals.
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
