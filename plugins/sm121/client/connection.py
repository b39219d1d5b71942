"""What the timed client and the load client have in common: their connections and patience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

#: Less than the five seconds after which uvicorn closes an idle connection.
_KEEP_ALIVE_S = 2.0


@dataclass(frozen=True)
class Patience:
    """How long a request may take in all, and how long it may be without news, in seconds.

    The timed client counts silence from the first byte on. The load client counts it from the
    request, and forgives a request that waits for its turn while others get their tokens.
    """

    within_s: float
    silent_s: float


def open_session(api_key: str, **options: Any) -> aiohttp.ClientSession:
    """A session with any number of connections and no time limit on a request.

    Args:
        options: further ones of `aiohttp.ClientSession`.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
        headers={
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
        **options,
    )
