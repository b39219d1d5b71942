"""Call functions in two steps."""

from collections.abc import Callable
from typing import Any


def in_two_steps(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Call a function with its first parameters, and the result with the others."""
    return lambda *options, **named: lambda *subject: function(*subject, *options, **named)
