"""Curry a function: a first call sets its options, and a second call passes its main arguments."""

from collections.abc import Callable
from typing import Any


def in_two_steps(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Return a curried form of a function.

    ``in_two_steps(f)(*options)(*subject)`` calls ``f(*subject, *options)``."""
    return lambda *options, **named: lambda *subject: function(*subject, *options, **named)
