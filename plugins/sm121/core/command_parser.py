"""Arguments of a command line as data: what argparse, and pytest's parser, take of a row."""

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError

#: What argparse calls wrong, and what it would take instead.
_WRONG = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)")
_CHOICES = re.compile(r" \(choose from (.*)\)")


class WrongArgumentsError(UsageError):
    """What argparse has to say."""


class Parser(argparse.ArgumentParser):
    """argparse would print its usage and end with 2, which is pytest's status of an interrupt.
    ``groups``: the commands under their titles, with what each does."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.groups: dict[str, dict[str, str]] = {}
        self.commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise WrongArgumentsError: one line, with what may have been meant."""
        text = " ".join(message.split())
        if (wrong := _WRONG.search(text)) is not None:
            parsers = (self, *self.commands.values())
            names = [name for parser in parsers for name in parser._option_string_actions]
            choices = _CHOICES.search(text)
            names += re.findall(r"[\w.-]+", choices[1]) if choices is not None else []
            if wrong[1] not in names and (hint := did_you_mean(wrong[1], names)):
                text = _CHOICES.sub("", text) + hint
        raise WrongArgumentsError(f"{self.prog}: {text} (see {self.prog} --help)")

    def format_help(self) -> str:
        """The commands by group, each in a line or two."""
        if not self.groups:
            return super().format_help()
        width = min(100, shutil.get_terminal_size().columns)
        parts = [f"usage: {self.prog} COMMAND ...\n\n{self.description}\n"]
        for title, commands in self.groups.items():
            parts.append(f"\n{title}:\n")
            for name, summary in commands.items():
                lines = textwrap.wrap(summary, max(30, width - 17))
                parts.append(f"  {name:13}  " + f"\n{'':17}".join(lines) + "\n")
        return "".join(parts) + f"\n{self.prog} COMMAND --help, {self.prog} --version\n"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """What to add to the refusal of a word that is near to a name; empty where none is."""
    close = difflib.get_close_matches(word, names, 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""


class Argument(DataTable):
    """An argument. Without ``help`` it is not shown."""

    name: str
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
        """The keyword arguments of ``add_argument``. `values`: for ``{name}`` in help, default."""
        excluded = {"name", "path", "integer"}
        keywords = self.model_dump(exclude=excluded, exclude_none=True)
        for key in ("help", "default"):
            if isinstance(text := keywords.get(key), str):
                keywords[key] = text.format(**values)
        if self.path or self.integer:
            keywords["type"] = Path if self.path else int
        return keywords
