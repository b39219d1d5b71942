"""A child process that tests kernels in the interpreter and the environment of the engine.

If the process ends during a case, that case fails, and the next case gets a new process.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import IO, Any

from sm121.core.errors import Sm121Error, UsageError
from sm121.core.unmet import Fact
from sm121.core.verdict import Inapplicable, Invalid, NotRun

#: A program that imports the suite's package without its parent folder on the import path, because
#: that folder may also contain the suite's own vLLM and torch. It removes the empty entry that
#: ``-c`` adds for the working directory.
_BOOT = """
import importlib.util, os, sys
sys.path[:] = [entry for entry in sys.path if entry]
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "sm121", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
sys.modules["sm121"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
try:
    from sm121.kernels import judge
except ImportError as error:
    sys.stderr.write(f"{error}")
    sys.exit(int(sys.argv[2]))
judge.main()
"""
#: The exit status of that program if it cannot import a module that `judge` needs.
_CANNOT_JUDGE = 61
_NEEDED = "torch, numpy, pydantic and Python 3.11 are needed there"
#: The number of bytes that are read from the end of the process's stderr.
_ERROR_BYTES = 4096
#: The maximum length of the quoted last line, in characters.
_LAST_LINE = 300


class ProcessEnded(Sm121Error):
    """The process ended, or was killed, before it answered. The message has the reason."""


class KernelError(Sm121Error):
    """A provider raised an exception; the message has its type and its text."""


class DeviceFault(Sm121Error):
    """The device reported an error. The child process is then ended."""


#: The exceptions that the parent raises again, by the name in the child's answer.
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Inapplicable, Invalid, NotRun, UsageError, DeviceFault)
}


@dataclass
class Child:
    """A child process that runs the functions of `sm121.kernels.judge` on request.

    It is started by the first request, and started again if it has ended.

    Attributes:
        python: The interpreter.
        environment: The whole environment of the process.
        path: The import path; None for the interpreter's own.
        workers: The number of such processes on this machine.
    """

    python: str
    environment: Mapping[str, str]
    path: tuple[str, ...] | None = None
    workers: int = 1
    _process: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = None

    def ask(self, question: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Send one request to the child, and return its answer.

        Args:
            question: The name of a request, a key of `sm121.kernels.judge._QUESTIONS`.
            *arguments: Its arguments, which must be picklable.
            within_s: The time limit in seconds; None if only the test has a time limit.

        Returns:
            The answer, decoded from JSON.

        Raises:
            Inapplicable: The function in the child raised it.
            Invalid: The function in the child raised it.
            NotRun: The function in the child raised it, or the child cannot be started.
            UsageError: The function in the child raised it.
            KernelError: The function in the child raised another exception.
            DeviceFault: The device reported an error.
            ProcessEnded: The child ended, or took too long.
        """
        process = self._start()
        try:
            _write(process, (question, *arguments))
            line = self._read_line(process, within_s)
        # This includes the test's timeout, after which nobody reads the answer.
        except BaseException:
            self.close()
            raise
        answer = json.loads(line)
        if "raised" not in answer:
            return answer["answer"]
        if answer["raised"] == "DeviceFault":
            self.close()
        error = _RAISED.get(answer["raised"], KernelError)(answer["text"])
        if "trace" in answer:
            error.add_note(f"In the process of the kernels:\n{answer['trace']}")
        raise error

    def kill(self) -> None:
        """Kill the process. A thread that waits in `ask` gets a `ProcessEnded`."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        process = self._process
        if process is None:
            return
        self._process = None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(OSError):  # unsent data may remain in the buffer
                stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process, and start it if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            process = subprocess.Popen(
                [self.python, "-c", _BOOT, str(files("sm121")), str(_CANNOT_JUDGE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Threads that wait must not spin. Spinning threads stalled the oracles of two
                # parallel runs.
                env={"OMP_WAIT_POLICY": "PASSIVE", **self.environment},
                start_new_session=True,  # The parent handles Ctrl-C.
            )
        except OSError as error:
            errors.close()
            raise NotRun(f"{self.python} cannot be started: {error.strerror}") from error
        self._process = process
        self._errors = errors
        path = None if self.path is None else list(self.path)
        _write(process, {"path": path, "workers": self.workers})
        return process

    def _read_line(self, process: subprocess.Popen[bytes], within_s: float | None) -> bytes:
        """Read one line. Raises ProcessEnded if the process ended before it, or took too long."""
        assert process.stdout is not None
        deadline = None if within_s is None else time.monotonic() + within_s
        line = b""
        while not line.endswith(b"\n"):
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([process.stdout], [], [], remaining)[0]:
                raise ProcessEnded(Fact(f"an end within {within_s:g} s"))
            block = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not block:
                raise self._describe_end(process)
            line += block
        return line

    def _describe_end(self, process: subprocess.Popen[bytes]) -> ProcessEnded | NotRun:
        """Wait for a process that has closed its output, and return why it ended."""
        status = process.wait()
        assert self._errors is not None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _ERROR_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1][:_LAST_LINE] if lines else "it printed nothing"
        if status == _CANNOT_JUDGE:
            return NotRun(f"the kernels cannot be judged with {self.python}: {last}; {_NEEDED}")
        ending = signal.Signals(-status).name if status < 0 else status
        return ProcessEnded(Fact("a result", f"the process ended with {ending}: {last}"))


def _write(process: subprocess.Popen[bytes], message: Any) -> None:
    assert process.stdin is not None
    # The process has ended; reading the answer shows the reason.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pickle.dumps(message, protocol=4))
        process.stdin.flush()


def of_this_process(workers: int = 1) -> Child:
    """Return a child with the interpreter, the environment and the import path of this process.

    Args:
        workers: The number of such processes on this machine.
    """
    return Child(sys.executable, dict(os.environ), tuple(sys.path), workers)
