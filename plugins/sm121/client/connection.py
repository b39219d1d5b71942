"""The connections of the load client."""

from typing import Any

import aiohttp

from sm121.core.bounded import LARGEST_ANSWER, tls

#: Idle connections are kept for this many seconds. It is less than the five seconds after which
#: uvicorn closes them.
_KEEP_ALIVE_S = 2.0
#: Time limit for establishing a connection, in seconds.
_CONNECT_WITHIN_S = 30.0


def open_session(api_key: str, *, reuse: bool = True, **options: Any) -> aiohttp.ClientSession:
    """Open a session without decompression, connection limit or total timeout.

    Args:
        api_key: The API key of the server.
        reuse: Whether later requests may use the same connection.
        **options: Further arguments of `aiohttp.ClientSession`.

    Returns:
        The session; the caller closes it.
    """
    reuse_options: dict[str, Any] = {"force_close": True}
    if reuse:
        reuse_options = {"keepalive_timeout": _KEEP_ALIVE_S}
    return aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls(), **reuse_options),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S),
        headers={
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
        **options,
    )


def refuse_packed(response: aiohttp.ClientResponse) -> None:
    """Reject a compressed answer, because its data cannot be timed, and their size is unknown.

    Args:
        response: The answer; only its headers are read.

    Raises:
        aiohttp.ClientPayloadError: The answer is compressed, although the request excludes it.
    """
    packed = response.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        raise aiohttp.ClientPayloadError(
            f"the response is compressed ({packed}), although the request had Accept-Encoding: "
            "identity"
        )


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of an answer that is not streamed.

    Args:
        response: The answer.

    Returns:
        The body.

    Raises:
        aiohttp.ClientError: The body is compressed or too large, or the connection broke.
    """
    refuse_packed(response)
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        require_bounded(len(body))
    return bytes(body)


def require_bounded(size: int) -> None:
    """Reject an answer that is larger than `LARGEST_ANSWER`.

    Args:
        size: The number of bytes that were read so far.

    Raises:
        aiohttp.ClientPayloadError: The answer is larger.
    """
    if size > LARGEST_ANSWER:
        raise aiohttp.ClientPayloadError(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB")
