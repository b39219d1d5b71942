"""What /v1/responses answers: items of reasoning, messages and calls, a status, and events."""

import json
from collections.abc import Callable, Iterable, Iterator

from sm121.api import cases, invariants, rendering, sdk, stream
from sm121.api.client import Api, Json, Refused
from sm121.api.rendering import ChatCase, ChatMessage
from sm121.api.tools import no_call, tools
from sm121.core.configuration import ServerConfiguration
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

_AND = "What is the capital of Germany?"
#: Without it vLLM keeps no response.
_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
#: Chats that /v1/responses is asked too.
IN_RESPONSES = (
    *("system", "turns", "earlier-reasoning-left-out", "tools-and-system", "effort-high"),
    *("tool-result-and-its-reasoning", "unicode", "special-tokens-as-text"),
)


def has_reasoning_and_message(api: Api, correctness: Correctness) -> None:
    """A completed response has one item of reasoning and one message, which has the answer."""
    chat = correctness.chats[0]
    answer = api.respond(chat.question, max_output_tokens=correctness.max_answer_tokens)
    require(answer["status"] == "completed", "completed", answer["status"])
    types = [item["type"] for item in answer["output"]]
    require(types == ["reasoning", "message"], "reasoning and message", types)
    text = _text(answer["output"][-1:])
    require(chat.contains in text, repr(chat.contains), repr(text))


