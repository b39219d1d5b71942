"""Check that a server renders a chat in harmony's format.

The checks depend on the capabilities of the engine:

- If the engine returns the ids of the prompt (vLLM's ``prompt_token_ids``), the prompt is compared
  with oss-harmony's rendering. Headers are compared field by field, and contents token by token.
  The answer to the chat must equal the answer to a completion request with the same ids.
- Otherwise, the usage must grow with each text, and the log-probabilities of the answer must depend
  on the chat.
"""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sm121.answers import agreement
from sm121.api import rendering
from sm121.api.chats import ChatCase, chat_body
from sm121.api.client import Api, Json
from sm121.api.rendering import PromptMessage, encoding
from sm121.api.tools import tools
from sm121.client.completion_json import Position, parse
from sm121.core import level_settings
from sm121.core.unmet import Fact, Unmet, require, with_subject
from sm121.core.verdict import NotRun

#: The environment variable that pins the date in vLLM's system message. By default, it is the
#: current date of the server.
START_DATE = "VLLM_SYSTEM_START_DATE"
_DATE = re.compile(r"Current date: (\S+)")
#: A message about two different texts shows this many characters of each. The second number says
#: how many of them come before the first difference.
_SHOWN, _SHOWN_BEFORE = 300, 60

#: The header of the answer's schema, with which a developer message ends (harmony's guide).
_FORMATS = "\n\n# Response Formats"
#: The first id of the special tokens of o200k_harmony.
_FIRST_SPECIAL = 199_998
#: Offsets of time zones from UTC, in hours. They cover all dates that a server may have at the same
#: time.
_TIME_ZONES = (-14, 0, 14)
#: A text that is appended to another one, so that the usage must grow.
_MORE = " and again, and once more, and again, and once more"
#: Two joined texts may have at most this many tokens fewer than both texts separately.
_JOINED = 2
#: Maximum number of tokens of an answer whose log-probabilities are compared.
_ANSWER_TOKENS = 12
#: Options with which vLLM returns token ids, also for the tokens of log-probabilities.
_AS_IDS: Json = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def prompt_is_harmony(api: Api, case: ChatCase, environment: Mapping[str, str]) -> None:
    """Require that the server renders a chat in harmony's format, and that usage counts the prompt.

    Args:
        api: The API of the server.
        case: The chat.
        environment: The known environment of the server, which may pin the date.

    Raises:
        Unmet: The prompt or the usage differs.
        NotRun: oss-harmony is not installed, or the engine sends neither ids nor usage.
    """
    encoding()
    if not api.capabilities.can("chat_token_ids"):
        _require_counted_texts(api, case)
        return
    answer = _ask(api, case, return_token_ids=True)
    ids = _prompt_ids(answer, case)
    counted = int(answer["usage"]["prompt_tokens"])
    require(counted == len(ids), f"usage of {len(ids)} prompt tokens", counted, f"{case}")
    _require_harmony(case, ids, environment)


def _ask(api: Api, case: ChatCase, **options: Any) -> Json:
    """Send the chat. The limit is one token, unless the options contain another limit."""
    body = chat_body(case, api.capabilities.file.reasoning_field)
    messages = body.pop("messages")
    return api.send_chat(messages, **{"max_tokens": 1, **body, **options})


def _prompt_ids(answer: Json, case: ChatCase) -> list[int]:
    ids = list(answer.get("prompt_token_ids") or [])
    require(ids, "prompt_token_ids with a chat (return_token_ids)", "none", f"{case}")
    return ids


def _require_harmony(case: ChatCase, ids: Sequence[int], environment: Mapping[str, str]) -> None:
    """Require that the prompt is one of harmony's two renderings, with a possible date."""
    parts = rendering.parse_prompt(ids)
    system = encoding().decode(list(parts[0].content)) if parts else ""
    match = _DATE.search(system)
    date = match[1] if match else "none"
    dates = _possible_dates(environment)
    hint = (
        "; if the server was started with another date, set it in the profile's "
        f"engine.environment: {START_DATE}"
    )
    required = f"the date {' or '.join(dates)} in the system message"
    require(date in dates, required, f"{date}{hint}", f"{case}")
    by_harmony = rendering.parse_prompt(rendering.rendered(case, date))
    in_system = rendering.parse_prompt(rendering.rendered(case, date, in_system=True))
    if case.response_format:
        parts = [_without_formats(part) for part in parts]
    if parts not in (by_harmony, in_system):
        raise Unmet(_first_difference(case, by_harmony, parts))


def _possible_dates(environment: Mapping[str, str]) -> list[str]:
    """Return the dates that the server may write into a prompt.

    These are the pinned date, or else the current dates of all time zones.
    """
    pinned = environment.get(START_DATE)
    if pinned:
        return [pinned]
    now = datetime.datetime.now(datetime.UTC)
    return [str((now + datetime.timedelta(hours=hours)).date()) for hours in _TIME_ZONES]


