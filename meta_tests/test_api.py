"""The schema, the invariants and the streams notice what is wrong in an answer."""

import itertools
import json
from collections import Counter
from operator import add, mul

import pytest
from documents import altered
from texts import text_file

from sm121.api import cases, harmony, invariants, sampling, schema, stream, tools
from sm121.api.cases import Case
from sm121.api.client import Api, Refused
from sm121.client.exchange import Exchange
from sm121.core import profile, verdict
from sm121.core.server import NO_KEY, Endpoint
from sm121.engines import capabilities

REQUEST = {"model": "canary", "prompt": "The capital of France is"}
COMPLETION = json.loads(text_file("completion.json"))
USAGE = COMPLETION["usage"]
CALL = json.loads(text_file("tool-call.json"))


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


def sse(chunks, done=True, kind="text/event-stream; charset=utf-8", end=""):
    events = [f"data: {json.dumps(item)}\n\n" for item in chunks] + ["data: [DONE]\n\n"] * done
    return read("".join([*events, end]), kind)


def chunks(*numbers):
    return [CHUNKS[number] for number in numbers]


def read(text, kind="text/event-stream"):
    return stream.read(kind, text.encode())


def wrong(answered):
    return "; ".join(stream.violations(answered, "chat completion chunk", usage=True))


def test_good_answers_are_as_published():
    assert schema.violations("completion", COMPLETION) == []
    assert schema.violations("chat completion", chat({"role": "assistant", "content": "x"})) == []
    assert schema.violations("error", {"error": {"message": "no", "type": "x", "code": 400}}) == []
    assert invariants.of_completion(COMPLETION, REQUEST, hidden=True) == []


@pytest.mark.parametrize("key", ["id", "object", "created", "model", "choices"])
def test_a_key_that_is_missing_is_noticed(key):
    broken = {name: value for name, value in COMPLETION.items() if name != key}
    assert key in schema.violations("completion", broken)[0]


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
        pytest.param({"error": "Unauthorized"}, id="error Unauthorized"),
        pytest.param({"detail": "Not Found"}, id="detail Not Found"),
        pytest.param({"error": {"message": "", "type": "x"}}, id="error message type x"),
        None,
        pytest.param((), id="nothing"),
    ],
)
def test_what_is_no_error_object_is_noticed(body):
    assert schema.violations("error", body)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"model": "gpt-4"}, "model 'gpt-4'", id="model gpt-4, model 'gpt-4'"),
        pytest.param({"id": ""}, "id is empty", id="id, id is empty"),
        pytest.param(
            {"usage.total_tokens": 8}, "does not add up", id="usage.total_tokens 8, does not add up"
        ),
        pytest.param({"usage": None}, "no usage", id="usage None, no usage"),
        pytest.param(
            {"choices.0.index": 1},
            "choices with index [1]",
            id="choices.0.index 1, choices with index (1)",
        ),
        pytest.param(
            {
                "choices": [
                    {"index": 0, "text": " Paris.", "finish_reason": "length", "logprobs": None},
                    {"index": 0, "text": " Paris.", "finish_reason": "length", "logprobs": None},
                ]
            },
            "choices with index [0, 0]",
            id="choices index 0 text Paris. finish_reason length",
        ),
        pytest.param(
            {"choices.0.text": "x<|end|>"},
            "<|end|> in text",
            id="choices.0.text x<|end|>, <|end|> in text",
        ),
    ],
)
def test_what_must_hold_in_every_completion(changes, fault):
    broken = altered(COMPLETION, changes)
    assert fault in "; ".join(invariants.of_completion(broken, REQUEST, hidden=True))


# What is changed of each call.
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param(({"id": ""},), "one of its own for each", id="id, one of its own for each"),
        pytest.param(({}, {}), "one of its own for each", id="one of its own for each"),
        pytest.param(
            ({"function": {"name": "rm", "arguments": "{}"}},),
            "a call of 'rm'",
            id="function name rm arguments {}, a call of 'rm'",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": "{"}},),
            "not JSON",
            id="function name get_weather arguments {, not JSON",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": "[]"}},),
            "are no object",
            id="function name get_weather arguments (), are no object",
        ),
        pytest.param(
            ({"function": {"name": "get_weather", "arguments": None}},),
            "not JSON",
            id="function name get_weather arguments None, not JSON",
        ),
    ],
)
def test_tool_calls_that_are_not_well_formed(changes, fault):
    request = {"model": "canary", "tools": tools.tools()}
    assert invariants.of_tool_calls([CALL], request) == []
    assert fault in "; ".join(invariants.of_tool_calls([CALL | each for each in changes], request))


