"""Find the suite's tests, and the command-line arguments with which pytest runs them."""

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
#: The name of the plugin for pytest's ``-p``. In a command line, the suite's own arguments end with
#: it.
PLUGIN = "sm121.plugin"
#: A file by which the folder of the suite's tests is recognised.
_FIRST = "test_smoke.py"


def folder() -> Path:
    """Return the folder that contains the suite's ``tests/``. The ids of tests are relative to it.

    The folder is the checkout, or the package if the suite was installed.
    """
    checkout = _PACKAGE.parents[1]
    return checkout if (checkout / "tests" / _FIRST).is_file() else _PACKAGE


def settings() -> Path:
    """Return the path of the suite's pytest.ini in the package."""
    return Path(str(files("sm121.fixtures"))) / "run.ini"


def words(started_in: Path, given: Sequence[str] = ()) -> list[str]:
    """Return the arguments that ``sm121 run`` passes to pytest.

    Args:
        started_in: The user's working directory, in which pytest creates its cache.
        given: The arguments that the user typed.
    """
    result = ["-c", str(settings()), "--rootdir", str(folder())]
    # If the cache plugin is disabled, pytest refuses this setting.
    if not any("no:cacheprovider" in word for word in given):
        result += ["-o", f"cache_dir={started_in / '.pytest_cache'}"]
    return [*result, "-p", PLUGIN, *given]


def certified_words() -> list[str]:
    """Return the arguments that ``sm121 certify`` passes to pytest.

    They select the suite's own settings, tests and plugins, and exclude all others.
    """
    own_files = ["-c", str(settings()), "--rootdir", str(folder()), "--noconftest"]
    plugins = ["no:cacheprovider", "pytest_benchmark.plugin", "pytest_timeout", PLUGIN]
    result = own_files
    for plugin in plugins:
        result += ["-p", plugin]
    return result


def given(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that the user typed.

    Args:
        arguments: The result of `words` or `certified_words`, followed by the user's arguments.
    """
    return list(arguments[arguments.index(PLUGIN) + 1 :])


def command(given: Sequence[str], started_in: Path) -> list[str]:
    """Return the command of ``sm121 run``.

    Python's option ``-P`` keeps the working directory off the import path.

    Args:
        given: The arguments that the user typed.
        started_in: The user's working directory.
    """
    return [sys.executable, "-P", "-m", "pytest", *words(started_in, given)]


def has_every_level(path: Path) -> bool:
    """Check whether a path contains all levels.

    Args:
        path: A file or folder. The suite's ``tests/`` and its checkout contain all levels.
    """
    return any((folder / _FIRST).is_file() for folder in (path, path / "tests"))


def has_levels(path: Path) -> bool:
    """Check whether a path contains levels, or is a file of one of the suite's levels.

    Args:
        path: An absolute path.
    """
    return has_every_level(path) or path.is_relative_to(folder() / "tests")


def located(path: str) -> str:
    """Return a path or node id. If it names one of the suite's own tests, make it absolute.

    Args:
        path: The path or the node id. If the file exists in the working directory, it is returned
            unchanged.
    """
    name = path.partition("::")[0]
    is_shipped = not Path(name).exists() and Path(name).parts[:1] == ("tests",)
    if is_shipped and (folder() / name).exists():
        return str(folder() / path)
    return path
