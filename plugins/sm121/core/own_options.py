"""The options that the suite adds to pytest's, as ``fixtures/options.toml`` has them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.core.command_parser import Parser

#: How a user makes the file that an option names.
WRITTEN_BY = {
    "--golden": "Record one with a build that you trust: --record-golden FILE",
    "--exam": "Write one with a JSON object on each line, as in docs/correctness.md",
}


class Argument(data_file.DataTable):
    """An option, in the terms of ``argparse.ArgumentParser.add_argument``."""

    name: str
    #: None: the option is not shown.
    help: str | None = None
    metavar: str | tuple[str, ...] | None = None
    nargs: int | str | None = None
    action: str | None = None
    choices: tuple[str, ...] | None = None
    default: str | int | list[str] | None = None
    dest: str | None = None
    required: bool | None = None
    #: Its values are paths.
    path: bool = False
    #: Its values are whole numbers.
    integer: bool = False

    def given(self, **values: str) -> dict[str, Any]:
        """Return the keyword arguments for ``add_argument``.

        Args:
            **values: The texts for ``{name}`` in the help and in the default.
        """
        keywords = self.model_dump(exclude={"name", "path", "integer"}, exclude_none=True)
        for key in ("help", "default"):
            text = keywords.get(key)
            if isinstance(text, str):
                keywords[key] = text.format(**values)
        if self.path:
            keywords["type"] = Path
        elif self.integer:
            keywords["type"] = int
        return keywords


class Marker(data_file.DataTable):
    """A marker of pytest, beside those of levels and architectures."""

    name: str
    help: str


class Group(data_file.DataTable):
    """Options that stand together in ``pytest --help``."""

    title: str
    option: tuple[Argument, ...]


class OptionsFile(data_file.DataTable):
    """The contents of ``fixtures/options.toml``."""

    group: tuple[Group, ...]
    marker: tuple[Marker, ...]


def file() -> OptionsFile:
    """Return the contents of ``fixtures/options.toml``."""
    return data_file.load("options.toml", OptionsFile)


def every() -> dict[str, Argument]:
    """Return the options by their names, ``--arch`` first."""
    options = {}
    for group in file().group:
        for option in group.option:
            options[option.name] = option
    return options


def reader(words: Sequence[str]) -> Callable[[str], Any]:
    """Read the suite's options from the words of a command line, without pytest.

    Args:
        words: The words. Those of other options are skipped.

    Returns:
        A function that returns the value of an option, or its default, by the option's name.

    Raises:
        UsageError: An option has no value, or a wrong one.
    """
    parser = Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    actions = {}
    for name, option in every().items():
        without_help = option.model_copy(update={"help": None})
        actions[name] = parser.add_argument(name, **without_help.given())
    values, _ = parser.parse_known_args(list(words))
    return lambda name: getattr(values, actions[name].dest)