def test_a_call_and_its_finish_reason_go_together():
    request = {"model": "canary", "tools": tools.tools()}
    message = {"role": "assistant", "content": None}
    for calls, wrong_is_seen in (({}, True), ({"tool_calls": [CALL]}, False)):
        answered = chat({**message, **calls}, "tool_calls")
        assert bool(invariants.of_chat(answered, request)) is wrong_is_seen


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
            "[DONE] is not once",
            id="sse CHUNKS done False, (DONE) is not once",
        ),
        pytest.param(
            sse(CHUNKS, kind="application/json"),
            "content type",
            id="sse CHUNKS kind application/json, content type",
        ),
        pytest.param(sse([]), "not one chunk", id="sse, not one chunk"),
        pytest.param(sse(chunks(1, 2, 3, 4, 5)), "no role", id="sse chunks 1 2 3 4 5, no role"),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 5)),
            "0 finish_reasons of choice 0",
            id="sse chunks 0 1 2 3 5, 0 finish_reasons of choice 0",
        ),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 4, 4, 5)),
            "2 finish_reasons of choice 0",
            id="sse chunks 0 1 2 3 4 4 5, 2 finish_reasons of choice 0",
        ),
        pytest.param(
            sse(chunks(0, 4, 2, 5)),
            "goes on with choice 0",
            id="sse chunks 0 4 2 5, goes on with choice 0",
        ),
        pytest.param(
            sse(chunks(0, 1, 2, 3, 4)),
            "usage not in the last chunk",
            id="sse chunks 0 1 2 3 4, usage not in the last chunk",
        ),
        pytest.param(
            sse(altered(CHUNKS, {"1.id": "other"})),
            "one id",
            id="sse altered CHUNKS 1.id other, one id",
        ),
        pytest.param(
            sse([{"error": {"message": "x"}}]),
            "an error inside the stream",
            id="sse error message x, an error inside the stream",
        ),
        pytest.param(
            read("data: {\n\ndata: [DONE]\n\n"),
            "not JSON",
            id="read data: { data: (DONE), not JSON",
        ),
        pytest.param(
            read("what\n\ndata: [DONE]\n\n"), "no event", id="read what data: (DONE), no event"
        ),
        pytest.param(sse([5]), "no JSON object", id="sse 5, no JSON object"),
        pytest.param(sse([None]), "no JSON object", id="sse None, no JSON object"),
        pytest.param(
            read(add("data: ", mul("[", 100000))),
            "not JSON",
            id="read operator.add data: operator.mul ( 100000, not JSON",
        ),
    ],
)
def test_streams_that_are_not_as_published(broken, fault):
    assert fault in wrong(broken)


def test_a_stream_may_have_any_text_and_an_error_that_is_null():
    """Characters that Python takes for the end of a line stand in JSON as they are."""
    chunks = [{**item, "error": None} for item in CHUNKS]
    chunks[-3] = {**chunk({"content": "a\u2028b\x85c"}), "error": None}
    sent = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\r\n\r\n" for c in chunks)
    answered = read(f"{sent}data: [DONE]\n\n")
    assert not wrong(answered)
    assert "a\u2028b\x85c" in stream.message_of(answered, None)["content"]


def test_a_header_in_a_message_is_noticed():
    for content in ("assistantfinalParis", "analysisWe know.assistantfinalParis", "finalParis"):
        lines = invariants.of_message({"role": "assistant", "content": content}, "stop", REQUEST)
        assert "harmony's header" in "; ".join(lines)
    for content in ("final answer: Paris", "The assistant: final", "analysis", None):
        message = {"role": "assistant", "content": content}
        assert invariants.of_message(message, "stop", REQUEST) == []


def test_merged_choices_are_kept_apart():
    choices = [{"index": n % 2, "text": c, "finish_reason": None} for n, c in enumerate("abcd")]
    chunks = [{**COMPLETION, "choices": [choice]} for choice in choices]
    assert [choice["text"] for choice in stream.completion_of(sse(chunks))] == ["ac", "bd"]


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
    return next(each for each in cases.shipped().case if each.id == name)


