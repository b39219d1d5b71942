"""The schema, the invariants and the streams notice what is wrong in an answer."""

import itertools
import json
from collections import Counter

import pytest
from data_rows import altered, from_data, table

from sm121.api import cases, harmony, invariants, sampling, schema, stream, tools
from sm121.api.cases import Case
from sm121.api.client import Api, Refused
from sm121.client.exchange import Exchange
from sm121.core import profile, verdict
from sm121.core.server import NO_KEY, Endpoint
from sm121.engines import capabilities

REQUEST = {"model": "canary", "prompt": "The capital of France is"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "canary",
    "choices": [{"index": 0, "text": " Paris.", "finish_reason": "length", "logprobs": None}],
    "usage": USAGE,
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}


def of_chat(kind, **choice):
    head = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "canary"}
    return {**head, "choices": [{"index": 0, **choice}]}


def chat(message, finish="stop"):
    whole = of_chat("chat.completion", message=message, finish_reason=finish, logprobs=None)
    return {**whole, "usage": USAGE}


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


def sse(chunks, done=True, kind="text/event-stream; charset=utf-8"):
    events = [f"data: {json.dumps(item)}\n\n" for item in chunks] + ["data: [DONE]\n\n"] * done
    return stream.read(kind, "".join(events).encode())


def chunks(*places):
    return [CHUNKS[place] for place in places]


def read(text):
    return stream.read("text/event-stream", text.encode())


def test_good_answers_are_as_published():
    assert schema.violations("completion", COMPLETION) == []
    assert schema.violations("chat completion", chat({"role": "assistant", "content": "x"})) == []
    assert schema.violations("error", {"error": {"message": "no", "type": "x", "code": 400}}) == []
    assert invariants.of_completion(COMPLETION, REQUEST, hidden=True) == []


@pytest.mark.parametrize("key", ["id", "object", "created", "model", "choices"])
def test_a_key_that_is_missing_is_noticed(key):
    broken = {name: value for name, value in COMPLETION.items() if name != key}
    assert key in schema.violations("completion", broken)[0]


@from_data
def test_nothing_is_converted(key, value):
    assert schema.violations("completion", {**COMPLETION, key: value})


def test_an_unknown_event_names_itself():
    found = schema.violations("response event", {"type": "response.created"})
    assert found and all("Audio" not in line for line in found), found


@from_data
def test_what_is_no_error_object_is_noticed(body):
    assert schema.violations("error", body)


@from_data
def test_what_must_hold_in_every_completion(changes, said):
    broken = altered(COMPLETION, changes)
    assert said in "; ".join(invariants.of_completion(broken, REQUEST, hidden=True))


@from_data
def test_tool_calls_that_are_not_well_formed(changes, said):
    request = {"model": "canary", "tools": tools.tools()}
    assert invariants.of_tool_calls([CALL], request) == []
    assert said in "; ".join(invariants.of_tool_calls([CALL | each for each in changes], request))


def test_a_call_and_its_finish_reason_go_together():
    request = {"model": "canary", "tools": tools.tools()}
    message = {"role": "assistant", "content": None}
    assert invariants.of_chat(chat(message, "tool_calls"), request)
    assert not invariants.of_chat(chat({**message, "tool_calls": [CALL]}, "tool_calls"), request)


def test_a_good_stream_is_as_published():
    found = sse(CHUNKS)
    assert stream.violations(found, "chat completion chunk", usage=True) == []
    message = stream.message_of(found, "reasoning")
    assert (message["content"], message["reasoning"], message["finish_reason"]) == (
        "Paris",
        "Hm.",
        "stop",
    )


@from_data
def test_streams_that_are_not_as_published(broken, said):
    found = stream.violations(broken, "chat completion chunk", usage=True)
    assert said in "; ".join(found), found


def test_a_stream_may_have_any_text_and_an_error_that_is_null():
    """Characters that Python takes for the end of a line stand in JSON as they are."""
    chunks = [{**item, "error": None} for item in CHUNKS]
    chunks[-3] = {**chunk({"content": "a\u2028b\x85c"}), "error": None}
    sent = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\r\n\r\n" for c in chunks)
    found = stream.read("text/event-stream", f"{sent}data: [DONE]\n\n".encode())
    assert stream.violations(found, "chat completion chunk", usage=True) == []
    assert "a\u2028b\x85c" in stream.message_of(found, None)["content"]


