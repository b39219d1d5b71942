"""What an attached server shows that differs between two processes, or two releases."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import psutil

from sm121.core import data_file
from sm121.core.server import Endpoint
from sm121.engines import process_tree
from sm121.engines.attached import CLOCK_SLACK_S, AttachedProcesses, json_in
from sm121.evidence import metrics

#: A process of the server that others could replace has so much of its memory.
_LEAST_SHARE = 0.05
#: Parts of an id that are drawn anew have this length or more.
_DRAWN = 16
_ID_NUMBER = "the number in the ids of its answers"
#: Moments of which one that does not move on is that of the start.
_CREATED = ("created (/v1/models)", "created of its answers")
_BOUND = {"random_seed (/server_info)", "random_seed (/get_server_info)", *_CREATED}
#: A page that answers so is withheld, and not merely slow.
_WITHHELD = (401, 403, 404, 410)


class _Page(data_file.DataTable):
    path: str
    fields: tuple[str, ...]
    source: str


class _Pages(data_file.DataTable):
    schema_version: int
    helpers: tuple[str, ...]
    page: tuple[_Page, ...]


def _data() -> _Pages:
    return data_file.load("signs.toml", _Pages)


@dataclass(frozen=True)
class Signs:
    """What a server shows at one moment. Null and empty where it does not say."""

    #: Pid and start (ticks since boot) of who listens, and of what holds the server's memory.
    processes: frozenset[tuple[int, int]] = frozenset()
    #: By its own metrics, in seconds since 1970.
    started: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    #: Values that stay, each by its name.
    words: dict[str, str] = field(default_factory=dict)
    #: How far its clock is ahead of this machine's, in seconds: the least and the most.
    clock: tuple[float, float] | None = None
    #: Pages that it withholds.
    withheld: frozenset[str] = frozenset()

    @property
    def of_one_process(self) -> bool:
        """Whether no restart leaves them as they are."""
        by_words = not _BOUND.isdisjoint(self.words)
        return bool(by_words or self.started or self.processes or any(self.counters.values()))

    def is_one_with(self, other: "Signs") -> bool | None:
        """Whether both are of the same process; None where that cannot be known."""
        if self.started is not None and other.started is not None:
            return self.started == other.started
        if self.processes and other.processes:
            return bool(self.processes & other.processes)
        return None

    def after(self, earlier: "Signs") -> "Signs":
        """These; what was not said now, and what stays, is from the earlier moment."""
        return replace(
            earlier,
            processes=self.processes,
            started=earlier.started if self.started is None else self.started,
            counters={**earlier.counters, **self.counters},
        )

    def steady(self, later: "Signs") -> "Signs":
        """Of the words those that a later moment repeats; the rest as it was later."""
        words = dict(self.words.items() & later.words.items())
        return replace(later, words=words, clock=None if _CREATED[1] in words else later.clock)

    def changes(self, now: "Signs") -> Iterator[str]:
        """What shows that another process, or another release, answers now."""
        if (self.started or self.counters) and "/metrics" in now.withheld - self.withheld:
            yield "its /metrics were shown before, and are withheld now"
        starts = [each for each in (self.started, now.started) if each is not None]
        if len(starts) == 2 and abs(starts[1] - starts[0]) > CLOCK_SLACK_S:
            before, after = (time.strftime("%F %TZ", time.gmtime(start)) for start in starts)
            yield f"its process began at {after}, the one before at {before}"
        if self.processes and self.processes != now.processes:
            ended, came = (
                ", ".join(str(pid) for pid, _ in sorted(each)) or "none"
                for each in (self.processes - now.processes, now.processes - self.processes)
            )
            yield f"of the processes that listen or hold its memory {ended} ended, {came} came"
        for name, value in self.words.items():
            if name in now.words and now.words[name] != value:
                yield f"its {name} is {now.words[name][:80]}, before {value[:80]}"
            elif name not in now.words and _page_of(name) in now.withheld - self.withheld:
                yield f"its {name} was {value[:80]} before, and is withheld now"
        for name, count in self.counters.items():
            if (current := now.counters.get(name)) is not None and current < count:
                kind = "counter " if ":" in name else ""
                yield f"its {kind}{name} fell from {count:g} to {current:g}"
        clocks = [each for each in (self.clock, now.clock) if each is not None]
        if len(clocks) == 2 and (
            max(least for least, _ in clocks) - min(most for _, most in clocks) > CLOCK_SLACK_S
        ):
            ahead, ahead_now = (least for least, _ in clocks)
            yield f"its answers are dated {ahead_now:.0f} s ahead of this clock, {ahead:.0f} before"


class SignReader:
    """Reads the signs of one server. `processes`: of where it listens."""

    def __init__(self, endpoint: Endpoint, processes: AttachedProcesses) -> None:
        self._endpoint, self._processes = endpoint, processes
        self._pages = _data().page[:1]  # the version, which costs nothing
        self._needed: set[psutil.Process] | None = None

    def read(self) -> Signs:
        """Its processes, its metrics and its version, which cost the server nothing."""
        processes = self._living()
        with self._endpoint.http(timeout_s=10.0) as http:
            pages = {
                path: _get(http, path) for path in ("/metrics", *(p.path for p in self._pages))
            }
        text = pages["/metrics"].text if pages["/metrics"].is_success else ""
        words = {
            f"{name} ({page.path})": str(value)
            for page in self._pages
            for name, value in _flat(json_in(pages[page.path]))
            if name in page.fields or "*" in page.fields
        }
        return Signs(
            processes,
            metrics.total(text, "process_start_time_seconds"),
            metrics.counters(text),
            words,
            withheld=frozenset(p for p, a in pages.items() if a.status_code in _WITHHELD),
        )

    def read_all(self, *, first: bool = False) -> Signs:
        """Also what its other pages say, its entry in the list of its models, and one token of an
        answer. `first`: no page was looked at so far."""
        if first:
            self._pages = _data().page
        signs = self.read()
        if first:
            answered = {_page_of(name) for name in signs.words}
            self._pages = tuple(page for page in self._pages if page.path in answered)
        words, counters, clock = dict(signs.words), dict(signs.counters), None
        with self._endpoint.http(timeout_s=10.0) as http:
            models = _get(http, "/v1/models")
            if "server" in models.headers:
                words["header server (/v1/models)"] = models.headers["server"]
            entry = entry_of(json_in(models), self._endpoint.served_name) or {}
            words |= {f"{name} (/v1/models)": str(value) for name, value in _flat(entry)}
            began = time.time()
            answer = token(http, self._endpoint.served_name)
            ended = time.time()
        if isinstance(created := answer.get("created"), int | float):
            words[_CREATED[1]] = str(created)
            clock = (created - ended, created - began + 1.0)
        for name in ("system_fingerprint", "model", "object"):
            if answer.get(name) is not None:
                words[f"{name} of its answers"] = str(answer[name])
        prefix, _, rest = str(answer.get("id", "")).replace("_", "-").partition("-")
        if rest:
            words["form of its ids"] = f"{prefix}-[{len(rest)}]" if len(rest) >= _DRAWN else prefix
        if rest.isdecimal() and len(rest) < _DRAWN:
            counters[_ID_NUMBER] = float(rest)
        return replace(signs, words=words, counters=counters, clock=clock)

    def _living(self) -> frozenset[tuple[int, int]]:
        """Who listens now, and which of the first look's other large processes still live."""
        listening, tree = self._processes.listening(again=True), self._processes.find()
        if not tree:
            return frozenset()
        if self._needed is None:
            self._needed = set(filter(_serves, self._processes.large(_LEAST_SHARE)))
        forked = {each for process in listening for each in self._processes.below(process)}
        needed = ({*listening} - forked) | (self._needed & {*tree})
        with contextlib.suppress(OSError):  # one has ended just now
            return frozenset((each.pid, process_tree.began(each.pid)) for each in needed)
        return self._living()


def _serves(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return not any(word in command for word in _data().helpers)


def token(http: httpx.Client, model: str, tokens: int = 1) -> dict[str, Any]:
    """A short answer of a chat, or else of a completion; empty where neither is answered."""
    limit = {"model": model, "max_tokens": tokens, "temperature": 0}
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        try:
            answer = json_in(http.post(path, json=limit | prompt))
        except httpx.HTTPError:
            return {}
        if answer:
            return answer
    return {}


def entry_of(models: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What a list of models says of one of them; None where it does not name it."""
    entries = [entry for entry in models.get("data") or () if isinstance(entry, dict)]
    return next((entry for entry in entries if entry.get("id") == name), None)


def _get(http: httpx.Client, path: str) -> httpx.Response:
    """The answer; one of status 504 where none came in time, or none at all."""
    try:
        return http.get(path)
    except httpx.HTTPError:
        return httpx.Response(504)


def _page_of(name: str) -> str:
    return name.rpartition("(")[2].rstrip(")")


def _flat(entry: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, str | int):  # a rate is a float, and moves
            yield f"{above}{name}", value
