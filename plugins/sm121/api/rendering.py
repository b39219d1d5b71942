"""Render chats with oss-harmony, and parse rendered prompts.

oss-harmony renders the messages of a `ChatCase`. `parse_prompt` parses the ids of any rendering
into its messages, so that two renderings can be compared. Headers are compared field by field,
because oss-harmony and vLLM write the recipient of a call at different positions. gpt-oss was
trained on both.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sm121.api import harmony
from sm121.api.chats import ChatCase, ChatMessage
from sm121.api.tools import tools
from sm121.core.verdict import NotRun

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, Message

#: An arbitrary date for renderings of which only the length is used.
ANY_DATE = "2026-01-31"
_TO = re.compile(r" to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
#: If a prompt does not begin with <|start|>, this many tokens of its beginning are kept.
_KEPT = 16


class PromptMessage(NamedTuple):
    """One message of a prompt. The last message, which the model continues, has no content."""

    author: str
    #: The channel. `channel`, `recipient` and `kind` are empty if the header lacks them.
    channel: str
    recipient: str
    #: The content type, for example ``json``.
    kind: str
    content: tuple[int, ...]
    #: The token that ends the message; None if there is none.
    end: int | None


def parse_prompt(ids: Sequence[int]) -> list[PromptMessage]:
    """Parse the ids of a prompt into its messages.

    Args:
        ids: The token ids.

    Returns:
        The messages. If the first token is not <|start|>, the first part has the beginning of the
        prompt.

    Raises:
        NotRun: oss-harmony is not installed.
    """
    starts = [index for index, token in enumerate(ids) if token == harmony.START]
    parts = []
    if starts[:1] != [0]:
        parts.append(PromptMessage("(no <|start|>)", "", "", "", tuple(ids[:_KEPT]), None))
    for start, stop in itertools.pairwise([*starts, len(ids)]):
        parts.append(_read_message(list(ids[start + 1 : stop])))
    return parts


def _read_message(ids: list[int]) -> PromptMessage:
    """Parse the tokens of one message, without its <|start|>."""
    cut = ids.index(harmony.MESSAGE) if harmony.MESSAGE in ids else len(ids)
    body = ids[cut + 1 :]
    end = None
    if body and body[-1] in harmony.ENDS:
        end = body.pop()
    header = encoding().decode(ids[:cut])
    recipient = _TO.search(header)
    channel = _CHANNEL.search(header)
    words = _CHANNEL.sub(" ", _TO.sub(" ", header)).replace("<|constrain|>", " ").split()
    return PromptMessage(
        author=words[0] if words else "",
        channel=channel[1] if channel else "",
        recipient=recipient[1] if recipient else "",
        kind=" ".join(words[1:]),
        content=tuple(body),
        end=end,
    )


@functools.cache
def encoding() -> "HarmonyEncoding":
    """Load harmony's rules from OpenAI's package.

    Raises:
        NotRun: The package or its vocabulary is missing.
    """
    try:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    except ImportError as error:
        raise NotRun(
            "the rendering of a chat is compared with OpenAI's harmony, which is not installed. In "
            "an environment without vLLM: pip install oss-harmony (it needs no network afterwards)"
        ) from error
    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # HarmonyError, or an error of the package's Rust code
        raise NotRun(
            f"harmony's vocabulary cannot be loaded ({error}). Write it with sm121 vocabulary DIR "
            "in a separate environment with oss-harmony, which overwrites a module of vLLM's, and "
            "set TIKTOKEN_ENCODINGS_BASE=DIR"
        ) from error


def rendered(case: ChatCase, date: str, *, in_system: bool = False) -> list[int]:
    """Render a chat with oss-harmony.

    Args:
        case: The chat.
        date: The date in the system message, for example "2026-01-31".
        in_system: Whether to put the first instructions into the system message, as vLLM does with
            ``VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS``.

    Returns:
        The token ids of the prompt.

    Raises:
        NotRun: oss-harmony or its vocabulary is missing.
    """
    # Call encoding() before the import, because its error names the package to install.
    rules = encoding()
    from openai_harmony import Conversation, RenderConversationConfig, Role

    conversation = Conversation.from_messages(list(_messages(case, date, in_system=in_system)))
    config = RenderConversationConfig(auto_drop_analysis=False)
    ids = rules.render_conversation_for_completion(conversation, Role.ASSISTANT, config=config)
    return list(ids)


def count(text: str, *, special: bool = False) -> int:
    """Return the number of tokens of a text.

    Args:
        text: The text.
        special: Whether to encode the texts of special tokens as these tokens.

    Raises:
        NotRun: oss-harmony or its vocabulary is missing.
    """
    allowed: Any = "all" if special else set()
    return len(encoding().encode(text, allowed_special=allowed, disallowed_special=()))


def _messages(case: ChatCase, date: str, *, in_system: bool) -> "Iterator[Message]":
    """Yield harmony's messages of a chat, the system message first."""
    from openai_harmony import Message, ReasoningEffort, Role, SystemContent

    messages = list(case.messages)
    first = None
    if messages[0].role in ("system", "developer"):
        first = messages.pop(0).text
    system = SystemContent.new().with_conversation_start_date(date)
    if case.reasoning_effort is not None:
        system = system.with_reasoning_effort(ReasoningEffort(case.reasoning_effort.capitalize()))
    if in_system and first is not None:
        system = system.with_model_identity(f"{system.model_identity}\n{first}")
        first = None
    yield Message.from_role_and_content(Role.SYSTEM, system)
    if first is not None or case.tools:
        yield _developer(first, case.tools)
    tool_names: dict[str, str] = {}
    for message in messages:
        for call in message.calls:
            tool_names[call.id] = call.name
    # Harmony omits reasoning before a final message, because reasoning belongs only to the current
    # turn.
    finals = [n for n, m in enumerate(messages) if m.role == "assistant" and m.content]
    for index, message in enumerate(messages):
        if message.role in ("system", "developer"):
            yield _developer(message.text, 0)
        elif message.role == "user":
            yield Message.from_role_and_content(Role.USER, message.text)
        elif message.role == "tool":
            yield _tool_result(message, tool_names[str(message.tool_call_id)])
        else:
            final_follows = any(final >= index for final in finals)
            yield from _assistant(message, with_reasoning=not final_follows)


