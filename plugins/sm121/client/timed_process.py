"""The timed client in a process of its own, so that nothing that pytest does is on the timed path.
``python -m sm121.client.timed_process`` reads the address of a server, then batches, and writes a
result for each, all pickled. It ends when its input does."""

import asyncio
import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import uvloop

from sm121.client.connection import Patience
from sm121.client.timed import TimedBatch, TimedClient, TimedRequest
from sm121.core.errors import Sm121Error

_SIZE_BYTES = 8
_REAL_TIME = 10
_NICE = -10


class ClientDied(Sm121Error):
    """The client's process ended in the middle of a batch."""


class TimedProcess:
    """Sends batches from a process of its own; a context manager."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sm121.client.timed_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        # Not on the command line: the key is nobody else's business.
        self._write((base_url, api_key))

    def __enter__(self) -> "TimedProcess":
        return self

    def __exit__(self, *_reason: object) -> None:
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass  # its end closes what leads to it, and waits for it

    def run(
        self, requests: Sequence[TimedRequest], *, concurrency: int = 1, patience: Patience
    ) -> TimedBatch:
        """Send a batch and wait for its end. Raises ClientDied: the process is no more."""
        self._write((requests, concurrency, patience))
        assert self._process.stdout is not None
        try:
            batch: TimedBatch = pickle.load(self._process.stdout)  # noqa: S301 - our own child's
        except (EOFError, pickle.UnpicklingError) as error:
            raise ClientDied(f"the measuring client ended with {self._process.wait()}") from error
        return batch

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        content = pickle.dumps(message)
        try:
            self._process.stdin.write(len(content).to_bytes(_SIZE_BYTES) + content)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClientDied(f"the measuring client ended with {self._process.wait()}") from error


async def _read(reader: asyncio.StreamReader) -> Any:
    """The parent's next message; None when it has closed the pipe."""
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
        return pickle.loads(await reader.readexactly(size))  # noqa: S301 - our own parent's
    except asyncio.IncompleteReadError:
        return None


async def _serve(output: IO[bytes]) -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    base_url, api_key = await _read(reader)
    async with TimedClient(base_url, api_key) as client:
        coming = asyncio.create_task(_read(reader))
        while (order := await coming) is not None:
            coming = asyncio.create_task(_read(reader))
            requests, concurrency, patience = order
            gc.collect()
            gc.freeze()
            run = client.run(requests, concurrency=concurrency, patience=patience)
            running = asyncio.create_task(run)
            await asyncio.wait((running, coming), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():  # nothing is asked meanwhile: the parent is no more
                return
            output.write(pickle.dumps(running.result()))
            output.flush()


def main() -> None:
    """Serve the parent until it closes the pipe."""
    gc.disable()  # collected between batches, never while one is measured
    try:  # before whatever else wants the processor: the client needs little, and at once
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REAL_TIME))
    except OSError:  # only root may, and not in every container
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.stdout.buffer))


if __name__ == "__main__":
    main()
