"""Log-probabilities as the API tells them: of each token, finite, and of the chosen one."""

import math

from sm121.answers.promised import likeliest
from sm121.api import sampled, stream
from sm121.api.client import Api, Json, together
from sm121.api.sdk import PROMPT, Sdk
from sm121.client.completions import parse
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require

#: Of a logarithm of a softmax in float32 over 200,000 tokens: one that is 0 may come out above it.
ROUNDING = 1e-5
#: Tokens whose log-probabilities differ by less are both the likeliest.
_TIED = 1e-3
#: Chats that a small model is not sure of.
_UNSURE = ("1, 2, 3", "Q:")


def are_finite(sdk: Sdk) -> None:
    """Each of 32 tokens has finite values, none above 0, and probabilities sum to 1 at most."""
    entries = sdk.exactly(32, logprobs=5).choices[0].logprobs
    count = len(entries.token_logprobs)
    require(count == 32, "32 log-probabilities", count)
    every = [*entries.token_logprobs, *(v for top in entries.top_logprobs for v in top.values())]
    bad = [v for v in every if v is None or not math.isfinite(v) or v > ROUNDING]
    require(not bad, "finite and at most 0", bad[:5])
    for position, top in enumerate(entries.top_logprobs):
        total = math.fsum(math.exp(value) for value in top.values())
        expected = f"probabilities of position {position} sum to at most 1"
        require(total <= 1.0 + ROUNDING, expected, total)


def name_the_chosen_token(api: Api) -> None:
    """A completion has one entry a token; the chosen one is the likeliest of those listed."""
    answer = api.complete(PROMPT, max_tokens=8, logprobs=2)
    text, entries = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    count = answer["usage"]["completion_tokens"]
    parts = [entries.get(key) or [] for key in ("tokens", "token_logprobs", "top_logprobs")]
    lengths = {len(part) for part in parts}
    require(lengths == {count}, f"{count} of each", lengths)
    require("".join(entries["tokens"]) == text, f"the tokens of {text!r}", entries["tokens"])
    for token, value, top in zip(*parts, strict=True):
        right = top.get(token) == value == max(top.values(), default=None)
        require(right, f"{token!r} with {value} on top", top)


def of_a_chat_are_whole(api: Api, correctness: Correctness) -> None:
    """An entry for each generated token: the chosen one is listed, and its bytes are its text."""
    question = correctness.chats[0].question
    likeliest = 20 if api.capabilities.can("top_logprobs_20") else 2
    answer = api.chat(question, max_tokens=12, logprobs=True, top_logprobs=likeliest)
    entries = answer["choices"][0]["logprobs"]["content"]
    count = answer["usage"]["completion_tokens"]
    require(len(entries) == count, f"{count} entries", len(entries))
    for entry in entries:
        token, value = entry["token"], entry["logprob"]
        listed = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        whole = (token, value) in listed and len(listed) == likeliest
        require(whole, f"the chosen token among {likeliest}", entry)
        bad = [v for _, v in listed if not math.isfinite(v) or v > min(ROUNDING, value)]
        expected = "finite, at most 0, none likelier than the chosen"
        require(not bad, expected, f"{bad} in {entry}")
        if entry["bytes"] is not None and "\ufffd" not in token:
            text = bytes(entry["bytes"]).decode("utf-8", "replace")
            require(text == token, f"the bytes of {token!r}", text)


def of_a_stream_are_whole(chunks: stream.Stream) -> None:
    """A streamed completion has as many finite values as its usage counts tokens."""
    values = stream.log_probabilities(chunks)
    count = chunks.chunks[-1]["usage"]["completion_tokens"]
    whole = len(values) == count and all(v is not None and math.isfinite(v) for v in values)
    require(whole, f"{count} log-probabilities in the stream", values)


def greedy_is_the_likeliest(api: Api, *, in_chats: bool) -> None:
    """At temperature 0 no token is less likely than another one that is listed: after texts which
    can go on in many ways, or in 48 chats."""
    options: Json = {"max_tokens": 24, "logprobs": 2}
    if in_chats:
        options = {"max_tokens": 16, "logprobs": True, "top_logprobs": 2}
        answers = together(lambda text: api.send_chat(text, **options), _UNSURE * 24)
    else:
        if api.capabilities.can("ignore_eos"):
            options["ignore_eos"] = True
        answers = [api.complete([*sampled.TEXTS], **options)]
    positions = [position for answer in answers for position in parse(answer).positions or ()]
    require(positions, "log-probabilities of the tokens")
    wrong = [
        (position.token, position.log_probability, position.top)
        for position in positions
        if position.log_probability < position.top[likeliest(position.top)] - _TIED
    ]
    required = f"the likeliest of those listed at each of {len(positions)} places"
    require(not wrong, required, f"another at {len(wrong)}", evidence=wrong[:3])
