"""What every server looks like to the tests, whoever started it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sm121.core.configuration import ServerConfiguration

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens. ``base_url`` has no trailing slash and no ``/v1``."""

    base_url: str
    api_key: str = field(repr=False)
    served_name: str

    def openai(self, *, timeout_s: float = 120.0) -> openai.OpenAI:
        """A client of the API; it never retries, since a retry would hide a failure."""
        import openai  # half a second, which those who measure need not spend

        return openai.OpenAI(**self.client_options(timeout_s=timeout_s))

    def client_options(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """What such a client is made with."""
        import openai

        return {
            "base_url": f"{self.base_url}/v1",
            "api_key": self.api_key,
            "timeout": timeout_s,
            "max_retries": 0,
            # A proxy or a .netrc of the environment must not be used.
            "http_client": openai.DefaultHttpxClient(timeout=timeout_s, trust_env=False),
        }

    def http(self, *, timeout_s: float = 30.0) -> httpx.Client:
        """A plain client for everything beside the API: /health, /metrics, /tokenize."""
        return httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=timeout_s,
            trust_env=False,
        )


@dataclass(frozen=True)
class Server:
    """A server that answers. ``log`` is None where the suite has no access to it."""

    endpoint: Endpoint
    managed: bool
    engine: str
    version: str | None
    log: Path | None
    configuration: ServerConfiguration | None
    startup_s: float | None
