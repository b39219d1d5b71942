"""Measure one running server with only its HTTP API, from a notebook or a command line.

The client, the metrics and the checks are those of the performance level. Of the suite's
dependencies, this package needs only httpx and numpy. uvloop is used if it is installed.

    from sm121 import clock

    result = clock.measure("http://127.0.0.1:8000")
    print(result)
    print(result.numbers["tg32@d0"].value)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm121.clock.measuring import Number, Result, measure

__all__ = ["Number", "PackageMissing", "Result", "measure"]


class PackageMissing(ImportError):
    """A package that `sm121.clock` needs is not installed. The message is one line."""


def __getattr__(name: str) -> Any:
    """Import `measuring` on first use, so that a missing package leads to a one-line error."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        measuring = importlib.import_module("sm121.clock.measuring")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "sm121"):
            raise
        raise PackageMissing(
            f"expected the package {package}, got none. Install it: pip install {package}"
        ) from error
    return getattr(measuring, name)
