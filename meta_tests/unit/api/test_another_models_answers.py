"""Checks of answers by other models than gpt-oss: short answers, and chats by a template."""

from types import SimpleNamespace
from typing import Any

import pytest

from sm121.api import logprobs, responses
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun

END = "<|eot_id|>"
PARIS = (" Paris", ".", END)
#: The limits of a model without harmony.
LIMITS: Any = SimpleNamespace(
    chats=[SimpleNamespace(question="What is the capital of France?")],
    max_answer_tokens=64,
    cannot={"harmony": "other chats"},
)


def completed(tokens: tuple[str, ...], text: str, finish: str) -> Any:
    """An API whose completion has these tokens and this text."""
    entries = {
        "tokens": list(tokens),
        "token_logprobs": [-0.1] * len(tokens),
        "top_logprobs": [{token: -0.1} for token in tokens],
    }
    choice = {"text": text, "finish_reason": finish, "logprobs": entries}
    body = {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}
    return SimpleNamespace(complete=lambda *_prompt, **_options: body)


@pytest.mark.parametrize(
    ("tokens", "text", "finish"),
    [
        pytest.param(PARIS, " Paris.", "stop", id="the text omits the end token"),
        pytest.param(PARIS, " Paris." + END, "stop", id="the text has the end token"),
        pytest.param(PARIS[:2], " Paris.", "stop", id="the entries omit the end token"),
        pytest.param(PARIS[:2], " Paris.", "length", id="truncated"),
    ],
)
def test_entries_of_a_completion_that_ended_are_whole(tokens, text, finish):
    logprobs.name_the_chosen_token(completed(tokens, text, finish))


@pytest.mark.parametrize(
    ("tokens", "text", "finish"),
    [
        pytest.param(PARIS, " Paris", "stop", id="two tokens are missing"),
        pytest.param(PARIS, ".", "stop", id="the first token is missing"),
        pytest.param(PARIS[:2], " Paris", "length", id="truncated, and one token is missing"),
    ],
)
def test_a_text_without_its_tokens_is_a_finding(tokens, text, finish):
    with pytest.raises(Unmet, match="the tokens of"):
        logprobs.name_the_chosen_token(completed(tokens, text, finish))


def answering(length: int, *, admits: bool = True) -> Any:
    """An API whose whole response has some tokens; `admits`: it reports that it was truncated."""

    def respond(_question: str, *, max_output_tokens: int) -> dict[str, Any]:
        cut = admits and length > max_output_tokens
        return {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {"output_tokens": min(length, max_output_tokens)},
        }

    return SimpleNamespace(respond=respond)


@pytest.mark.parametrize("length", [2, 8, 9])
def test_a_short_response_is_truncated_by_a_lower_limit(length):
    responses.is_incomplete_at_the_limit(answering(length), LIMITS)


@pytest.mark.parametrize("length", [2, 8, 9])
def test_a_truncated_response_that_is_reported_as_complete_is_a_finding(length):
    with pytest.raises(Unmet, match="incomplete for max_output_tokens"):
        responses.is_incomplete_at_the_limit(answering(length, admits=False), LIMITS)


def test_a_response_of_one_token_cannot_be_truncated():
    with pytest.raises(NotRun, match="a single token"):
        responses.is_incomplete_at_the_limit(answering(1), LIMITS)


@pytest.mark.parametrize("keeps", [True, False], ids=["earlier turns kept", "earlier turns lost"])
def test_earlier_turns_are_counted_by_the_models_own_template(keeps):
    """Without harmony, a chat of the same turns has the right number of tokens."""

    def respond(content: str, **options: Any) -> dict[str, Any]:
        before = 30 if keeps and "previous_response_id" in options else 0
        parts = [{"type": "output_text", "text": "Paris."}]
        return {
            "id": "resp_1",
            "output": [{"type": "message", "content": parts}],
            "usage": {"input_tokens": 10 + before + len(options.get("instructions", ""))},
        }

    def send_chat(messages: list[dict[str, str]], **_options: Any) -> dict[str, Any]:
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        return {"usage": {"prompt_tokens": 40}}

    api: Any = SimpleNamespace(respond=respond, send_response=respond, send_chat=send_chat)
    if keeps:
        responses.goes_on_from_another(api, LIMITS, pytest.fail, None)
    else:
        with pytest.raises(Unmet, match="usage of 40 input tokens"):
            responses.goes_on_from_another(api, LIMITS, pytest.fail, None)
