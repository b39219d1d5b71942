"""The options that the suite adds to pytest's, as ``fixtures/options.toml`` has them."""

from collections.abc import Callable, Sequence
from typing import Any

from sm121.core import arguments, data_file

#: How the file of an option is made.
WRITTEN_BY = {
    "--golden": "Record one with a build that you trust: --record-golden FILE",
    "--exam": "Write one with a JSON object on each line, as in docs/correctness.md",
}


class Marker(data_file.DataTable):
    """A marker beside those of levels and architectures."""

    name: str
    help: str


class Group(data_file.DataTable):
    """Options that stand together in ``pytest --help``."""

    title: str
    option: tuple[arguments.Argument, ...]


class OptionsFile(data_file.DataTable):
    """What ``fixtures/options.toml`` says."""

    group: tuple[Group, ...]
    marker: tuple[Marker, ...]


def file() -> OptionsFile:
    """``fixtures/options.toml``."""
    return data_file.load("options.toml", OptionsFile)


def every() -> dict[str, arguments.Argument]:
    """The options by their names, ``--arch`` first."""
    return {option.name: option for group in file().group for option in group.option}


def reader(words: Sequence[str]) -> Callable[[str], Any]:
    """Read the suite's options from the words of a command line, without pytest.

    Args:
        words: The words. Those of other options are skipped.

    Returns:
        What gives the value of an option by its name, or its default.

    Raises:
        UsageError: An option has no value, or a wrong one.
    """
    parser = arguments.Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    actions = {}
    for name, option in every().items():
        without_help = option.model_copy(update={"help": None})
        actions[name] = parser.add_argument(name, **without_help.given())
    values, _ = parser.parse_known_args(list(words))
    return lambda name: getattr(values, actions[name].dest)
