"""What a chat becomes: the tokens that a server makes of messages, against harmony's own.
oss-harmony renders what the messages of ``fixtures/api/chats.toml`` mean; the server tells what it
made of them (vLLM: ``prompt_token_ids``). Both are read as lists of messages. The header is
compared by what it says (oss-harmony and vLLM write the recipient of a call in two places, both as
gpt-oss knows them) and the content token by token. Where a server tells no ids, usage must have
grown by the texts, and the log-probabilities of the answer must depend on them."""

import datetime
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from sm121.answers import agreement
from sm121.api import harmony
from sm121.api.client import Api, Json
from sm121.api.tools import tools
from sm121.client.completions import Position, parse
from sm121.core import data_file, level_settings
from sm121.core.unmet import Fact, Unmet, of, require
from sm121.core.verdict import NotRun

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, Message

#: Pins the date in vLLM's system message; without it, it is the day of the server.
START_DATE = "VLLM_SYSTEM_START_DATE"
_DATE = re.compile(r"Current date: (\S+)")
_TO = re.compile(r" to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_FORMATS = "\n\n# Response Formats"
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Call(data_file.DataTable):
    """A call of a tool in a chat."""

    id: str
    name: str
    arguments: str


class ChatMessage(data_file.DataTable):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[dict[str, str], ...] | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, tuple):
            return "".join(part["text"] for part in self.content)
        return self.content or ""


