"""The options that the user gave: on the command line, in a variable or in an ini file."""

import configparser
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from sm121.core import data_file, own_tests
from sm121.plugin import workers


@dataclass(frozen=True)
class Given:
    """An option whose value is neither the default nor set by the suite itself.

    Attributes:
        dest: The name in pytest's configuration, such as ``markexpr``.
        name: The name on a command line, such as ``-m``.
        value: The value, quoted for a shell.
    """

    dest: str
    name: str
    value: str


def given(config: pytest.Config) -> list[Given]:
    """Return the options that the user gave.

    Args:
        config: The configuration of pytest, after all plugins have added their options.

    Returns:
        The options, sorted by their names in pytest's configuration.
    """
    parser = config._parser
    defaults = vars(parser.parse([]))
    own = vars(parser.parse(_own_words(config)))
    names: dict[str, str] = {}
    # `--exitfirst` and `--maxfail` set the same value. pytest 8.2 parses `--exitfirst` first, and
    # it declares no default, so the default of `--maxfail` counts.
    declared: dict[str, object] = {}
    for action in parser.optparser._actions:
        names.setdefault(action.dest, (action.option_strings or ["paths or node ids"])[-1])
        if action.default is not None:
            declared.setdefault(action.dest, action.default)
    options = []
    for dest, value in sorted(vars(config.option).items()):
        if dest == "benchmark_disable" and workers.is_parallel(config):
            continue  # `workers.disable_timing` has set it
        if value is None or value in (defaults.get(dest), declared.get(dest), own.get(dest)):
            continue
        if isinstance(value, list):
            of_suite = [*(defaults.get(dest) or ()), *(own.get(dest) or ())]
            value = [part for part in value if part not in of_suite]
            if not value:
                continue
            text = shlex.join(map(str, value))
        else:
            text = str(value)
        options.append(Given(dest, names.get(dest, dest), text))
    return options


def _own_words(config: pytest.Config) -> list[str]:
    """All arguments that ``sm121 run`` or ``sm121 certify`` adds, and those in its ini file."""
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(own_tests.settings(), "utf-8")
    return [
        *shlex.split(ini["pytest"]["addopts"]),
        *own_tests.words(config.invocation_params.dir),
        *own_tests.certified_words(),
        str(own_tests.folder() / "tests"),
    ]


def fingerprinted(options: Iterable[Given]) -> dict[str, str]:
    """Return the options that belong to the fingerprint of a run, by their names.

    Args:
        options: The options that the user gave.
    """
    left_out = data_file.load_key("fingerprinted-options.toml", "left_out", frozenset[str])
    return {option.name: option.value for option in options if option.dest not in left_out}
