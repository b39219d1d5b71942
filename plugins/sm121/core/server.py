"""A server as the tests use it, whether the suite started it or attached to it."""

import contextlib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sm121.core import bounded, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_arguments import one_line

if TYPE_CHECKING:
    import openai


#: The API key that requests contain if the user gave none.
NO_KEY = "none"
#: The engine of an attached server as long as neither its log nor an answer shows another name.
UNRECOGNISED = "openai-compatible"
#: The options of vLLM and SGLang for the length of the context.
_CONTEXT = re.compile(r"--(?:max-model-len|context-length) (\d+)(?!\S)")


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, with its API key and its model's name."""

    #: The URL, without a trailing slash and without ``/v1``.
    base_url: str
    #: The API key; `NO_KEY` if the user gave none.
    api_key: str = field(repr=False)
    served_name: str

    @property
    def asks_for_a_key(self) -> bool:
        """Whether the user gave an API key. If so, the server must refuse other keys."""
        return self.api_key != NO_KEY

    def openai(self, *, timeout_s: float = 120.0) -> "openai.OpenAI":
        """Return a client of the API. It never retries, because a retry would hide a failure.

        Args:
            timeout_s: The time limit of a whole answer, in seconds.
        """
        import openai  # imported late: it takes 0.5 s, and the measuring process does not need it

        return openai.OpenAI(**self.client_options(timeout_s=timeout_s))

    def client_options(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """Return the arguments of a client of the API.

        Args:
            timeout_s: The time limit of a whole answer, in seconds.
        """
        import openai

        is_httpx = issubclass(openai.DefaultHttpxClient, httpx.Client)
        library = httpx if is_httpx else importlib.import_module("httpx2")
        return {
            "base_url": f"{self.base_url}/v1",
            "api_key": self.api_key,
            "timeout": timeout_s,
            "max_retries": 0,
            "http_client": openai.DefaultHttpxClient(
                timeout=timeout_s, trust_env=False, transport=bounded.transport(library)
            ),
        }

    def http(self, *, timeout_s: float = 30.0) -> httpx.Client:
        """Return a plain HTTP client for paths that are not part of the API.

        Args:
            timeout_s: The time limit of a whole answer, in seconds.
        """
        return httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=timeout_s,
            trust_env=False,
            transport=bounded.transport(httpx),
        )

    def page(self, path: str, *, timeout_s: float = 10.0) -> str | None:
        """Request a path, and return the text of the answer.

        Args:
            path: The path, with its leading slash.
            timeout_s: The time limit of the answer, in seconds.

        Returns:
            The text of an answer with status 200, else None.
        """
        with self.http(timeout_s=timeout_s) as http:
            try:
                answer = http.get(path)
            except httpx.HTTPError:
                return None
        return answer.text if answer.status_code == 200 else None


def context_of(models: dict[str, Any], name: str) -> int | None:
    """Return the context length of a model, in tokens.

    Args:
        models: The answer of ``/v1/models``.
        name: The served name of the model.

    Returns:
        The length, or None if the answer does not contain it.
    """
    for entry in models.get("data") or ():
        length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        if entry.get("id") == name and length:
            return int(length)
    return None


def context_argument(arguments: Sequence[str]) -> int | None:
    """Return the context length in an engine's arguments.

    Args:
        arguments: The command line of vLLM or SGLang.

    Returns:
        The length in tokens; None if no argument sets it to a number without a suffix.
    """
    lengths = _CONTEXT.findall(one_line(arguments))
    return int(lengths[-1]) if lengths else None


def require_context(context: int | None, prompt: int, answer: int) -> None:
    """Check that a context is long enough for a prompt and its answer.

    Args:
        context: The length of the context, in tokens; None if it is unknown.
        prompt: The length of the prompt, in tokens.
        answer: The length of the answer, in tokens.

    Raises:
        NotRun: The context is too short.
    """
    if context is not None and prompt + answer > context:
        raise verdict.NotRun(
            f"a prompt of {prompt} tokens and {answer} of its answer need a context of "
            f"{prompt + answer} tokens; the server has {context} (vLLM: --max-model-len)"
        )


@dataclass(frozen=True)
class Node:
    """One machine of a server that spans several machines."""

    rank: int
    #: The name that the user gave to the machine.
    name: str
    #: The log of the rank on this machine; None if the suite cannot read it.
    log: Path | None = None

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


@dataclass(frozen=True)
class Server:
    """A server that answers requests."""

    endpoint: Endpoint
    #: Whether the suite started the server.
    managed: bool
    engine: str
    #: The engine's version; None if it is unknown.
    version: str | None
    #: The server's log; None if the suite cannot read it, or cannot prove that this server writes
    #: it.
    log: Path | None
    #: The configuration with which the suite started the server; None for an attached server.
    configuration: ServerConfiguration | None
    #: Seconds from the start until the server was ready; None for an attached server.
    startup_s: float | None
    #: The engine whose formats of log and metrics the server has; None if it is unknown.
    reader: str | None = None
    #: One line for each cache into which the start had to compile kernels; empty if all caches were
    #: warm.
    compiled: tuple[str, ...] = ()
    #: Why `log` is None.
    why_no_log: str = "the attached server's log is unknown; give --server-log or --container"
    #: The machines, in the order of their ranks; empty if the server runs on one machine.
    nodes: tuple[Node, ...] = ()
    #: The path or hub id of an attached server's model, from ``/v1/models``.
    root: str | None = None
    #: The names under which an attached server lists its model; empty if it lists several models.
    names: tuple[str, ...] = ()

    def context_tokens(self) -> int | None:
        """Return the length of the context, in tokens, or None if it is unknown.

        For a server that the suite started, the arguments count, and not what the server reports.
        If the server reports a shorter context than requested, the tests of the longer context
        still run, and can fail.
        """
        arguments = self.configuration.arguments if self.configuration is not None else ()
        length = context_argument(arguments)
        if length is not None:
            return length
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            models = json.loads(self.endpoint.page("/v1/models") or "")
            return context_of(models, self.endpoint.served_name)
        return None

    @property
    def logs(self) -> dict[Path, str]:
        """The existing logs of the server's nodes, with a title for each."""
        logs = {}
        if self.log is not None and self.log.is_file():
            logs[self.log] = f"log of {self.log.stem}"
        for node in self.nodes[1:]:
            if node.log is not None and node.log.is_file():
                logs[node.log] = f"log of {node}"
        return logs

    @property
    def why_cold(self) -> str | None:
        """Why the server's start-up time is not judged; None if its caches were warm."""
        if not self.compiled:
            return None
        return (
            f"the start took {self.startup_s:.0f} s and was a cold one: it compiled "
            f"{'; '.join(self.compiled)}. Only the time of a warm start is judged: run again with "
            "the same caches, or run `sm121 warm` first"
        )
