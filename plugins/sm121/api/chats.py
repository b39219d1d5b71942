"""Load the chats of ``fixtures/api/chats.toml``, which check how servers render prompts."""

from typing import Literal

from pydantic import Field

from sm121.api.client import Json
from sm121.api.tools import tools
from sm121.core import data_file

#: The schema of `ChatCase.response_format`.
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Call(data_file.DataTable):
    """A tool call of an assistant's message."""

    id: str
    name: str
    #: The arguments, as the text of a JSON object.
    arguments: str


class ChatMessage(data_file.DataTable):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    #: The content: a text, or a list of parts.
    content: str | tuple[dict[str, str], ...] | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    #: For a tool's message, the id of the call that it answers.
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, tuple):
            return "".join(part["text"] for part in self.content)
        return self.content or ""


class ChatCase(data_file.DataTable):
    """A chat and the options of its request."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    #: The number of tools that the request offers.
    tools: int = 0
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    #: Whether the request contains a JSON schema for the answer.
    response_format: bool = False

    def __str__(self) -> str:
        return self.id

    def with_message(self, index: int, **change: str) -> "ChatCase":
        """Return a copy with changed fields of one message.

        Args:
            index: The index of the message.
            **change: The new values of the message's fields.
        """
        messages = list(self.messages)
        messages[index] = messages[index].model_copy(update=change)
        return self.model_copy(update={"messages": tuple(messages)})


class ChatFile(data_file.DataTable):
    """The file of all chats."""

    schema_version: Literal[1]
    chat: tuple[ChatCase, ...]


def load_chats() -> tuple[ChatCase, ...]:
    """Load the chats that come with the suite.

    Raises:
        UsageError: The file is not valid.
    """
    return data_file.load("api/chats.toml", ChatFile).chat


def find_chat(name: str) -> ChatCase:
    """Return the chat with an id.

    Args:
        name: The id of a chat in ``fixtures/api/chats.toml``.

    Raises:
        StopIteration: There is no such chat.
    """
    return next(case for case in load_chats() if case.id == name)


def chat_body(case: ChatCase, reasoning_field: str | None) -> Json:
    """Return the body of a /v1/chat/completions request, without the model.

    Args:
        case: The chat.
        reasoning_field: The name of the engine's field for reasoning; None if it has none.
    """
    body: Json = {"messages": [_as_json(message, reasoning_field) for message in case.messages]}
    if case.tools:
        body["tools"] = tools(case.tools)
    if case.reasoning_effort is not None:
        body["reasoning_effort"] = case.reasoning_effort
    if case.response_format:
        schema = {"name": "city", "schema": _SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _as_json(message: ChatMessage, reasoning_field: str | None) -> Json:
    content = list(message.content) if isinstance(message.content, tuple) else message.content
    body: Json = {"role": message.role, "content": content}
    if message.reasoning is not None and reasoning_field is not None:
        body[reasoning_field] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.calls:
        calls = []
        for call in message.calls:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        body["tool_calls"] = calls
    return body
