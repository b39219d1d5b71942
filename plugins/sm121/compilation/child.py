"""Running a compiler: with a time limit for the whole tree of it; of its output the beginning."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import Sm121Error
from sm121.core.unmet import Fact

OUTPUT_LIMIT = 64_000
"""Bytes kept of what a child prints; ptxas can print a line for each of 18,000 instructions."""


class TookTooLong(Sm121Error):
    """A child was ended because it exceeded its time limit."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    output: str
    """stdout and stderr together, the first `OUTPUT_LIMIT` bytes."""


def run(
    command: Sequence[str | Path], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end, and end what it leaves. Raises TookTooLong: it ran longer than
    ``timeout_s`` seconds; OSError: it cannot be started."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            start_new_session=True,  # nvcc starts others: all of them end with the group
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            name = Path(str(command[0])).name
            raise TookTooLong(Fact(f"done in {timeout_s:.0f} s", "not", name)) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(status, output.read(OUTPUT_LIMIT).decode("utf-8", "replace"))
