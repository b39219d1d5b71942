"""The events that `timed_server.py` sends, their delays, and its tokens.

Each token depends on those before it. At one of 64 positions, two tokens are equally likely, and
the first one is generated."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

from aiohttp import web

VOCABULARY = 199_998
#: The number of states of the scripted engine, the factor with which a token changes the state, and
#: the number of positions between two ties.
_STATES = (1 << 61) - 1
_FACTOR = 1_000_003
_TIES = 64
#: The number of tokens of the context that a fault keeps, the number that another fault drops, and
#: the number of tokens of an answer that a third fault does not change.
_WINDOW = 128
_CUT = 1024
_RIGHT = 40
#: A generated token, the second best token, and their log-probabilities.
Place = tuple[int, int, float, float]
#: The time at which an event is due (None for never), its bytes, and its number of tokens.
Event = tuple[int | None, bytes, int]


def bundled(events: list[Event], burst: int) -> list[Event]:
    """Hold events back and send several together: after the first event, the given number at a
    time, or all of them."""
    if burst == 1:
        return events
    first, rest = (events[:1], events[1:]) if burst else ([], events)
    size = burst or len(rest)
    for start in range(0, len(rest), size):
        group = rest[start : start + size]
        first.extend((group[-1][0], payload, tokens) for _, payload, tokens in group)
    return first


def late(events: list[Event], first: int, leak: float) -> list[Event]:
    """Delay the first event until the given time, and let the next ones follow faster than usual.

    They follow at once, or after gaps that are shortened by the factor ``leak``.

    They follow at once, or after gaps that are shortened by a factor."""
    made: list[Event] = []
    sent = first
    before = events[0][0] or 0
    for due, payload, tokens in events:
        due = due or 0
        step = int((1.0 - leak) * (due - before)) if leak else 0
        sent = max(due, sent + step) if made else max(due, first)
        before = due
        made.append((sent, payload, tokens))
    return made


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def choice_of(
    chat: bool, text: str, finish: str | None = None, *, role: bool = False
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if not chat:
        return {**choice, "text": text}
    return {**choice, "delta": ({"role": "assistant"} if role else {}) | {"content": text}}


def chunk_text(text: str, ids: list[int], withheld_one_in: int) -> str | None:
    """Return the text of the last chunk of `ids`; None if it is withheld until the next token.

    One of `withheld_one_in` tokens ends within a character, and one has no text."""
    if withheld_one_in:
        kinds = [token % withheld_one_in for token in ids[-2:]]
        if kinds[-1] == 0:
            return None
        if kinds[0] == 0:
            return f" \N{REPLACEMENT CHARACTER}{text}"
        if kinds[-1] == 1:
            return ""
    return text


def id_of(word: str) -> int:
    number = re.fullmatch(r"w(\d+)", word)
    return int(number.group(1)) if number else sum(word.encode()) % VOCABULARY


def ids_of(prompt: list[int] | str) -> list[int]:
    return [id_of(word) for word in prompt.split()] if isinstance(prompt, str) else prompt


def generated(
    prompt: list[int], *, second: bool = False, below: int = VOCABULARY
) -> Iterator[Place]:
    """Return the continuation of a prompt, with ids below a given number.

    With `second`, the second of two equally likely tokens is chosen."""
    state = 1
    for token in prompt:
        state = (state * _FACTOR + token + 1) % _STATES
    while True:
        tokens = (state % below, (state >> 20) % below)
        tie = state % _TIES == 0
        token, other = tokens[::-1] if tie and second else tokens
        values = (-0.75, -0.75) if tie else (-0.1 - state / _STATES / 1e3, -6.0)
        yield token, other, *values
        state = (state * _FACTOR + token + 1) % _STATES


def answer(
    lie: str, prompt: list[int], body: dict[str, Any], count: int, below: int = VOCABULARY
) -> list[Place]:
    """Return the given number of tokens.

    `lie` is the fault of timed requests; with the prefix ``always-``, it affects all requests. With
    ``ties``, a timed request gets the second of two equally likely tokens."""
    timed = bool(body.get("stream")) and body.get("logprobs") is None
    kind = lie.removeprefix("always-")
    if not timed and (kind == lie or (kind == "ends" and not body.get("ignore_eos"))):
        kind = ""
    context = {
        "constant": [], "window": prompt[-_WINDOW:], "cut": prompt[_CUT:],
        "ends": prompt[::-1],
    }.get(kind, prompt)  # fmt: skip
    tokens = generated(context, second=kind == "ties", below=below)
    steps = list(itertools.islice(tokens, count))
    if kind in ("noise", "late-noise"):  # the same noise for the same prompt
        noise = random.Random(str(prompt[:64]))
        right = _RIGHT if kind == "late-noise" else 0
        steps[right:] = [(noise.randrange(VOCABULARY), 0, -0.1, -6.0) for _ in steps[right:]]
    return steps


def log_probabilities(steps: list[Place], body: dict[str, Any]) -> dict[str, Any] | None:
    """Return log-probabilities in the form of /v1/completions; None if the request did not ask for
    them."""
    if not isinstance(body.get("logprobs"), int):
        return None
    tops = [{f"token_id:{a}": p, f"token_id:{b}": q} for a, b, p, q in steps]
    names = [f"token_id:{step[0]}" for step in steps]
    values = [step[2] for step in steps]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}


async def out_of_vocabulary(request: web.Request, token: int) -> web.StreamResponse:
    """Refuse an id outside of the vocabulary as vLLM refuses a streamed request: in an event, with
    status 200."""
    error = {"message": f"Token id {token} is out of vocabulary", "code": 400}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    await response.write_eof()
    return response
