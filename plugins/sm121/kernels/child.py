"""A process in which kernels are judged, in the interpreter and the environment of the engine. A
case that ends the process is a failure of that case. The next one gets a new process."""

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

#: Imports the suite's package from its folder alone: a folder of packages on the path would bring
#: the suite's own vLLM and torch. What ``-c`` puts first on the path is the working directory.
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
#: Exit status of an interpreter that has not what `judge` imports.
_CANNOT_JUDGE = 61
_LEAST = "torch, numpy, pydantic and Python 3.11 are needed there"


class Ended(Sm121Error):
    """The process ended, or was ended, before it answered. The message says how."""


class KernelError(Sm121Error):
    """What a provider raised; the message has the type and the words of it."""


class DeviceFault(Sm121Error):
    """The device reported an error: the process on it is used no more."""


_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Inapplicable, Invalid, NotRun, UsageError, DeviceFault)
}


@dataclass
class Child:
    """A process that answers what `sm121.kernels.judge` is asked. It is started when it is asked
    something, and again after it has ended."""

    python: str
    """The interpreter."""
    environment: Mapping[str, str]
    """The whole environment of the process."""
    path: tuple[str, ...] | None = None
    """Where it imports from; None: as the interpreter does by itself."""
    workers: int = 1
    """So many processes share this machine."""
    _process: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = None

    def ask(self, question: str, *arguments: Any, within_s: float | None = None) -> Any:
        """The answer to a question of `sm121.kernels.judge`. Without ``within_s`` seconds, the
        test's own limit ends the process. Raises what was raised there, as itself or KernelError;
        DeviceFault: the device reported an error; Ended: the process ended, or took too long."""
        process = self._started()
        try:
            _write(process, (question, *arguments))
            line = self._line(process, within_s)
        except BaseException:  # also the test's own limit: what still computes is of no use
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

    def close(self) -> None:
        if (process := self._process) is None:
            return
        self._process = None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not sent is lost with the process
                stream.close()

    def _started(self) -> subprocess.Popen[bytes]:
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
                # Threads that wait do not spin: the oracle stood still beside another run's.
                env={"OMP_WAIT_POLICY": "PASSIVE", **self.environment},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as error:
            errors.close()
            raise NotRun(f"{self.python} cannot be started: {error.strerror}") from error
        self._process, self._errors = process, errors
        path = None if self.path is None else list(self.path)
        _write(process, {"path": path, "workers": self.workers})
        return process

    def _line(self, process: subprocess.Popen[bytes], within_s: float | None) -> bytes:
        assert process.stdout is not None
        ends = None if within_s is None else time.monotonic() + within_s
        line = b""
        while not line.endswith(b"\n"):
            remaining = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([process.stdout], [], [], remaining)[0]:
                raise Ended(Fact(f"an end within {within_s:g} s"))
            block = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not block:
                break
            line += block
        else:
            return line
        status = process.wait()
        assert self._errors is not None
        self._errors.seek(0, 2)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1][:300] if lines else "it said nothing"
        if status == _CANNOT_JUDGE:
            raise NotRun(f"the kernels cannot be judged with {self.python}: {last}; {_LEAST}")
        by = signal.Signals(-status).name if status < 0 else status
        raise Ended(Fact("a result", f"the process ended with {by}: {last}"))


def _write(process: subprocess.Popen[bytes], message: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and reading its answer says how
        process.stdin.write(pickle.dumps(message, protocol=4))
        process.stdin.flush()


def of_this_process(workers: int = 1) -> Child:
    return Child(sys.executable, dict(os.environ), tuple(sys.path), workers)
