"""Make a process of an engine write the Python stacks of its threads when it receives a signal.

The folder of this file is the first one on the PYTHONPATH of servers that the suite starts. Python
imports the file before the program. Nothing else changes: the folder is removed from sys.path, and
the sitecustomize that this one hides is imported.
"""

import contextlib
import faulthandler
import importlib
import os
import sys
from pathlib import Path


def _register() -> None:
    """Register the handler, which writes to this process's own file, even if Python is stuck."""
    try:
        number = int(os.environ["SM121_STACKS_SIGNAL"])
        file = Path(os.environ["SM121_STACKS"], str(os.getpid()))
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(number, file=descriptor)
    except (KeyError, ValueError, OSError):  # another machine, or the folder was removed
        _forget()


def _forget() -> None:
    """Remove the inherited handler, which would write to the parent process's file."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        faulthandler.unregister(int(os.environ["SM121_STACKS_SIGNAL"]))


def _import_the_next() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if "SM121_STACKS" in os.environ:
    _register()
    os.register_at_fork(after_in_child=_register)
    _import_the_next()
