"""Read the `Signs` of an attached server from its processes and the answers of its API."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import psutil

from sm121.core import data_file
from sm121.core.server import Endpoint
from sm121.engines import process_tree
from sm121.engines.attached_pages import entry_of, json_in, request_token
from sm121.engines.attached_processes import AttachedProcesses
from sm121.engines.signs import CREATED_OF_ANSWERS, ClockOffset, Signs, Word
from sm121.evidence import metrics

#: If a process that holds a smaller share of the server's memory is replaced, this does not count
#: as a restart of the server.
_LEAST_SHARE = 0.05
#: An id of at least this many characters is random; a shorter one may be a counter.
_DRAWN = 16
_ID_NUMBER = "the number in the ids of its answers"
#: If a server answers with one of these status codes, it does not offer the path. After a timeout,
#: it may still offer the path.
_WITHHELD = (401, 403, 404, 410)


class _Page(data_file.DataTable):
    path: str
    fields: tuple[str, ...]
    source: str


class _Pages(data_file.DataTable):
    schema_version: int
    helpers: tuple[str, ...]
    page: tuple[_Page, ...]


def _load_pages() -> _Pages:
    return data_file.load("signs.toml", _Pages)


class SignReader:
    """Reads the `Signs` of one server.

    Args:
        endpoint: The server.
        processes: The processes of the server.
    """

    def __init__(self, endpoint: Endpoint, processes: AttachedProcesses) -> None:
        self._endpoint = endpoint
        self._processes = processes
        self._pages = _load_pages().page[:1]  # only the version, which is cheap to request
        #: The processes that hold the server's memory; None before the first reading.
        self._needed: set[psutil.Process] | None = None

    def read(self) -> Signs:
        """Read only the signs that are cheap for the server: its processes, metrics and version."""
        processes = self._living()
        paths = ("/metrics", *(page.path for page in self._pages))
        with self._endpoint.http(timeout_s=10.0) as http:
            pages = {path: _get(http, path) for path in paths}
        text = pages["/metrics"].text if pages["/metrics"].is_success else ""
        words = {}
        for page in self._pages:
            for name, value in _plain_values(json_in(pages[page.path])):
                if name in page.fields or "*" in page.fields:
                    words[Word(name, page.path)] = str(value)
        withheld = [path for path, answer in pages.items() if answer.status_code in _WITHHELD]
        return Signs(
            processes=processes,
            started=metrics.total(text, "process_start_time_seconds"),
            counters=metrics.counters(text),
            words=words,
            withheld=frozenset(withheld),
        )

    def read_all(self, *, first: bool = False) -> Signs:
        """Read all signs, for which the server must also generate one token.

        Args:
            first: Whether this is the first call, which requests all paths. Later calls request
                only the paths that the server has answered before.
        """
        if first:
            self._pages = _load_pages().page
        signs = self.read()
        if first:
            answered = {word.page for word in signs.words}
            self._pages = tuple(page for page in self._pages if page.path in answered)
        words = dict(signs.words)
        counters = dict(signs.counters)
        with self._endpoint.http(timeout_s=10.0) as http:
            words |= self._words_of_models(_get(http, "/v1/models"))
            began = time.time()
            answer = request_token(http, self._endpoint.served_name)
            ended = time.time()
        clock = None
        created = answer.get("created")
        if isinstance(created, int | float):
            words[CREATED_OF_ANSWERS] = str(created)
            clock = ClockOffset(created - ended, created - began + 1.0)
        for name in ("system_fingerprint", "model", "object"):
            if answer.get(name) is not None:
                words[Word(name, None)] = str(answer[name])
        prefix, _, rest = str(answer.get("id", "")).replace("_", "-").partition("-")
        if rest:
            form = f"{prefix}-[{len(rest)}]" if len(rest) >= _DRAWN else prefix
            words[Word("form of the ids", None)] = form
        if rest.isdecimal() and len(rest) < _DRAWN:
            counters[_ID_NUMBER] = float(rest)
        return replace(signs, words=words, counters=counters, clock=clock)

    def _words_of_models(self, models: httpx.Response) -> dict[Word, str]:
        words = {}
        if "server" in models.headers:
            words[Word("header server", "/v1/models")] = models.headers["server"]
        entry = entry_of(json_in(models), self._endpoint.served_name) or {}
        for name, value in _plain_values(entry):
            words[Word(name, "/v1/models")] = str(value)
        return words

    def _living(self) -> frozenset[tuple[int, int]]:
        """Return the listening processes, and the large processes that still live."""
        while True:
            listening = self._processes.listening(again=True)
            tree = self._processes.find()
            if not tree:
                return frozenset()
            if self._needed is None:
                self._needed = set(filter(_serves, self._processes.large(_LEAST_SHARE)))
            forked: set[psutil.Process] = set()
            for process in listening:
                forked.update(self._processes.below(process))
            needed = ({*listening} - forked) | (self._needed & {*tree})
            try:
                return frozenset((one.pid, process_tree.start_ticks(one.pid)) for one in needed)
            except OSError:
                continue  # a process has just ended, so read again


def _serves(process: psutil.Process) -> bool:
    """Return whether a process must live as long as the server; helper processes need not."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return not any(word in command for word in _load_pages().helpers)


def _get(http: httpx.Client, path: str) -> httpx.Response:
    """Request a path. If the server sends no answer, return a response with status 504."""
    try:
        return http.get(path)
    except httpx.HTTPError:
        return httpx.Response(504)


def _plain_values(entry: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the texts and integers in a JSON object. Names of nested values are joined by dots."""
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from _plain_values(value, f"{above}{name}.")
        # Floats are left out, because they are mostly rates, which change all the time.
        elif isinstance(value, str | int):
            yield f"{above}{name}", value
