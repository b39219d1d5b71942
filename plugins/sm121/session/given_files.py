"""Checks the files, folders and programs that options name, before a server starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

from sm121.answers.options import WRITTEN_BY
from sm121.core.errors import UsageError
from sm121.core.options import Option


def path(option: Option, name: str) -> Path | None:
    """Return the path that an option names, unchanged; None without the option.

    Args:
        option: A function that returns the value of an option.
        name: The option.
    """
    given = option(name)
    if not given:
        return None
    return Path(given)


def checked(option: Option, name: str, holds: Callable[[Path], bool], expected: str) -> Path | None:
    """Return the absolute path that an option names; None without the option.

    Args:
        option: A function that returns the value of an option.
        name: The option.
        holds: A function that returns whether the path is valid for the option.
        expected: The valid paths, in words.

    Raises:
        UsageError: The path is not valid.
    """
    given = option(name)
    if given is None:
        return None
    if not holds(Path(given)):
        raise UsageError(f"{name} {given}: expected {expected}")
    return Path(given).absolute()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder contains a checkpoint.

    Args:
        folder: The folder.
    """
    return (folder / "config.json").is_file()


def existing(option: Option, name: str) -> Path | None:
    """Return the existing file that an option names; None without the option.

    Args:
        option: A function that returns the value of an option.
        name: An option of `WRITTEN_BY`.

    Raises:
        UsageError: There is no such file.
    """
    expected = f"a file, got none of that name. {WRITTEN_BY[name]}"
    return checked(option, name, Path.is_file, expected)


def new(option: Option, name: str) -> Path | None:
    """Return the path of a file that the run will write; None without the option.

    Args:
        option: A function that returns the value of an option.
        name: The option.

    Raises:
        UsageError: The path is a folder, or its folder does not exist.
    """
    return checked(option, name, _can_be_written, "the name of a file in a folder that exists")


def _can_be_written(file: Path) -> bool:
    return file.absolute().parent.is_dir() and not file.is_dir()


def interpreter(option: Option, name: str) -> Path | None:
    """Return the Python interpreter that an option names by its path, or by its name on the PATH.

    Args:
        option: A function that returns the value of an option.
        name: The option.

    Returns:
        The absolute path; None without the option.

    Raises:
        UsageError: There is no such file.
    """
    given = option(name)
    if given is None:
        return None
    found = Path(shutil.which(given) or given)
    if not found.is_file():
        raise UsageError(f"{name} {given}: expected a Python, by its path or its name on the PATH")
    return found.absolute()
