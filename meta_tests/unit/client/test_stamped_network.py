"""The timestamps that the network layer of the timed client records."""

import asyncio
import time

import httpcore
import pytest

from sm121.client.stamped_network import CURRENT, StampedNetwork, Stamps

_LATE_S = 0.1
_MUCH = 8 << 20


async def _opened(answer: bytes) -> tuple[asyncio.Server, httpcore.AsyncNetworkStream]:
    """Start a server that answers the first byte that it receives, and connect to it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    CURRENT.set(Stamps())
    return server, await StampedNetwork().connect_tcp("127.0.0.1", port, timeout=5.0)


def test_a_stamp_is_that_of_the_socket_and_not_of_its_reader():
    async def run() -> int:
        server, stream = await _opened(b"answer")
        async with server:
            await stream.write(b"?")
            await asyncio.sleep(_LATE_S)
            now_ns = time.perf_counter_ns()
            await stream.read(100)
            await stream.aclose()
        stamps = CURRENT.get()
        assert stamps.heard and not stamps.reused
        return now_ns - stamps.read_ns

    assert asyncio.run(run()) > _LATE_S / 2 * 1e9


def test_a_flood_waits_in_the_socket_and_arrives_whole():
    async def run() -> tuple[int, int]:
        server, stream = await _opened(b"x" * _MUCH)
        async with server:
            await stream.write(b"?")
            await asyncio.sleep(_LATE_S)
            buffered = sum(len(data) for _, data in stream._wire.reads)  # type: ignore[attr-defined]
            size = 0
            while data := await stream.read(1 << 16):
                size += len(data)
            await stream.aclose()
        return buffered, size

    buffered, size = asyncio.run(run())
    assert size == _MUCH and buffered < _MUCH / 2


def test_a_refused_connection_is_a_failed_request():
    async def run() -> None:
        server, stream = await _opened(b"")
        port = server.sockets[0].getsockname()[1]
        await stream.aclose()
        server.close()
        await server.wait_closed()
        await StampedNetwork().connect_tcp("127.0.0.1", port, timeout=5.0)

    with pytest.raises(httpcore.ConnectError):
        asyncio.run(run())
