"""``sm121 certify``: runs the tests for a certificate in an isolated process.

The process uses the suite's pytest.ini, the plugins that are named in this module, no conftest.py,
and only those environment variables that are in an allow list. So the user's plugins, conftest.py,
pytest.ini and variables have no effect. Packages in the interpreter's environment do have an
effect, including ``.pth`` files. The user's arguments are added; an argument that is not known to
be harmless is refused.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sm121.core import data_file, errors, own_tests
from sm121.session import fingerprinting

OPTION = "--certify"
#: The variable in which `start` names the variables that it removed.
_REMOVED = "SM121_REMOVED_VARIABLES"
_COLLECTS = "--collect-only"


class _Variables(data_file.DataTable):
    names: frozenset[str]
    prefixes: tuple[str, ...]
    #: Additional variables for a run that only collects its tests (``--collect-only``).
    collecting: frozenset[str]


def command(given: Sequence[str]) -> list[str]:
    """Return the command line of a certified run.

    Args:
        given: The caller's own arguments of pytest.
    """
    words = [word for word in given if word != OPTION]
    return [sys.executable, "-P", "-m", "pytest", *own_tests.certified_words(), OPTION, *words]


def environment(variables: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """Return the variables of a certified run: those of the allow list, and no entry-point plugins.

    Args:
        variables: The variables of the caller.
        given: The caller's own arguments of pytest.
    """
    listed = data_file.load("certified-variables.toml", _Variables)
    names = listed.names | ({*fingerprinting.location_variables()} - {"PYTHONPATH"})
    if _COLLECTS in given:
        names |= listed.collecting
    allowed = {}
    for name, value in variables.items():
        if name in names or name.startswith(listed.prefixes):
            allowed[name] = value
    allowed["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return allowed


def is_this_process() -> bool:
    """Whether `start` started this process. Only such a process may certify."""
    words = sys.orig_argv
    if own_tests.PLUGIN not in words:
        return False
    given = own_tests.given(words)
    if words != command(given):
        return False
    rows = Path("/proc/self/environ").read_bytes().split(b"\0")
    began = dict(os.fsdecode(row).split("=", 1) for row in rows if b"=" in row)
    return began == environment(began, given)


def removed_variables() -> list[str]:
    """Return the names of the variables that `start` removed; empty in any other process."""
    return os.environ.get(_REMOVED, "").split()


def start(given: Sequence[str]) -> NoReturn:
    """Replace this process with a certified run.

    Args:
        given: The caller's arguments of pytest.

    Raises:
        UsageError: PYTHONPATH is set, which could add other code.
    """
    if os.environ.get("PYTHONPATH"):
        raise errors.UsageError(
            f"{OPTION} with the variable PYTHONPATH: expected no such variable. If the engine "
            "needs it, write it into the table engine.environment of a profile of your own "
            "(--profile)"
        )
    variables = environment(os.environ, given)
    removed = sorted({*os.environ} - {*variables})
    # The new process shows these names when its run is open. This process shows nothing, because a
    # refusal must be a single line.
    variables[_REMOVED] = " ".join(removed)
    sys.stdout.flush()
    sys.stderr.flush()
    words = command(given)
    os.execve(words[0], words, variables)  # noqa: S606 - no shell; pytest takes this process
