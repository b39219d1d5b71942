"""Make a process of an engine write the stack traces of its threads when it receives a signal.

The folder of this file is the first one on the PYTHONPATH of servers that the suite starts. Python
imports the file before it runs the program. The file has no other effect: it removes its folder
from sys.path, and imports the sitecustomize module that it hides.
"""

import contextlib
import faulthandler
import importlib
import os
import sys
from pathlib import Path


def _register() -> None:
    """Register the handler, which writes to this process's own file even while Python hangs."""
    try:
        number = int(os.environ["SM121_STACKS_SIGNAL"])
        file = Path(os.environ["SM121_STACKS"], str(os.getpid()))
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(number, file=descriptor)
    except (KeyError, ValueError, OSError):  # on another machine, or the folder was removed
        _forget()


def _forget() -> None:
    """Remove the inherited handler, which would write to the parent process's file."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        faulthandler.unregister(int(os.environ["SM121_STACKS_SIGNAL"]))


def _import_the_next() -> None:
    """Import the sitecustomize module that this file hides, if there is one."""
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
