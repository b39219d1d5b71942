"""Measured numbers for people: digits that can be copied into anything that reads numbers."""

from __future__ import annotations

from decimal import Decimal


def number(value: float | None) -> str:
    """A number with four significant digits, or all digits before the point; empty for none.

    Never an exponent, and nothing between the digits: ``17280``, ``52.39``, ``0.0003``.
    """
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return format(Decimal(text), "f") if "e" in text else text
