"""Let a process of an engine write the Python stacks of its threads when it gets a signal.

The folder of this file is first on PYTHONPATH of a server that the suite starts. Python imports it
before the program. It changes nothing else: sys.path is as it would be, and another sitecustomize
is imported as ever.
"""

import contextlib
import faulthandler
import importlib
import os
import sys
from pathlib import Path


def _register() -> None:
    """Register the handler, with a file of this process's own. It works while Python is stuck."""
    try:
        number = int(os.environ["SM121_STACKS_SIGNAL"])
        file = Path(os.environ["SM121_STACKS"], str(os.getpid()))
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(number, file=descriptor)
    except (KeyError, ValueError, OSError):  # another machine, or a folder that is gone
        _forget()


def _forget() -> None:
    """Remove the handler, which would write into the file of the parent process."""
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