def test_a_header_in_a_message_is_noticed():
    for content in ("assistantfinalParis", "analysisWe know.assistantfinalParis", "finalParis"):
        found = invariants.of_message({"role": "assistant", "content": content}, "stop", REQUEST)
        assert "harmony's header" in "; ".join(found)
    for content in ("final answer: Paris", "The assistant: final", "analysis", None):
        message = {"role": "assistant", "content": content}
        assert invariants.of_message(message, "stop", REQUEST) == []


def test_merged_choices_are_kept_apart():
    chunks = [
        {**COMPLETION, "choices": [{"index": n % 2, "text": text, "finish_reason": None}]}
        for n, text in enumerate("abcd")
    ]
    texts = [choice["text"] for choice in stream.completion_of(sse(chunks))]
    assert texts == ["ac", "bd"]


# The cases.


ENDPOINT = Endpoint("http://127.0.0.1:1", "key", "canary")


def replying(*answers: Exchange, engine: str = "vllm", version: str | None = None) -> Api:
    """The API of a server that answers so, the last time again and again."""
    to_come = itertools.chain(answers, itertools.repeat(answers[-1]))

    class Replying(Api):
        def send(self, *_arguments, **_options):
            return next(to_come)

    return Replying(ENDPOINT, capabilities.of(engine, version))


def judged(case: Case, *answers: Exchange, engine: str = "vllm", version: str | None = "0.32.0"):
    """What becomes of a case whose answers are these; the last is that of the sentinel."""
    return cases.judge(replying(*answers, engine=engine, version=version), case, " Paris.")[1]


def answer(status: int | None, body: object = None, failure: str = "") -> Exchange:
    return Exchange(status, "application/json", json.dumps(body).encode(), failure)


ERROR = {"error": {"message": "no", "type": "x", "param": None, "code": 400}}
WELL = answer(200, COMPLETION)
#: Bodies that rows name.
BODIES = {"ERROR": ERROR, "COMPLETION": COMPLETION}


def case(name: str) -> Case:
    return next(found for found in cases.shipped().case if found.id == name)


@from_data
def test_what_becomes_of_a_case(name, status, body, kind, fails):
    """Of an answer to it, of which there is none where no status is named."""
    first = answer(status, BODIES.get(str(body), body), failure="" if status else "no answer")
    problem = judged(case(name), first, WELL)
    assert (problem and problem.kind) == kind
    assert problem is None or problem.fails == fails


def test_a_server_that_asks_for_no_key_is_not_asked_with_a_wrong_one():
    endpoint = Endpoint("http://127.0.0.1:1", NO_KEY, "canary")
    for name in ("wrong-key", "wrong-key-chat"):
        with pytest.raises(verdict.Inapplicable, match="attached without --api-key"):
            cases.judge(Api(endpoint, capabilities.of("vllm", None)), case(name), " Paris.")
    assert "leave out --api-key" in judged(case("wrong-key"), WELL, WELL).fact.observed


PROFILE = profile.load("cpu-tiny-gpt-oss").correctness


def asked_for_a_tool(reply: Exchange, check=tools.called_every_time, engine: str = "vllm"):
    """A check of tools against a server that always answers the same."""
    check(replying(reply, engine=engine), PROFILE)


TOOL_CHECKS = (tools.called_every_time, tools.named, tools.required, tools.results_are_answered)


@pytest.mark.parametrize("check", TOOL_CHECKS)
@from_data
def test_a_server_that_says_it_has_no_tool_parser_is_not_judged(check, engine, said):
    refusal = answer(400, {"error": {"message": said, "type": "x", "param": None, "code": 400}})
    with pytest.raises(verdict.NotRun, match="reads tool calls when started with --"):
        asked_for_a_tool(refusal, check, engine)


def test_another_refusal_of_tools_is_a_failure():
    with pytest.raises(Refused, match="seen: 400"):
        asked_for_a_tool(answer(400, ERROR))


@pytest.mark.parametrize("check", TOOL_CHECKS)
@pytest.mark.parametrize(
    ("last", "said"), [(harmony.CALL, "did not read it"), (harmony.RETURN, "no call at all")]
)
def test_calls_that_nobody_reads_name_the_parser(check, last, said):
    seen = chat({"role": "assistant", "content": None, "reasoning": "I call the tool."})
    seen["choices"][0]["token_ids"] = [harmony.CHANNEL, last]
    with pytest.raises(AssertionError) as caught:
        asked_for_a_tool(answer(200, seen), check)
    text = str(caught.value)
    assert "required: a call" in text and said in text, text
    assert "--enable-auto-tool-choice --tool-call-parser openai" in text, text