class ChatCase(data_file.DataTable):
    """A chat, with what is asked beside its messages."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    #: How many.
    tools: int = 0
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    response_format: bool = False

    def __str__(self) -> str:
        return self.id


class ChatFile(data_file.DataTable):
    """All chats."""

    schema_version: Literal[1]
    chat: tuple[ChatCase, ...]


def shipped() -> tuple[ChatCase, ...]:
    """The chats that come with the suite. Raises UsageError: the file is not valid."""
    return data_file.load("api/chats.toml", ChatFile).chat


def named(name: str) -> ChatCase:
    """One of them."""
    return next(case for case in shipped() if case.id == name)


class Part(NamedTuple):
    """One message of a prompt. The last one, which the model goes on from, has no content."""

    author: str
    channel: str
    recipient: str
    kind: str
    content: tuple[int, ...]
    end: int | None


def read(ids: Sequence[int]) -> list[Part]:
    """The messages that the ids of a prompt are."""
    starts = [index for index, token in enumerate(ids) if token == harmony.START]
    parts = [] if starts[:1] == [0] else [Part("(no <|start|>)", "", "", "", tuple(ids[:16]), None)]
    for start, stop in itertools.pairwise([*starts, len(ids)]):
        piece = list(ids[start + 1 : stop])
        cut = piece.index(harmony.MESSAGE) if harmony.MESSAGE in piece else len(piece)
        body = piece[cut + 1 :]
        end = body.pop() if body and body[-1] in harmony.ENDS else None
        header = encoding().decode(piece[:cut])
        recipient, channel = _TO.search(header), _CHANNEL.search(header)
        rest = _CHANNEL.sub(" ", _TO.sub(" ", header)).replace("<|constrain|>", " ").split()
        author, kind = rest[0] if rest else "", " ".join(rest[1:])
        on, to = (match[1] if match else "" for match in (channel, recipient))
        parts.append(Part(author, on, to, kind, tuple(body), end))
    return parts


@functools.cache
def encoding() -> "HarmonyEncoding":
    """Harmony's rules, by OpenAI's package. Raises NotRun: it or its vocabulary is missing."""
    try:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    except ImportError as error:
        raise NotRun(
            "what a chat becomes is compared with OpenAI's own harmony, and that is not installed: "
            "pip install oss-harmony (it needs no network afterwards)"
        ) from error
    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # its own HarmonyError, or what its Rust half raises
        raise NotRun(
            f"harmony's vocabulary cannot be loaded ({error}): install oss-harmony, which has it "
            "inside, or name a folder that has it in TIKTOKEN_ENCODINGS_BASE"
        ) from error


def rendered(case: ChatCase, date: str, *, in_system: bool = False) -> list[int]:
    """The ids of what a chat means in harmony, as oss-harmony writes them. `date`: of the system
    message, as "2026-01-31"; `in_system`: the first instructions are part of the system message
    (``VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS``). Raises NotRun as `encoding` does."""
    rules = encoding()  # before the import: it says what to install
    from openai_harmony import Conversation, RenderConversationConfig, Role

    conversation = Conversation.from_messages(list(_harmony(case, date, in_system=in_system)))
    config = RenderConversationConfig(auto_drop_analysis=False)
    ids = rules.render_conversation_for_completion(conversation, Role.ASSISTANT, config=config)
    return list(ids)


def count(text: str, *, special: bool = False) -> int:
    """How many tokens a text is. Raises NotRun as `encoding` does."""
    allowed: Any = "all" if special else set()
    return len(encoding().encode(text, allowed_special=allowed, disallowed_special=()))


def _harmony(case: ChatCase, date: str, *, in_system: bool) -> "Iterator[Message]":
    from openai_harmony import Author, Message, ReasoningEffort, Role, SystemContent

    messages = list(case.messages)
    first = messages.pop(0).text if messages[0].role in ("system", "developer") else None
    system = SystemContent.new().with_conversation_start_date(date)
    if case.reasoning_effort is not None:
        system = system.with_reasoning_effort(ReasoningEffort(case.reasoning_effort.capitalize()))
    if in_system and first is not None:
        system = system.with_model_identity(f"{system.model_identity}\n{first}")
        first = None
    yield Message.from_role_and_content(Role.SYSTEM, system)
    if first is not None or case.tools:
        yield _developer(first, case)
    names = {call.id: call.name for message in messages for call in message.calls}
    # Reasoning is for the turn that is under way: what led to a final message is left out.
    finals = [n for n, m in enumerate(messages) if m.role == "assistant" and m.content]
    for index, message in enumerate(messages):
        if message.role in ("system", "developer"):
            yield _developer(message.text, None)
        elif message.role == "user":
            yield Message.from_role_and_content(Role.USER, message.text)
        elif message.role == "tool":
            author = Author.new(Role.TOOL, f"functions.{names[str(message.tool_call_id)]}")
            result = Message.from_author_and_content(author, message.text)
            yield result.with_channel("commentary").with_recipient("assistant")
        else:
            if message.reasoning and not any(final >= index for final in finals):
                reply = Message.from_role_and_content(Role.ASSISTANT, message.reasoning)
                yield reply.with_channel("analysis")
            for call in message.calls:
                reply = Message.from_role_and_content(Role.ASSISTANT, call.arguments)
                reply = reply.with_channel("commentary").with_recipient(f"functions.{call.name}")
                yield reply.with_content_type("json")
            if message.content:
                reply = Message.from_role_and_content(Role.ASSISTANT, message.text)
                yield reply.with_channel("final")


def _developer(instructions: str | None, case: ChatCase | None) -> "Message":
    from openai_harmony import DeveloperContent, Message, Role, ToolDescription

    content = DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if case is not None and case.tools:
        described = [
            ToolDescription.new(f["name"], f["description"], parameters=f["parameters"])
            for f in (tool["function"] for tool in tools(case.tools))
        ]
        content = content.with_function_tools(described)
    return Message.from_role_and_content(Role.DEVELOPER, content)


def request(case: ChatCase, reasoning_field: str | None) -> Json:
    """The body of /v1/chat/completions, without the model."""
    body: Json = {"messages": [_message(message, reasoning_field) for message in case.messages]}
    if case.tools:
        body["tools"] = tools(case.tools)
    if case.reasoning_effort is not None:
        body["reasoning_effort"] = case.reasoning_effort
    if case.response_format:
        schema = {"name": "city", "schema": _SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _message(message: ChatMessage, reasoning_field: str | None) -> Json:
    content = list(message.content) if isinstance(message.content, tuple) else message.content
    body: Json = {"role": message.role, "content": content}
    if message.reasoning is not None and reasoning_field is not None:
        body[reasoning_field] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.model_dump(exclude={"id"})}
            for call in message.calls
        ]
    return body


def becomes_its_harmony(api: Api, case: ChatCase, environment: Mapping[str, str]) -> None:
    """The server makes of a chat what harmony makes of it, and counts it. `environment`: of the
    server, as far as it is known: it may pin the date. Raises NotRun: harmony is not at hand, or
    the server tells neither ids nor usage."""
    encoding()
    if api.capabilities.can("chat_token_ids"):
        ids, counted = _rendered(api, case)
        require(counted == len(ids), f"usage of {len(ids)} prompt tokens", counted, f"{case}")
        _hold(case, ids, environment)
    else:
        _counts_what_it_is_told(api, case)


def _rendered(api: Api, case: ChatCase) -> tuple[list[int], int]:
    answer = _ask(api, case, return_token_ids=True)
    ids = list(answer.get("prompt_token_ids") or [])
    require(ids, "prompt_token_ids with a chat (return_token_ids)", "none", f"{case}")
    return ids, int(answer["usage"]["prompt_tokens"])


def _ask(api: Api, case: ChatCase, **options: Any) -> Json:
    body = request(case, api.capabilities.file.reasoning_field)
    return api.send_chat(body.pop("messages"), **{"max_tokens": 1, **body, **options})


def _hold(case: ChatCase, ids: Sequence[int], environment: Mapping[str, str]) -> None:
    parts = read(ids)
    system = encoding().decode(list(parts[0].content)) if parts else ""
    match = _DATE.search(system)
    date = match[1] if match else "none"
    # Days that may be today where the server is, or the one that it was given.
    now, hours = datetime.datetime.now(datetime.UTC), (-14, 0, 14)
    dates = [str((now + datetime.timedelta(hours=h)).date()) for h in hours]
    if environment.get(START_DATE):
        dates = [environment[START_DATE]]
    hint = f"; a date that it was given belongs in the profile's engine.environment: {START_DATE}"
    requirement = f"the date {' or '.join(dates)} in the system message"
    require(date in dates, requirement, f"{date}{hint}", f"{case}")
    ways = [read(rendered(case, date, in_system=each)) for each in (False, True)]
    if case.response_format:
        parts = [_without_formats(part) for part in parts]
    if parts not in ways:
        pairs = enumerate(zip(ways[0], parts, strict=False))
        index = next((n for n, (a, b) in pairs if a != b), min(len(ways[0]), len(parts)))
        mine, other = (
            _shown(x[index], x) if index < len(x) else "the end" for x in (ways[0], parts)
        )
        raise Unmet(Fact(mine, other, f"{case}: message {index}"))


def _without_formats(part: Part) -> Part:
    """A schema may also be told at the end of the developer message, as harmony's guide has it."""
    if part.author != "developer":
        return part
    text, formats, _ = encoding().decode(list(part.content)).partition(_FORMATS)
    return part._replace(content=tuple(encoding().encode(text))) if formats else part