@pytest.mark.parametrize(
    ("name", "status", "body", "kind", "fails"),
    [
        ("negative-max-tokens", 400, "ERROR", None, None),
        ("negative-max-tokens", 200, "COMPLETION", "served", True),
        ("negative-max-tokens", 500, "ERROR", "server_error", True),
        ("negative-max-tokens", None, None, "hang", True),
        pytest.param(
            "negative-max-tokens",
            400,
            {"detail": "no"},
            "no_error_object",
            True,
            id="negative-max-tokens, 400, detail no, no_error_object",
        ),
        ("negative-max-tokens", 200, "ERROR", "served", True),
        ("wrong-model", 418, "ERROR", "wrong_status", True),
        ("nul-character", 400, "ERROR", "refused", True),
        ("huge-logit-bias", 400, "ERROR", None, None),
        # Unspecified: a note, unless the server breaks.
        pytest.param(
            "unknown-field",
            400,
            {"detail": "no"},
            "no_error_object",
            False,
            id="unknown-field, 400, detail no, no_error_object, not",
        ),
        ("unknown-field", 500, "ERROR", "server_error", True),
        # Known of vLLM 0.32, and excused in no other way than the one that is known.
        pytest.param(
            "wrong-key",
            401,
            {"error": "Unauthorized"},
            "no_error_object",
            False,
            id="wrong-key, 401, error Unauthorized, no_error_object",
        ),
        ("wrong-key", 200, "COMPLETION", "served", True),
    ],
)
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


CPU = profile.load("cpu-tiny-gpt-oss").correctness


def ask_for_a_tool(reply: Exchange, check=tools.called_every_time, engine: str = "vllm"):
    """A check of tools against a server that always answers the same."""
    check(replying(reply, engine=engine), CPU)


TOOL_CHECKS = (tools.called_every_time, tools.named, tools.required, tools.results_are_answered)


@pytest.mark.parametrize("check", TOOL_CHECKS)
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        pytest.param(
            "vllm",
            '"auto" requires --enable-auto-tool-choice and --tool-call-parser to be set',
            id='vllm, "auto" requires --enable-auto-tool-choice and',
        ),
        ("sglang", "Please set --tool-call-parser to use tools"),
        ("llama-cpp", "tools param requires --jinja flag"),
    ],
)
def test_a_server_that_says_it_has_no_tool_parser_is_not_judged(check, engine, message):
    refusal = answer(400, {"error": {"message": message, "type": "x", "param": None, "code": 400}})
    with pytest.raises(verdict.NotRun, match="reads tool calls when started with --"):
        ask_for_a_tool(refusal, check, engine)


def test_another_refusal_of_tools_is_a_failure():
    with pytest.raises(Refused, match="seen: 400"):
        ask_for_a_tool(answer(400, ERROR))


@pytest.mark.parametrize("check", TOOL_CHECKS)
@pytest.mark.parametrize(
    ("last", "reason"), [(harmony.CALL, "did not read it"), (harmony.RETURN, "no call at all")]
)
def test_calls_that_nobody_reads_name_the_parser(check, last, reason):
    answered = chat({"role": "assistant", "content": None, "reasoning": "I call the tool."})
    answered["choices"][0]["token_ids"] = [harmony.CHANNEL, last]
    with pytest.raises(AssertionError) as caught:
        ask_for_a_tool(answer(200, answered), check)
    text = str(caught.value)
    assert "required: a call" in text and reason in text, text
    assert "--enable-auto-tool-choice --tool-call-parser openai" in text, text


