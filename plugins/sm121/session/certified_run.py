"""``sm121 certify``: a process of its own gives the certificate.

Its command line is the suite's, with the suite's pytest.ini, the plugins that are named here, no
conftest, and the variables of an allow list. So no plugin, conftest, pytest.ini or variable of the
caller reaches it. What is installed in the interpreter's environment does, a ``.pth`` file too. The
caller's arguments are added; those that are not known to be harmless are refused.
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
REMOVED = "SM121_REMOVED_VARIABLES"
_COLLECTS = "--collect-only"


class _Variables(data_file.DataTable):
    names: frozenset[str]
    prefixes: tuple[str, ...]
    #: Of a run that only collects its tests.
    collecting: frozenset[str]


def command(given: Sequence[str]) -> list[str]:
    """Return the command line of a certified run.

    Args:
        given: The caller's own arguments of pytest.
    """
    words = [word for word in given if word != OPTION]
    return [sys.executable, "-P", "-m", "pytest", *own_tests.certified_words(), OPTION, *words]


def environment(variables: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """Return the variables of a certified run: the allow list, and no plugin by entry point.

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
    """Whether `start` began this process. Only then it may certify."""
    words = sys.orig_argv
    if own_tests.PLUGIN not in words:
        return False
    given = own_tests.given(words)
    if words != command(given):
        return False
    rows = Path("/proc/self/environ").read_bytes().split(b"\0")
    began = dict(os.fsdecode(row).split("=", 1) for row in rows if b"=" in row)
    return began == environment(began, given)


def start(given: Sequence[str]) -> NoReturn:
    """Begin a certified run, which takes this process and its signals.

    Args:
        given: The caller's arguments of pytest.

    Raises:
        UsageError: PYTHONPATH is set, by which other code may run.
    """
    if os.environ.get("PYTHONPATH"):
        raise errors.UsageError(
            f"{OPTION} with the variable PYTHONPATH: expected none; put the engine's into the "
            "table engine.environment of a profile of your own (--profile)"
        )
    variables = environment(os.environ, given)
    removed = sorted({*os.environ} - {*variables})
    variables[REMOVED] = " ".join(removed)  # shown when the run is open: a refusal is one line
    sys.stdout.flush()
    sys.stderr.flush()
    words = command(given)
    os.execve(words[0], words, variables)  # noqa: S606 - no shell; pytest takes this process
