"""Check that log-probabilities are complete and finite, and belong to the chosen tokens."""

import math
from collections.abc import Mapping
from typing import Any

from sm121.answers.expected_samples import likeliest
from sm121.api import stream
from sm121.api.client import Api, Json, together
from sm121.api.sample_source import TEXTS
from sm121.api.sdk import PROMPT, Sdk
from sm121.client.completion_json import parse
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require

#: The rounding error of a log-softmax in float32 over 200,000 tokens, in nats. A server may send a
#: value up to this error above 0 in place of 0.
ROUNDING = 1e-5
#: Two tokens count as equally likely if their log-probabilities differ by less than this, in nats.
_TIED = 1e-3
#: Chats whose continuation is uncertain even for a small model, and how often each is sent.
_UNSURE = ("1, 2, 3", "Q:")
_UNSURE_TIMES = 24


def are_finite(sdk: Sdk) -> None:
    """Require finite values of at most 0 for 32 tokens, whose probabilities sum to at most 1.

    Args:
        sdk: The client of the server.

    Raises:
        Unmet: A value is missing, not finite or above 0, or probabilities sum to more than 1.
    """
    entries = sdk.exactly(32, logprobs=5).choices[0].logprobs
    values = list(getattr(entries, "token_logprobs", None) or ())
    require(len(values) == 32, "32 log-probabilities", len(values))
    tops = list(getattr(entries, "top_logprobs", None) or ())
    require(len(tops) == 32 and all(tops), "alternatives at each of 32 positions", tops[:3])
    for top in tops:
        values += top.values()
    bad = [v for v in values if v is None or not math.isfinite(v) or v > ROUNDING]
    require(not bad, "finite values of at most 0", bad[:5])
    for position, top in enumerate(tops):
        total = math.fsum(math.exp(value) for value in top.values())
        expected = f"probabilities of position {position} sum to at most 1"
        require(total <= 1.0 + ROUNDING, expected, total)


def name_the_chosen_token(api: Api) -> None:
    """Require one entry for each token of a completion, with the chosen token as the likeliest.

    If the answer ended by itself, its last token, the end token, is not part of the text.

    Args:
        api: The API of the server.

    Raises:
        Unmet: Entries are missing, their tokens do not form the text, or a listed token is likelier
            than the chosen one.
    """
    answer = api.complete(PROMPT, max_tokens=8, logprobs=2)
    choice = answer["choices"][0]
    text = choice["text"]
    entries = _entries_of(choice)
    count = answer["usage"]["completion_tokens"]
    columns = [entries.get(key) or [] for key in ("tokens", "token_logprobs", "top_logprobs")]
    lengths = {len(column) for column in columns}
    require(lengths == {count}, f"{count} entries of each field", lengths)
    tokens = columns[0]
    require(all(tokens), f"the tokens of {text!r}", tokens)
    texts = {"".join(tokens)}
    if choice.get("finish_reason") == "stop":
        texts.add("".join(tokens[:-1]))
    require(text in texts, f"the tokens of {text!r}", tokens)
    for token, value, top in zip(*columns, strict=True):
        expected = f"{token!r} with {value} as the likeliest token"
        numbers = isinstance(top, Mapping) and all(map(_is_number, (value, *top.values())))
        require(numbers, expected, top)
        require(top.get(token) == value == max(top.values(), default=None), expected, top)


def of_a_chat_are_whole(api: Api, correctness: Correctness) -> None:
    """Require a complete entry for each token of a chat: chosen token, alternatives and bytes.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: Entries or alternatives are missing; a value is not finite, above 0 or above the
            chosen token's value; or the bytes do not match the token.
    """
    question = correctness.chats[0].question
    listed = 20 if api.capabilities.can("top_logprobs_20") else 2
    answer = api.chat(question, max_tokens=12, logprobs=True, top_logprobs=listed)
    entries = _entries_of(answer["choices"][0]).get("content") or []
    count = answer["usage"]["completion_tokens"]
    require(len(entries) == count, f"{count} entries", len(entries))
    for entry in entries:
        _require_whole_entry(entry, listed)


