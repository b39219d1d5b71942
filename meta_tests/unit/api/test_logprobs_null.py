"""If log-probabilities are null, absent or empty, the checks report a finding, and never a
traceback."""

from types import SimpleNamespace
from typing import Any

import pytest

from sm121.api import logprobs, stream
from sm121.client.completion_json import parse
from sm121.core.unmet import Unmet

ABSENT = object()
EMPTY = [
    pytest.param(None, id="null"),
    pytest.param(ABSENT, id="absent"),
    pytest.param([], id="empty-list"),
    pytest.param({}, id="empty-object"),
    pytest.param([None], id="list-of-null"),
]
COMPLETION = {
    "tokens": [" a"],
    "token_logprobs": [-0.1],
    "top_logprobs": [{" a": -0.1, " b": -3.0}],
}
ALTERNATIVES = [{"token": " a", "logprob": -0.1}, {"token": " b", "logprob": -3.0}]
ENTRY = {"token": " a", "logprob": -0.1, "bytes": [32, 97], "top_logprobs": ALTERNATIVES}
CORRECTNESS: Any = SimpleNamespace(chats=[SimpleNamespace(question="Why?")])


def changed(whole: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy with another value of one key, or without the key."""
    rest = {name: part for name, part in whole.items() if name != key}
    return rest if value is ABSENT else rest | {key: value}


def completion(entries: object) -> dict[str, Any]:
    return answer(changed({"text": " a"}, "logprobs", entries))


def chat(entries: object) -> dict[str, Any]:
    return answer(changed({"message": {"content": " a"}}, "logprobs", entries))


def answer(choice: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [choice], "usage": {"completion_tokens": 1}}


class Server:
    """An API that gives the same answer to each request."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.capabilities = SimpleNamespace(can=lambda _name: False)

    def complete(self, *_prompt: object, **_options: object) -> dict[str, Any]:
        return self.body

    def chat(self, *_question: object, **_options: object) -> dict[str, Any]:
        return self.body

    send_chat = chat

    def exactly(self, tokens: int, **_options: object) -> Any:
        entries = self.body["choices"][0].get("logprobs")
        if isinstance(entries, dict):
            long = {}
            for key, column in entries.items():
                if column:
                    long[key] = column * tokens
                else:
                    long[key] = column
            entries = SimpleNamespace(**long)
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=entries)])


def check(body: dict[str, Any]) -> list[Any]:
    """Return the checks of an answer that is not streamed."""
    server: Any = Server(body)
    if "message" in body["choices"][0]:
        return [
            lambda: logprobs.of_a_chat_are_whole(server, CORRECTNESS),
            lambda: logprobs.greedy_is_the_likeliest(server, in_chats=True),
        ]
    return [
        lambda: logprobs.name_the_chosen_token(server),
        lambda: logprobs.are_finite(server),
        lambda: logprobs.greedy_is_the_likeliest(server, in_chats=False),
    ]


def streamed(body: dict[str, Any]) -> Any:
    return stream.Stream("text/event-stream", (), (body,), ())


@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("key", ["logprobs", "tokens", "token_logprobs", "top_logprobs"])
def test_completion_without_them_is_a_finding(key: str, value: object) -> None:
    entries = value if key == "logprobs" else changed(COMPLETION, key, value)
    first, finite, greedy = check(completion(entries))
    checks = [first] if key == "tokens" else [first, finite]
    # The parser reads a missing number as NaN.
    for each in [*checks, greedy] if not (key == "tokens" and value == [None]) else checks:
        with pytest.raises(Unmet):
            each()


@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("key", ["logprobs", "content", "top_logprobs", "logprob", "token"])
def test_chat_without_them_is_a_finding(key: str, value: object) -> None:
    if key == "logprobs":
        entries = value
    elif key == "content":
        entries = changed({"content": []}, key, value)
    else:
        entries = {"content": [changed(ENTRY, key, value)]}
    whole, greedy = check(chat(entries))
    with pytest.raises(Unmet):
        whole()
    if key != "token":
        with pytest.raises(Unmet):
            greedy()


@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("of", [completion, chat], ids=["completion", "chat"])
def test_stream_without_them_is_a_finding(of: Any, value: object) -> None:
    with pytest.raises(Unmet):
        logprobs.of_a_stream_are_whole(streamed(of(value)))


@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("key", ["token_logprobs", "content"])
def test_stream_without_numbers_is_a_finding(key: str, value: object) -> None:
    with pytest.raises(Unmet):
        logprobs.of_a_stream_are_whole(streamed(completion(changed({}, key, value))))


@pytest.mark.parametrize("value", EMPTY)
def test_streamed_alternatives_are_parsed(value: object) -> None:
    """In a streamed answer, a chunk without alternatives gives a position without alternatives."""
    entries = [
        changed(COMPLETION, "top_logprobs", value),
        {"content": [changed(ENTRY, "top_logprobs", value)]},
    ]
    for part in entries:
        (position,) = parse(completion(part), completion(None)).positions or ()
        assert (position.log_probability, dict(position.top)) == (-0.1, {})


@pytest.mark.parametrize(
    "body",
    [completion(COMPLETION), chat({"content": [ENTRY]})],
    ids=["completion", "chat"],
)
def test_complete_log_probabilities_pass(body: dict[str, Any]) -> None:
    for each in check(body):
        each()
    logprobs.of_a_stream_are_whole(streamed(body))
