"""HTTP transports whose answers have a bound in bytes and in time: a server may send a byte a
second for ever, or a kilobyte that unpacks to a gigabyte, and an HTTP library bounds neither."""

import functools
import os
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: Bytes of an answer, unpacked: to GET, to anything else, and of a stream of events.
LARGEST_PAGE = 4 << 20
LARGEST_ANSWER = 64 << 20
LARGEST_STREAM = 256 << 20
#: A stream of events may take so many times the time that a whole answer may.
_STREAM_PATIENCE = 10.0
#: Where a request has no timeout of its own, in seconds.
_LONGEST_S = 600.0
_PIECE = 1 << 16
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def tls() -> ssl.SSLContext:
    """Whom every client of the suite trusts: the authorities of the system, or those that
    SSL_CERT_FILE and SSL_CERT_DIR name, and those of certifi."""
    return _trusting(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _trusting(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """OpenSSL reads the two variables itself: here they only tell one context from another."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class _Deadline(threading.local):
    """When the answer that this thread reads must be whole."""

    at: float = float("inf")
    within_s: float = float("inf")


@dataclass
class _Around:
    """What stands around a part of a library, and knows the deadline of whoever reads."""

    _inner: Any
    _deadline: _Deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def transport(library: Any) -> Any:
    """A transport for a client of ``library``, of no class that mypy could know."""
    return _Transport(library)


class _Transport(_Around):
    """Sends requests over ``httpx``, or a library with the same names such as ``httpx2``. The whole
    answer to a request must come within the request's own read timeout, a stream of events within
    ten times that. Its bytes are counted after unpacking. What breaks a bound ends in the library's
    ``ReadTimeout`` or ``ReadError``, which says which bound. `library`: the module whose client is
    to use it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        inner = library.HTTPTransport(
            trust_env=False,  # a proxy or a .netrc of the environment must not be used
            verify=tls(),
            limits=library.Limits(max_connections=1000, max_keepalive_connections=100),
        )
        super().__init__(inner, _Deadline())
        # The library has no place for a network backend; the pool under it has.
        pool = self._inner._pool
        pool._network_backend = _Backend(pool._network_backend, self._deadline)

    def handle_request(self, request: Any) -> Any:
        within_s = (request.extensions.get("timeout") or {}).get("read") or _LONGEST_S
        began = time.monotonic()
        self._deadline.at, self._deadline.within_s = began + within_s, within_s
        request.headers["Accept-Encoding"] = "identity"
        response = self._inner.handle_request(request)
        largest = LARGEST_PAGE if request.method in ("GET", "HEAD") else LARGEST_ANSWER
        kind = response.headers.get("content-type", "")
        if request.method == "POST" and kind.startswith("text/event-stream"):
            within_s, largest = within_s * _STREAM_PATIENCE, LARGEST_STREAM
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        stream = _stream_class(self._library)(
            response.stream, self._deadline, self._library, began, within_s, largest, encoding
        )
        return self._library.Response(
            status_code=response.status_code,
            headers=response.headers,
            stream=stream,
            extensions=response.extensions,
        )

    def __enter__(self) -> "_Transport":
        self._inner.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        self._inner.__exit__(*why)


@dataclass
class _Stream(_Around):
    """The body of an answer, unpacked, as far as the bounds let it."""

    _library: Any
    _began: float
    _within_s: float
    _largest: int
    _encoding: str
    _inflater: Any = field(default_factory=lambda: zlib.decompressobj(_GZIP_OR_ZLIB))

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self._inner)
        size = 0
        while True:
            self._deadline.at = self._began + self._within_s
            self._deadline.within_s = self._within_s
            if (packed := next(pieces, None)) is None:
                return
            for piece in self._unpacked(packed):
                size += len(piece)
                if size > self._largest:
                    raise self._library.ReadError(
                        f"the answer is larger than {self._largest >> 20} MiB"
                    )
                yield piece

    def close(self) -> None:
        self._inner.close()

    def _unpacked(self, packed: bytes) -> Iterator[bytes]:
        if self._encoding in ("identity", ""):
            yield packed
            return
        if self._encoding not in ("gzip", "x-gzip", "deflate"):
            raise self._library.DecodingError(
                f"the answer is packed ({self._encoding}) though it was asked for as it is"
            )
        try:
            while packed:
                yield self._inflater.decompress(packed, _PIECE)
                packed = self._inflater.unconsumed_tail
                if self._inflater.eof and self._inflater.unused_data:  # another member of a file
                    packed = self._inflater.unused_data
                    self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        except zlib.error as error:
            raise self._library.DecodingError(f"the answer cannot be unpacked: {error}") from error


@functools.cache
def _stream_class(library: Any) -> Any:
    return type("BoundedStream", (_Stream, library.SyncByteStream), {})


class _Backend(_Around):
    def connect_tcp(self, *arguments: Any, **options: Any) -> "_Connection":
        return _Connection(self._inner.connect_tcp(*arguments, **options), self._deadline)


class _Connection(_Around):
    """A connection. A read ends at the deadline, however much of its own timeout is left."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        remaining_s = self._deadline.at - time.monotonic()
        core = sys.modules[type(self._inner).__module__.partition(".")[0]]
        late = f"no whole answer within {self._deadline.within_s:g} s"
        if remaining_s <= 0:
            raise core.ReadTimeout(late)
        try:
            data: bytes = self._inner.read(
                max_bytes, timeout=remaining_s if timeout is None else min(timeout, remaining_s)
            )
        except core.ReadTimeout as error:
            raise core.ReadTimeout(late) from error
        return data

    def start_tls(self, *arguments: Any, **options: Any) -> "_Connection":
        return _Connection(self._inner.start_tls(*arguments, **options), self._deadline)
