"""What every server looks like to the tests, whoever started it."""

import contextlib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from sm121.core import bounded, errors, redaction, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_arguments import one_line

if TYPE_CHECKING:
    import openai


#: Sent where the user gave no key.
NO_KEY = "none"
#: As vLLM and SGLang call it; the last of two wins.
_CONTEXT = re.compile(r"--(?:max-model-len|context-length) (\d+)(?!\S)")


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens. ``base_url`` has no trailing slash and no ``/v1``."""

    base_url: str
    api_key: str = field(repr=False)
    served_name: str

    @property
    def asks_for_a_key(self) -> bool:
        """Whether a key is known, so that the server is meant to refuse others."""
        return self.api_key != NO_KEY

    def openai(self, *, timeout_s: float = 120.0) -> "openai.OpenAI":
        """A client of the API; it never retries, since a retry would hide a failure."""
        import openai  # half a second, which those who measure need not spend

        return openai.OpenAI(**self.client_options(timeout_s=timeout_s))

    def client_options(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """What such a client is made with."""
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
        """A plain client for what is beside the API. `timeout_s`: of a whole answer."""
        return httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=timeout_s,
            trust_env=False,
            transport=bounded.transport(httpx),
        )

    def page(self, path: str, *, timeout_s: float = 10.0) -> str | None:
        """The text that GET answers with status 200; None where it does not."""
        with self.http(timeout_s=timeout_s) as http:
            try:
                answer = http.get(path)
            except httpx.HTTPError:
                return None
        return answer.text if answer.status_code == 200 else None


def context_of(models: dict[str, Any], name: str) -> int | None:
    """The context of a model in tokens, by a list of models; None where it does not say."""
    for entry in models.get("data") or ():
        length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        if entry.get("id") == name and length:
            return int(length)
    return None


def context_argument(arguments: Sequence[str]) -> int | None:
    """The context in tokens that arguments of an engine ask for; None where they do not."""
    lengths = _CONTEXT.findall(one_line(arguments))
    return int(lengths[-1]) if lengths else None


def require_context(context: int | None, prompt: int, answer: int) -> None:
    """Raise `NotRun` for what a context (None: not known) is too short for; all in tokens."""
    if context is not None and prompt + answer > context:
        raise verdict.NotRun(
            f"a prompt of {prompt} tokens and {answer} of its answer need a context of "
            f"{prompt + answer} tokens; the server has {context} (vLLM: --max-model-len)"
        )


def root_of(url: str, option: str) -> str:
    """A server's address as `Endpoint` has it. Raises UsageError: ``url`` is no address, or has a
    password in it; the message, which names ``option``, does not show it."""
    scheme, _, rest = url.partition("://")
    expected = "expected http://HOST:PORT, with or without /v1"
    if "@" in rest:
        raise errors.UsageError(
            f"{option} {scheme}://{redaction.REDACTED}@{rest.rpartition('@')[2]}: {expected}, and "
            "no user or password in it, which would be in every report: give the server's key by "
            "the variable OPENAI_API_KEY, with --api-key-file or with --api-key"
        )
    if "?" in rest or "#" in rest:
        path = rest.partition("?")[0].partition("#")[0]
        raise errors.UsageError(f"{option} {scheme}://{path}: {expected}, and nothing behind it")
    parts = urlsplit(url)
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise errors.UsageError(f"{option} {url}: {expected}")
    return url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class Node:
    """One machine of a server that spans several. ``name``: as its user calls it; ``log``: of its
    rank, None where the suite has no access to it."""

    rank: int
    name: str
    log: Path | None = None

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


@dataclass(frozen=True)
class Server:
    """A server that answers. ``log`` is None where the suite has no access to it, or where it is
    not proven to be this server's."""

    endpoint: Endpoint
    managed: bool
    engine: str
    version: str | None
    log: Path | None
    configuration: ServerConfiguration | None
    startup_s: float | None
    #: Whose words its log and its metrics use; None where that is not known.
    reader: str | None = None
    #: What its start compiled, a line for each cache; empty: its caches were warm.
    compiled: tuple[str, ...] = ()
    why_no_log: str = "the attached server's log is not known; give --server-log or --container"
    #: By rank; empty: it is on one machine.
    nodes: tuple[Node, ...] = ()
    #: Of an attached server, where its list of models says that its model lies: a path or a hub id.
    root: str | None = None

    def context_tokens(self) -> int | None:
        """Most tokens of a prompt and its answer: by the arguments of its start, or else by its own
        word, which excuses no server that was started for more. None where neither says."""
        arguments = self.configuration.arguments if self.configuration is not None else ()
        if (length := context_argument(arguments)) is not None:
            return length
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            models = json.loads(self.endpoint.page("/v1/models") or "")
            return context_of(models, self.endpoint.served_name)
        return None

    @property
    def logs(self) -> dict[Path, str]:
        """Of each of its nodes, as far as the suite has access to it, and whose it is."""
        others = {node.log: f"log of {node}" for node in self.nodes[1:]}
        logs = {self.log: f"log of {self.log.stem}" if self.log else "", **others}
        return {log: name for log, name in logs.items() if log is not None and log.is_file()}

    @property
    def why_cold(self) -> str | None:
        """Why the time of its start decides nothing; None after a start with warm caches."""
        if not self.compiled:
            return None
        return (
            f"the start took {self.startup_s:.0f} s and was a cold one: it compiled "
            f"{'; '.join(self.compiled)}. A warm start decides: run again with these caches kept, "
            "or `sm121 warm` before"
        )
