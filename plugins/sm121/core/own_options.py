"""The options that the suite adds to pytest's, as ``fixtures/options.toml`` has them, and the names
that they had before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from sm121.core import data_file
from sm121.core.arguments import Argument
from sm121.core.data_file import DataTable


class Marker(DataTable):
    """A marker beside those of levels and architectures."""

    name: str
    help: str


class Group(DataTable):
    """Options that stand together in ``pytest --help``."""

    title: str
    option: tuple[Argument, ...]


class OptionsFile(DataTable):
    """What ``fixtures/options.toml`` says."""

    group: tuple[Group, ...]
    marker: tuple[Marker, ...]


@functools.cache
def file() -> OptionsFile:
    """``fixtures/options.toml``."""
    return data_file.load("options.toml", OptionsFile)


def every() -> dict[str, Argument]:
    """The options by their names, ``--arch`` first."""
    return {option.name: option for group in file().group for option in group.option}


@functools.cache
def _formerly() -> dict[str, tuple[str, str | None]]:
    """The name of today of each former one, and the value that the former one stands for."""
    return {
        former.name: (name, former.value)
        for name, option in every().items()
        for former in option.formerly
    }


def is_own(name: str) -> bool:
    """Whether an option is the suite's, by its name of today or a former one."""
    return name in every() or name in _formerly()


def as_now(given: Mapping[str, str]) -> dict[str, str]:
    """Options and their values, as a run has stored them, under the names of today."""
    found = {}
    for name, value in given.items():
        now, stands_for = _formerly().get(name, (name, None))
        found[now] = value if stands_for is None else stands_for
    return found


def words_as_now(arguments: Iterable[str]) -> list[str]:
    """A command line, with the names of today."""
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        now, stands_for = _formerly().get(name, (name, None))
        found.append(f"{now}={stands_for}" if stands_for else f"{now}{equals}{value}")
    return found
