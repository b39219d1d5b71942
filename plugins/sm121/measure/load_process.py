"""The client in a process of its own, so that nothing that pytest does is on the timed path.

``python -m sm121.measure.load_process`` reads one JSON line a batch and writes one a result. It
ends when its input does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import uvloop

from sm121.core.errors import Sm121Error
from sm121.measure.client import Batch, Client, Patience, Request
from sm121.measure.stream import Answer

#: A longer line than any batch: prompts of 131,072 ids, eight at a time.
_LONGEST_LINE = 1 << 28
_REAL_TIME = 10
_NICE = -10


class ClientDied(Sm121Error):
    """The client's process ended in the middle of a batch."""


class LoadProcess:
    """Sends batches from a process of its own; a context manager."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._hello = {"base_url": base_url, "api_key": api_key}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LoadProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sm121.measure.load_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._write(self._hello)  # not on the command line: the key is nobody else's business
        return self

    def __exit__(self, *_reason: object) -> None:
        assert self._process is not None
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()
        self._process = None

    def run(
        self, requests: Sequence[Request], *, concurrency: int = 1, patience: Patience
    ) -> Batch:
        """Send a batch and wait for its end.

        Raises:
            ClientDied: the process is no more.
        """
        self._write(
            {
                "concurrency": concurrency,
                "within_s": patience.within_s,
                "silent_s": patience.silent_s,
                "requests": [_pack(request) for request in requests],
            }
        )
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClientDied(f"the measuring client ended with {self._process.wait()}")
        result = json.loads(line)
        answers = [Answer.from_record(record) for record in result.pop("answers")]
        return Batch(answers=answers, **result)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClientDied(f"the measuring client ended with {self._process.wait()}") from error


def _pack(request: Request) -> dict[str, Any]:
    return {
        "path": request.path,
        "body": base64.b64encode(request.body).decode(),
        "asked_tokens": request.asked_tokens,
        "asked_prompt": request.asked_prompt,
        "stream": request.stream,
    }


def _unpack(record: dict[str, Any]) -> Request:
    return Request(**{**record, "body": base64.b64decode(record["body"])})


async def _serve(output: IO[bytes]) -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    hello = json.loads(await reader.readline())
    async with Client(hello["base_url"], hello["api_key"]) as client:
        coming = asyncio.create_task(reader.readline())
        while message := await coming:
            coming = asyncio.create_task(reader.readline())
            order = json.loads(message)
            requests = [_unpack(record) for record in order["requests"]]
            gc.collect()
            gc.freeze()
            running = asyncio.create_task(
                client.run(
                    requests,
                    concurrency=order["concurrency"],
                    patience=Patience(order["within_s"], order["silent_s"]),
                )
            )
            await asyncio.wait((running, coming), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():  # nothing is asked meanwhile: the parent is no more
                return
            batch = running.result()
            result = {
                "answers": [answer.as_record() for answer in batch.answers],
                "started_ns": batch.started_ns,
                "ended_ns": batch.ended_ns,
                "cpu_s": batch.cpu_s,
                "worst_lag_ns": batch.worst_lag_ns,
                "clock_steps": batch.clock_steps,
            }
            output.write(json.dumps(result).encode() + b"\n")
            output.flush()


def _be_prompt() -> None:
    """Run before whatever else wants the processor: the client needs little, and at once."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REAL_TIME))
    except OSError:  # only root may, and not in every container
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def main() -> None:
    """Serve the parent until it closes the pipe."""
    gc.disable()  # collected between batches, never while one is measured
    _be_prompt()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.stdout.buffer))


if __name__ == "__main__":
    main()
