"""HTTP transports that limit the size and the duration of a response.

A server may send one byte a second for ever, or a kilobyte that decompresses to a gigabyte. The
timeouts of an HTTP library limit only single reads, and its size limits apply only to headers.
"""

import contextlib
import functools
import importlib
import os
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: The maximum size of a response to GET or HEAD, in bytes after decompression.
LARGEST_PAGE = 4 << 20
#: The maximum size of a response to any other method, in bytes after decompression.
LARGEST_ANSWER = 64 << 20
#: The maximum size of an event stream, in bytes after decompression.
LARGEST_STREAM = 256 << 20
#: The time limit of an event stream, as a multiple of the request's read timeout.
_STREAM_PATIENCE = 10.0
#: The time limit of a request that sets no read timeout, in seconds.
_LONGEST_S = 600.0
#: The maximum output of one decompression step, in bytes.
_PIECE = 1 << 16
#: Makes zlib accept a gzip header as well as a zlib header.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def tls() -> ssl.SSLContext:
    """Return the TLS context that all clients of the suite use.

    It trusts the certificate authorities of certifi and those of the system. The variables
    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the system's authorities.
    """
    return _trusting(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _trusting(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Create a TLS context.

    The arguments are only a cache key; OpenSSL itself reads the variables.
    """
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class _Deadline(threading.local):
    """The deadline of the response that the current thread reads."""

    #: The deadline, in seconds of the monotonic clock.
    at: float = float("inf")
    #: The time limit from which the deadline was computed, in seconds.
    within_s: float = float("inf")


def transport(library: Any) -> Any:
    """Make a transport for a client of an HTTP library.

    A response must be complete within the request's read timeout, and an event stream within ten
    times that timeout. Sizes are counted after decompression.

    Args:
        library: The module of the client: ``httpx``, or ``httpx2`` with the same names.

    Returns:
        A transport. It raises the library's ``ReadTimeout`` or ``ReadError``, whose message names
        the exceeded limit. It is typed as Any, because the library is only known at run time.
    """
    return _Transport(library)


#: For each client library, the package that contains its connection pools. These pools accept a
#: network backend.
_CORES = {"httpx": "httpcore", "httpx2": "httpcore2"}


class _Transport:
    """A transport like the library's own, but reads from its connections have a deadline."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._core = importlib.import_module(_CORES[library.__name__])
        self._deadline = _Deadline()
        self._pool = self._core.ConnectionPool(
            ssl_context=tls(),
            max_connections=1000,
            max_keepalive_connections=100,
            keepalive_expiry=5.0,
            network_backend=_Backend(self._core, self._core.SyncBackend(), self._deadline),
        )

    def handle_request(self, request: Any) -> Any:
        within_s = (request.extensions.get("timeout") or {}).get("read") or _LONGEST_S
        began = time.monotonic()
        self._deadline.at = began + within_s
        self._deadline.within_s = within_s
        request.headers["Accept-Encoding"] = "identity"
        response = self._send(request)
        headers = self._library.Headers(response.headers)
        largest = LARGEST_PAGE if request.method in ("GET", "HEAD") else LARGEST_ANSWER
        kind = headers.get("content-type", "")
        if request.method == "POST" and kind.startswith("text/event-stream"):
            within_s *= _STREAM_PATIENCE
            largest = LARGEST_STREAM
        stream = _stream_class(self._library)(
            response.stream,
            self._deadline,
            self._library,
            began=began,
            within_s=within_s,
            largest=largest,
            encoding=headers.pop("content-encoding", "identity").strip().lower(),
        )
        return self._library.Response(
            status_code=response.status,
            headers=headers,
            stream=stream,
            extensions=response.extensions,
        )

    def _send(self, request: Any) -> Any:
        url = self._core.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        with _as_errors_of(self._library):
            return self._pool.handle_request(
                self._core.Request(
                    method=request.method,
                    url=url,
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> "_Transport":
        self._pool.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        self._pool.__exit__(*why)


@contextlib.contextmanager
def _as_errors_of(library: Any) -> Iterator[None]:
    """Convert errors of the connection pool into the library's errors of the same names."""
    core = importlib.import_module(_CORES[library.__name__])
    try:
        yield
    except (
        core.TimeoutException,
        core.NetworkError,
        core.ProtocolError,
        core.UnsupportedProtocol,
    ) as error:
        raise getattr(library, type(error).__name__)(str(error)) from error


@dataclass
class _Stream:
    """The body of a response, decompressed up to the limits."""

    #: The chunks as they arrive, perhaps compressed.
    packed: Any
    deadline: _Deadline
    library: Any
    #: When the request was started, in seconds of the monotonic clock.
    began: float
    #: The time limit, in seconds from the start.
    within_s: float
    #: The maximum size, in bytes after decompression.
    largest: int
    #: The content encoding.
    encoding: str
    _inflater: Any = field(default_factory=lambda: zlib.decompressobj(_GZIP_OR_ZLIB))

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self.packed)
        size = 0
        while True:
            self.deadline.at = self.began + self.within_s
            self.deadline.within_s = self.within_s
            with _as_errors_of(self.library):
                packed = next(pieces, None)
            if packed is None:
                return
            for piece in self._unpacked(packed):
                size += len(piece)
                if size > self.largest:
                    raise self.library.ReadError(
                        f"the answer is larger than {self.largest >> 20} MiB"
                    )
                yield piece

    def close(self) -> None:
        self.packed.close()

    def _unpacked(self, packed: bytes) -> Iterator[bytes]:
        if self.encoding in ("identity", ""):
            yield packed
            return
        if self.encoding not in ("gzip", "x-gzip", "deflate"):
            raise self.library.DecodingError(
                f"the response is compressed ({self.encoding}), although the request had "
                "Accept-Encoding: identity"
            )
        try:
            while packed:
                yield self._inflater.decompress(packed, _PIECE)
                packed = self._inflater.unconsumed_tail
                if self._inflater.eof and self._inflater.unused_data:  # another gzip member follows
                    packed = self._inflater.unused_data
                    self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        except zlib.error as error:
            raise self.library.DecodingError(
                f"the response cannot be decompressed: {error}"
            ) from error


@functools.cache
def _stream_class(library: Any) -> Any:
    """Return `_Stream` as a subclass of the library's stream."""
    return type("BoundedStream", (_Stream, library.SyncByteStream), {})


@dataclass
class _Backend:
    """A network backend whose connections end a read at the deadline."""

    _core: Any
    _inner: Any
    _deadline: _Deadline

    def connect_tcp(self, *arguments: Any, **options: Any) -> "_Connection":
        stream = self._inner.connect_tcp(*arguments, **options)
        return _Connection(self._core, stream, self._deadline)


@dataclass
class _Connection:
    """A network stream whose reads end at the deadline, even before their own timeout."""

    _core: Any
    _inner: Any
    _deadline: _Deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        remaining_s = self._deadline.at - time.monotonic()
        late = f"no whole answer within {self._deadline.within_s:g} s"
        if remaining_s <= 0:
            raise self._core.ReadTimeout(late)
        if timeout is not None:
            remaining_s = min(timeout, remaining_s)
        try:
            data: bytes = self._inner.read(max_bytes, timeout=remaining_s)
        except self._core.ReadTimeout as error:
            raise self._core.ReadTimeout(late) from error
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout=timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, *arguments: Any, **options: Any) -> "_Connection":
        stream = self._inner.start_tls(*arguments, **options)
        return _Connection(self._core, stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
