"""Attaching to a server that somebody else started. Nothing here starts or stops anything."""

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from sm121.core.errors import UsageError
from sm121.core.server import NO_KEY, Endpoint, Server, root_of
from sm121.engines import process_tree
from sm121.evidence import metrics

_ANSWER_WITHIN_S = 10.0
#: Of two processes that are asked by chance, one is missed in so many questions once in 128 times.
_QUESTIONS = 8
#: Tokens of the answers during which it is seen whom a listener asks, and how often at least.
_TOKENS_ASKED, _LOOKS = (16, 64, 256), 10
#: A process' start is read from clocks that may be set in between.
CLOCK_SLACK_S = 2.0


def attach(
    base_url: str,
    *,
    api_key: str | None,
    served_name: str | None,
    default_name: str,
    log: Path | None,
) -> Server:
    """Probe a running OpenAI-compatible server. `served_name`: the model that it must serve; None:
    ``default_name``, or the only one that it serves, whatever its name is. Raises UsageError:
    nobody answers, what answers is no such server, or it serves another model."""
    root = root_of(base_url, "--base-url")
    endpoint = Endpoint(root, api_key or NO_KEY, served_name or default_name)
    expected = f"--base-url {root}: expected an OpenAI-compatible server"
    with endpoint.http(timeout_s=_ANSWER_WITHIN_S) as http:
        try:
            answer = http.get("/v1/models")
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                reason += "; an authority of your own is named by the variable SSL_CERT_FILE"
            raise UsageError(
                f"{expected}, got no answer from /v1/models ({reason}). Start the server, or name "
                "the address at which it listens"
            ) from error
        if answer.status_code in (401, 403):
            raise UsageError(
                f"{expected} that accepts the key; it answered {answer.status_code}: give it by "
                "the variable OPENAI_API_KEY, with --api-key-file or with --api-key"
            )
        if answer.status_code != 200:
            raise UsageError(f"{expected}; /v1/models answered with status {answer.status_code}")
        try:
            roots = {str(model["id"]): model.get("root") for model in answer.json()["data"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            kind = answer.headers.get("content-type", "no content type")
            why = f"/v1/models answered with {kind}, not a list of models"
            raise UsageError(f"{expected}; {why}") from error
        version = json_of(http, "/version").get("version")  # others than vLLM have none
    if served_name is None and len(roots) == 1:
        endpoint = replace(endpoint, served_name=next(iter(roots)))
    if endpoint.served_name not in roots:
        raise another_model(base_url, endpoint.served_name, ", ".join(roots) or "nothing")
    version = str(version) if version is not None else None
    root = roots[endpoint.served_name]
    return Server(
        endpoint, False, "openai-compatible", version, log, None, None,
        root=root if isinstance(root, str) else None,
    )  # fmt: skip


def another_model(base_url: str, expected: str, serves: str) -> UsageError:
    """The refusal of a server that serves another model than the expected one."""
    return UsageError(
        f"--base-url {base_url}: expected a server of {expected!r}, it serves {serves}; "
        "name one with --model"
    )


def several_processes(base_url: str, api_key: str | None) -> str | None:
    """What shows that more than one process answers at an address, each question by a connection of
    its own, as behind a load balancer; None where nothing does."""
    endpoint = Endpoint(root_of(base_url, "--base-url"), api_key or NO_KEY, "")
    # All of one page first: of two replicas that take turns, each would show one page alone.
    texts = [endpoint.page("/metrics") or "" for _ in range(_QUESTIONS)]
    moments = (metrics.total(text, "process_start_time_seconds") for text in texts)
    starts = [start for start in moments if start is not None]
    versions: set[str] = set()
    for _ in range(_QUESTIONS):
        with endpoint.http(timeout_s=_ANSWER_WITHIN_S) as http:
            versions.add(str(json_of(http, "/version").get("version")))
    if starts and max(starts) - min(starts) > CLOCK_SLACK_S:
        count = len({round(start) for start in starts})
        signs = f"/metrics tells the starts of {count}"
    elif len(versions) > 1:
        signs = f"/version tells {' and '.join(sorted(versions))}"
    else:
        return None
    return f"several processes answer at {base_url} ({signs}): attach to the address of one of them"


class AttachedProcesses:
    """The processes of an attached server: whoever holds the listening socket, and all that
    descends from it, as vLLM's engine core. What stands behind a proxy, in a container, or belongs
    to another user is not among them."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        #: Where whoever listens asks for its answers; None where it is the server, as far as seen.
        self.upstream: str | None = None
        self._listeners: list[psutil.Process] = []

    @functools.cached_property
    def here(self) -> bool:
        """Whether it listens on this machine."""
        return process_tree.is_here(self.host)

    def listening(self, *, again: bool = False) -> list[psutil.Process]:
        """Who listens; empty where that cannot be known. `again`: look anew, though all of those
        that were there still live."""
        ended = not self._listeners or any(map(process_tree.has_ended, self._listeners))
        if self.here and (again or ended):
            self._listeners = process_tree.listeners(self.host, self.port)
        return self._listeners

    def find(self) -> list[psutil.Process]:
        """The server's that live now; empty where they cannot be known."""
        return [] if self.upstream is not None else self._tree()

    def large(self, share: float) -> set[psutil.Process]:
        """Those with such a share of the resident memory of all of them. Where this process is one,
        its other children are no server's."""
        sizes: dict[psutil.Process, int] = {}
        for process in self.find():
            with contextlib.suppress(psutil.Error):
                sizes[process] = process.memory_info().rss
        least = share * sum(sizes.values())
        of_us = any(process.pid == os.getpid() for process in sizes)
        return set() if of_us else {p for p, size in sizes.items() if size >= least}

    def look_behind(self, ask: Callable[[int], object]) -> None:
        """Note where whoever listens asks for its answers, while it gives one. `ask`: for so many
        tokens, more of them where an answer came too soon to be looked at often."""
        tree = self._tree()
        for tokens in _TOKENS_ASKED:
            looks = 0
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(ask, tokens)
                while self.upstream is None and not answer.done():
                    self.upstream = process_tree.upstream(tree, self.port)
                    looks += 1
            if self.upstream is not None or looks >= _LOOKS:
                return

    @staticmethod
    def below(process: psutil.Process) -> list[psutil.Process]:
        """All that descends from a process; nothing of one that has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.children(recursive=True)
        return []

    def _tree(self) -> list[psutil.Process]:
        trees = [[each, *self.below(each)] for each in self.listening()]
        return list(dict.fromkeys(each for tree in trees for each in tree))


def json_of(http: httpx.Client, path: str) -> dict[str, Any]:
    """The JSON object that a server answers; empty where it answers anything else."""
    try:
        return json_in(http.get(path))
    except httpx.HTTPError:
        return {}


def json_in(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty where it has none, or is an error."""
    try:
        content = answer.json() if answer.status_code == 200 else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
