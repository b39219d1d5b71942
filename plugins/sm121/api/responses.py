"""Check /v1/responses: items, status, events, usage, and conversations of several responses."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from sm121.api import cases, invariants, rendering, sdk, stream
from sm121.api.chats import ChatCase, ChatMessage, find_chat
from sm121.api.client import Api, Json, Refused
from sm121.api.tools import no_call, tools
from sm121.core.configuration import ServerConfiguration
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

_SECOND_QUESTION = "What is the capital of Germany?"
#: The environment variable that makes vLLM store responses.
_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
#: Chats of ``fixtures/api/chats.toml`` that are also sent to /v1/responses.
IN_RESPONSES = (
    "system",
    "turns",
    "earlier-reasoning-left-out",
    "tools-and-system",
    "effort-high",
    "tool-result-and-its-reasoning",
    "unicode",
    "special-tokens-as-text",
)
#: A limit that truncates an answer, in tokens.
_TRUNCATING = 8
#: Maximum number of tokens of an answer of which only the usage is read.
_SHORT = 16


def has_reasoning_and_message(api: Api, correctness: Correctness) -> None:
    """Require one message with the answer, after one item of reasoning if the model reasons.

    Args:
        api: The API of the server.
        correctness: The question and its answer are those of its first chat.

    Raises:
        Unmet: The status, the items or the answer differ.
    """
    chat = correctness.chats[0]
    answer = api.respond(chat.question, max_output_tokens=correctness.max_answer_tokens)
    require(answer["status"] == "completed", "completed", answer["status"])
    types = [item["type"] for item in answer["output"]]
    expected = ["message"]
    if correctness.chat_format.reasoning:
        expected = ["reasoning", "message"]
    require(types == expected, " and ".join(expected), types)
    text = _text(answer["output"][-1:])
    require(chat.contains in text, repr(chat.contains), repr(text))


def is_incomplete_at_the_limit(api: Api, correctness: Correctness) -> None:
    """Require the status and the reason of a response that ended at its limit.

    If the whole response is not longer than the limit, the check uses a lower limit.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: The status, the reason or the usage differs.
        NotRun: The whole response has a single token.
    """
    question = correctness.chats[0].question
    limit = _TRUNCATING
    answer = api.respond(question, max_output_tokens=limit)
    if answer["status"] == "completed":
        whole = api.respond(question, max_output_tokens=correctness.max_answer_tokens)
        limit = min(limit, whole["usage"]["output_tokens"] - 1)
        if limit == 0:
            raise NotRun("the whole response has a single token, so no limit truncates it")
        answer = api.respond(question, max_output_tokens=limit)
    reason = (answer.get("incomplete_details") or {}).get("reason")
    observed = (
        f"status {answer['status']}, reason {reason}, {answer['usage']['output_tokens']} tokens"
    )
    required = f"status incomplete, reason max_output_tokens, {limit} tokens"
    require(observed == required, required, observed)


def calls_and_reads_the_result(api: Api, correctness: Correctness) -> None:
    """Require the correct tool call, and then an answer that uses the call's output.

    Args:
        api: The API of the server.
        correctness: The first of its ``tool_calls`` has the question, the result and the answer.

    Raises:
        Unmet: There is no call or a wrong call, or the answer lacks the expected text.
    """
    case = correctness.tool_calls[0]
    options: Json = {"tools": _offered(2), "max_output_tokens": correctness.max_answer_tokens}
    output = api.respond(case.question, **options)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    require(calls, f"a call of {case.tool}", no_call(api, {"output": output}))
    observed = [(call["name"], json.loads(call["arguments"])) for call in calls]
    require(observed == [(case.tool, case.arguments)], f"{case.tool}({case.arguments})", output)
    call_id = calls[0]["call_id"]
    items = [
        {"role": "user", "content": case.question},
        {key: calls[0][key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "function_call_output", "call_id": call_id, "output": case.result},
    ]
    last = api.respond(items, **options)["output"][-1]
    require(case.answer_contains in _text([last]), repr(case.answer_contains), last)


def events_add_up(api: Api, judge: cases.Judge, correctness: Correctness, attempts: int) -> None:
    """Require that the deltas form the final response, and the response without streaming.

    Args:
        api: The API of the server.
        judge: Records the known deviation of engines that send unpublished events.
        correctness: The question and its answer are those of its first chat.
        attempts: The number of attempts to get the same answer without streaming.

    Raises:
        Unmet: The texts differ, or the final response is inconsistent.
    """
    chat = correctness.chats[0]
    options = {"max_output_tokens": correctness.max_answer_tokens}
    events = api.stream_response(chat.question, **options)
    deviation = api.capabilities.deviation("response-events", "unpublished_event")
    if deviation is not None:
        types = {event.get("type") for event in events.chunks}.intersection(deviation.events)
        judge.known_or_mended(deviation, ", ".join(sorted(map(str, types))))
    last = events.chunks[-1]["response"]
    text = _text(last["output"][-1:])
    deltas = stream.response_deltas(events, "output_text")
    require(deltas == text and chat.contains in text, f"deltas of {text!r}", repr(deltas))
    errors = invariants.of_response(last, {"model": api.model})
    require(not errors, "a response as specified at the end", "; ".join(errors))
    reasoning = _text(item for item in last["output"] if item["type"] == "reasoning")
    streamed = stream.response_deltas(events, "reasoning_text")
    require(streamed in (None, reasoning), f"deltas of {reasoning!r}", repr(streamed))
    expected = _text_by_type(last["output"])
    answers = (api.respond(chat.question, **options)["output"] for _ in range(attempts))
    whole = sdk.first_that(map(_text_by_type, answers), lambda texts: texts == expected)
    for kind, text in expected.items():
        require(whole.get(kind) == text, f"{text!r} as in the stream", whole.get(kind), kind)


def _text_by_type(items: Iterable[Json]) -> dict[str, str]:
    return {item["type"]: _text([item]) for item in items}


def text_of(answer: Json) -> str:
    """Return the text of a response's messages.

    Args:
        answer: A valid answer of /v1/responses. Its reasoning and its calls are left out.
    """
    return _text(item for item in answer["output"] if item["type"] == "message")


def _text(items: Iterable[Json]) -> str:
    text = ""
    for item in items:
        for part in item.get("content") or []:
            text += part["text"]
    return text


def usage_counts_harmony(api: Api, case: ChatCase) -> None:
    """Require that usage counts the tokens of harmony's rendering of the input.

    If the engine returns no token ids, the usage must at least grow by the tokens of the texts.

    Args:
        api: The API of the server.
        case: The conversation.

    Raises:
        Unmet: The usage or the reasoning effort differs.
        NotRun: oss-harmony is not installed.
    """
    answer = _answer_shortly(api, case)
    counted = answer["usage"]["input_tokens"]
    effort = _effort(answer)
    shown = effort is not None or api.capabilities.engine == "vllm"
    if case.reasoning_effort is not None and shown:
        require(effort == case.reasoning_effort, case.reasoning_effort, effort, f"{case}: effort")
    if api.capabilities.can("chat_token_ids"):
        right = lengths(case)
        expected = " or ".join(map(str, sorted(right)))
        require(counted in right, f"usage of {expected} input tokens", counted, f"{case}")
    else:
        plain = find_chat("question")
        least = count_texts(case) - count_texts(plain)
        before = _answer_shortly(api, plain)["usage"]["input_tokens"]
        expected = f"usage of at least {least} input tokens more than the {before} of {plain.id!r}"
        require(counted - before >= least, expected, counted, f"{case}")


def goes_on_from_another(
    api: Api,
    correctness: Correctness,
    remark: Callable[[str], object],
    configuration: ServerConfiguration | None,
) -> None:
    """Require that ``previous_response_id`` puts the earlier turns into the prompt.

    The usage is compared with harmony's rendering of the conversation. If the model's chats are not
    in harmony's format, it is compared with the usage of a chat of the same turns.

    Args:
        api: The API of the server.
        correctness: The profile's table. ``max_answer_tokens`` is the limit, and ``cannot`` shows
            whether chats are in harmony's format.
        remark: Called with a remark if new instructions do not reach the model.
        configuration: The configuration of a managed server; None for an attached one.

    Raises:
        Unmet: The usage does not count the earlier turns, or a server that is configured to store
            responses refuses the request.
        NotRun: The server stores no responses, or oss-harmony is not installed.
    """
    plain = find_chat("question")
    options: Json = {"max_output_tokens": correctness.max_answer_tokens}
    first = api.respond(plain.messages[0].text, store=True, **options)
    options["previous_response_id"] = first["id"]
    second = _second_response(api, options, configuration)
    previous = second.get("previous_response_id")
    require(previous in (None, first["id"]), f"previous_response_id {first['id']}", previous)
    turn = (
        ChatMessage(role="assistant", content=text_of(first)),
        ChatMessage(role="user", content=_SECOND_QUESTION),
    )
    both = plain.model_copy(update={"messages": (*plain.messages, *turn), "id": "two-turns"})
    counted = second["usage"]["input_tokens"]
    if "harmony" in correctness.cannot:
        _require_count({_count_as_chat(api, both)}, counted)
    elif api.capabilities.can("chat_token_ids"):
        _require_count(lengths(both), counted)
    else:
        least = min(lengths(plain)) + count_texts(both) - count_texts(plain)
        require(counted >= least, f"usage of at least {least} input tokens", counted)
    options["max_output_tokens"] = _SHORT
    options["instructions"] = "Answer with one word only."
    third = api.send_response(_SECOND_QUESTION, **options)
    if third["usage"]["input_tokens"] <= counted:
        # According to OpenAI's reference, new instructions replace those of the earlier response.
        remark("instructions sent with previous_response_id do not reach the model")


def _require_count(right: set[int], counted: int) -> None:
    """Require that the second turn has one of the possible numbers of input tokens."""
    expected = f"usage of {' or '.join(map(str, right))} input tokens"
    require(counted in right, expected, counted, "the second turn")


def _count_as_chat(api: Api, case: ChatCase) -> int:
    """Return the number of prompt tokens of a conversation that is sent as a chat."""
    messages = [{"role": message.role, "content": message.text} for message in case.messages]
    return int(api.send_chat(messages, max_tokens=1)["usage"]["prompt_tokens"])


def _second_response(
    api: Api, options: dict[str, Any], configuration: ServerConfiguration | None
) -> Json:
    """Send the second question, or raise NotRun if the server stores no responses."""
    try:
        return api.respond(_SECOND_QUESTION, **options)
    except Refused as refusal:
        keeps = configuration is not None and (_STORE, "1") in configuration.environment
        if keeps or refusal.status is None or not 400 <= refusal.status < 500:
            raise
        raise NotRun(
            f"the server stores no responses ({refusal.status}: {refusal.text[:80]}); start vLLM "
            f"with {_STORE}=1 in its environment"
        ) from refusal


def lengths(case: ChatCase) -> set[int]:
    """Return the possible lengths of a conversation in tokens.

    There are several, because a call's header has two forms: oss-harmony writes the recipient after
    the channel, and vLLM before it.

    Args:
        case: The conversation.

    Raises:
        NotRun: oss-harmony is not installed.
    """
    by_harmony = len(rendering.rendered(case, rendering.ANY_DATE))
    by_vllm = by_harmony
    for message in case.messages:
        for call in message.calls:
            to = f" to=functions.{call.name}"
            harmony_header = f"assistant<|channel|>commentary{to} <|constrain|>json"
            vllm_header = f"assistant{to}<|channel|>commentary json"
            by_vllm += rendering.count(vllm_header, special=True)
            by_vllm -= rendering.count(harmony_header, special=True)
    return {by_harmony, by_vllm}


def count_texts(case: ChatCase) -> int:
    """Return the number of tokens of a conversation's texts, without headers and special tokens.

    Args:
        case: The conversation.

    Raises:
        NotRun: oss-harmony is not installed.
    """
    total = 0
    for message in case.messages:
        total += rendering.count(message.text)
        for call in message.calls:
            total += rendering.count(call.name + call.arguments)
    return total


def _effort(answer: Json) -> str | None:
    """Return the reasoning effort in vLLM's messages to the model, or else in the response."""
    for message in answer.get("input_messages") or ():
        for part in message.get("content") or ():
            if isinstance(part, dict) and part.get("reasoning_effort"):
                return str(part["reasoning_effort"]).lower()
    return (answer.get("reasoning") or {}).get("effort")


