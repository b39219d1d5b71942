"""The kinds of values that options have: how each is checked, before a server starts."""

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sm121.core.errors import UsageError
from sm121.core.options import Value

_T = TypeVar("_T")
#: Any path, unchanged.
PATH = Value(lambda _name, text: Path(text))
#: The largest number of digits. Python converts no text of thousands of digits.
_DIGITS = 18
#: How many characters of a wrong value a message shows.
_SHOWN = 40
#: How many characters of a path that cannot be read a message shows.
_SHOWN_PATH = 160
#: A wrong value of every kind: longer than the name of a file may be, and no number.
_LONG = "x" * 5000


def checked_by(read: Callable[[str], _T], *, wrong: tuple[str, ...]) -> Value[_T]:
    """Return the kind of a value that another function checks and converts.

    Args:
        read: Takes the text and returns the value. It refuses a wrong text by a UsageError that
            begins with the name of the option and the text.
        wrong: Texts that it refuses.
    """
    return Value(lambda _name, text: read(text), wrong)


def whole_number(most: int | None = None, counted: str = "") -> Value[int]:
    """Return the kind of a whole number that is at least 1.

    Args:
        most: The largest number; None without a bound.
        counted: What the number counts, in the plural, for the message about `most`.
    """

    def read(name: str, text: str) -> int:
        if not text.isdecimal() or _number(text) < 1:
            raise UsageError(f"{name} {_shown(text)}: expected a number, 1 or more")
        _refuse_above(name, text, _number(text), most, counted)
        return _number(text)

    return Value(read, ("0", "-1", "x", "1.5", "3,6", _LONG, *_too_large(most)))


def numbers(
    example: str, *, least: int = 0, most: int | None = None, counted: str = ""
) -> Value[tuple[int, ...]]:
    """Return the kind of a list of whole numbers, separated by commas. Repeated numbers count once.

    Args:
        example: A correct value, for the message.
        least: The smallest number that is accepted.
        most: The largest number; None without a bound.
        counted: What the numbers count, in the plural, for the message about `most`.
    """

    def read(name: str, text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.strip().isdecimal() and _number(part) >= least for part in parts):
            raise UsageError(
                f"{name} {_shown(text)}: expected numbers of at least {least}, as in "
                f"{name} {example}"
            )
        values = tuple(dict.fromkeys(_number(part) for part in parts))
        _refuse_above(name, text, max(values), most, counted)
        return values

    below = str(least - 1)
    return Value(read, (below, f"{example},{below}", "x", "4;8", "4,", _LONG, *_too_large(most)))


def _too_large(most: int | None) -> tuple[str, ...]:
    """Return numbers above a bound, and one that Python does not convert."""
    above = () if most is None else (str(most + 1),)
    return (*above, "9" * 5000)


def _number(text: str) -> int:
    return int(text.strip()[:_DIGITS])


def _refuse_above(name: str, text: str, value: int, most: int | None, counted: str) -> None:
    """Raise UsageError if a number is above the bound of its option."""
    if most is not None and value > most:
        raise UsageError(f"{name} {_shown(text)}: expected at most {most} {counted}")
    if any(len(part.strip()) > _DIGITS for part in text.split(",")):
        raise UsageError(f"{name} {_shown(text)}: expected numbers of at most {_DIGITS} digits")


def _shown(text: str) -> str:
    """Return a wrong number as a message shows it: only its beginning if it is long."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."


def one_of(choices: Sequence[str]) -> Value[str]:
    """Return the kind of a text that is one of several.

    Args:
        choices: The texts.
    """

    def read(name: str, text: str) -> str:
        if text not in choices:
            raise UsageError(f"{name} {text}: expected {' or '.join(choices)}")
        return text

    return Value(read, ("no-such-choice",))


def assignment() -> Value[tuple[str, str]]:
    """Return the kind of the name and the value of a variable, as KEY=VALUE."""
    return Value(_assignment, ("KEY", "=VALUE", "1=VALUE", "a b=VALUE"))


def _assignment(name: str, text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise UsageError(f"{name} {text}: expected KEY=VALUE")
    return key, value


def words() -> Value[tuple[str, ...]]:
    """Return the kind of a text that is split as by a shell. A backslash may end a line."""
    return Value(_words, ("--flag 'x",))


def _words(name: str, text: str) -> tuple[str, ...]:
    text = text.replace("\\\n", " ")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name} {text}: {error}") from error


def path_that(holds: Callable[[Path], bool], expected: str) -> Value[Path]:
    """Return the kind of a path that fulfils a condition. The value is absolute.

    Args:
        holds: A function that returns whether a path is valid.
        expected: The valid paths, in words.
    """

    def read(name: str, text: str) -> Path:
        path = Path(text)
        if not _checked(name, path, holds):
            raise UsageError(f"{name} {text}: expected {expected}")
        return path.absolute()

    return Value(read, ("no-such-folder/no-such-file", _LONG))


def _checked(name: str, path: Path, holds: Callable[[Path], bool]) -> bool:
    """Return whether a path of an option fulfils a condition.

    Raises:
        UsageError: The system cannot read the path: its name is too long, or a folder of it is
            closed to this user.
    """
    try:
        return holds(path)
    except OSError as error:
        raise UsageError(
            f"{name} {str(path)[:_SHOWN_PATH]}: expected a path that can be read, got "
            f"{error.strerror!r}"
        ) from error


def existing_file(how: str) -> Value[Path]:
    """Return the kind of a file that exists.

    Args:
        how: A sentence that tells how to create such a file.
    """
    return path_that(Path.is_file, f"a file, got none of that name. {how}")


def new_file() -> Value[Path]:
    """Return the kind of a file that the run will write."""
    return path_that(_can_be_written, "the name of a file in a folder that exists")


def _can_be_written(file: Path) -> bool:
    return file.absolute().parent.is_dir() and not file.is_dir()


def interpreter() -> Value[Path]:
    """Return the kind of a Python interpreter, named by its path or by its name on the PATH."""
    return Value(_interpreter, ("no-such-python", _LONG))


def _interpreter(name: str, text: str) -> Path:
    found = Path(shutil.which(text) or text)
    if not _checked(name, found, Path.is_file):
        raise UsageError(f"{name} {text}: expected a Python, by its path or its name on the PATH")
    return found.absolute()