def _shown(part: Part, beside: Sequence[Part]) -> str:
    head = [part.author, part.channel, part.recipient and f"to={part.recipient}", part.kind]
    control = [token for token in part.content if token >= 199_998]
    text = encoding().decode(list(part.content))
    note = f", with {len(control)} control tokens" if control else ""
    end = f", ended by {part.end}" if beside[-1] is not part else ""
    return f"{' '.join(filter(None, head))} {text!r} ({len(part.content)} tokens{note}{end})"


# Where a server tells no ids.

#: Added to a text, so that usage must grow; where it joins the text, a token or two may be saved.
_MORE = " and again, and once more, and again, and once more"
_JOINED = 2


def _counts_what_it_is_told(api: Api, case: ChatCase) -> None:
    """Usage grows with every text and with the tools, and not with reasoning that is left out."""
    total = _prompt_tokens(api, case)
    more = count(_MORE) - _JOINED
    for index, message in enumerate(case.messages):
        of = f"{case}, message {index} ({message.role})"
        if message.text:
            longer = _with(case, index, content=message.text + _MORE)
            grown = _prompt_tokens(api, longer) - total
            require(grown >= more, f"usage of {more} more, for as many in the text", grown, of)
        if message.text and "<|" in message.text:
            neutral = message.text.replace("<|", "<!").replace("|>", "!>")
            least = count(message.text) - count(neutral) - _JOINED
            grown = total - _prompt_tokens(api, _with(case, index, content=neutral))
            requirement = f"usage as of a text: at least {least:+} against {neutral!r}"
            require(grown >= least, requirement, f"{grown:+}", of)
        if message.reasoning is not None and api.capabilities.file.reasoning_field is not None:
            longer = _with(case, index, reasoning=message.reasoning + _MORE)
            grown = _prompt_tokens(api, longer) - total
            whole = read(rendered(case, "2026-01-31"))
            analyses = (list(part.content) for part in whole if part.channel == "analysis")
            stays = message.reasoning in map(encoding().decode, analyses)
            requirement = f"reasoning that is {'kept' if stays else 'left out'}, in usage too"
            right = grown >= more if stays else grown == 0
            require(right, requirement, f"{grown:+} tokens", of)
    if case.tools:
        functions = [tool["function"] for tool in tools(case.tools)]
        least = sum(count(f["name"]) + count(f["description"]) for f in functions)
        grown = total - _prompt_tokens(api, case.model_copy(update={"tools": 0}))
        require(grown >= least, f"usage of {least} more with the tools", grown, f"{case}")


