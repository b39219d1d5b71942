"""Format measured numbers for people, in digits that programs can also parse."""

from decimal import Decimal

#: The maximum number of decimals, with which any two floats differ unless they are very small.
_MOST_DECIMALS = 17


def number(value: float | None) -> str:
    """Format a number with four significant digits. Digits before the point are never dropped.

    Args:
        value: The number. None becomes an empty text.

    Returns:
        The digits without exponents or separators, for example ``17280``, ``52.39`` or ``0.0003``.
    """
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return format(Decimal(text), "f") if "e" in text else text


def apart(value: float, limit: float | None) -> str:
    """Format a number with enough digits to distinguish it from its limit.

    Args:
        value: The number.
        limit: The number with which the value is compared; None if there is no limit.

    Returns:
        The text of `number`. If the limit has the same text, a text with up to 17 decimals.
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
