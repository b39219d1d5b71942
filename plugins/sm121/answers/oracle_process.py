"""Compute the oracle's answers to some prompts in a process of its own, beside the tests.

``python -m sm121.answers.oracle_process CHECKPOINT ROUNDING FOLDER NAME...`` writes them to the
cache in FOLDER, from which the test reads them. It ends when its standard input ends.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sm121.answers import oracle_making
from sm121.core.verdict import NotRun
from sm121.oracles.formats import Rounding

#: Other processes go first: the server and the client of the tests.
_NICE = 19
#: The number of cores that the server and the tests keep.
_OTHER_CORES = 2
#: How long a test waits for the process: about three times the longest estimated time on a GB10.
_WAIT_S = 300.0
_POLL_S = 0.1


class OracleProcess:
    """A process that computes the oracle's answers to some prompts, and caches them.

    Args:
        checkpoint: The folder of the checkpoint.
        rounding: The formats in which the checkpoint is served.
        folder: The folder of the cache.
        names: The names of the prompts.
    """

    def __init__(
        self, checkpoint: Path, rounding: Rounding, folder: Path, names: Sequence[str]
    ) -> None:
        command = [sys.executable, "-m", "sm121.answers.oracle_process", str(checkpoint)]
        command += [rounding.formats, str(folder), *names]
        # Threads that wait must not spin. The process must not open a context on the GPU.
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, **quiet},
            start_new_session=True,  # the parent handles Ctrl-C
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def wait(self, say: Callable[[], None]) -> None:
        """Wait until the process has ended.

        Args:
            say: Called repeatedly while this waits.

        Raises:
            NotRun: The process failed, or takes too long.
        """
        ends_at = time.monotonic() + _WAIT_S
        while self._process.poll() is None:
            if time.monotonic() > ends_at:
                raise NotRun(
                    f"the oracle: expected its answers within {_WAIT_S:.0f} s, but it still "
                    "computes. Run again: the next run continues with the next layer"
                )
            say()
            time.sleep(_POLL_S)
        status = self._process.returncode
        if status:
            self._errors.seek(0)
            lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            last = lines[-1] if lines else "it printed nothing"
            ending = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise NotRun(
                f"the oracle's process: expected an end with status 0, got {ending}: {last}. "
                "`sm121 golden` computes the answers without a server"
            )

    def close(self) -> None:
        """End the process, if it still runs. An interrupted computation can be resumed."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._errors.close()


def _end_with_the_parent() -> None:
    # A thread that waits in `sys.stdin` would abort the interpreter at its end.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> None:
    """Compute the answers that the command line names, and cache them."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - _OTHER_CORES))
    checkpoint, formats, folder, *names = sys.argv[1:]
    rounding = Rounding.parse(formats)
    oracle_making.prompts_kept_or_made(Path(checkpoint), rounding, Path(folder), names)


if __name__ == "__main__":
    main()
