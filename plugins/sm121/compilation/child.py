"""Running a compiler: with a time limit for the whole tree of it, and output of bounded size."""

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

OUTPUT_LIMIT = 64_000
"""Bytes kept of what a child prints; ptxas can print a line for each of 18,000 instructions."""


class TookTooLong(errors.Sm121Error):
    """A child was ended because it exceeded its time limit."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    output: str
    """stdout and stderr together, the first `OUTPUT_LIMIT` bytes."""


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command to its end, in a folder. Raises TookTooLong: it, or something that it started,
    ran longer than ``timeout_s`` seconds; OSError: it cannot be started."""
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        cwd=folder,
        start_new_session=True,  # nvcc starts others: all of them end with the group
    )
    assert process.stdout is not None
    with process.stdout as stream:
        try:
            output = _drain(stream, deadline)
            status = process.wait(max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            with contextlib.suppress(ProcessLookupError):  # also where the first of them has ended
                os.killpg(process.pid, signal.SIGKILL)
            name = Path(str(command[0])).name
            raise TookTooLong(unmet.Fact(f"done in {timeout_s:.0f} s", "not", name)) from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Ended(status, output.decode("utf-8", "replace"))


def _drain(stream: IO[bytes], deadline: float) -> bytes:
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
