"""Check that a server generates one token within a time limit.

An engine's `/health` can return 200 although the scheduler is stuck. This check therefore sends a
real request. The module imports no large package, so that a container's health check takes less
than a second in addition to the request.
"""

import http.client
import json
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from sm121.core.address import root_of

#: Maximum number of bytes that are read from an answer.
_LARGEST_ANSWER = 1 << 20
#: Maximum number of characters of an error's message that are shown.
_LONGEST_REASON = 200
#: The values of finish_reason for a request that the engine could not complete.
_NOT_FINISHED = ("abort", "error", "timeout")
#: The prompt of the request.
_PROMPT = "1 2 3"


@dataclass(frozen=True)
class Health:
    """The result of one check.

    Attributes:
        healthy: Whether the server generated a token in time.
        message: The result in one line, for people.
    """

    healthy: bool
    message: str


#: The next steps that messages recommend.
_START = "Start the server, or name the address at which it listens."
_GIVE_KEY = "Set the key in OPENAI_API_KEY."
_READ_LOG = "Read the server's log for the cause."
_RESTART = "Read the server's log; restart the server if the log shows no progress."


class _UnhealthyError(Exception):
    """The server answered, but did not generate a token."""

    def __init__(self, fault: str, next_step: str = _READ_LOG) -> None:
        super().__init__(fault)
        self.next_step = next_step


def check(base_url: str, *, within_s: float, api_key: str | None, model: str | None) -> Health:
    """Request one token from a server.

    Args:
        base_url: The address of the server, with or without /v1.
        within_s: The time limit of the whole check, in seconds.
        api_key: The server's API key, if it has one.
        model: The name of the model on the server; None for the first model in `/v1/models`.

    Returns:
        Whether a token arrived in time, and the result in one line.

    Raises:
        UsageError: The address is not an HTTP address, or contains a password.
    """
    server = _Server.parse(base_url, api_key)
    outcome: list[Health] = []
    fault = f"{base_url}: expected a token within {within_s:g} s, got none"
    late = Health(False, f"{fault}. {_RESTART}")
    started = time.monotonic()

    def request() -> None:
        try:
            name = model or server.first_model(within_s)
            generated = server.generate(name, within_s)
        except _UnhealthyError as error:
            outcome.append(Health(False, f"{base_url}: {error}. {error.next_step}"))
        except TimeoutError:
            outcome.append(late)
        except OSError as error:
            got = str(error) or type(error).__name__
            outcome.append(Health(False, f"{base_url}: expected a server, got {got}. {_START}"))
        except (http.client.HTTPException, ValueError, RecursionError) as error:
            got = str(error) or type(error).__name__
            outcome.append(Health(False, f"{base_url}: expected JSON, got {got}. {_READ_LOG}"))
        else:
            seconds = time.monotonic() - started
            outcome.append(Health(True, f"{base_url}: {name}: {generated} in {seconds:.2f} s"))

    # If a server sends one byte a second, the socket's timeout is never reached. The thread is then
    # abandoned; it is a daemon thread, so it does not keep the process alive.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(within_s)
    return outcome[0] if outcome else late


@dataclass(frozen=True)
class _Server:
    """A client of the server at one address."""

    scheme: str
    host: str
    port: int | None
    path: str
    api_key: str | None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> "_Server":
        root = root_of(base_url, "URL")
        parts = urllib.parse.urlsplit(root)
        return cls(parts.scheme, parts.hostname or "", parts.port, parts.path, api_key)

    def first_model(self, within_s: float) -> str:
        """Return the name of the first model that the server lists."""
        answer = self._answer("GET", "/v1/models", None, within_s)
        models = answer.get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise _UnhealthyError("/v1/models: expected a model, got none")
        return str(models[0].get("id"))

    def generate(self, model: str, within_s: float) -> str:
        """Generate one token, and describe the result for a message."""
        body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        answer = self._answer("POST", "/v1/completions", body, within_s)
        if answer.get("error"):
            raise _UnhealthyError(
                f"/v1/completions: expected one token, got an error: {_reason(answer['error'])}"
            )
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not choice:
            raise _UnhealthyError("/v1/completions: expected a choice, got none")
        if choice.get("finish_reason") in _NOT_FINISHED:
            raise _UnhealthyError(
                "/v1/completions: expected finish_reason length or stop, got "
                f"{choice['finish_reason']}: the engine ended the request"
            )
        tokens = _tokens(choice, answer.get("usage"))
        if tokens > 0:
            return f"{tokens} token"
        text = choice.get("text")
        if isinstance(text, str) and text:
            return "text"
        raise _UnhealthyError("/v1/completions: expected one token, got none")

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, within_s: float
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection: http.client.HTTPConnection
        if self.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                self.host, self.port, timeout=within_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=within_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self.path + path, content, headers)
            response = connection.getresponse()
            text = response.read(_LARGEST_ANSWER)
        finally:
            connection.close()
        if response.status != 200:
            step = _GIVE_KEY if response.status in (401, 403) else _READ_LOG
            raise _UnhealthyError(f"{path}: expected status 200, got {response.status}", step)
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise _UnhealthyError(f"{path}: expected an object, got {type(answer).__name__}")
        return answer


def _tokens(choice: dict[str, Any], usage: object) -> int:
    """Return the number of tokens in an answer, from its usage or its choice; 0 if neither has it.

    The text does not show the number, because special tokens, for example the end of a message,
    have no text.
    """
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(counted, int) and not isinstance(counted, bool) and counted > 0:
        return counted
    logprobs = choice.get("logprobs")
    of_logprobs = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    for listed in (choice.get("token_ids"), of_logprobs):
        if isinstance(listed, list) and listed:
            return len(listed)
    return 0


def _reason(error: object) -> str:
    """Return the message of an error object, truncated."""
    reason = error.get("message") if isinstance(error, dict) else None
    return str(reason or error)[:_LONGEST_REASON].rstrip(" .")