def calls_and_reads_the_result(api: Api, correctness: Correctness) -> None:
    """A response calls the right tool, and after its output says what that says."""
    case, limit = correctness.tool_calls[0], correctness.max_answer_tokens
    offered = [{"type": "function", **tool["function"]} for tool in tools()]
    output = api.respond(case.question, tools=offered, max_output_tokens=limit)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    require(calls, f"a call of {case.tool}", no_call(api, {"output": output}))
    observed = [(call["name"], json.loads(call["arguments"])) for call in calls]
    require(observed == [(case.tool, case.arguments)], f"{case.tool}({case.arguments})", output)
    number = calls[0]["call_id"]
    messages = [
        {"role": "user", "content": case.question},
        {key: calls[0][key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "function_call_output", "call_id": number, "output": case.result},
    ]
    after = api.respond(messages, tools=offered, max_output_tokens=limit)["output"][-1]
    require(case.answer_contains in _text([after]), repr(case.answer_contains), after)


def events_add_up(api: Api, judge: cases.Judge, correctness: Correctness, attempts: int) -> None:
    """The deltas of text and of reasoning are those of the response at the end, and of one that
    comes at once."""
    chat, options = correctness.chats[0], {"max_output_tokens": correctness.max_answer_tokens}
    events = api.stream_response(chat.question, **options)
    deviation = api.capabilities.deviation("response-events", "unpublished_event")
    if deviation is not None:
        types = {event.get("type") for event in events.chunks}.intersection(deviation.events)
        judge.known_or_mended(deviation, ", ".join(sorted(map(str, types))))
    whole = events.chunks[-1]["response"]
    text, deltas = _text(whole["output"][-1:]), stream.response_deltas(events, "output_text")
    require(deltas == text and chat.contains in text, f"deltas of {text!r}", repr(deltas))
    wrong = invariants.of_response(whole, {"model": api.model})
    require(not wrong, "a response as specified at the end", "; ".join(wrong))
    reasoning = _text(item for item in whole["output"] if item["type"] == "reasoning")
    streamed = stream.response_deltas(events, "reasoning_text")
    require(streamed in (None, reasoning), f"deltas of {reasoning!r}", repr(streamed))
    wholes = (api.respond(chat.question, **options)["output"] for _ in range(attempts))
    once = sdk.first_that(map(_by_type, wholes), lambda answer: answer == _by_type(whole["output"]))
    for kind, text in _by_type(whole["output"]).items():
        require(once.get(kind) == text, f"{text!r} as in the stream", once.get(kind), kind)


def _by_type(items: Iterable[Json]) -> dict[str, str]:
    return {item["type"]: _text([item]) for item in items}


def text_of(answer: Json) -> str:
    """The messages of a response."""
    return _text(item for item in answer["output"] if item["type"] == "message")


def _text(items: Iterable[Json]) -> str:
    return "".join(part["text"] for item in items for part in item.get("content") or [])


def becomes_its_harmony(api: Api, case: ChatCase) -> None:
    """A response is to the tokens of harmony's rendering, as its usage counts them. A server with
    another template must count the texts at least. Raises NotRun: harmony is not at hand."""
    answer = _cut(api, case)
    counted, effort = answer["usage"]["input_tokens"], _effort(answer)
    silent = effort is None and api.capabilities.engine != "vllm"
    if case.reasoning_effort is not None and not silent:
        require(effort == case.reasoning_effort, case.reasoning_effort, effort, f"{case}: effort")
    if api.capabilities.can("chat_token_ids"):
        right = lengths(case)
        expected = " or ".join(map(str, sorted(right)))
        require(counted in right, f"usage of {expected} input tokens", counted, f"{case}")
    else:
        plain = rendering.named("question")
        least = texts_are(case) - texts_are(plain)
        before = _cut(api, plain)["usage"]["input_tokens"]
        expected = f"usage of at least {least} input tokens more than the {before} of {plain.id!r}"
        require(counted - before >= least, expected, counted, f"{case}")


def goes_on_from_another(
    api: Api,
    correctness: Correctness,
    remark: Callable[[str], object],
    configuration: ServerConfiguration | None,
) -> None:
    """With ``previous_response_id`` a response is to the turns before as well. `configuration`:
    what the server was started with, None for an attached one: one that was told to keep responses
    may not refuse. Raises NotRun: the server keeps no responses; or harmony is not at hand."""
    plain, limit = rendering.named("question"), correctness.max_answer_tokens
    first = api.respond(plain.messages[0].text, max_output_tokens=limit, store=True)
    reply = text_of(first)
    turn = [ChatMessage(role="assistant", content=reply), ChatMessage(role="user", content=_AND)]
    whole = plain.model_copy(update={"messages": (*plain.messages, *turn), "id": "two-turns"})
    options = {"previous_response_id": first["id"], "max_output_tokens": limit}
    try:
        second = api.respond(_AND, **options)
    except Refused as refusal:
        keeps = configuration is not None and (_STORE, "1") in configuration.environment
        if keeps or refusal.status is None or not 400 <= refusal.status < 500:
            raise
        raise NotRun(
            f"the server keeps no responses ({refusal.status}: {refusal.text[:80]}); start vLLM "
            f"with {_STORE}=1 in its environment"
        ) from refusal
    previous = second.get("previous_response_id")
    require(previous in (None, first["id"]), f"previous_response_id {first['id']}", previous)
    counted = second["usage"]["input_tokens"]
    least = min(lengths(plain)) + texts_are(whole) - texts_are(plain)
    if api.capabilities.can("chat_token_ids"):
        right = lengths(whole)
        expected = f"usage of {' or '.join(map(str, right))} input tokens"
        require(counted in right, expected, counted, "the second turn")
    else:
        require(counted >= least, f"usage of at least {least} input tokens", counted)
    options["max_output_tokens"] = 16
    third = api.send_response(_AND, instructions="Answer with one word only.", **options)
    if third["usage"]["input_tokens"] <= counted:
        # OpenAI's reference: they take the place of the earlier response's.
        remark("instructions sent with previous_response_id do not reach the model")


def lengths(case: ChatCase) -> set[int]:
    """How many tokens a chat may be: the recipient of a call has two places in a header."""
    whole = len(rendering.rendered(case, "2026-01-31"))
    difference = 0
    for call in (call for message in case.messages for call in message.calls):
        to = f" to=functions.{call.name}"
        harmony_header = f"assistant<|channel|>commentary{to} <|constrain|>json"
        vllm_header = f"assistant{to}<|channel|>commentary json"
        difference += rendering.count(vllm_header, special=True)
        difference -= rendering.count(harmony_header, special=True)
    return {whole, whole + difference}


def texts_are(case: ChatCase) -> int:
    """How many tokens the texts of a chat are at least, whatever stands between them."""
    return sum(
        rendering.count(text)
        for message in case.messages
        for text in (message.text, *(c.name + c.arguments for c in message.calls))
    )


def _effort(answer: Json) -> str | None:
    """The effort in vLLM's messages to the model; else the one that the response repeats."""
    for message in answer.get("input_messages") or ():
        for part in message.get("content") or ():
            if isinstance(part, dict) and part.get("reasoning_effort"):
                return str(part["reasoning_effort"]).lower()
    return (answer.get("reasoning") or {}).get("effort")


def _cut(api: Api, case: ChatCase) -> Json:
    rendering.encoding()
    items: list[Json] = []
    body: Json = {"max_output_tokens": 16}
    if api.capabilities.engine == "vllm":
        body["enable_response_messages"] = True
    messages = list(case.messages)
    if messages[0].role in ("system", "developer"):
        body["instructions"] = messages.pop(0).text
    for message in messages:
        items += _items(message)
    if case.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in tools(case.tools)]
    if case.reasoning_effort is not None:
        body["reasoning"] = {"effort": case.reasoning_effort}
    answer = api.send_response(items, **body)
    require(answer.get("usage"), "usage", "none", f"{case}")
    return answer


def _items(message: ChatMessage) -> Iterator[Json]:
    """A message of a chat as the items of a response's input."""
    if message.role == "tool":
        number = message.tool_call_id
        yield {"type": "function_call_output", "call_id": number, "output": message.text}
        return
    if message.reasoning is not None:
        text = {"type": "reasoning_text", "text": message.reasoning}
        yield {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]}
    for call in message.calls:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"type": "function_call", "call_id": call.id, **function}
    if message.content:
        yield {"role": message.role, "content": message.text}
