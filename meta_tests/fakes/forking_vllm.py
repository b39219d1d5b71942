"""vLLM's API server with an engine core that is forked from it.

On a CPU, vLLM starts the core as a new interpreter, which imports torch and vLLM again; this takes
most of the time of a start. A forked core has imported them already. `fake_python.py` runs this
file for ``-m vllm...``. The worker must be in the engine core: a worker forked from the core would
keep the pipe open by which the API server notices the death of the core.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import stat
import sys
from pathlib import Path

_new_context = multiprocessing.get_context


def _forking(method: str | None = None) -> multiprocessing.context.BaseContext:
    """Return the context of a start method, with ``fork`` in place of ``spawn``."""
    return _new_context("fork" if method == "spawn" else method)


def _leave_the_server_alone() -> None:
    """Close the server's port and event loop in a forked child, because a new interpreter would not
    have them.

    The port of a dead API server must be free while its engine core lives, and a signal must reach
    only one process."""
    signal.set_wakeup_fd(-1)
    with Path(os.devnull).open() as nowhere:
        for entry in list(Path("/proc/self/fd").iterdir()):
            descriptor = int(entry.name)
            try:
                is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            except OSError:  # it is the descriptor of the directory listing
                continue
            if is_socket and _has_an_internet_address(descriptor):
                os.dup2(nowhere.fileno(), descriptor)


def _has_an_internet_address(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6)


if __name__ == "__main__":
    # As with `python -m`, modules are not imported from the folder of this script.
    sys.path[0] = str(Path.cwd())
    multiprocessing.get_context = _forking
    os.register_at_fork(after_in_child=_leave_the_server_alone)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
