"""Send one request, and return the answer without validating it."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from sm121.core import server, unmet

#: Maximum number of characters that a message quotes from the body.
_SHOWN = 300


@dataclass(frozen=True)
class Exchange:
    """One answer, without validation.

    Attributes:
        status: The HTTP status; None if no answer arrived.
        content_type: The Content-Type header; empty if there is none.
        content: The body.
        failure: Why no answer arrived; empty if an answer arrived.
    """

    status: int | None
    content_type: str
    content: bytes
    failure: str = ""

    @property
    def text(self) -> str:
        """The beginning of the body, for a message."""
        return self.content[:_SHOWN].decode("utf-8", "replace")

    @property
    def observed(self) -> str:
        """The status and the body without ids and times, so that two runs can be compared."""
        if self.status is None:
            return self.failure
        parsed = self.parsed()
        text = self.text
        if parsed is not None:
            text = json.dumps(unmet.steady(parsed))[:_SHOWN]
        return f"{self.status} {text}"

    def parsed(self) -> Any:
        """Return the body as JSON, or None if it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


def send(
    endpoint: server.Endpoint,
    method: str,
    path: str,
    content: bytes | None = None,
    *,
    key: str | None = None,
    timeout_s: float,
) -> Exchange:
    """Send a request, without validating the request or the answer.

    Args:
        endpoint: The server.
        method: The HTTP method.
        path: The path.
        content: The JSON body; None for no body.
        key: An API key to send in place of the endpoint's.
        timeout_s: The time limit of the whole answer, in seconds.

    Returns:
        The answer, or the reason why none arrived.
    """
    headers: dict[str, str] = {}
    if content is not None:
        headers["Content-Type"] = "application/json"
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    with endpoint.http(timeout_s=timeout_s) as http:
        try:
            answer = http.request(method, path, content=content, headers=headers)
        except httpx.TimeoutException:
            failure = f"no answer within {timeout_s:.0f} s"
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        else:
            kind = answer.headers.get("content-type", "")
            return Exchange(answer.status_code, kind, answer.content)
    return Exchange(None, "", b"", failure)
