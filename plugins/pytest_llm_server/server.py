"""The server object that tests use."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm121.core.server import Endpoint

if TYPE_CHECKING:
    import httpx
    import openai

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LlmServer:
    """A server that answers requests.

    Attributes:
        log: The path of the server's log; None for a server that the plugin did not start.
    """

    _endpoint: Endpoint
    log: Path | None

    @property
    def url(self) -> str:
        """The server's address, without ``/v1`` and without a trailing slash."""
        return self._endpoint.base_url

    @property
    def api_key(self) -> str:
        """The API key that the server requires."""
        return self._endpoint.api_key

    @property
    def model(self) -> str:
        """The model name for requests."""
        return self._endpoint.served_name

    def client(self, *, timeout_s: float = _TIMEOUT_S) -> "openai.OpenAI":
        """Return an OpenAI client. It never retries, because a retry would hide a failure.

        Args:
            timeout_s: The time limit of a whole answer, in seconds.
        """
        return self._endpoint.openai(timeout_s=timeout_s)

    def async_client(self, *, timeout_s: float = _TIMEOUT_S) -> "openai.AsyncOpenAI":
        """Return an asynchronous OpenAI client. It never retries.

        Args:
            timeout_s: The timeout of a single read, in seconds.
        """
        import openai  # imported here, because it takes half a second

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.api_key,
            timeout=timeout_s,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(timeout=timeout_s, trust_env=False),
        )

    def http(self, *, timeout_s: float = _TIMEOUT_S) -> "httpx.Client":
        """Return an HTTP client for paths outside the API, relative to `url`. It sends the API key.

        Args:
            timeout_s: The time limit of a whole answer, in seconds.
        """
        return self._endpoint.http(timeout_s=timeout_s)
