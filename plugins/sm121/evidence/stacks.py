"""Read Python stack traces of the processes of an engine that hangs.

py-spy reads the stack traces from outside, even if a signal has stopped the process. If py-spy is
not installed or lacks permission, a process can write its own stack traces when it receives a
signal. For this, the suite starts engines with a signal handler (`in_engine/sitecustomize.py`),
which works even while Python waits for a GPU kernel.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.core.waiting import until

#: The folder of the module that registers the handler.
_HANDLER = Path(__file__).parent / "in_engine"
#: The signal, which no engine uses.
_SIGNAL = int(signal.SIGRTMIN) + 12
#: The time limit of py-spy for one process, in seconds.
_PY_SPY_TIMEOUT_S = 30
#: The time limit for processes to write their stack traces, in seconds.
_WRITTEN_WITHIN_S = 3.0
#: The time between two checks of the files. A file that did not grow in between is complete.
_LOOK_EVERY_S = 0.2


class NoStacks(Exception):
    """No stack trace could be read. The message contains the reasons."""


@dataclass
class _Process:
    """A running process, with its stack traces or the reasons why there are none."""

    pid: int
    name: str
    #: The state of the process, as named by psutil.
    status: str
    stacks: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The name and the pid of the process."""
        return f"{self.name} ({self.pid})"


def variables(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment variables that install the handlers in an engine's processes.

    PYTHONFAULTHANDLER makes Python write the stack traces to the log if SIGSEGV, SIGBUS, SIGABRT,
    SIGILL or SIGFPE ends the process. This is needed because vLLM does not log the exit status of
    its engine core.

    Args:
        environment: The environment of the engine.
        scratch: The engine's temporary folder, in which a folder for the stack traces is created.
    """
    folder = folder_in(scratch)
    folder.mkdir(exist_ok=True)
    paths = [str(_HANDLER)]
    if environment.get("PYTHONPATH"):
        paths.append(environment["PYTHONPATH"])
    return {
        "PYTHONFAULTHANDLER": environment.get("PYTHONFAULTHANDLER", "1"),
        "SM121_STACKS": str(folder),
        "SM121_STACKS_SIGNAL": str(_SIGNAL),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def folder_in(scratch: Path) -> Path:
    """Return the folder for stack traces in an engine's temporary folder.

    Args:
        scratch: The temporary folder.
    """
    return scratch / "stacks"


def take_stacks(tree: Sequence[Mapping[str, Any]], folder: Path | None) -> str:
    """Read the stack traces of the running processes of an engine.

    Args:
        tree: The processes, from `process_snapshot.snapshot`.
        folder: The folder to which the processes write their stack traces; None if they have no
            handler.

    Returns:
        A section for each process, with its stack traces or the reasons why there are none.

    Raises:
        NoStacks: No stack trace of any process could be read.
    """
    processes = []
    for entry in tree:
        if entry["status"] not in ("zombie", "dead") and Path(f"/proc/{entry['pid']}").is_dir():
            processes.append(_Process(entry["pid"], entry["name"], entry["status"]))
    if not processes:
        raise NoStacks("no process of the server was left to inspect")
    tool = _py_spy()
    for process in processes:
        if tool is None:
            process.reasons.append("py-spy is not installed (pip install py-spy)")
        else:
            _read_from_outside(tool, process)
    _let_write([process for process in processes if not process.stacks], folder)
    if not any(process.stacks for process in processes):
        raise NoStacks("; ".join(f"{each.title}: {', '.join(each.reasons)}" for each in processes))
    sections = []
    for process in processes:
        text = process.stacks or f"no stack: {', '.join(process.reasons)}"
        sections.append(f"## {process.title}\n{text.rstrip()}\n")
    return "\n".join(sections)


def take_or_why(tree: Sequence[Mapping[str, Any]], folder: Path | None) -> str:
    """Return an engine's stack traces, or the reasons why there are none.

    Args:
        tree: As in `take_stacks`.
        folder: As in `take_stacks`.
    """
    try:
        return take_stacks(tree, folder)
    except NoStacks as error:
        return f"{error}\n"


def _py_spy() -> str | None:
    """Return the path of py-spy, from PATH or from the folder of this interpreter."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("py-spy") or shutil.which("py-spy", path=beside)


def _read_from_outside(tool: str, process: _Process) -> None:
    """Read the stack traces of a process with py-spy."""
    command = [tool, "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        process.reasons.append(f"py-spy: {error}")
        return
    if answer.returncode == 0 and "\nThread " in answer.stdout:
        process.stacks = answer.stdout
    else:
        words = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        process.reasons.append(f"py-spy: {words[0] if words else 'no answer'}")


def _let_write(processes: Sequence[_Process], folder: Path | None) -> None:
    """Send the signal to processes that have the handler, and read what they write."""
    written: list[_Written] = []
    for process in processes:
        if process.status == "stopped":
            process.reasons.append("a signal has stopped it, so it cannot write its stacks")
        elif folder is None or not (folder / str(process.pid)).is_file():
            process.reasons.append("it has no handler that writes its stacks (is it Python?)")
        elif not _has_handler(process.pid):
            process.reasons.append("its handler is gone, so the signal would end it")
        else:
            written.append(_Written(process, folder / str(process.pid)))
    for each in written:
        each.before = _size_of(each.file)
        try:
            os.kill(each.process.pid, _SIGNAL)
        except OSError as error:
            each.process.reasons.append(f"the signal could not be sent ({error.strerror})")
    # Use a list, not a generator, so that all files are checked each time.
    until(
        lambda: all([each.is_complete() for each in written]),  # noqa: C419
        _WRITTEN_WITHIN_S,
        every_s=_LOOK_EVERY_S,
    )
    for each in written:
        each.process.stacks = each.text().strip()
        if not each.file.is_file():
            each.process.reasons.append("the server has ended meanwhile, and its files are gone")
        elif not each.process.stacks:
            each.process.reasons.append(f"it wrote nothing within {_WRITTEN_WITHIN_S:.0f} s")


@dataclass
class _Written:
    """The file to which a process writes its stack traces when it receives the signal."""

    process: _Process
    file: Path
    #: The size of the file before the signal, in bytes.
    before: int = 0
    #: The size at the last check, in bytes.
    size: int = 0

    def is_complete(self) -> bool:
        """Return whether the process has written, and has not written more since the last check.

        If the process has ended, its file was removed with the server's temporary folder.
        """
        if not self.file.is_file():
            return True
        size = _size_of(self.file)
        is_complete = size > self.before and size == self.size
        self.size = size
        return is_complete

    def text(self) -> str:
        """Return the text that the process has written since the signal."""
        try:
            written = self.file.read_bytes()
        except FileNotFoundError:
            return ""
        return written[self.before :].decode("utf-8", "replace")


def _size_of(file: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _has_handler(pid: int) -> bool:
    """Return whether a process has a handler for the signal.

    Without one, the signal would kill it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return False
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (_SIGNAL - 1) & 1)
    return False
