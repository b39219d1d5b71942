"""One request and whatever came back, however wrong."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from sm121.core import server, unmet

#: Characters of a content for people.
_SHOWN = 300


@dataclass(frozen=True)
class Exchange:
    """One answer as it came. ``status`` is None when none came, and ``failure`` says why."""

    status: int | None
    content_type: str
    content: bytes
    failure: str = ""

    @property
    def text(self) -> str:
        """The content for people, shortened."""
        return self.content[:_SHOWN].decode("utf-8", "replace")

    @property
    def observed(self) -> str:
        """What came, without the ids and times that differ from one answer to the next."""
        if self.status is None:
            return self.failure
        parsed = self.parsed()
        text = self.text if parsed is None else json.dumps(unmet.steady(parsed))[:_SHOWN]
        return f"{self.status} {text}"

    def parsed(self) -> Any:
        """The content as JSON; None if it is none."""
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
    """Send any request. `key`: in place of the endpoint's; `timeout_s`: for the whole answer."""
    headers = {"Content-Type": "application/json"} if content is not None else {}
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
