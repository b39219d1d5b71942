"""Completions as data classes, and the parser of the JSON that servers send.

The parser reads the formats of OpenAI's /v1/completions, /v1/chat/completions and /v1/responses. It
also reads the token ids and prompt log-probabilities of vLLM, and the token ids of llama-server.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm121.core.unmet import Fact, Unmet, require

#: A prompt: a text, or token ids.
Prompt = str | tuple[int, ...]
#: The prefix of a token's name if the request sets vLLM's ``return_tokens_as_token_ids``.
_ID = "token_id:"


@dataclass(frozen=True)
class Position:
    """One generated token, with the likeliest tokens at its position.

    A token is identified by ``token_id:N`` if the engine sends ids, or else by its text.

    Attributes:
        token: The generated token.
        log_probability: The token's log-probability; NaN if the server sent no number.
        top: The log-probability of each of the most likely tokens.
    """

    token: str
    log_probability: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Completion:
    """A completion. Fields that the engine did not send are None."""

    text: str
    finish_reason: str | None
    #: The ids of the generated tokens.
    ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    #: One position per generated token.
    positions: tuple[Position, ...] | None
    #: One log-probability for each token of the prompt, beginning with the second token.
    prompt_log_probabilities: tuple[float, ...] | None
    #: ``usage.completion_tokens``.
    completion_tokens: int | None
    #: ``usage.prompt_tokens``.
    prompt_tokens: int | None
    #: For each token of the prompt, beginning with the second one, the log-probabilities of the
    #: likeliest tokens; the keys are token ids.
    prompt_tops: tuple[Mapping[int, float], ...] | None = None


def parse(*parts: Mapping[str, Any]) -> Completion:
    """Parse a completion.

    Args:
        *parts: The JSON answer of /v1/completions, /v1/chat/completions or /v1/responses; or the
            chunks of a stream from /v1/completions or /v1/chat/completions.

    Returns:
        The completion. The texts, ids and positions of several choices are joined.

    Raises:
        Unmet: The answer has no choice.
    """
    if parts and "output" in parts[0]:
        parts = (_from_response(parts[0]),)
    choices: list[Mapping[str, Any]] = []
    usage: Mapping[str, Any] = {}
    for part in parts:
        choices.extend(part.get("choices") or ())
        usage = part.get("usage") or usage
    if not choices:
        raise Unmet(Fact("an answer with choices"))
    finish_reason = None
    ids: list[int] = []
    positions: list[Position] = []
    prompt_ids = None
    for choice in choices:
        finish_reason = choice.get("finish_reason") or finish_reason
        if choice.get("token_ids") is not None:
            ids.extend(choice["token_ids"])
        positions.extend(_parse_positions(choice.get("logprobs")))
        prompt_ids = prompt_ids or choice.get("prompt_token_ids")
    if not ids and positions:
        # llama-server sends the ids only in the log-probabilities.
        ids.extend(ids_of(positions) or ())
    prompt_tops = _parse_prompt_tops(choices[0].get("prompt_logprobs"), prompt_ids)
    return Completion(
        text="".join(text_of(choice) for choice in choices),
        finish_reason=finish_reason,
        ids=tuple(ids) or None,
        prompt_ids=tuple(prompt_ids) if prompt_ids else None,
        positions=tuple(positions) or None,
        prompt_log_probabilities=_prompt_log_probabilities(prompt_ids, prompt_tops),
        completion_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        prompt_tops=prompt_tops,
    )


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice.

    Args:
        choice: The JSON of a choice, from a whole answer or from one chunk of a stream.

    Returns:
        For a completion, its text. For a chat, its reasoning, content and tool calls, joined.
    """
    text = choice.get("text")
    if isinstance(text, str):
        return text
    message = choice.get("message") or choice.get("delta") or {}
    texts = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        texts.append(function.get("name"))
        texts.append(function.get("arguments"))
    return "".join(text for text in texts if text)


