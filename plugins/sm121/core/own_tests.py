"""Where the suite's tests are: in a checkout, or inside the installed package."""

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
PLUGIN = "sm121.plugin"
#: In each folder of the suite's tests.
_FIRST = "test_smoke.py"


def folder() -> Path:
    """The folder in which ``tests/`` belongs to this package. Ids of tests are relative to it."""
    checkout = _PACKAGE.parents[1]
    return checkout if (checkout / "tests" / _FIRST).is_file() else _PACKAGE


def settings() -> Path:
    """The suite's pytest.ini, as the package has it."""
    return Path(str(files("sm121.fixtures"))) / "run.ini"


def words(started_in: Path, given: Sequence[str] = ()) -> list[str]:
    """What ``sm121 run`` says to pytest, by the user's words and the folder for the cache."""
    # Without its cache, pytest does not know the setting.
    cacheless = any("no:cacheprovider" in word for word in given)
    return [
        *("-c", str(settings())),
        *("--rootdir", str(folder())),
        *(() if cacheless else ("-o", f"cache_dir={started_in / '.pytest_cache'}")),
        *("-p", PLUGIN),
        *given,
    ]


def certified_words() -> list[str]:
    """What ``sm121 certify`` says to pytest: the suite's settings, tests and plugins, no others."""
    return [
        *("-c", str(settings())),
        *("--rootdir", str(folder()), "--noconftest", "-p", "no:cacheprovider"),
        *("-p", "pytest_benchmark.plugin", "-p", "pytest_timeout", "-p", PLUGIN),
    ]


def given(arguments: Sequence[str]) -> list[str]:
    """What the user said, of the words that `words` or `certified_words` made."""
    return list(arguments[arguments.index(PLUGIN) + 1 :])


def command(given: Sequence[str], started_in: Path) -> list[str]:
    """The command of ``sm121 run``. The folder where it starts is not on the path of imports."""
    return [sys.executable, "-P", "-m", "pytest", *words(started_in, given)]


def has_every_level(path: Path) -> bool:
    """Whether a path is the suite's ``tests/`` or the checkout around it, and so names no level."""
    return any((folder / _FIRST).is_file() for folder in (path, path / "tests"))


def located(path: str) -> str:
    """A path or node id of the command line; one of the suite's own tests is found here."""
    name = path.partition("::")[0]
    is_shipped = not Path(name).exists() and Path(name).parts[:1] == ("tests",)
    return str(folder() / path) if is_shipped and (folder() / name).exists() else path