def _answer_shortly(api: Api, case: ChatCase) -> Json:
    """Send a conversation to /v1/responses with a limit of a few tokens, and require usage."""
    rendering.encoding()
    body: Json = {"max_output_tokens": _SHORT}
    if api.capabilities.engine == "vllm":
        body["enable_response_messages"] = True
    messages = list(case.messages)
    if messages[0].role in ("system", "developer"):
        body["instructions"] = messages.pop(0).text
    items: list[Json] = []
    for message in messages:
        items += _items(message)
    if case.tools:
        body["tools"] = _offered(case.tools)
    if case.reasoning_effort is not None:
        body["reasoning"] = {"effort": case.reasoning_effort}
    answer = api.send_response(items, **body)
    require(answer.get("usage"), "usage", "none", f"{case}")
    return answer


def _offered(count: int) -> list[Json]:
    """Return tools in the format of /v1/responses."""
    return [{"type": "function", **tool["function"]} for tool in tools(count)]


def _items(message: ChatMessage) -> list[Json]:
    """Return a message as input items of /v1/responses."""
    if message.role == "tool":
        call_id = message.tool_call_id
        return [{"type": "function_call_output", "call_id": call_id, "output": message.text}]
    items: list[Json] = []
    if message.reasoning is not None:
        text = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]})
    for call in message.calls:
        function = {"name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "call_id": call.id, **function})
    if message.content:
        items.append({"role": message.role, "content": message.text})
    return items
