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


def oracle(option: Option) -> Path | None:
    """Return the file of an oracle that ``--reference`` names; None if it names none.

    Args:
        option: Gives the value of an option.
    """
    reference = path(option, "--reference")
    if reference is None or not reference.is_file():
        return None
    return reference.absolute()


def reference_checkpoint(option: Option) -> Path | None:
    """Return the checkpoint folder that ``--reference`` names; None without one, or for a file.

    Args:
        option: Gives the value of an option.

    Raises:
        UsageError: It is neither a checkpoint folder nor a file.
    """
    if oracle(option) is not None:
        return None
    expected = "a checkpoint folder with config.json, or the file that `sm121 golden` made of one"
    return checked(option, "--reference", _is_checkpoint, expected)


def _is_checkpoint(folder: Path) -> bool:
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


def model(option: Option, base_url: str | None) -> str | None:
    """Return the checkpoint that ``--model`` names for a server that the suite starts.

    Args:
        option: Gives the value of an option.
        base_url: The URL of the attached server; None if the suite starts one.

    Returns:
        A path or a hub id; None without one, or for an attached server.

    Raises:
        UsageError: It is neither a checkpoint nor a hub id.
    """
    given: str | None = option("--model")
    if base_url or given is None:
        return None
    place = Path(given)
    if place.is_file() and place.suffix == ".gguf":
        return given
    if place.exists():
        if not _is_checkpoint(place):
            raise UsageError(f"--model {given}: expected a checkpoint folder with config.json")
        return given
    if given.count("/") != 1 or given.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {given}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
    return given
