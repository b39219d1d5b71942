"""Measured numbers for people: digits that can be copied into anything that reads numbers."""

from decimal import Decimal


def number(value: float | None) -> str:
    """A number with four significant digits, or all digits before the point; empty for none. Never
    an exponent, and nothing between the digits: ``17280``, ``52.39``, ``0.0003``."""
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return format(Decimal(text), "f") if "e" in text else text


def apart(value: float, limit: float | None) -> str:
    """A number with as many digits as tell it from its limit."""
    if limit is None or value == limit or number(value) != number(limit):
        return number(value)
    return next(
        text
        for digits in range(1, 18)
        if float(text := f"{value:.{digits}f}") != float(number(limit)) or digits == 17
    )
