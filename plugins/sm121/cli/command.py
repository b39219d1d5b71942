"""How a subcommand of ``sm121`` is added, and its lines of progress."""

import argparse
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

#: Runs a subcommand and returns its exit status; None is 0.
Command: TypeAlias = Callable[[argparse.Namespace], int | None]
#: The subcommands of a parser: the result of ``add_subparsers``.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"

#: The exit status of a wrong request, as pytest's.
EXIT_USAGE = 4


def command(commands: Commands, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        commands: The subcommands of the parser.
        name: The name of the subcommand.
        run: Runs the subcommand.
        summary: The help.

    Returns:
        The parser of the subcommand.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def progress(line: str, stream: TextIO | None = None) -> None:
    """Print a line of progress with the time of day.

    Args:
        line: The line.
        stream: Where it is printed. None: standard output.
    """
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True, file=stream)