#: Each known deviation of vLLM, as it was seen on the wire, and of which case and kind it is.
DEVIATIONS = table(__name__, "DEVIATIONS")


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_known_deviation_is_excused_until_it_is_mended(name):
    """0.24 has the lines that 0.32 has, and so may a release that nobody has looked at."""
    status, body = DEVIATIONS[name]
    deviation = answer(status, BODIES.get(str(body), body))
    for version in ("0.24.0", "0.32.0", "0.33.0", "0.34.0", "0.33.1rc2.dev5+g1234"):
        found = judged(case(name), deviation, WELL, version=version)
        assert found is not None and not found.fails and "known of vLLM" in found.fact.about, (
            version
        )
    for version in (None, "0.11.0"):
        found = judged(case(name), deviation, WELL, version=version)
        assert found is not None and found.fails, version


def test_a_deviation_that_is_mended_asks_to_be_removed():
    def remarks(name: str, reply: Exchange, version: str) -> list[str]:
        lines: list[str] = []
        api = replying(reply, WELL, version=version)
        judge = cases.Judge(api, lines.append, {ENDPOINT.base_url: " Paris."})
        judge(case(name))
        excused.append(judge.excused)
        return lines

    excused: list[list[str]] = []

    (said,) = remarks("wrong-key", answer(401, ERROR), "0.40.0")
    assert "0.40.0 does not show it: close the range in fixtures/engines/vllm.toml" in said
    (said,) = remarks("wrong-key", answer(401, {"error": "Unauthorized"}), "0.40.0")
    assert "known of vLLM >=0.14:" in said
    assert excused == [[], ["wrong-key: no_error_object"]], "what a trusted run is asked about"
    assert remarks("negative-max-tokens", answer(400, ERROR), "0.40.0") == []
    assert remarks("wrong-key", answer(401, ERROR), "0.11.0") == []


def test_the_end_token_of_a_choice_is_known_from_where_the_grammar_allows_it():
    for version, known in (("0.26.0", False), ("0.28.0", True), ("0.34.0", True)):
        found = capabilities.of("vllm", version).deviation("choice-in-a-chat", "special_token")
        assert (found is not None) == known, version


def test_a_server_that_is_not_well_afterwards_fails_whatever_it_said():
    other = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "text": "!!!!"}]}
    found = judged(case("unknown-field"), answer(400, ERROR), answer(200, other))
    assert found is not None and found.fails and found.kind == "serves_wrongly_afterwards"


def test_a_server_that_is_not_well_to_begin_with_is_not_judged():
    with pytest.raises(AssertionError, match="before any bad one"):
        cases.healthy(replying(answer(503, "dead"), version="0.32.0"))


def test_every_case_says_why_and_none_comes_twice():
    tiers = Counter(case.tier for case in cases.shipped().case)
    assert len(tiers) == 3 and min(tiers.values()) >= 5, tiers


@from_data
def test_what_comes_after_the_last_whole_event_is_judged(tail, wrong):
    """A client drops what the body breaks off; a server that sends it is wrong all the same."""
    events = [f"data: {json.dumps(item)}\n\n" for item in CHUNKS] + ["data: [DONE]\n\n", tail]
    found = stream.violations(
        stream.read("text/event-stream", "".join(events).encode()),
        "chat completion chunk",
        usage=True,
    )
    assert (wrong in "; ".join(found)) if wrong else not found, found


def test_what_became_required_later_is_not_asked_of_an_older_engine() -> None:
    """vLLM 0.24 on an H100, judged with openai 3.54: a healthy server was red."""
    details = {"cached_tokens": 64}
    usage = {
        "input_tokens": 74, "input_tokens_details": details, "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 79,
    }  # fmt: skip
    answer = {
        "id": "resp_1", "created_at": 1, "model": "m", "object": "response", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage,
    }  # fmt: skip
    assert schema.violations("response", answer) == []
    del details["cached_tokens"]
    assert "usage.input_tokens_details.cached_tokens" in schema.violations("response", answer)[0]


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ()])
def test_reasoning_is_read_once_whatever_its_names(names):
    """vLLM 0.14 gives both, with the same text: what follows a stop string was seen in it."""
    message = {
        "content": None,
        **dict.fromkeys(names or ("reasoning", "reasoning_content"), "Paris"),
    }
    assert sampling.said(message) == "Paris"
    assert sampling.said({**message, "content": "!"}) == "Paris!"
