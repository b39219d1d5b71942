"""What the timed client and the load client have in common: their connections and patience."""

from dataclasses import dataclass
from typing import Any

import aiohttp

from sm121.core.bounded import LARGEST_ANSWER, tls

#: Less than the five seconds after which uvicorn closes an idle connection.
_KEEP_ALIVE_S = 2.0


@dataclass(frozen=True)
class Patience:
    """How long a request may take in all, and how long it may be without news, in seconds. The
    timed client counts silence from the first byte on. The load client counts it from the request,
    and forgives a request that waits for its turn while others get their tokens."""

    within_s: float
    silent_s: float


def open_session(api_key: str, *, reuse: bool = True, **options: Any) -> aiohttp.ClientSession:
    """A session with any number of connections and no time limit. Nothing is unpacked. ``reuse``:
    of connections, for later requests; ``options``: of `aiohttp.ClientSession`."""
    reuse_options: dict[str, Any] = (
        {"keepalive_timeout": _KEEP_ALIVE_S} if reuse else {"force_close": True}
    )
    return aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls(), **reuse_options),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
        headers={
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
        **options,
    )


def refuse_packed(response: aiohttp.ClientResponse) -> None:
    """Raises aiohttp.ClientPayloadError: a packed answer can be neither timed nor bounded."""
    packed = response.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        raise aiohttp.ClientPayloadError(
            f"the answer is packed ({packed}) though it was asked for as it is"
        )


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer that is no stream. Raises aiohttp.ClientError: it is packed or too
    large, or the connection broke."""
    refuse_packed(response)
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > LARGEST_ANSWER:
            raise aiohttp.ClientPayloadError(
                f"the answer is larger than {LARGEST_ANSWER >> 20} MiB"
            )
    return bytes(body)