def _with(case: ChatCase, index: int, **change: str) -> ChatCase:
    messages = list(case.messages)
    messages[index] = messages[index].model_copy(update=change)
    return case.model_copy(update={"messages": tuple(messages)})


def _prompt_tokens(api: Api, case: ChatCase) -> int:
    if not (usage := _ask(api, case).get("usage")):
        raise NotRun("this check needs prompt_token_ids or usage with a chat; the engine has none")
    return int(usage["prompt_tokens"])


#: Chats of which the answer shows whether they were read, and a change that must change it.
TELLING: dict[str, Callable[[ChatCase], ChatCase]] = {
    "system": lambda case: _reworded(case, "system", "rude"),
    "developer": lambda case: _reworded(case, "developer", "long"),
    "turns": lambda case: _reworded(case, "assistant", "Rome."),
    "tool-result-and-its-reasoning": lambda case: _reworded(case, "tool", "{}"),
    "effort-high": lambda case: case.model_copy(update={"reasoning_effort": "low"}),
    "tools": lambda case: case.model_copy(update={"tools": 0}),
}


def _reworded(case: ChatCase, role: str, text: str) -> ChatCase:
    index = next(n for n, message in enumerate(case.messages) if message.role == role)
    return _with(case, index, content=text)


def answer_is_to_the_chat(
    api: Api, case: ChatCase, bound: level_settings.AgreementBound, environment: Mapping[str, str]
) -> None:
    """The answer is the one that the tokens of harmony's own rendering have, by its tokens and
    log-probabilities; where the server takes or tells no ids, it depends on what the chat says.
    Raises NotRun: the server tells no log-probabilities of a chat, or its noise hides the
    difference."""
    encoding()
    can = api.capabilities.can
    if can("chat_token_ids") and can("token_prompts") and can("logprobs"):
        _equals_a_completion(api, case, bound, environment)
        return
    first, again, changed = (_positions(api, each) for each in (case, case, TELLING[case.id](case)))
    noise, difference = _apart(first, again), _apart(first, changed)
    if 0 < difference <= noise:
        raise NotRun(f"{case}: one chat asked twice differs by {noise:.3g} nats, as another does")
    requirement = "another answer, or other log-probabilities, to another chat"
    require(difference > noise, requirement, "the same ones", f"{case}")


_ANSWER_TOKENS = 12
_NAMES: Json = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def _equals_a_completion(
    api: Api, case: ChatCase, bound: level_settings.AgreementBound, environment: Mapping[str, str]
) -> None:
    ids, _ = _rendered(api, case)
    _hold(case, ids, environment)
    of_chat = _positions(api, case, **_NAMES)

    def ask(prefix: tuple[int, ...]) -> tuple[Position, ...] | None:
        tokens = len(of_chat) - len(prefix)
        answer = api.complete([*ids, *prefix], max_tokens=tokens, logprobs=5, **_NAMES)
        return parse(answer).positions

    alone = ask(())
    require(alone, "log-probabilities", "none", f"{case}")
    if (wrong := agreement.judge(of_chat, alone or (), bound, ask).disagreement) is not None:
        raise Unmet(*of(f"{case}: a chat against /v1/completions of its prompt_token_ids", [wrong]))


def _positions(api: Api, case: ChatCase, **options: Any) -> tuple[Position, ...]:
    api.capabilities.require("chat_logprobs")
    body = {"max_tokens": _ANSWER_TOKENS, "logprobs": True, "top_logprobs": 5, **options}
    positions = parse(_ask(api, case, **body)).positions
    require(positions, "log-probabilities of a chat", "none", f"{case}")
    return positions or ()


def _apart(mine: Sequence[Position], other: Sequence[Position]) -> float:
    """Largest difference of a log-probability up to the first other token, that one included."""
    largest = 0.0
    for a, b in zip(mine, other, strict=False):
        shared = a.top.keys() & b.top.keys()
        largest = max([largest, *(abs(a.top[t] - b.top[t]) for t in shared)])
        if a.token != b.token:
            return max(largest, 1.0)
    return largest
