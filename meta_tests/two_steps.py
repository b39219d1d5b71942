"""Functions that are called in two steps."""

from collections.abc import Callable
from typing import Any


def in_two_steps(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Call it with what makes it up, and what comes of that with what it works on: the function's
    first parameters."""
    return lambda *options, **named: lambda *subject: function(*subject, *options, **named)
