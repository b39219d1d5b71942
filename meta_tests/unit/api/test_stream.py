"""Faults of a stream of events are detected."""

import json
from operator import add, mul

import pytest

from meta_tests.documents import altered
from meta_tests.fakes.api_answers import COMPLETION, USAGE, of_chat
from sm121.api import stream


def chunk(delta, finish=None):
    return of_chat("chat.completion.chunk", delta=delta, finish_reason=finish)


CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "Hm."}),
    chunk({"content": "Par"}),
    chunk({"content": "is"}),
    chunk({}, "stop"),
    {**chunk({}), "choices": [], "usage": USAGE},
]


def sse(chunks, done=True, kind="text/event-stream; charset=utf-8", end=""):
    events = [f"data: {json.dumps(item)}\n\n" for item in chunks] + ["data: [DONE]\n\n"] * done
    return read("".join([*events, end]), kind)


def chunks(*numbers):
    return [CHUNKS[number] for number in numbers]


def read(text, kind="text/event-stream"):
    return stream.parse_stream(kind, text.encode())


def wrong(answered):
    return "; ".join(stream.violations(answered, "chat completion chunk", usage=True))


def test_a_good_stream_is_as_published():
    answered = sse(CHUNKS)
    assert not wrong(answered)
    message = stream.message_of(answered, "reasoning")
    parts = [message[key] for key in ("content", "reasoning", "finish_reason")]
    assert parts == ["Paris", "Hm.", "stop"]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        pytest.param(
            sse(CHUNKS, done=False),
            "[DONE]: expected once",
            id="no [DONE]",
        ),
        pytest.param(
            sse(CHUNKS, kind="application/json"),
            "content type",
            id="another content type",
        ),
        pytest.param(sse([]), "no chunk", id="no chunk"),
        pytest.param(sse(chunks(1, 2, 3, 4, 5)), "no role", id="no role"),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 5)),
            "0 finish_reasons of choice 0",
            id="no finish_reason",
        ),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 4, 4, 5)),
            "2 finish_reasons of choice 0",
            id="two finish_reasons",
        ),
        pytest.param(
            sse(chunks(0, 4, 2, 5)),
            "continues choice 0",
            id="a choice goes on after its end",
        ),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 4)),
            "not only in the last chunk",
            id="no usage",
        ),
        pytest.param(
            sse(altered(CHUNKS, {"1.id": "other"})),
            "different values of id",
            id="two ids",
        ),
        pytest.param(
            sse([{"error": {"message": "x"}}]),
            "an error inside the stream",
            id="an error inside",
        ),
        pytest.param(
            read("data: {\n\ndata: [DONE]\n\n"),
            "not JSON",
            id="a chunk that breaks off",
        ),
        pytest.param(
            read("what\n\ndata: [DONE]\n\n"), "not an event", id="a line that is no event"
        ),
        pytest.param(sse([5]), "not a JSON object", id="a chunk that is a number"),
        pytest.param(sse([None]), "not a JSON object", id="a chunk that is null"),
        pytest.param(
            read(add("data: ", mul("[", 100000))),
            "not JSON",
            id="a list in a list in a list",
        ),
    ],
)
def test_streams_that_are_not_as_published(broken, fault):
    assert fault in wrong(broken)


def test_a_stream_may_have_any_text_and_an_error_that_is_null():
    """JSON in a stream may contain characters that Python takes for the end of a line."""
    chunks = [{**item, "error": None} for item in CHUNKS]
    chunks[-3] = {**chunk({"content": "a\u2028b\x85c"}), "error": None}
    sent = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\r\n\r\n" for c in chunks)
    answered = read(f"{sent}data: [DONE]\n\n")
    assert not wrong(answered)
    assert "a\u2028b\x85c" in stream.message_of(answered, None)["content"]


def test_merged_choices_are_kept_apart():
    choices = [{"index": n % 2, "text": c, "finish_reason": None} for n, c in enumerate("abcd")]
    chunks = [{**COMPLETION, "choices": [choice]} for choice in choices]
    assert [choice["text"] for choice in stream.completion_of(sse(chunks))] == ["ac", "bd"]


@pytest.mark.parametrize(
    ("tail", "fault"),
    [
        ("INTERNAL ERROR", "not an event"),
        ('data: {"b":', "not JSON"),
        pytest.param(
            'data: {"error": "x"}\n',
            "[DONE]: expected once",
            id="an error without a blank line",
        ),
        pytest.param("\n", "", id="a line end"),
    ],
)
def test_an_incomplete_last_event_is_judged(tail, fault):
    """A client drops an incomplete event at the end of a stream.

    A server that sends one still fails."""
    lines = wrong(sse(CHUNKS, end=tail))
    assert fault in lines if fault else not lines, lines
