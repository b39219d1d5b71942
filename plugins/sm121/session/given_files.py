"""Files, folders and programs that options name, checked before anything starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

from sm121.answers.options import WRITTEN_BY
from sm121.core.errors import UsageError
from sm121.core.options import Option


def path(option: Option, name: str) -> Path | None:
    """Return the path that an option names, as it was given; None without one.

    Args:
        option: Gives the value of an option.
        name: The option.
    """
    given = option(name)
    if not given:
        return None
    return Path(given)


def checked(option: Option, name: str, holds: Callable[[Path], bool], expected: str) -> Path | None:
    """Return the absolute path that an option names; None without one.

    Args:
        option: Gives the value of an option.
        name: The option.
        holds: Whether a path is what the option expects.
        expected: What it expects, in words.

    Raises:
        UsageError: The path is something else.
    """
    given = option(name)
    if given is None:
        return None
    if not holds(Path(given)):
        raise UsageError(f"{name} {given}: expected {expected}")
    return Path(given).absolute()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint.

    Args:
        folder: The folder.
    """
    return (folder / "config.json").is_file()


def existing(option: Option, name: str) -> Path | None:
    """Return the file that an option names; None without one.

    Args:
        option: Gives the value of an option.
        name: An option of `WRITTEN_BY`.

    Raises:
        UsageError: There is no such file.
    """
    expected = f"a file, got none of that name. {WRITTEN_BY[name]}"
    return checked(option, name, Path.is_file, expected)


def new(option: Option, name: str) -> Path | None:
    """Return the file that the run will write; None without one.

    Args:
        option: Gives the value of an option.
        name: The option.

    Raises:
        UsageError: It is a folder, or its folder does not exist.
    """
    return checked(option, name, _can_be_written, "the name of a file in a folder that exists")


def _can_be_written(file: Path) -> bool:
    return file.absolute().parent.is_dir() and not file.is_dir()


def interpreter(option: Option, name: str) -> Path | None:
    """Return a Python that an option names by its path, or by its name on the PATH.

    Args:
        option: Gives the value of an option.
        name: The option.

    Returns:
        Its absolute path; None without one.

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