def _first_difference(
    case: ChatCase, expected: list[PromptMessage], observed: list[PromptMessage]
) -> Fact:
    """Return a fact about the first message that differs."""
    index = 0
    for one, other in zip(expected, observed, strict=False):
        if one != other:
            break
        index += 1
    about = f"{case}: message {index}"
    texts = [
        encoding().decode(list(parts[index].content)) if index < len(parts) else ""
        for parts in (expected, observed)
    ]
    pairs = enumerate(zip(*texts, strict=False))
    equal = next((n for n, (one, other) in pairs if one != other), min(map(len, texts)))
    start = max(0, equal - _SHOWN_BEFORE)
    return Fact(_described(expected, index, start), _described(observed, index, start), about)


def _described(parts: Sequence[PromptMessage], index: int, start: int) -> str:
    """Describe one message of a prompt, with its text from `start` on.

    At most `_SHOWN` characters of the text are in the description.
    """
    if index >= len(parts):
        return "the end"
    part = parts[index]
    recipient = f"to={part.recipient}" if part.recipient else ""
    header = [part.author, part.channel, recipient, part.kind]
    text = encoding().decode(list(part.content))
    special = [token for token in part.content if token >= _FIRST_SPECIAL]
    note = f", with {len(special)} control tokens" if special else ""
    is_last = part is parts[-1]
    end = "" if is_last else f", ended by {part.end}"
    shown = repr(text[start : start + _SHOWN])
    before, after = "..." if start else "", "..." if start + _SHOWN < len(text) else ""
    size = f"{len(part.content)} tokens{note}{end}"
    return f"{' '.join(filter(None, header))} {before}{shown}{after} ({size})"


def _without_formats(part: PromptMessage) -> PromptMessage:
    """Remove the schema of an answer from a developer message."""
    if part.author != "developer":
        return part
    text, formats, _ = encoding().decode(list(part.content)).partition(_FORMATS)
    if not formats:
        return part
    return part._replace(content=tuple(encoding().encode(text)))


def _require_counted_texts(api: Api, case: ChatCase) -> None:
    """Require that usage grows with each text and with tools, but not with omitted reasoning."""
    total = _prompt_tokens(api, case)
    for index, message in enumerate(case.messages):
        about = f"{case}, message {index} ({message.role})"
        if message.text:
            more = rendering.count(_MORE) - _JOINED
            longer = case.with_message(index, content=message.text + _MORE)
            grown = _prompt_tokens(api, longer) - total
            require(
                grown >= more,
                f"usage of {more} more tokens, as many as the text has",
                grown,
                about,
            )
        if message.text and "<|" in message.text:
            _require_no_control_tokens(api, case, index, total)
        if message.reasoning is not None and api.capabilities.file.reasoning_field is not None:
            _require_counted_reasoning(api, case, index, total)
    if case.tools:
        least = 0
        for tool in tools(case.tools):
            function = tool["function"]
            least += rendering.count(function["name"]) + rendering.count(function["description"])
        grown = total - _prompt_tokens(api, case.model_copy(update={"tools": 0}))
        require(grown >= least, f"usage of {least} more tokens with the tools", grown, f"{case}")


def _require_no_control_tokens(api: Api, case: ChatCase, index: int, total: int) -> None:
    """Require that a special token's spelling in a user's text is tokenized as plain text."""
    message = case.messages[index]
    about = f"{case}, message {index} ({message.role})"
    neutral = message.text.replace("<|", "<!").replace("|>", "!>")
    least = rendering.count(message.text) - rendering.count(neutral) - _JOINED
    grown = total - _prompt_tokens(api, case.with_message(index, content=neutral))
    required = (
        f"usage that counts the special tokens as text: at least {least:+} compared with "
        f"{neutral!r}"
    )
    require(grown >= least, required, f"{grown:+}", about)


def _require_counted_reasoning(api: Api, case: ChatCase, index: int, total: int) -> None:
    """Require that usage counts reasoning if, and only if, harmony keeps it in the prompt."""
    message = case.messages[index]
    about = f"{case}, message {index} ({message.role})"
    longer = case.with_message(index, reasoning=f"{message.reasoning}{_MORE}")
    grown = _prompt_tokens(api, longer) - total
    analyses = []
    for part in rendering.parse_prompt(rendering.rendered(case, rendering.ANY_DATE)):
        if part.channel == "analysis":
            analyses.append(encoding().decode(list(part.content)))
    if message.reasoning in analyses:
        right = grown >= rendering.count(_MORE) - _JOINED
        required = "usage that includes the kept reasoning"
    else:
        right = grown == 0
        required = "usage without the omitted reasoning"
    require(right, required, f"{grown:+} tokens", about)