#: Each known deviation of vLLM, as it was seen on the wire, and of which case and kind it is.
DEVIATIONS = {
    "wrong-key": (401, {"error": "Unauthorized"}),
    "wrong-key-chat": (401, {"error": "Unauthorized"}),
    "unknown-path": (404, {"detail": "Not Found"}),
    "body-is-not-utf-8": (400, {"detail": "There was an error parsing the body"}),
    "one-model": (404, {"detail": "Not Found"}),
    "empty-messages": (200, "COMPLETION"),
    "user-without-content": (200, "COMPLETION"),
    "tool-result-of-no-call": (200, "COMPLETION"),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_known_deviation_is_excused_until_it_is_mended(name):
    """0.24 has the lines that 0.32 has, and so may a release that nobody has looked at."""
    status, body = DEVIATIONS[name]
    deviation = answer(status, BODIES.get(str(body), body))
    later = ("0.24.0", "0.32.0", "0.33.0", "0.34.0", "0.33.1rc2.dev5+g1234")
    for version in (*later, None, "0.11.0"):
        problem = judged(case(name), deviation, WELL, version=version)
        assert problem is not None and problem.fails == (version not in later), version
        assert problem.fails or "known of vLLM" in problem.fact.about, version


def test_a_deviation_that_is_mended_asks_to_be_removed():
    excused: list[list[str]] = []
    symptoms: list[str] = []

    def remarks(name: str, reply: Exchange, version: str = "0.40.0") -> list[str]:
        lines: list[str] = []
        api = replying(reply, WELL, version=version)
        judge = cases.Judge(api, lines.append, {ENDPOINT.base_url: " Paris."})
        judge(case(name))
        excused.append(judge.excused)
        symptoms.extend(judge.symptoms)
        return lines

    (remark,) = remarks("wrong-key", answer(401, ERROR))
    assert "0.40.0 does not show it: close the range in fixtures/engines/vllm.toml" in remark
    assert remarks("wrong-key", answer(401, {"error": "Unauthorized"})) == []
    assert len(symptoms) == 1 and "known of vLLM >=0.14:" in symptoms[0], "apart from the remarks"
    assert excused == [[], ["wrong-key: no_error_object"]], "what a trusted run is asked about"
    assert remarks("negative-max-tokens", answer(400, ERROR)) == []
    assert remarks("wrong-key", answer(401, ERROR), "0.11.0") == []


def test_the_end_token_of_a_choice_is_known_from_where_the_grammar_allows_it():
    for version, is_recorded in (("0.26.0", False), ("0.28.0", True), ("0.34.0", True)):
        deviation = capabilities.of("vllm", version).deviation("choice-in-a-chat", "special_token")
        assert (deviation is not None) == is_recorded, version


def test_a_server_that_is_not_well_afterwards_fails_whatever_it_said():
    other = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "text": "!!!!"}]}
    problem = judged(case("unknown-field"), answer(400, ERROR), answer(200, other))
    assert problem is not None and problem.fails and problem.kind == "serves_wrongly_afterwards"


def test_a_server_that_is_not_well_to_begin_with_is_not_judged():
    with pytest.raises(AssertionError, match="before any bad one"):
        cases.healthy(replying(answer(503, "dead"), version="0.32.0"))


def test_every_case_says_why_and_none_comes_twice():
    tiers = Counter(case.tier for case in cases.shipped().case)
    assert len(tiers) == 3 and min(tiers.values()) >= 5, tiers


@pytest.mark.parametrize(
    ("tail", "fault"),
    [
        ("INTERNAL ERROR", "no event"),
        ('data: {"b":', "not JSON"),
        pytest.param(
            'data: {"error": "x"}\n',
            "[DONE] is not once",
            id='data: {"error": "x"}, (DONE) is not once',
        ),
        pytest.param("\n", "", id="nothing"),
    ],
)
def test_what_comes_after_the_last_whole_event_is_judged(tail, fault):
    """A client drops what the body breaks off; a server that sends it is wrong all the same."""
    lines = wrong(sse(CHUNKS, end=tail))
    assert fault in lines if fault else not lines, lines


def test_what_became_required_later_is_not_asked_of_an_older_engine() -> None:
    """vLLM 0.24 on an H100, judged with openai 3.54: a healthy server was red."""
    response = json.loads(text_file("response.json"))
    assert schema.violations("response", response) == []
    del response["usage"]["input_tokens_details"]["cached_tokens"]
    missing = "usage.input_tokens_details.cached_tokens"
    assert missing in schema.violations("response", response)[0]


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ()])
def test_reasoning_is_read_once_whatever_its_names(names):
    """vLLM 0.14 gives both, with the same text: what follows a stop string was seen in it."""
    names = names or ("reasoning", "reasoning_content")
    message = {"content": None, **dict.fromkeys(names, "Paris")}
    assert sampling.said(message) == "Paris"
    assert sampling.said({**message, "content": "!"}) == "Paris!"


def test_a_refused_dot_in_a_tools_name_is_not_judged_and_a_refused_hyphen_is_a_failure():
    refusal = answer(400, ERROR)
    with pytest.raises(verdict.Inapplicable, match="refuses a dot in the name of a tool"):
        tools.named_as_offered(replying(refusal), CPU, "weather.get")
    with pytest.raises(Refused, match="seen: 400"):
        tools.named_as_offered(replying(refusal), CPU, "get-weather")
    with pytest.raises(Refused, match="seen: 500"):
        tools.named_as_offered(replying(answer(500, ERROR)), CPU, "weather.get")
