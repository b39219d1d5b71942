"""Connections for the HTTP client of `timed` that store a timestamp for each socket read."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpcore

#: A connection stops reading if it has buffered this many bytes.
_BUFFER_BYTES = 1 << 20


@dataclass
class Stamps:
    """The timestamps of one request, taken at the socket (``time.perf_counter_ns``).

    Attributes:
        sent_ns: When the request was sent, or began to wait for a connection; None before that.
        read_ns: When the latest bytes of the answer arrived.
        reused: Whether an earlier request used the same connection.
        heard: Whether any byte of the answer has arrived.
    """

    sent_ns: int | None = None
    read_ns: int = 0
    reused: bool = True
    heard: bool = False

    def note_sending(self) -> None:
        """Set ``sent_ns`` to the current time. Later calls do not change it."""
        if self.sent_ns is None:
            self.sent_ns = time.perf_counter_ns()


#: The timestamps of the request that the current task sends.
CURRENT: ContextVar[Stamps] = ContextVar("stamps")


class StampedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections on the running event loop."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection. The current time counts as the time at which the request was sent.

        Args:
            host: The host to connect to.
            port: Its port.
            timeout: The time limit of the connection, in seconds; None for none.
            local_address: Not used.
            socket_options: Not used.

        Raises:
            httpcore.ConnectTimeout: The connection was not opened within the time limit.
            httpcore.ConnectError: The host has no address, or refuses the connection.
            LookupError: The current task has no `CURRENT` timestamps.
        """
        del local_address, socket_options  # the client sets neither
        stamps = CURRENT.get()
        stamps.note_sending()
        stamps.reused = False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, wire = await loop.create_connection(_Wire, host, port)
        except TimeoutError as error:
            message = f"no connection to {host}:{port} within {timeout} s"
            raise httpcore.ConnectTimeout(message) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return _Stream(wire)


class _Wire(asyncio.Protocol):
    """A connected socket, with its received bytes and the time of each read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        #: The time and the bytes of each read that `take` has not returned yet.
        self.reads: deque[tuple[int, bytes]] = deque()
        self.ended = False
        self.error: Exception | None = None
        self._buffered = 0
        self._paused = False
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment] # of TCP, so it is a Transport

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter_ns(), data))
        self._buffered += len(data)
        if self._buffered > _BUFFER_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._arrived.set()

    def eof_received(self) -> None:
        self.ended = True
        self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self.error = error
        self._arrived.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def take(self) -> tuple[int, bytes]:
        """Return the time and the bytes of the next read.

        At the end of the data, the bytes are empty.
        """
        while not self.reads:
            if self.error is not None:
                raise httpcore.ReadError(str(self.error)) from self.error
            if self.ended:
                return time.perf_counter_ns(), b""
            self._arrived.clear()
            await self._arrived.wait()
        at_ns, data = self.reads.popleft()
        self._buffered -= len(data)
        if self._paused and not self.reads:
            self._paused = False
            self.transport.resume_reading()
        return at_ns, data

    async def send(self, data: bytes) -> None:
        if self.ended:
            raise httpcore.WriteError("the connection is closed")
        self.transport.write(data)
        await self._writable.wait()


class _Stream(httpcore.AsyncNetworkStream):
    """A connection with httpcore's interface.

    It has no time limits, because `timed` enforces them.
    """

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the bytes of one socket read, and store the time of this read for the request."""
        del max_bytes, timeout
        stamps = CURRENT.get()
        stamps.read_ns, data = await self._wire.take()
        stamps.heard = stamps.heard or bool(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes. A request counts as sent when its first bytes are sent."""
        del timeout
        CURRENT.get().note_sending()
        await self._wire.send(buffer)

    async def aclose(self) -> None:
        """Close the connection."""
        self._wire.transport.close()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Return the connection with TLS."""
        loop = asyncio.get_running_loop()
        wire = self._wire
        try:
            async with asyncio.timeout(timeout):
                transport = await loop.start_tls(
                    wire.transport, wire, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError as error:
            message = f"no TLS with {server_hostname} within {timeout} s"
            raise httpcore.ConnectTimeout(message) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        assert transport is not None
        wire.transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        """Return a property.

        ``is_readable`` means that the connection is closed or has unexpected data.
        """
        if info == "is_readable":
            return self._wire.ended or bool(self._wire.reads)
        return self._wire.transport.get_extra_info(info)
