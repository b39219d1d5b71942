"""Checks of answers from other models than gpt-oss: short answers, and chats with a template."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from meta_tests.fakes.api_answers import COMPLETION, answer, replying
from sm121.answers.expected_samples import Split
from sm121.api import cases, logprobs, responses, streaming
from sm121.api.sample_comparison import compare_samples
from sm121.api.stream import Stream
from sm121.client.completion_json import Position
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import NotRun
from sm121.engines import capabilities

END = "<|eot_id|>"
PARIS = (" Paris", ".", END)
#: The limits of a model without harmony.
LIMITS: Any = SimpleNamespace(
    chats=[SimpleNamespace(question="What is the capital of France?")],
    max_answer_tokens=64,
    cannot={"harmony": "other chats"},
)


def completed(tokens: tuple[str, ...], text: str, finish: str) -> Any:
    """An API whose completion has the given tokens and text."""
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


@pytest.mark.parametrize(
    ("engine", "likelier", "passes"),
    [
        pytest.param("llama-cpp", (END, END), True, id="llama.cpp bans the end token"),
        pytest.param("llama-cpp", (END, " x"), False, id="another token is likelier as well"),
        pytest.param("vllm", (END, END), False, id="vLLM bans no token"),
    ],
)
def test_a_banned_end_token_may_be_likelier_than_the_greedy_choice(engine, likelier, passes):
    entries = {
        "tokens": [" a", " b"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{" a": -1.0, likelier[0]: -0.5}, {" b": -1.0, likelier[1]: -0.5}],
    }
    choice = {"text": " a b", "finish_reason": "length", "logprobs": entries}
    body = {"choices": [choice], "usage": {"completion_tokens": 2}}
    api: Any = SimpleNamespace(
        complete=lambda *_prompt, **_options: body,
        capabilities=capabilities.capabilities_of(engine, None),
    )
    if passes:
        logprobs.greedy_is_the_likeliest(api, in_chats=False)
    else:
        with pytest.raises(Unmet, match="another token at 2"):
            logprobs.greedy_is_the_likeliest(api, in_chats=False)


def answering(length: int, *, admits: bool = True) -> Any:
    """An API whose complete response has some tokens.

    With `admits`, it reports that it was truncated."""

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
    with pytest.raises(Unmet, match="status incomplete, reason max_output_tokens"):
        responses.is_incomplete_at_the_limit(answering(length, admits=False), LIMITS)


def test_a_response_of_one_token_cannot_be_truncated():
    with pytest.raises(NotRun, match="a single token"):
        responses.is_incomplete_at_the_limit(answering(1), LIMITS)


@pytest.mark.parametrize("keeps", [True, False], ids=["earlier turns kept", "earlier turns lost"])
def test_earlier_turns_are_counted_by_the_models_own_template(keeps):
    """Without harmony, a chat with the same turns has the right number of tokens by the model's own
    template."""

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


@pytest.mark.parametrize(
    ("name", "lacks", "known"),
    [
        pytest.param("unknown-role", {}, False, id="harmony refuses an unknown role"),
        pytest.param("unknown-role", {"harmony": "no"}, True, id="a template may write any role"),
        pytest.param("empty-messages", {}, True, id="harmony adds a message to none"),
        pytest.param("empty-messages", {"harmony": "no"}, False, id="a template needs a message"),
    ],
)
def test_a_deviation_of_vllm_may_depend_on_the_format_of_chats(name, lacks, known):
    served = answer(200, {**COMPLETION, "object": "chat.completion"})
    api = replying(served, answer(200, COMPLETION), version="0.32.0")
    api = dataclasses.replace(api, capabilities=dataclasses.replace(api.capabilities, lacks=lacks))
    (case,) = (each for each in cases.shipped().case if each.id == name)
    problem = cases.judge_case(api, case, COMPLETION["choices"][0]["text"]).problem
    assert problem is not None and problem.kind == "served" and problem.fails == (not known)


def a_banned_word() -> Fact:
    """A sample with a word of `bad_words`, as vLLM 0.32 returned it with the small Llama."""
    position = Position("token_id:268", math.log(0.9), {"token_id:268": math.log(0.9)})
    (fact, *_) = compare_samples(
        "bad_words",
        [(position,)],
        lambda top: Split(set(), set(top)),
        "[' of'] after '1 + 1 = 2. The capital'",
    )
    return fact


def endless_spaces() -> Fact:
    """A chat with a JSON schema whose answer is endless spaces, as the small Llama wrote it."""
    text = "{ " + "\n" * 300
    message = {"role": "assistant", "content": text, "tool_calls": []}
    chunk = {"choices": [{"index": 0, "delta": message, "finish_reason": "length"}]}
    api: Any = SimpleNamespace(
        chat=lambda *_question, **_options: {"choices": [{"message": message}]},
        stream_chat=lambda *_question, **_options: Stream("", (), (chunk,), ()),
    )
    with pytest.raises(Unmet) as caught:
        streaming.keeps_every_character(api, "chat", 1)
    return caught.value.facts[0]


def another_form() -> Fact:
    """A completion with a regex, as vLLM 0.32 returned it with the reasoning parser of the small
    Qwen3."""
    return Fact("the text of the form '  Paris.'", "' 7, 8, 9, 10, 11, 12'")


@pytest.mark.parametrize(
    ("fact", "link"),
    [
        pytest.param(a_banned_word, "vllm/issues/32557", id="a word with a space is not banned"),
        pytest.param(endless_spaces, "vllm/issues/38696", id="spaces up to the limit"),
        pytest.param(another_form, "vllm/issues/57726", id="no form beside a reasoning parser"),
    ],
)
def test_a_failure_by_a_known_bug_has_its_link(fact, link):
    failed = fact()
    known = capabilities.capabilities_of("vllm", "0.32.0").bugs(
        "tests/test_correctness.py::test_any"
    )
    links = []
    for bug in known:
        if re.search(bug.says, failed.requirement) or re.search(bug.says, failed.observation):
            links.append(bug.source)
    assert len(links) == 1 and links[0].endswith(link), failed
