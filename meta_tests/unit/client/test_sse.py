"""The suite's only parser of server-sent events, and a streamed completion that it parses."""

import itertools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sm121
from meta_tests.fakes.loopback import serving
from sm121.client.completions import Asker, Refused, Request
from sm121.client.sse import EventParser
from sm121.core.server import Endpoint, Server

PACKAGE = Path(sm121.__file__).parent
LINE_ENDS = ["\n", "\r\n", "\r"]


def events(*pieces: bytes) -> list[str]:
    parser = EventParser()
    texts = []
    for piece in pieces:
        for data in parser.feed(piece):
            texts.append(data.decode())
    return texts


@settings(max_examples=100, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 800), max_size=20),
    ends=st.lists(st.sampled_from(LINE_ENDS), max_size=12),
)
def test_events_are_the_same_however_the_bytes_are_cut(cuts, ends):
    """The parsed events do not depend on where the bytes are split, even inside a character or a
    CRLF."""
    end = itertools.cycle(ends or ["\n"])
    texts = [f'{{"text": "{n}\u2028a\u2029b\x85c\x0bd\x1ce"}}' for n in range(12)]
    body = b""
    for text, line_end in zip(texts, end, strict=False):
        lines = (": ping", "id: 1", f"data: {text}", "")
        body += "".join(line + line_end for line in lines).encode()
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert events(*(body[a:b] for a, b in itertools.pairwise(edges))) == texts


@pytest.mark.parametrize("end", LINE_ENDS)
def test_every_byte_alone(end):
    body = f"data: 1{end}{end}: ping{end}data: 2{end}{end}".encode()
    assert events(*(bytes([byte]) for byte in body)) == ["1", "2"]


def test_an_event_is_returned_with_the_read_that_completes_it():
    assert events(b"data: 1\r", b"\ndata: 2\r", b"\n\r", b"\n") == ["1\n2"]
    parser = EventParser()
    assert list(parser.feed(b"data: 1\r\n\r")) == [b"1"]
    assert list(parser.feed(b"\ndata: 2\n")) == []
    assert list(parser.feed(b"\n")) == [b"2"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(("data: a\ndata: b\n\n"), ("a\nb",), id="data: a data: b, a b"),
        pytest.param(("data:a\n\ndata\n\n"), ("a", ""), id="data:a data, a"),
        pytest.param((": data: a\n\n:\n\n"), (), id=": data: a :"),
        pytest.param(("event: done\nid: 7\nretry: 10\n\n"), (), id="event: done id: 7 retry: 10"),
        pytest.param(("event: x\ndata: a\n\n\n\n"), ("a",), id="event: x data: a, a"),
        pytest.param(("data: a\n\ndata: broken off\n"), ("a",), id="data: a data: broken off, a"),
        pytest.param(("data: a\n\ndata: broken off"), ("a",), id="data: a data: broken off, a (2)"),
    ],
)
def test_fields(body, expected):
    assert events(body.encode()) == [*expected]


def test_malformed_lines_of_a_stream_are_kept():
    parser = EventParser()
    assert list(parser.feed(b'what\n{"a": 1}\n:x\nid: 1\ndata: 1\n\n')) == [b"1"]
    assert parser.malformed == [b"what", b'{"a": 1}']


@pytest.fixture
def server() -> Iterator[Server]:
    """Stream a text with U+2028, and then wait until the client disconnects."""
    chunks = [{"choices": [{"text": text, "token_ids": [7]}]} for text in ("a\u2028b", "c")]
    chunks.append({"choices": [{"text": "", "finish_reason": "length"}]})
    body = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\r\n\r\n" for c in chunks)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body_of_request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if body_of_request["prompt"] else 400)
            self.end_headers()
            self.wfile.write(f"{body}data: [DONE]\r\n\r\n".encode())
            self.wfile.flush()
            if body_of_request["max_tokens"] > 2:
                hung_up.wait(10)

        def log_message(self, *_arguments: object) -> None: ...

    hung_up = threading.Event()
    with serving(Handler) as url:
        yield Server(Endpoint(url, "key", "canary"), False, "vllm", None, None, None, None)
        hung_up.set()


def test_a_completion_may_be_streamed_broken_off_or_refused(server):
    streamed = Asker(server).stream(Request("x", 2))
    assert (streamed.text, streamed.ids) == ("a\u2028bc", (7, 7))
    Asker(server, timeout_s=5.0).abort(Request("x", 100))
    with pytest.raises(Refused, match="400"):
        Asker(server).stream(Request("", 2))


def test_nobody_else_opens_connections_or_reads_events():
    """Only the suite's clients open connections and read events.

    The only exception is `Endpoint`, for simple requests."""
    clients = re.compile(r"(import|from) aiohttp|httpx\.(Async)?Client\(|[\"']data: ?[\"']")
    allowed = {PACKAGE / "core" / "server.py", *(PACKAGE / "client").glob("*.py")}
    files = set(PACKAGE.rglob("*.py")) - allowed
    assert [path for path in files if clients.search(path.read_text("utf-8"))] == []
