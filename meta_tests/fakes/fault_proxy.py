"""A proxy in front of a real server that injects one known fault at a time into its answers.

A fault is a row of ``data/protocol-faults.toml``. If it only changes fields, the row lists the
changes. Otherwise the row names functions: those of ``fault_changes.py`` for parsed answers
(``completion``, ``chat`` and ``response`` for complete answers, ``stream``, ``deltas`` and
``events`` for the chunks of a stream, ``request`` for the forwarded request), or one of
``fault_exchanges.py`` for an ``exchange``, which gets both request and answer.
"""

import contextlib
import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.faults import fault_changes, fault_exchanges, lie_changes
from meta_tests.faults.fault_changes import Json
from meta_tests.faults.fault_exchanges import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Answer,
    Exchange,
    Request,
)
from meta_tests.folders import DATA


def _same(content: Any) -> Any:
    return content


@dataclass(frozen=True)
class Fault:
    """A fault, and the test that must fail because of it."""

    name: str
    caught_by: str
    request: Callable[[Json], Json] = _same
    completion: Callable[[Json], Json] = _same
    chat: Callable[[Json], Json] = _same
    response: Callable[[Json], Json] = _same
    stream: Callable[[list[Json]], list[Json]] = _same
    deltas: Callable[[list[Json]], list[Json]] = _same
    events: Callable[[list[Json]], list[Json]] = _same
    #: Changes the text of a whole stream.
    wire: Callable[[str], str] = _same
    #: Creates a new hook for each run, so that the hook may have a state.
    exchange: Callable[[], Exchange] | None = None
    status: Callable[[str], int | None] = lambda _path: None
    #: Parts of the names of the tests whose requests the fault changes; empty for all tests.
    among: tuple[str, ...] = ()
    #: If no test can detect the fault, the reason.
    why: str = ""


#: Values of a sampling parameter that have no effect. A fault that scales the parameter does not
#: change them.
NEUTRAL = (0.0, 1.0, -1)
PARTS = {
    name: getattr(fault_changes, name)
    for name in ("top", "choice", "message", "usage", "chat_entry", "tool_call")
}
PARTS["tool_call.function"] = lambda change: PARTS["tool_call"](lambda c: change(c["function"]))


def _edit(row: Json) -> Callable[[Json], Json]:
    """Change the fields of an object in place, as a row of the data file describes."""
    limits = {"most": min, "least": max}

    def change(part: Json) -> Json:
        if row.get("where", "") not in {"", *part}:
            return part
        defaults = {k: v for k, v in row.get("default", {}).items() if k not in part}
        part.update(defaults | row.get("set", {}), **dict.fromkeys(row.get("null", ())))
        for key in row.get("drop", ()):
            part.pop(key, None)
        for key, (first, end) in row.get("slice", {}).items():
            if isinstance(part.get(key), list | str):
                part[key] = part[key][first:end]
        part |= {k: f"{part.get(k) or ''}{more}" for k, more in row.get("append", {}).items()}
        part |= {new: part.pop(key) for key, new in row.get("rename", {}).items() if key in part}
        part |= {k: v for k, v in row.get("zero", {}).items() if part.get(k) == 0}
        swaps = row.get("instead", {}).items()
        part |= {k: new for k, (old, new) in swaps if part.get(k) == old}
        numbers = {k: v for k, v in part.items() if type(v) in (int, float)}
        for key in numbers.keys() & {*row.get("scale", ()), *row.get("add", ())}:
            factor, more = (row.get(name, {}).get(key, n) for name, n in (("scale", 1), ("add", 0)))
            if numbers[key] not in NEUTRAL:
                part[key] = numbers[key] * factor + more
        for name, limit in limits.items():
            part |= {k: limit(part[k], v) for k, v in row.get(name, {}).items() if k in numbers}
        if "replace" in row:
            part = json.loads(json.dumps(part).replace(*row["replace"]))
        return part

    return change


def _meant(term: Any) -> Any:
    """Return the value of an entry in a fault's row.

    A name means a function, and a list means the result of a call. Any other entry is the value
    itself.
    """
    if isinstance(term, list):
        function, *arguments = map(_meant, term)
        return function(*arguments)
    functions = vars(lie_changes) | vars(fault_exchanges) | vars(fault_changes)
    functions |= lie_changes.SMALL | fault_changes.SMALL
    return functions.get(term, term) if isinstance(term, str) else term