def _prompt_tokens(api: Api, case: ChatCase) -> int:
    usage = _ask(api, case).get("usage")
    if not usage:
        raise NotRun("this check needs prompt_token_ids or usage with a chat; the engine has none")
    return int(usage["prompt_tokens"])


#: Changes of chats that must change the answer. The keys are the ids of the chats.
TELLING: dict[str, Callable[[ChatCase], ChatCase]] = {
    "system": lambda case: _reworded(case, "system", "rude"),
    "developer": lambda case: _reworded(case, "developer", "long"),
    "turns": lambda case: _reworded(case, "assistant", "Rome."),
    "tool-result-and-its-reasoning": lambda case: _reworded(case, "tool", "{}"),
    "effort-high": lambda case: case.model_copy(update={"reasoning_effort": "low"}),
    "tools": lambda case: case.model_copy(update={"tools": 0}),
}


def _reworded(case: ChatCase, role: str, text: str) -> ChatCase:
    """Return a copy of a chat in which the first message of a role has another text."""
    index = next(n for n, message in enumerate(case.messages) if message.role == role)
    return case.with_message(index, content=text)


def answer_is_to_the_chat(
    api: Api, case: ChatCase, bound: level_settings.AgreementBound, environment: Mapping[str, str]
) -> None:
    """Require that the answer depends on the chat.

    If the engine returns and accepts token ids, the tokens and log-probabilities of the answer are
    compared with those of the answer to a completion request for harmony's rendering. Otherwise,
    three requests are sent: the chat, the same chat again, and the chat with a changed message
    (`TELLING`). The third answer must differ more from the first answer than the second one does.

    Args:
        api: The API of the server.
        case: A chat of `TELLING`.
        bound: The tolerance of log-probabilities.
        environment: The known environment of the server, which may pin the date.

    Raises:
        Unmet: The answer belongs to another prompt.
        NotRun: The engine sends no log-probabilities with chats, its noise hides the effect of the
            change, or oss-harmony is not installed.
    """
    encoding()
    can = api.capabilities.can
    if can("chat_token_ids") and can("token_prompts") and can("logprobs"):
        _require_answer_of_completion(api, case, bound, environment)
        return
    first = _positions(api, case)
    repeated = _positions(api, case)
    changed = _positions(api, TELLING[case.id](case))
    noise = _distance(first, repeated)
    difference = _distance(first, changed)
    if 0 < difference <= noise:
        raise NotRun(
            f"{case}: two answers to one chat differ by {noise:.3g} nats, as much as the answers "
            "to two chats"
        )
    required = "another answer, or other log-probabilities, to another chat"
    require(difference > noise, required, "the same log-probabilities", f"{case}")


def _require_answer_of_completion(
    api: Api, case: ChatCase, bound: level_settings.AgreementBound, environment: Mapping[str, str]
) -> None:
    """Require the same answer as from /v1/completions with the ids of the chat's prompt."""
    ids = _prompt_ids(_ask(api, case, return_token_ids=True), case)
    _require_harmony(case, ids, environment)
    of_chat = _positions(api, case, **_AS_IDS)

    def complete(prefix: tuple[int, ...]) -> tuple[Position, ...] | None:
        tokens = len(of_chat) - len(prefix)
        answer = api.complete([*ids, *prefix], max_tokens=tokens, logprobs=5, **_AS_IDS)
        return parse(answer).positions

    of_completion = complete(())
    require(of_completion, "log-probabilities", "none", f"{case}")
    agreed = agreement.compare_runs(of_chat, of_completion or (), bound, complete)
    if agreed.disagreement is not None:
        about = f"{case}: a chat against /v1/completions of its prompt_token_ids"
        raise Unmet(*with_subject(about, [agreed.disagreement]))


def _positions(api: Api, case: ChatCase, **options: Any) -> tuple[Position, ...]:
    """Return the tokens of a greedy answer to the chat with their log-probabilities."""
    api.capabilities.require("chat_logprobs")
    body = {"max_tokens": _ANSWER_TOKENS, "logprobs": True, "top_logprobs": 5, **options}
    positions = parse(_ask(api, case, **body)).positions
    require(positions, "log-probabilities of a chat", "none", f"{case}")
    return positions or ()


def _distance(one: Sequence[Position], other: Sequence[Position]) -> float:
    """Return the largest difference of a log-probability up to the first different token.

    A different token counts as a difference of at least 1 nat.
    """
    largest = 0.0
    for mine, theirs in zip(one, other, strict=False):
        for token in mine.top.keys() & theirs.top.keys():
            largest = max(largest, abs(mine.top[token] - theirs.top[token]))
        if mine.token != theirs.token:
            return max(largest, 1.0)
    return largest
