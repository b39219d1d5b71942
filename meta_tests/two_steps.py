"""Call a function in two steps."""

from collections.abc import Callable
from typing import Any


def in_two_steps(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Return a function that takes the first parameters, and returns a function that takes the
    others."""
    return lambda *options, **named: lambda *subject: function(*subject, *options, **named)
