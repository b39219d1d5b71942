"""A scripted engine for `/v1/completions` that samples from a known distribution.

It applies the sampling parameters in vLLM's documented order. A fault changes the parameters."""

import json
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meta_tests.fakes.loopback import JsonHandler, serving
from sm121.core.server import Endpoint

Json = dict[str, Any]
#: The tokens of the vocabulary. The logits of the likeliest tokens differ as much as in a language
#: model.
VOCABULARY = 300
_SPREAD = 2.6
_LISTED = 20
#: The difference between two neighbouring BF16 values near 8, so that some tokens are equally
#: likely.
_STEP = 2**-5


def ids(text: str) -> list[int]:
    """Return the ids of a text, in which each word is a token."""
    return [zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


def logits(prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
    """Return the logits of the next token.

    Some tokens are likelier than others, for example those of the prompt."""
    seed = zlib.crc32(repr((prompt, output)).encode())
    common = np.random.default_rng(1).normal(3.0, _SPREAD / 2**0.5, VOCABULARY)
    common[[*prompt]] += 2.0
    values = common + np.random.default_rng(seed).normal(0.0, _SPREAD / 2**0.5, VOCABULARY)
    return np.round(values / _STEP) * _STEP


def probabilities(prompt: tuple[int, ...], output: tuple[int, ...], body: Json) -> np.ndarray:
    """Return the distribution after applying the parameters of a request.

    `drafted` contains the parameters for all tokens except the first."""
    body = body | body.get("drafted", {}) if output else body
    values = logits(prompt, output)
    if body.get("allowed_token_ids"):
        banned = np.ones(VOCABULARY, bool)
        banned[body["allowed_token_ids"]] = False
        values[banned] = -np.inf
    for word in body.get("bad_words") or ():
        values[int(word.strip()[1:])] = -np.inf
    for token, bias in (body.get("logit_bias") or {}).items():
        values[int(token)] += bias
    repetition = body.get("repetition_penalty", 1.0)
    repeated = [] if body.get("output_only") else [*prompt]
    repeated += [] if body.get("prompt_only") else [*output]
    for token in {*repeated}:
        values[token] *= 1 / repetition if values[token] > 0 else repetition
    for token, count in Counter((*(prompt if body.get("prompt_counts") else ()), *output)).items():
        values[token] -= body.get("frequency_penalty", 0.0) * count
        values[token] -= body.get("presence_penalty", 0.0)
    if not (temperature := body.get("temperature", 1.0)):
        return np.eye(VOCABULARY)[int(values.argmax())]
    values /= temperature
    shares = np.exp(values - values.max())
    shares /= shares.sum()
    shares[shares < body.get("min_p", 0.0) * shares.max()] = 0.0
    order = np.argsort(-shares)
    if (most := int(body.get("top_k", -1))) > 0:
        shares[order[most:]] = 0.0
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= body.get("top_p", 1.0) * shares.sum()]] = 0.0
    return shares / shares.sum()


def _outputs(
    prompt: tuple[int, ...], count: int, body: Json, generator: np.random.Generator
) -> list[tuple[int, ...]]:
    outputs = {(): count}
    for _ in range(body["max_tokens"]):
        longer: dict[tuple[int, ...], int] = {}
        for output, times in outputs.items():
            drawn = generator.multinomial(times, probabilities(prompt, output, body))
            longer |= {(*output, int(token)): int(drawn[token]) for token in np.flatnonzero(drawn)}
        outputs = longer
    samples = []
    for output, times in outputs.items():
        samples += [output] * times
    return samples


def _entries(prompt: tuple[int, ...], output: tuple[int, ...]) -> Json:
    names: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for at, token in enumerate(output):
        values = logits(prompt, output[:at])
        values -= values.max() + np.log(np.exp(values - values.max()).sum())
        listed = [token, *np.argsort(-values)[:_LISTED]]  # vLLM sends the tokens in this order
        names["tokens"].append(f"token_id:{token}")
        names["token_logprobs"].append(float(values[token]))
        names["top_logprobs"].append({f"token_id:{one}": float(values[one]) for one in listed})
        names["text_offset"].append(0)
    return names


