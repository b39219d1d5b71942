"""Run the timed client in its own process, so that the work of pytest does not affect the times.

``python -m sm121.client.timed_process`` reads pickled messages from its standard input: first the
address and API key of a server, then batches. It writes one pickled result for each batch, and ends
when its input ends.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import IO, Any

from sm121.client.patience import Patience
from sm121.client.timed import TimedBatch, TimedClient, TimedRequest
from sm121.core.errors import Sm121Error

uvloop: ModuleType | None
try:
    import uvloop
except ImportError:  # asyncio's own loop is as precise, but uses more processor time
    uvloop = None

#: The size of the length field before each message to the process, in bytes.
_SIZE_BYTES = 8
#: How many bytes of its input the process buffers.
_BUFFER_BYTES = 1 << 20
#: The real-time priority of the process (1 to 99, see sched(7)).
_REAL_TIME = 10
#: The nice value of the process if a real-time priority is not allowed.
_NICE = -10


class ClientDied(Sm121Error):
    """The client's process ended before it had completed a batch."""


class TimedProcess:
    """Sends batches from a separate process. It is a context manager.

    Args:
        base_url: The address of the server, without /v1.
        api_key: The server's API key.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sm121.client.timed_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the parent handles Ctrl-C
        )
        # The key is not passed on the command line, because other users of the machine can read
        # that.
        self._write((base_url, api_key))

    def __enter__(self) -> "TimedProcess":
        return self

    def __exit__(self, *_reason: object) -> None:
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass  # the end of the block closes the pipes and waits for the process

    def run(
        self, requests: Sequence[TimedRequest], *, concurrency: int = 1, patience: Patience
    ) -> TimedBatch:
        """Send a batch and wait for its end.

        Args:
            requests: The requests.
            concurrency: The number of concurrent requests.
            patience: The time limits of each request.

        Returns:
            The answers and the client's own figures.

        Raises:
            ClientDied: The process ended before it returned the batch.
        """
        self._write((requests, concurrency, patience))
        assert self._process.stdout is not None
        try:
            batch: TimedBatch = pickle.load(self._process.stdout)  # noqa: S301 - our own child's
        except (EOFError, pickle.UnpicklingError) as error:
            raise ClientDied(
                f"the process of the measuring client ended with exit status {self._process.wait()}"
            ) from error
        return batch

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        content = pickle.dumps(message)
        size = len(content).to_bytes(_SIZE_BYTES)
        try:
            self._process.stdin.write(size + content)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClientDied(
                f"the process of the measuring client ended with exit status {self._process.wait()}"
            ) from error


async def _read(reader: asyncio.StreamReader) -> Any:
    """Return the parent's next message; None if the parent has closed the pipe."""
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
        return pickle.loads(await reader.readexactly(size))  # noqa: S301 - our own parent's
    except asyncio.IncompleteReadError:
        return None


async def _serve(output: IO[bytes]) -> None:
    """Send the batches of the parent until it closes the pipe."""
    reader = asyncio.StreamReader(limit=_BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    base_url, api_key = await _read(reader)
    async with TimedClient(base_url, api_key) as client:
        # The next message is read during a batch, to notice if the parent ends.
        coming = asyncio.create_task(_read(reader))
        while (order := await coming) is not None:
            coming = asyncio.create_task(_read(reader))
            requests, concurrency, patience = order
            gc.collect()
            gc.freeze()
            run = client.run(requests, concurrency=concurrency, patience=patience)
            running = asyncio.create_task(run)
            await asyncio.wait((running, coming), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():  # the parent has ended: it sends nothing during a batch
                return
            output.write(pickle.dumps(running.result()))
            output.flush()


def _raise_priority() -> None:
    """Raise the process's priority, because the client needs its processor time at once."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REAL_TIME))
    except OSError:  # only root may raise the priority, and not in every container
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def main() -> None:
    """Serve the parent until it closes the pipe."""
    gc.disable()  # garbage is collected between batches, not during a measurement
    _raise_priority()
    loop_factory = None if uvloop is None else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(sys.stdout.buffer))


if __name__ == "__main__":
    main()
