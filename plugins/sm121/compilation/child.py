"""Run a compiler, with a time limit for its whole process tree and a limit on its output."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sm121.core import errors, unmet

#: The number of bytes of a child's output that are kept. ptxas can print a line for each of 18,000
#: instructions.
OUTPUT_LIMIT = 64_000


class TookTooLong(errors.Sm121Error):
    """A child process was killed because it exceeded its time limit."""


@dataclass(frozen=True)
class ProcessResult:
    """The result of a child process.

    Attributes:
        status: The exit status; negative for a signal.
        output: stdout and stderr together, the first `OUTPUT_LIMIT` bytes.
    """

    status: int
    output: str


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> ProcessResult:
    """Run a command, and wait until it ends.

    Args:
        command: The command and its arguments.
        timeout_s: The limit of wall-clock time, in seconds.
        environment: The whole environment; None for that of this process.
        folder: The working directory; None for that of this process.

    Raises:
        TookTooLong: The command, or a process that it started, ran longer.
        OSError: The command cannot be started.
    """
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        cwd=folder,
        start_new_session=True,  # nvcc starts other processes; they can be killed as a group
    )
    assert process.stdout is not None
    with process.stdout as stream:
        try:
            output = _drain(stream, deadline)
            status = process.wait(max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            with contextlib.suppress(ProcessLookupError):  # the whole group may have ended
                os.killpg(process.pid, signal.SIGKILL)
            name = Path(str(command[0])).name
            raise TookTooLong(
                unmet.Fact(f"an end within {timeout_s:.0f} s", "none", name)
            ) from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return ProcessResult(status, output.decode("utf-8", "replace"))


def _drain(stream: IO[bytes], deadline: float) -> bytes:
    """Read to the end of a stream. Raises TimeoutError at the deadline."""
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            block = os.read(stream.fileno(), 1 << 16)
            if not block:
                return bytes(output)
            output += block[: max(0, OUTPUT_LIMIT - len(output))]