def ids_of(positions: Sequence[Position]) -> tuple[int, ...] | None:
    """Return the token ids that the names of tokens contain.

    Args:
        positions: The tokens.

    Returns:
        One id for each position; None if any token is identified only by its text.
    """
    ids: list[int] = []
    for position in positions:
        token_id = id_of(position.token)
        if token_id is None:
            return None
        ids.append(token_id)
    return tuple(ids)


def id_of(name: str) -> int | None:
    """Return the id in the name of a token.

    Args:
        name: The name in an answer's log-probabilities, for example ``token_id:7``.

    Returns:
        The id; None if the name is the token's text.

    Raises:
        ValueError: The text after ``token_id:`` is not an integer.
    """
    if not name.startswith(_ID):
        return None
    return int(name.removeprefix(_ID))


def name_of(token_id: int) -> str:
    """Return the engine's name of a token id, ``token_id:N``.

    Args:
        token_id: The id.
    """
    return f"{_ID}{token_id}"


def _from_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of /v1/responses in the format of /v1/completions."""
    text = ""
    for item in response["output"]:
        for part in item.get("content") or ():
            text += part.get("text") or ""
    usage = response.get("usage") or {}
    counts = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
    }
    return {"choices": [{"text": text, "finish_reason": response.get("status")}], "usage": counts}


def _parse_positions(entries: Mapping[str, Any] | None) -> list[Position]:
    """Parse the ``logprobs`` of a choice, in the format of a chat or of a completion."""
    if not isinstance(entries, Mapping):
        return []
    if entries.get("content"):
        return [_parse_position(item or {}) for item in entries["content"]]
    tokens = entries.get("tokens")
    if not tokens or entries.get("token_logprobs") is None:
        return []
    values = entries["token_logprobs"]
    tops = entries.get("top_logprobs") or [None] * len(tokens)
    lengths = {len(tokens), len(values), len(tops)}
    require(len(lengths) == 1, f"log-probabilities of {len(tokens)} tokens", sorted(lengths))
    positions: list[Position] = []
    for token, value, top in zip(tokens, values, tops, strict=True):
        numbers = {str(name): _number(number) for name, number in (top or {}).items()}
        positions.append(Position(str(token), _number(value), numbers))
    return positions


def _parse_position(item: Mapping[str, Any]) -> Position:
    """Parse a token of a chat, or of a completion of llama-server."""
    tops = [top for top in item.get("top_logprobs") or () if top]
    return Position(
        token=_token_name(item),
        log_probability=_number(item.get("logprob")),
        top={_token_name(top): _number(top.get("logprob")) for top in tops},
    )


def _token_name(item: Mapping[str, Any]) -> str:
    """Return ``token_id:N`` if the engine sent the token's id, else the token's text."""
    token_id = item.get("id")
    if isinstance(token_id, int):
        return name_of(token_id)
    return str(item.get("token"))


def _parse_prompt_tops(
    entries: Sequence[Mapping[str, Any] | None] | None, ids: Sequence[int] | None
) -> tuple[Mapping[int, float], ...] | None:
    """Parse vLLM's ``prompt_logprobs``, from the second token on."""
    if entries is None or ids is None:
        return None
    require(len(entries) == len(ids), f"prompt_logprobs of {len(ids)} tokens", len(entries))
    tops: list[Mapping[int, float]] = []
    for entry in entries[1:]:
        top: dict[int, float] = {}
        for token, value in (entry or {}).items():
            if value:
                top[int(token)] = _number(value["logprob"])
        tops.append(top)
    return tuple(tops)


def _prompt_log_probabilities(
    ids: Sequence[int] | None, tops: Sequence[Mapping[int, float]] | None
) -> tuple[float, ...] | None:
    """Return the log-probability of each token of the prompt, from the second on."""
    if ids is None or tops is None:
        return None
    return tuple(top.get(token, math.nan) for token, top in zip(ids[1:], tops, strict=True))


def _number(value: Any) -> float:
    """Return a JSON number as a float, or NaN for any other value."""
    return float(value) if isinstance(value, int | float) else math.nan
