"""Whether an attached server is still the process that was attached to, by what tells two apart."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import psutil

from sm121.core import data_file
from sm121.core.server import Endpoint, Server
from sm121.core.waiting import until
from sm121.engines import process_tree
from sm121.engines.attached import CLOCK_SLACK_S, AttachedProcesses, json_in, json_of
from sm121.engines.life import Alive, Dead
from sm121.evidence import metrics
from sm121.evidence.failure import Cause

#: vLLM and others call a model "created" at the moment of the question.
_TWO_QUESTIONS_S = 1.2
#: How long a server that does not answer is asked again before it is called gone.
_GONE_AFTER_S = 5.0
#: A log that is proven to be the server's has a line of a request so soon.
_LOGGED_WITHIN_S = 5.0
#: A process of the server that others could replace has so much of its memory.
_LEAST_SHARE = 0.05
#: Parts of an id that are drawn anew have this length or more.
_DRAWN = 16
_ID_NUMBER = "the number in the ids of its answers"
#: A page that answers so is withheld, and not merely slow.
_WITHHELD = (401, 403, 404, 410)


@dataclass(frozen=True)
class Word:
    """The name of a value that a server shows and that stays while it lives."""

    name: str
    #: The page that shows it; None for its answers.
    page: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.page})" if self.page else f"{self.name} of its answers"


#: Moments of which one that does not move on is that of the start.
_CREATED_OF_ANSWERS = Word("created", None)
_BOUND = {
    Word("random_seed", "/server_info"),
    Word("random_seed", "/get_server_info"),
    Word("created", "/v1/models"),
    _CREATED_OF_ANSWERS,
}


class AttachedLife:
    """The life of a server that somebody else has started: `sm121.engines.life.Life`. It has died
    where it is gone, and where another process has taken its place; then that one is looked at. Two
    processes differ in pids, start and counters (``/metrics``). Where neither pids nor start are
    seen, all that it says of itself counts (`Signs`), and its log has to follow questions."""

    def __init__(self, server: Server) -> None:
        self.accounted = False
        self.processes = AttachedProcesses(server.endpoint.base_url)
        self._endpoint, self._log = server.endpoint, server.log
        with self._endpoint.http(timeout_s=10.0) as http:
            self._named = entry_of(json_of(http, "/v1/models"), server.endpoint.served_name)
        self._reader = SignReader(self._endpoint, self.processes)
        started = self._reader.read().started
        starts = [each.create_time() for each in self.processes.find()]
        # Whoever listens is the server itself where its start is the one of /metrics, or where it
        # asks nobody for its answers.
        if starts and (started is None or all(abs(s - started) >= 2.0 for s in starts)):
            with self._endpoint.http(timeout_s=30.0) as http:
                self.processes.look_behind(partial(token, http, self._endpoint.served_name))
            self._reader = SignReader(self._endpoint, self.processes)
        self._last = self._reader.read()
        self._is_bound = bool(self._last.processes or self._last.started)
        if not self._is_bound:
            first = self._reader.read_all(first=True)
            time.sleep(_TWO_QUESTIONS_S)
            self._last = first.steady(self._reader.read_all())
        self.signs, self._asked_at = self._last, time.monotonic()
        self._changed_after = time.time()
        self._silent = False
        self._dead: Dead | None = None

    @property
    def unwatched(self) -> str | None:
        """Why a restart behind the URL may go unnoticed; None where each one shows."""
        signs, by_words = self.signs, not _BOUND.isdisjoint(self.signs.words)
        if by_words or signs.started or signs.processes or any(signs.counters.values()):
            return None  # no restart leaves them as they are
        return (
            f"life of the attached server: {self._where}, and it shows neither the start of its "
            "process nor counters (/metrics): a restart of the same release would not be detected; "
            "attach to its own port, on its machine and as its user, or show its /metrics"
        )

    @property
    def no_memory(self) -> str | None:
        """Why its memory cannot be judged; None where its processes are seen here."""
        remedy = "run the suite where it runs, as its user"
        is_here = bool(self.processes.find())
        return None if is_here else f"memory of the attached server: {self._where}; {remedy}"

    @property
    def _where(self) -> str:
        address, upstream = f"{self.processes.host}:{self.processes.port}", self.processes.upstream
        if upstream is not None:
            return f"a proxy listens at {address}, and asks {upstream}"
        return f"nobody who listens at {address} is seen from here"

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """A death stands until it is accounted for; after that, whether the next one lives."""
        reported = self._dead is None or self.accounted
        if reported and time.monotonic() - self._asked_at >= asked_within_s:
            silence, was_silent = self._silence(), self._silent
            self._silent, self._asked_at = silence is not None, time.monotonic()
            if silence is None or not was_silent:
                sign = silence or self._change(was_silent)
                self._dead = self._died(sign, replaced=silence is None) if sign else None
                self.accounted = False
            self._changed_after = time.time()
        return self._dead or Alive()

    def answers(self) -> bool:
        """Whether it gives the list of its models within 10 s."""
        return self._endpoint.page("/v1/models") is not None

    def _died(self, sign: str, *, replaced: bool) -> Dead:
        moments = [time.strftime("%TZ", time.gmtime(s)) for s in (self._changed_after, time.time())]
        sign = f"{sign}; between {moments[0]} and {moments[1]}"
        cause = Cause(
            kind="engine_dead",
            summary=sign,
            owner="whoever keeps the attached server: its own log says why it ended",
            remedy="attach to one process, and let it live until the run has ended",
        )
        ended = "the attached server ended, and was perhaps started again"
        return Dead(ended, cause, time.monotonic(), self._log, sign, replaced)

    def _change(self, was_silent: bool) -> str | None:
        size = self._log_size()
        now, before = self._reader.read() if self._is_bound else self._reader.read_all(), self._last
        sign = next(before.changes(now), None)
        if sign is None and not self._is_bound and size is not None:
            # One that is moved away is copied from where it goes.
            follows = until(lambda: self._log_size() != size, _LOGGED_WITHIN_S, every_s=0.05)
            sign = None if follows else f"its log {self._log} follows its answers no more"
        if sign is None and was_silent:
            sign = "it answered no more, and answers again"
        self._last = now.after(before)
        if sign is not None:
            words = {n: value for n, value in now.words.items() if n in before.words}
            self._last = replace(now, words=words)
        return sign

    def _log_size(self) -> int | None:
        return self._log.stat().st_size if self._log is not None and self._log.is_file() else None

    def _silence(self) -> str | None:
        deadline, name = time.monotonic() + _GONE_AFTER_S, self._endpoint.served_name
        with self._endpoint.http(timeout_s=10.0) as http:
            while True:
                try:
                    answer = http.get("/v1/models")
                except httpx.TimeoutException:
                    return None  # slow, perhaps for others' sake; a hang is for a test to find
                except httpx.TransportError as error:
                    why = f"it answers no more ({type(error).__name__}: {error})"
                else:
                    if self._named is None or entry_of(json_in(answer), name) is not None:
                        return None
                    why = f"its model is named no more (/v1/models: HTTP {answer.status_code})"
                if time.monotonic() >= deadline:
                    return why
                time.sleep(0.5)


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
    words: dict[Word, str] = field(default_factory=dict)
    #: How far its clock is ahead of this machine's, in seconds: the least and the most.
    clock: tuple[float, float] | None = None
    #: Pages that it withholds.
    withheld: frozenset[str] = frozenset()

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
        return replace(
            later, words=words, clock=None if _CREATED_OF_ANSWERS in words else later.clock
        )

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
        for word, value in self.words.items():
            if word in now.words and now.words[word] != value:
                yield f"its {word} is {now.words[word][:80]}, before {value[:80]}"
            elif word not in now.words and word.page in now.withheld - self.withheld:
                yield f"its {word} was {value[:80]} before, and is withheld now"
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
        paths = ("/metrics", *(page.path for page in self._pages))
        with self._endpoint.http(timeout_s=10.0) as http:
            pages = {path: _get(http, path) for path in paths}
        text = pages["/metrics"].text if pages["/metrics"].is_success else ""
        words = {
            Word(name, page.path): str(value)
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
            answered = {word.page for word in signs.words}
            self._pages = tuple(page for page in self._pages if page.path in answered)
        words, counters, clock = dict(signs.words), dict(signs.counters), None
        with self._endpoint.http(timeout_s=10.0) as http:
            models = _get(http, "/v1/models")
            if "server" in models.headers:
                words[Word("header server", "/v1/models")] = models.headers["server"]
            entry = entry_of(json_in(models), self._endpoint.served_name) or {}
            words |= {Word(name, "/v1/models"): str(value) for name, value in _flat(entry)}
            began = time.time()
            answer = token(http, self._endpoint.served_name)
            ended = time.time()
        if isinstance(created := answer.get("created"), int | float):
            words[_CREATED_OF_ANSWERS] = str(created)
            clock = (created - ended, created - began + 1.0)
        for name in ("system_fingerprint", "model", "object"):
            if answer.get(name) is not None:
                words[Word(name, None)] = str(answer[name])
        prefix, _, rest = str(answer.get("id", "")).replace("_", "-").partition("-")
        if rest:
            words[Word("form of the ids", None)] = (
                f"{prefix}-[{len(rest)}]" if len(rest) >= _DRAWN else prefix
            )
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
    try:
        return http.get(path)
    except httpx.HTTPError:
        return httpx.Response(504)


def _flat(entry: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, str | int):  # a rate is a float, and moves
            yield f"{above}{name}", value
