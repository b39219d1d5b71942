"""An argparse parser with one-line errors, suggestions, and commands in groups."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from sm121.core.errors import UsageError
from sm121.core.suggestion import did_you_mean

#: The unknown word in an error message of argparse.
_UNKNOWN_WORD = re.compile(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)")
#: The list of valid words at the end of such a message.
_CHOICES = re.compile(r" \(choose from (.*)\)")
#: The maximum width of the help, in columns.
_WIDEST = 100
#: The number of columns before a command's summary.
_INDENT = 17
#: The minimum width of a summary, in columns, even on a narrower terminal.
_NARROWEST_SUMMARY = 30


class InvalidArgumentsError(UsageError):
    """argparse refused the arguments of a command line."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as `InvalidArgumentsError`.

    argparse itself would print the usage and exit with 2, pytest's status for an interrupted run.

    Attributes:
        groups: For each group of commands, by its title: the summary of each command, by its name.
        commands: The parser of each command; the keys are the commands' names.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.groups: dict[str, dict[str, str]] = {}
        self.commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise an error of argparse as an exception.

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
        """Return a suggestion for the unknown word in a message; empty if no name is similar."""
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
        """Return the help. If there are `groups`, it lists the commands by group with summaries."""
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


class CommandParser(Parser):
    """A parser that refuses an empty value, which usually comes from an unset shell variable.

    As a path, an empty value would be the current folder. Only an argument whose default is empty
    may be empty.
    """

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_of_command = action.nargs == argparse.PARSER  # it also gets the command's arguments
        if arg_string == "" and action.default != "" and not is_of_command:
            raise argparse.ArgumentError(
                action,
                "expected a value, got an empty one. Leave it out, or set the variable that it "
                "comes from",
            )
        return super()._get_value(action, arg_string)