def _entries_of(choice: Json) -> Mapping[str, Any]:
    """Return the log-probabilities of a choice; empty if the server sent no object."""
    entries = choice.get("logprobs")
    return entries if isinstance(entries, Mapping) else {}


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_entry(entry: Any) -> bool:
    """Return whether a JSON value is an object with a token and its log-probability."""
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("token"), str)
        and _is_number(entry.get("logprob"))
    )


def _require_whole_entry(entry: Json, listed: int) -> None:
    """Require ``listed`` alternatives, the chosen token as the likeliest one, and its bytes."""
    require(_is_entry(entry), "a token with its log-probability", entry)
    token = entry["token"]
    value = entry["logprob"]
    alternatives = entry.get("top_logprobs") or []
    require(all(map(_is_entry, alternatives)), "a token with each alternative", entry)
    top = [(alternative["token"], alternative["logprob"]) for alternative in alternatives]
    whole = (token, value) in top and len(top) == listed
    require(whole, f"the chosen token among {listed}", entry)
    bad = [v for _, v in top if not math.isfinite(v) or v > min(ROUNDING, value)]
    expected = "finite, at most 0, none likelier than the chosen"
    require(not bad, expected, f"{bad} in {entry}")
    if entry.get("bytes") is not None and "\ufffd" not in token:
        text = bytes(entry["bytes"]).decode("utf-8", "replace")
        require(text == token, f"the bytes of {token!r}", text)


def of_a_stream_are_whole(chunks: stream.Stream) -> None:
    """Require one finite log-probability per token that the usage of a streamed completion counts.

    Args:
        chunks: A streamed completion with usage in its last chunk.

    Raises:
        Unmet: A value is missing or not finite.
    """
    values = stream.log_probabilities(chunks)
    count = chunks.chunks[-1]["usage"]["completion_tokens"]
    whole = len(values) == count and all(v is not None and math.isfinite(v) for v in values)
    require(whole, f"{count} log-probabilities in the stream", values)


def greedy_is_the_likeliest(api: Api, *, in_chats: bool) -> None:
    """Require that no listed token is likelier than the chosen one at temperature 0.

    llama.cpp bans the end token for ``ignore_eos``, and sends its log-probability before the ban.
    With llama.cpp, one token may therefore be likelier, if it is the same at all positions.

    Args:
        api: The API of the server.
        in_chats: Whether to send 48 chats, instead of completions with uncertain continuations.

    Raises:
        Unmet: Another listed token is likelier.
    """
    if in_chats:
        options: Json = {"max_tokens": 16, "logprobs": True, "top_logprobs": 2}
        texts = _UNSURE * _UNSURE_TIMES
        answers = together(lambda text: api.send_chat(text, **options), texts)
    else:
        options = {"max_tokens": 24, "logprobs": 2}
        if api.capabilities.can("ignore_eos"):
            options["ignore_eos"] = True
        answers = [api.complete([*TEXTS], **options)]
    count = 0
    others = []
    likelier: set[str] = set()
    for answer in answers:
        for position in parse(answer).positions or ():
            count += 1
            highest = position.top[likeliest(position.top)]
            numbers = math.isfinite(position.log_probability) and math.isfinite(highest)
            require(numbers, "finite log-probabilities at each position", position)
            if position.log_probability < highest - _TIED:
                others.append((position.token, position.log_probability, position.top))
                limit = position.log_probability + _TIED
                likelier |= {token for token, log in position.top.items() if log > limit}
    bans_end = "ignore_eos" in options and api.capabilities.engine == "llama-cpp"
    if bans_end and len(likelier) == 1:
        others = []
    require(count, "log-probabilities of the tokens")
    required = f"the likeliest listed token at each of {count} positions"
    require(not others, required, f"another token at {len(others)}", evidence=others[:3])
