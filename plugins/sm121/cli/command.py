"""Functions that add a subcommand to ``sm121`` and print its progress."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

#: A function that runs a subcommand and returns its exit status; None means 0.
Command: TypeAlias = Callable[[argparse.Namespace], int | None]
#: The subcommands of a parser: the result of ``add_subparsers``.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"

#: The exit status of a usage error; pytest has the same.
EXIT_USAGE = 4


def drop_output() -> None:
    """Discard the rest of the output after its reader has ended, for example ``head``.

    Otherwise Python's last flush fails again, and changes the exit status.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_if_read(line: str) -> None:
    """Print a line. If the reader of the output has ended, ignore the error.

    Args:
        line: The line.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError:
        drop_output()


def command(commands: Commands, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        commands: The subcommands of the parser.
        name: The name of the subcommand.
        run: The function that runs the subcommand.
        summary: The help text of the subcommand.

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
        stream: The stream to print to. None: standard output.
    """
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True, file=stream)
