"""An argparse parser with one-line errors, suggestions, and commands in groups."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from sm121.core.errors import UsageError
from sm121.core.suggestion import did_you_mean

#: The unknown word in a message of argparse.
_UNKNOWN_WORD = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)")
#: The end of such a message, with the words that exist.
_CHOICES = re.compile(r" \(choose from (.*)\)")
#: The columns of the help: at most, and those in front of a summary.
_WIDEST = 100
_INDENT = 17
#: The least width of a summary, on the narrowest terminal.
_NARROWEST_SUMMARY = 30


class InvalidArgumentsError(UsageError):
    """argparse refused the arguments of a command line."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as `InvalidArgumentsError`.

    argparse itself prints its usage and exits with 2, which is pytest's status of an interrupt.

    Attributes:
        groups: The summaries of the commands by their names, under the titles of their groups.
        commands: The parsers of the commands by their names.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.groups: dict[str, dict[str, str]] = {}
        self.commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise a message of argparse.

        Args:
            message: The message. A suggestion replaces its list of choices.

        Raises:
            InvalidArgumentsError: Always. Its message is one line.
        """
        text = " ".join(message.split())
        hint = self._suggestion(text)
        if hint:
            text = _CHOICES.sub("", text) + hint
        raise InvalidArgumentsError(f"{self.prog}: {text} (see {self.prog} --help)")

    def _suggestion(self, message: str) -> str:
        """Return what the unknown word in a message may mean; empty if nothing is near."""
        unknown = _UNKNOWN_WORD.search(message)
        if unknown is None:
            return ""
        names: list[str] = []
        for parser in (self, *self.commands.values()):
            names.extend(parser._option_string_actions)
        choices = _CHOICES.search(message)
        if choices is not None:
            names.extend(re.findall(r"[\w.-]+", choices[1]))
        word = unknown[1]
        return "" if word in names else did_you_mean(word, names)

    def format_help(self) -> str:
        """Return the help; of a parser with `groups`, the commands by group with a summary each."""
        if not self.groups:
            return super().format_help()
        width = min(_WIDEST, shutil.get_terminal_size().columns)
        parts = [f"usage: {self.prog} COMMAND ...\n\n{self.description}\n"]
        for title, commands in self.groups.items():
            parts.append(f"\n{title}:\n")
            for name, summary in commands.items():
                lines = textwrap.wrap(summary, max(_NARROWEST_SUMMARY, width - _INDENT))
                indented = f"\n{'':{_INDENT}}".join(lines)
                parts.append(f"  {name:13}  {indented}\n")
        parts.append(f"\n{self.prog} COMMAND --help, {self.prog} --version\n")
        return "".join(parts)