def _tool_result(message: ChatMessage, name: str) -> "Message":
    from openai_harmony import Author, Message, Role

    author = Author.new(Role.TOOL, f"functions.{name}")
    result = Message.from_author_and_content(author, message.text)
    return result.with_channel("commentary").with_recipient("assistant")


def _assistant(message: ChatMessage, *, with_reasoning: bool) -> "Iterator[Message]":
    """Yield the messages of one turn: reasoning, calls, and the final message."""
    from openai_harmony import Message, Role

    if message.reasoning and with_reasoning:
        reply = Message.from_role_and_content(Role.ASSISTANT, message.reasoning)
        yield reply.with_channel("analysis")
    for call in message.calls:
        reply = Message.from_role_and_content(Role.ASSISTANT, call.arguments)
        reply = reply.with_channel("commentary").with_recipient(f"functions.{call.name}")
        yield reply.with_content_type("json")
    if message.content:
        reply = Message.from_role_and_content(Role.ASSISTANT, message.text)
        yield reply.with_channel("final")


def _developer(instructions: str | None, tool_count: int) -> "Message":
    from openai_harmony import DeveloperContent, Message, Role, ToolDescription

    content = DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tool_count:
        descriptions = []
        for tool in tools(tool_count):
            function = tool["function"]
            description = ToolDescription.new(
                function["name"], function["description"], parameters=function["parameters"]
            )
            descriptions.append(description)
        content = content.with_function_tools(descriptions)
    return Message.from_role_and_content(Role.DEVELOPER, content)
