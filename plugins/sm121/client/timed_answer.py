"""What a streamed answer said, and when: from stamped socket reads to counted tokens."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sm121.client.sse import DONE, EventParser

#: How tokens are counted: by the ids that the server sends with each chunk, by its continuous
#: usage, or a token a chunk.
Clock = Literal["token_ids", "usage", "chunks"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event with a choice."""

    at_ns: int
    #: Token ids in it; None when it has no such field.
    ids: int | None
    #: The server's running count of completion tokens, None without continuous usage.
    counted: int | None
    #: It has content, reasoning or a tool call, visible or not.
    text: bool
    #: It has what a user sees: content.
    visible: bool
    finish: str | None
    #: Bytes of data since the chunk before it, its own included.
    size: int = 0


class Arrival(NamedTuple):
    """A chunk that carries a generated token."""

    at_ns: int
    #: Tokens so far, its own included.
    tokens: int
    #: Bytes since the arrival before it.
    size: int


@dataclass(slots=True)
class TimedAnswer:
    """One request: when it was sent, what came back, and what went wrong if something did."""

    sent_ns: int
    ended_ns: int = 0
    asked_tokens: int = 0
    asked_prompt: int = 0
    #: The fixed text that its prompt ends with; empty where the prompt is of random tokens.
    text: str = ""
    #: What was answered: the text of a completion, the content of a chat.
    content: str = ""
    status: int | None = None
    error: str | None = None
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Length of the prompt that the server says it was given, from the ids it returned.
    prompt_ids: int | None = None
    cached_tokens: int | None = None
    #: Times that it was sent again, since the server had ended the idle connection.
    retries: int = 0
    redirected_to: str | None = None
    #: Bytes of events without a choice that came since the last one with a choice.
    unclaimed_bytes: int = 0
    #: The worst delay of our own that could be in: the sending, the first token, the last one.
    lag_ns: tuple[int, int, int] = (0, 0, 0)

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None

    def clock(self) -> Clock | None:
        """The best clock that this answer allows; None when it carries no token at all."""
        spoken = [chunk for chunk in self.chunks if chunk.text]
        with_ids = [chunk for chunk in self.chunks if chunk.ids]
        if with_ids and all(chunk.ids for chunk in spoken):
            return "token_ids"
        counting = [chunk for chunk in self.chunks if chunk.counted]
        if counting and all(chunk.counted for chunk in spoken):
            return "usage"
        return "chunks" if spoken else None

    def arrivals(self, clock: Clock) -> list[Arrival]:
        """The chunks that carry a generated token."""
        arrivals: list[Arrival] = []
        total = size = 0
        for chunk in self.chunks:
            if clock == "token_ids":
                fresh = chunk.ids or 0
            elif clock == "usage":
                fresh = (chunk.counted or total) - total
            else:
                fresh = int(chunk.text)
            size += chunk.size
            if fresh > 0:
                total += fresh
                arrivals.append(Arrival(chunk.at_ns, total, size))
                size = 0
        return arrivals

    def tokens(self, clock: Clock) -> int:
        """Tokens that arrived, by that clock."""
        arrivals = self.arrivals(clock)
        return arrivals[-1].tokens if arrivals else 0


def read_answer(answer: TimedAnswer, reads: Iterable[tuple[int, bytes]]) -> None:
    """Fill in what the stamped reads of a streamed body say. A chunk has the time of the read that
    completed it. What cannot be understood makes the answer one that failed."""
    parser = EventParser()
    for at_ns, piece in reads:
        for data in parser.feed(piece):
            if data != DONE:
                read_event(answer, at_ns, data)


def read_event(answer: TimedAnswer, at_ns: int, data: bytes) -> None:
    """Fill in what one event says, or the body of an answer that was not streamed."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        answer.error = answer.error or f"bad-event: not JSON: {data[:120]!r}"
        return
    if not isinstance(event, dict):
        return
    if "error" in event and not event.get("choices"):
        answer.error = answer.error or f"error-event: {str(event['error'])[:200]}"
        return
    answer.unclaimed_bytes += len(data)
    usage = event.get("usage") or {}
    counted = usage.get("completion_tokens")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.completion_tokens = counted
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            answer.cached_tokens = details["cached_tokens"]
    for choice in event.get("choices") or ():
        message = choice.get("delta") or choice.get("message") or {}
        ids = choice.get("token_ids")
        if prompt_ids := choice.get("prompt_token_ids") or event.get("prompt_token_ids"):
            answer.prompt_ids = len(prompt_ids)
        content = choice.get("text") or message.get("content") or ""
        answer.content += content if isinstance(content, str) else ""
        visible = bool(content)
        hidden = any(message.get(k) for k in ("reasoning", "reasoning_content", "tool_calls"))
        answer.chunks.append(
            Chunk(
                at_ns=at_ns,
                ids=None if ids is None else len(ids),
                counted=counted,
                text=visible or hidden,
                visible=visible,
                finish=choice.get("finish_reason"),
                size=answer.unclaimed_bytes,
            )
        )
        answer.unclaimed_bytes = 0