def answer(body: Json, generator: np.random.Generator) -> Json:
    """Return the JSON of a completion whose tokens are sampled."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    choices = []
    order = []
    for text in prompts:
        order += [text] * body.get("n", 1)
    for text, count in Counter(order).items():
        numbers = iter([n for n, other in enumerate(order) if other == text])
        prompt = tuple(ids(text))
        entries: dict[tuple[int, ...], Json] = {}
        drawn = generator
        times = 1
        if body.get("seed") is not None:  # repeated for each prompt
            drawn = np.random.default_rng(body["seed"])
            times = count
            count = 1
        for output in _outputs(prompt, count, body, drawn) * times:
            if output not in entries:
                entries[output] = _entries(prompt, output)
            choices.append({
                "index": next(numbers), "text": "".join(f" w{token}" for token in output),
                "finish_reason": "length", "token_ids": output, "prompt_token_ids": prompt,
                "logprobs": entries[output] if body.get("logprobs") else None,
            })  # fmt: skip
            if body.get("bare") and body.get("logprobs"):
                choices[-1]["logprobs"]["top_logprobs"] = [{} for _ in output]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "c", "object": "text_completion", "created": 1, "model": body["model"],
            "choices": choices, "usage": usage}  # fmt: skip


def chat(body: Json, generator: np.random.Generator) -> Json:
    """Return the JSON of a chat. Like vLLM, it lists as many log-probabilities as requested."""
    text = body["messages"][-1]["content"]
    listed = body.get("top_logprobs", 0)
    whole = answer({**body, "prompt": text}, generator)
    (choice,) = whole["choices"]
    entries = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    tops = []
    for top in entries["top_logprobs"]:
        tops.append(
            [{"token": token, "logprob": value, "bytes": None} for token, value in top.items()]
        )
    rows = zip(entries["tokens"], entries["token_logprobs"], tops, strict=True)
    content = [
        {"token": token, "logprob": value, "bytes": None, "top_logprobs": top[:listed]}
        for token, value, top in rows
    ]
    message = {"role": "assistant", "content": choice["text"], "refusal": None}
    reply = {"index": 0, "message": message, "finish_reason": "length"}
    reply |= {"logprobs": {"content": content, "refusal": None}, "token_ids": choice["token_ids"]}
    return whole | {"object": "chat.completion", "choices": [reply]}


def _stream(whole: Json) -> str:
    """Return an answer as chunks: the text, the usage, and the end."""
    (choice,) = whole["choices"]
    if message := choice.pop("message", None):
        choice["delta"] = {"role": "assistant", "content": message["content"]}
    kind = {"object": whole["object"].replace("chat.completion", "chat.completion.chunk")}
    chunks = [whole | kind | {"usage": None}, whole | kind | {"choices": []}]
    return "".join(f"data: {part}\n\n" for part in (*map(json.dumps, chunks), "[DONE]"))


def _response(whole: Json, body: Json) -> Json:
    text = whole["choices"][0]["message"]["content"]
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    sampled = {name: body.get(name, 1.0) for name in ("temperature", "top_p")}
    return {"id": "r", "object": "response", "created_at": 1, "model": body["model"], **sampled,
            "status": "completed", "output": [item | {"content": content}], "tools": [],
            "tool_choice": "none", "parallel_tool_calls": True, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": None}  # fmt: skip


@contextmanager
def sampling(fault: Callable[[Json], Json], seed: int) -> Iterator[Endpoint]:
    """Serve on a loopback port until the block ends."""
    generator = np.random.default_rng(seed)
    lock = threading.Lock()

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            with lock:
                body = fault(self.asked())
                if "input" in body:
                    messages = [{"content": body["input"]}]
                    body |= {"messages": messages, "max_tokens": body["max_output_tokens"]}
                whole = (chat if "messages" in body else answer)(body, generator)
            if "input" in body:
                self.say(_response(whole, body))
            elif body.get("stream"):
                self.say(_stream(whole), kind="text/event-stream")
            else:
                self.say(whole)

    with serving(Handler) as url:
        yield Endpoint(url, "key", "canary")
