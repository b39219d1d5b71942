"""Checks of tool calls: a server without a parser of tool calls is not judged, and any other
refusal fails."""

import pytest

from meta_tests.fakes.api_answers import ERROR, answer, chat, replying
from sm121.api import harmony, tools
from sm121.api.client import Refused
from sm121.client.exchange import Exchange
from sm121.core import profile, verdict

CPU = profile.load("cpu-tiny-gpt-oss").correctness


@pytest.mark.parametrize(
    ("content", "is_spilled"),
    [
        pytest.param("<think>\nI call get_weather.\n</think>\n\n", False, id="reasoning"),
        pytest.param("I will look it up.", False, id="a preamble"),
        pytest.param("<think>a</think> get_weather(Paris)", True, id="the call after reasoning"),
        pytest.param("<think>I call get_weather", True, id="reasoning without an end"),
        pytest.param("I call get_weather.</think>Sure.", False, id="the prompt has the first tag"),
        pytest.param("[THINK]I call get_weather.[/THINK]", False, id="reasoning of Magistral"),
        pytest.param("<think>a<|tool_call|>b</think>ok", True, id="a special token in reasoning"),
        pytest.param("<think>to=functions.a</think>", True, id="a recipient in reasoning"),
    ],
)
def test_reasoning_without_a_parser_may_name_the_tool(content, is_spilled):
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert tools.spilled({"content": content, "tool_calls": [call]}) == is_spilled


@pytest.mark.parametrize("tag", ["</think>", "[/THINK]"])
@pytest.mark.parametrize(
    ("before", "parsed"),
    [
        pytest.param(
            '{"name": "get_weather", "arguments": {"city": "Paris"}}\n', {}, id="a call as JSON"
        ),
        pytest.param("I call get_weather.", {"reasoning": "a"}, id="a parser of reasoning"),
        pytest.param("I call get_weather.", {"reasoning_content": "a"}, id="the older field"),
    ],
)
def test_a_call_before_a_stray_closing_tag_is_spilled(before, parsed, tag):
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert tools.spilled({"content": before + tag, "tool_calls": [call], **parsed})


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_an_empty_field_of_reasoning_shows_no_parser(field):
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    message = {"content": "I call get_weather.</think>Sure.", field: None, "tool_calls": [call]}
    assert not tools.spilled(message)


def ask_for_a_tool(reply: Exchange, check=tools.called_every_time, engine: str = "vllm"):
    """Run a check of tool calls on a server that always gives the same answer."""
    check(replying(reply, engine=engine), CPU)


TOOL_CHECKS = (tools.called_every_time, tools.named, tools.required, tools.results_are_answered)


@pytest.mark.parametrize("check", TOOL_CHECKS)
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        pytest.param(
            "vllm",
            '"auto" requires --enable-auto-tool-choice and --tool-call-parser to be set',
            id="vllm",
        ),
        ("sglang", "Please set --tool-call-parser to use tools"),
        ("llama-cpp", "tools param requires --jinja flag"),
    ],
)
def test_a_server_that_says_it_has_no_tool_parser_is_not_judged(check, engine, message):
    refusal = answer(400, {"error": {"message": message, "type": "x", "param": None, "code": 400}})
    with pytest.raises(verdict.NotRun, match="parses tool calls if it is started with --"):
        ask_for_a_tool(refusal, check, engine)


def test_another_refusal_of_tools_is_a_failure():
    with pytest.raises(Refused, match="got 400"):
        ask_for_a_tool(answer(400, ERROR))


@pytest.mark.parametrize("check", TOOL_CHECKS)
@pytest.mark.parametrize(
    ("last", "reason"),
    [(harmony.CALL, "did not parse it"), (harmony.RETURN, "the model called no tool")],
)
def test_unparsed_tool_calls_name_the_parser_arguments(check, last, reason):
    answered = chat({"role": "assistant", "content": None, "reasoning": "I call the tool."})
    answered["choices"][0]["token_ids"] = [harmony.CHANNEL, last]
    with pytest.raises(AssertionError) as caught:
        ask_for_a_tool(answer(200, answered), check)
    text = str(caught.value)
    assert "expected a call" in text and reason in text, text
    assert "--enable-auto-tool-choice --tool-call-parser openai" in text, text


def test_a_refused_dot_in_a_tools_name_is_not_judged_and_a_refused_hyphen_is_a_failure():
    refusal = answer(400, ERROR)
    with pytest.raises(verdict.Inapplicable, match="refuses a dot in the name of a tool"):
        tools.named_as_offered(replying(refusal), CPU, "weather.get")
    with pytest.raises(Refused, match="got 400"):
        tools.named_as_offered(replying(refusal), CPU, "get-weather")
    with pytest.raises(Refused, match="got 500"):
        tools.named_as_offered(replying(answer(500, ERROR)), CPU, "weather.get")
