"""The schema and the invariants detect faults of an answer."""

import json

import pytest

from meta_tests.documents import altered
from meta_tests.fakes.api_answers import COMPLETION, REQUEST, chat
from meta_tests.texts import text_file
from sm121.api import invariants, sampling, schema, tools

CALL = json.loads(text_file("tool-call.json"))


def test_good_answers_are_as_published():
    assert schema.violations("completion", COMPLETION) == []
    assert schema.violations("chat completion", chat({"role": "assistant", "content": "x"})) == []
    assert schema.violations("error", {"error": {"message": "no", "type": "x", "code": 400}}) == []
    assert invariants.of_completion(COMPLETION, REQUEST, hidden=True) == []


@pytest.mark.parametrize("key", ["id", "object", "created", "model", "choices"])
def test_a_key_that_is_missing_is_noticed(key):
    broken = {name: value for name, value in COMPLETION.items() if name != key}
    assert key in schema.violations("completion", broken)[0]


def test_a_violation_names_nothing_that_differs_between_answers():
    """The text of a violation contains nothing that differs between answers.

    With `--against`, the same violation must have the same text in the trusted run."""
    lines = set()
    for number in (1, 2):
        answer = {"id": f"cmpl-{number}", "created": number, "model": "m", "object": "list"}
        lines.add("; ".join(schema.violations("completion", answer)))
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", "1"),
        ("created", 1.5),
        ("id", 7),
        ("object", "list"),
    ],
)
def test_nothing_is_converted(key, value):
    assert schema.violations("completion", {**COMPLETION, key: value})


def test_an_unknown_event_names_itself():
    lines = schema.violations("response event", {"type": "response.created"})
    assert lines and all("Audio" not in line for line in lines), lines


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"error": "Unauthorized"}, id="an error that is text"),
        pytest.param({"detail": "Not Found"}, id="a detail"),
        pytest.param({"error": {"message": "", "type": "x"}}, id="an empty message"),
        None,
        pytest.param((), id="nothing"),
    ],
)
def test_an_invalid_error_object_is_noticed(body):
    assert schema.violations("error", body)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"model": "gpt-4"}, "model 'gpt-4'", id="another model"),
        pytest.param({"id": ""}, "id is empty", id="no id"),
        pytest.param({"usage.total_tokens": 8}, "does not add up", id="a sum that is wrong"),
        pytest.param({"usage": None}, "no usage", id="no usage"),
        pytest.param(
            {"choices.0.index": 1},
            "choices with index [1]",
            id="a choice with index 1",
        ),
        pytest.param(
            {
                "choices": [
                    {"index": 0, "text": " Paris.", "finish_reason": "length", "logprobs": None},
                    {"index": 0, "text": " Paris.", "finish_reason": "length", "logprobs": None},
                ]
            },
            "choices with index [0, 0]",
            id="two choices with index 0",
        ),
        pytest.param(
            {"choices.0.text": "x<|end|>"},
            "<|end|> in text",
            id="a special token in the text",
        ),
    ],
)
def test_each_broken_rule_of_completions_is_noticed(changes, fault):
    broken = altered(COMPLETION, changes)
    assert fault in "; ".join(invariants.of_completion(broken, REQUEST, hidden=True))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param(({"id": ""},), "ids that are not unique", id="no id"),
        pytest.param(({}, {}), "ids that are not unique", id="one id twice"),
        pytest.param(
            ({"function": {"name": "rm", "arguments": "{}"}},),
            "a call of the tool 'rm'",
            id="a function that was not offered",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": "{"}},),
            "not JSON",
            id="arguments that break off",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": "[]"}},),
            "are not a JSON object",
            id="arguments that are a list",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": None}},),
            "not JSON",
            id="no arguments",
        ),
    ],
)
def test_tool_calls_that_are_not_well_formed(changes, fault):
    """Tool calls that are not well formed fail. `changes` are the changes of each call."""
    request = {"model": "canary", "tools": tools.tools()}
    assert invariants.of_tool_calls([CALL], request) == []
    assert fault in "; ".join(invariants.of_tool_calls([CALL | each for each in changes], request))


def test_a_call_and_its_finish_reason_go_together():
    request = {"model": "canary", "tools": tools.tools()}
    message = {"role": "assistant", "content": None}
    for calls, wrong_is_seen in (({}, True), ({"tool_calls": [CALL]}, False)):
        answered = chat({**message, **calls}, "tool_calls")
        assert bool(invariants.of_chat(answered, request)) is wrong_is_seen


def test_a_header_in_a_message_is_noticed():
    for content in ("assistantfinalParis", "analysisWe know.assistantfinalParis", "finalParis"):
        lines = invariants.of_message({"role": "assistant", "content": content}, "stop", REQUEST)
        assert "harmony's header" in "; ".join(lines)
    for content in ("final answer: Paris", "The assistant: final", "analysis", None):
        message = {"role": "assistant", "content": content}
        assert invariants.of_message(message, "stop", REQUEST) == []


def test_fields_required_later_are_not_required_of_older_engines() -> None:
    """Fields that became required later are not required of older engines.

    vLLM 0.24 on an H100, a healthy server, failed with openai 3.54."""
    response = json.loads(text_file("response.json"))
    assert schema.violations("response", response) == []
    del response["usage"]["input_tokens_details"]["cached_tokens"]
    missing = "usage.input_tokens_details.cached_tokens"
    assert missing in schema.violations("response", response)[0]


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ()])
def test_reasoning_is_read_once_whatever_its_names(names):
    """Reasoning that an answer contains under two names is read only once.

    vLLM 0.14 sends two names, and the second one was taken for text after a stop string."""
    names = names or ("reasoning", "reasoning_content")
    message = {"content": None, **dict.fromkeys(names, "Paris")}
    assert sampling.reasoning_and_content(message) == "Paris"
    assert sampling.reasoning_and_content({**message, "content": "!"}) == "Paris!"
