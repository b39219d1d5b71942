"""Convert socket reads with timestamps to timed answers with counted tokens."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sm121.client.sse import DONE, EventParser

#: How tokens are counted: by the ids in each chunk, by continuous usage, or one token per chunk.
Clock = Literal["token_ids", "usage", "chunks"]
#: Fields of a message other than ``content`` that contain generated tokens.
_HIDDEN_FIELDS = ("reasoning", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event that contains a choice."""

    #: When the socket read that completed the event ended (``time.perf_counter_ns``).
    at_ns: int
    #: The number of token ids in the event; None if it has no such field.
    ids: int | None
    #: The number of completion tokens so far, as reported by the server; None if it sends no
    #: continuous usage.
    counted: int | None
    #: Whether the event has content, reasoning or a tool call.
    text: bool
    #: Whether the event has content that users read.
    visible: bool
    #: The finish_reason in the event.
    finish: str | None
    #: The bytes of data since the previous chunk, including this chunk.
    size: int = 0
    #: The number of characters of the visible text that are not ASCII.
    wide: int = 0


class Arrival(NamedTuple):
    """A chunk that carries a generated token."""

    #: The time of the chunk (``time.perf_counter_ns``).
    at_ns: int
    #: The number of tokens so far, including those of this chunk.
    tokens: int
    #: The bytes of data since the previous arrival.
    size: int


@dataclass(slots=True)
class TimedAnswer:
    """The answer to one request. Times are values of ``time.perf_counter_ns``."""

    #: When the request was sent.
    sent_ns: int
    #: When the answer ended or failed.
    ended_ns: int = 0
    #: The number of tokens that the request sets.
    asked_tokens: int = 0
    #: The number of tokens of the prompt.
    asked_prompt: int = 0
    #: The name of the fixed text that ends the prompt; empty if the prompt has random tokens.
    text: str = ""
    #: The text of the completion, or the content of the chat.
    content: str = ""
    #: The HTTP status; None if no answer arrived.
    status: int | None = None
    #: Why the request failed; None if it did not fail.
    error: str | None = None
    chunks: list[Chunk] = field(default_factory=list)
    #: ``usage.prompt_tokens`` of the last event with usage.
    prompt_tokens: int | None = None
    #: ``usage.completion_tokens`` of the last event with usage.
    completion_tokens: int | None = None
    #: The number of prompt ids that the server returned.
    prompt_ids: int | None = None
    #: ``usage.prompt_tokens_details.cached_tokens``.
    cached_tokens: int | None = None
    #: How often the request was sent again because the server had closed an idle connection.
    retries: int = 0
    #: The address of a redirect, which the client does not follow.
    redirected_to: str | None = None
    #: The bytes of events without a choice that follow the last event with a choice.
    unclaimed_bytes: int = 0
    #: The delays that the client itself added to three timestamps: of the request, of the first
    #: token and of the last token.
    lag_ns: tuple[int, int, int] = (0, 0, 0)

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    def clock(self) -> Clock | None:
        """Return the most exact way to count this answer's tokens; None if it has no token."""
        with_text = [chunk for chunk in self.chunks if chunk.text]
        with_ids = [chunk for chunk in self.chunks if chunk.ids]
        if with_ids and all(chunk.ids for chunk in with_text):
            return "token_ids"
        counting = [chunk for chunk in self.chunks if chunk.counted]
        if counting and all(chunk.counted for chunk in with_text):
            return "usage"
        return "chunks" if with_text else None

    def arrivals(self, clock: Clock) -> list[Arrival]:
        """Return the chunks that carry a generated token.

        Args:
            clock: How tokens are counted.

        Returns:
            One arrival for each chunk with new tokens.
        """
        arrivals: list[Arrival] = []
        total = 0
        size = 0
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
        """Return the number of generated tokens.

        Args:
            clock: How tokens are counted.
        """
        arrivals = self.arrivals(clock)
        return arrivals[-1].tokens if arrivals else 0


def read_answer(answer: TimedAnswer, reads: Iterable[tuple[int, bytes]]) -> None:
    """Parse a streamed body into an answer. Malformed data sets the answer's error.

    Args:
        answer: The answer, whose fields are set.
        reads: The time and the bytes of each socket read. A chunk has the time of the read that
            completed it.
    """
    parser = EventParser()
    for at_ns, piece in reads:
        for data in parser.feed(piece):
            if data != DONE:
                read_event(answer, at_ns, data)


def read_event(answer: TimedAnswer, at_ns: int, data: bytes) -> None:
    """Parse one event, or the whole body of an answer that is not streamed.

    Args:
        answer: The answer, whose fields are set.
        at_ns: When the data arrived.
        data: The JSON. Malformed data sets the answer's error.
    """
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
        _read_usage(answer, usage)
    for choice in event.get("choices") or ():
        message = choice.get("delta") or choice.get("message") or {}
        ids = choice.get("token_ids")
        prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
        if prompt_ids:
            answer.prompt_ids = len(prompt_ids)
        content = choice.get("text") or message.get("content") or ""
        wide = 0
        if isinstance(content, str):
            answer.content += content
            if not content.isascii():
                wide = sum(not character.isascii() for character in content)
        visible = bool(content)
        hidden = any(message.get(key) for key in _HIDDEN_FIELDS)
        answer.chunks.append(
            Chunk(
                at_ns=at_ns,
                ids=None if ids is None else len(ids),
                counted=counted,
                text=visible or hidden,
                visible=visible,
                finish=choice.get("finish_reason"),
                size=answer.unclaimed_bytes,
                wide=wide,
            )
        )
        answer.unclaimed_bytes = 0


def _read_usage(answer: TimedAnswer, usage: Mapping[str, Any]) -> None:
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
    answer.completion_tokens = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        answer.cached_tokens = details["cached_tokens"]