def faults_of(file: Path) -> Iterator[Fault]:
    """Return the faults that the rows of a file describe."""
    for title, row in tomllib.loads(file.read_text("utf-8")).items():
        changes = {hook: _meant(term) for hook, term in row.get("do", {}).items()}
        if "of" in row:
            hook, _, part = row["of"].partition(".")
            change = _edit(row)
            change = PARTS[part](change) if part else change
            streamed = hook in ("stream", "deltas", "events")
            changes[hook] = fault_changes.of_each(change) if streamed else change
        changes |= {"among": tuple(row.get("among", ())), "why": row.get("why", "")}
        yield Fault(title, row.get("caught_by", ""), **changes)


FAULTS = {fault.name: fault for fault in faults_of(DATA / "protocol-faults.toml")}
SAMPLING = {fault.name: fault for fault in faults_of(DATA / "sampling-faults.toml")}
LIES = {fault.name: fault for fault in faults_of(DATA / "lies.toml")}


class FaultProxy:
    """Forwards requests to ``upstream``, with a fault that can be switched.

    `key` is the real server's key, for the fault that accepts every client."""

    def __init__(self, upstream: str, fault: Fault, key: str, http: httpx.Client) -> None:
        self._upstream = upstream
        self._key = key
        self._http = http
        #: The address of the proxy.
        self.base_url = ""
        #: Exceptions of the proxy itself since the last switch of the fault.
        self.errors: list[str] = []
        self.switch(fault)

    @classmethod
    @contextlib.contextmanager
    def listening(cls, upstream: str, fault: Fault, key: str = "") -> Iterator["FaultProxy"]:
        """Start a proxy on a free loopback port; stop it at the end of the block."""
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(timeout=120.0, trust_env=False, limits=limits) as http:
            proxy = cls(upstream, fault, key, http)
            with serving(_handler(proxy)) as proxy.base_url:
                yield proxy

    def switch(self, fault: Fault) -> None:
        """Inject another fault into all later answers."""
        self.errors.clear()
        self._fault = fault
        self._exchange = fault.exchange() if fault.exchange else None

    def answer(self, request: Request) -> Answer:
        """Return the answer for the client."""
        exchange = self._exchange
        answer = exchange(request, self._forward) if exchange else self._forward(request)
        status = self._fault.status(request.path)
        return replace(answer, status=status) if status else answer

    def _forward(self, request: Request) -> Answer:
        fault = self._fault
        content = request.content
        if (body := request.body) is not None and request.path in (COMPLETIONS, CHAT, RESPONSES):
            content = json.dumps(fault.request(body)).encode()
        answer = self._ask(replace(request, content=content))
        if answer.status != 200 or request.path not in (COMPLETIONS, CHAT, RESPONSES):
            return answer
        text = answer.content.decode("utf-8", "replace")
        changed = broken(fault, request.path, answer.content_type, text)
        return replace(answer, content=changed.encode())

    def _ask(self, request: Request) -> Answer:
        """Request the answer of the server behind the proxy."""
        key = f"Bearer {self._key}" if request.key is None else request.key
        headers = {"Content-Type": "application/json", "Authorization": key}
        url = self._upstream + request.path
        answer = self._http.request(request.method, url, content=request.content, headers=headers)
        return Answer(answer.status_code, answer.headers.get("content-type", ""), answer.content)


def broken(fault: Fault, path: str, kind: str, content: str) -> str:
    """Return an answer with a fault.

    If the fault does not change the answer, return the same text.
    """
    if "event-stream" in kind:
        hooks = {COMPLETIONS: fault.stream, CHAT: fault.deltas, RESPONSES: fault.events}
        same = hooks[path] is _same or _stream(content, _same) == _stream(content, hooks[path])
        return fault.wire(content if same else _stream(content, hooks[path]))
    hook = {COMPLETIONS: fault.completion, CHAT: fault.chat, RESPONSES: fault.response}[path]
    if hook is _same or not content:
        return content
    changed = hook(json.loads(content))
    return content if changed == json.loads(content) else json.dumps(changed)


def _stream(text: str, change: Callable[[list[Json]], list[Json]]) -> str:
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    done = "[DONE]" in data
    chunks = change([json.loads(event) for event in data if event != "[DONE]"])
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, *(["data: [DONE]\n\n"] if done else [])])


def _handler(proxy: FaultProxy) -> type[JsonHandler]:
    class Handler(JsonHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            self._answer("GET", b"")

        def do_POST(self) -> None:
            self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _answer(self, method: str, content: bytes) -> None:
            key = self.headers.get("Authorization") or ""
            try:
                answer = proxy.answer(Request(method, self.path, content, key))
            except Exception as error:
                proxy.errors.append(f"{type(error).__name__}: {error}")
                raise
            if answer.status is None:
                self.close_connection = True
            else:
                self.say(answer.content, answer.status, answer.content_type)

    return Handler
