"""How a package declares its pytest options.

A package that owns options has a module ``options`` with a function for each group of them::

    def add_options(add: AddOption) -> None:
        add("--soak", metavar="DURATION", help="mixed load for so long")

`sm121.session.own_options` lists these functions in the order of ``pytest --help``.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

#: Returns the value of the option with a given command-line name; None if it was not given.
Option: TypeAlias = Callable[[str], Any]


class AddOption(Protocol):
    """Adds an option: ``addoption`` of pytest's groups, or ``add_argument`` of argparse."""

    def __call__(self, *names: str, **keywords: Any) -> object:
        """Add an option.

        Args:
            *names: The names of the option, such as ``--soak``.
            **keywords: Keyword arguments of ``argparse.ArgumentParser.add_argument``.
        """
