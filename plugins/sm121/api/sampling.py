"""What the parameters of sampling do (temperature, seed, logit_bias, n), and what holds where one
is not sent: vLLM promises what the checkpoint's generation_config.json says, else OpenAI's
defaults."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sm121.api.client import Api, Json
from sm121.api.sampled import TEXTS
from sm121.api.sdk import PROMPT, Sdk, first_that
from sm121.client.completions import parse
from sm121.core.level_settings import Correctness
from sm121.core.server import Server
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

Form = Literal["streamed completion", "streamed chat", "response"]
#: Each form is asked so often, for so many tokens, after a text that can go on in many ways.
_TIMES, _OPEN, _OPEN_CHAT = 8, "The capital", "1, 2, 3, 4, 5,"
_LIMIT: Json = {"max_tokens": 20}


def seed_repeats_itself(sdk: Sdk, attempts: int) -> None:
    """One seed gives the same tokens again, at the latest at the last attempt."""

    def sampled() -> Any:
        options: Json = {"max_tokens": 24, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
        ids = sdk.complete(seed=1234, **options).choices[0].token_ids
        require(len(ids) == 24, "24 token ids", len(ids))
        return ids

    _hold_repeated(sampled, attempts, "tokens")


def chat_obeys_temperature_and_seed(sdk: Sdk, correctness: Correctness, attempts: int) -> None:
    """At temperature 2 seeds differ, and one seed repeats itself."""

    def sampled(seed: int) -> str:
        answer = sdk.chat(correctness.chats[0].question, 12, temperature=2.0, seed=seed)
        return said(answer.choices[0].message.model_dump())

    texts = {sampled(seed) for seed in range(6)}
    require(len(texts) > 1, "seeds that differ at temperature 2", f"{texts} six times")
    _hold_repeated(lambda: sampled(1234), attempts, "text")


def form_obeys_temperature_and_top_p(api: Api, form: Form) -> None:
    """At temperature 1 answers differ. At 0, and where top_p leaves one token, most are the same:
    kernels round in more ways than one, and tokens may be equally likely."""
    asks: dict[Form, Callable[[Json], Any]] = {
        "streamed completion": lambda o: api.stream_completion(_OPEN, **_LIMIT, **o).chunks,
        "streamed chat": lambda o: api.stream_chat(_OPEN_CHAT, **_LIMIT, **o).chunks,
        "response": lambda o: [api.send_response(_OPEN_CHAT, max_output_tokens=20, **o)],
    }

    def answer(options: Json) -> str:
        return parse(*asks[form](options)).text

    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1e-6}):
        texts = counted_until(mostly_alike, functools.partial(answer, options))
        about = f"{form}, {options}"
        require(mostly_alike(texts), "mostly the same text", "others", about, evidence=f"{texts}")
    hot = counted_until(differing, functools.partial(answer, {"temperature": 1.0}))
    require(differing(hot), "texts that differ at temperature 1", "one", form, evidence=f"{[*hot]}")


def counted_until(decided: Callable[[Counter[str]], bool], ask: Callable[[], str]) -> Counter[str]:
    """Count texts until `decided`, which more texts cannot revoke, and `_TIMES` at most."""
    texts = Counter[str]()
    for _ in range(_TIMES):
        texts[ask()] += 1
        if decided(texts):
            break
    return texts


def mostly_alike(texts: Counter[str]) -> bool:
    """Whether half of `_TIMES` texts are the same."""
    return 2 * max(texts.values()) >= _TIMES


def differing(texts: Counter[str]) -> bool:
    """Whether two texts differ."""
    return len(texts) > 1


def said(message: Json) -> str:
    """All text of a message: reasoning, under either name (vLLM 0.14 gives both), and content."""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return f"{reasoning}{message.get('content') or ''}"


def logit_bias_is_obeyed(api: Api) -> None:
    """-100 bans the likeliest token; 50 puts another one in its place."""
    first = api.ids(PROMPT + api.complete(PROMPT, max_tokens=1)["choices"][0]["text"])[-1]
    other = api.ids(PROMPT + " London")[-1]
    for bias in ({str(first): -100}, {str(other): 50}):
        answer = api.complete(PROMPT, max_tokens=1, logit_bias=bias, return_token_ids=True)
        token = answer["choices"][0]["token_ids"][0]
        right = token != first and (token == other or str(other) not in bias)
        require(right, f"another token than {first}", token, f"logit_bias {bias}")


def answers_belong_to_their_prompts(api: Api, correctness: Correctness) -> None:
    """Each prompt has its own answer: asked one after the other, twice, and in one request."""
    facts = correctness.known_answers
    pairs = []
    for _ in range(2):
        pairs += [(f, api.complete(f.prompt, max_tokens=8)["choices"][0]) for f in facts]
    many = [*facts, *reversed(facts), *facts]
    answer = api.complete([fact.prompt for fact in many], max_tokens=8)
    pairs += [(many[choice["index"]], choice) for choice in answer["choices"]]
    for fact, choice in pairs:
        right = choice["text"].startswith(fact.begins)
        require(right, repr(fact.begins), repr(choice["text"]), f"{fact.prompt!r}")


def _hold_repeated(sampled: Callable[[], object], attempts: int, quantity: str) -> None:
    first = sampled()
    second = first_that((sampled() for _ in range(attempts)), lambda answer: answer == first)
    # Without them: they differ in each run, and a known failure must be known again (--against).
    require(first == second, f"the same {quantity} with the same seed", f"others, {attempts} times")


NEUTRAL: Json = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_OWN = ("--generation-config", "--override-generation-config")
_HOT: Json = {"temperature": 2.0}


def defaults_promised(api: Api, server: Server) -> list[Json]:
    """The values that hold where none is sent. Of a server that somebody else started two are
    possible: it may have been told to leave the checkpoint's out. Raises NotRun: the engine
    promises none, or was told others."""
    if api.capabilities.engine != "vllm":
        raise NotRun("the engine does not say what holds where a parameter is not sent")
    started = server.configuration
    if started is not None and any(option.startswith(_OWN) for option in started.arguments):
        raise NotRun(f"the server was started with {' or '.join(_OWN)}")
    roots = {entry["id"]: entry.get("root") for entry in api.models()["data"]}
    model = started.model if started is not None else roots.get(api.model)
    file = Path(model or "") / "generation_config.json"
    if started is None and not file.is_file():
        raise NotRun(f"the server's checkpoint is not here ({model}): what it promises is unknown")
    values = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    checkpoint = NEUTRAL | {n: v for n, v in values.items() if n in NEUTRAL and v is not None}
    return [checkpoint] if started is not None else [checkpoint, NEUTRAL]


def defaults_hold(api: Api, candidates: list[Json], attempts: int) -> None:
    """With one seed, texts have the same answers where the values are sent as where none is, or a
    high temperature alone; and without a seed they differ."""

    def differing(values: Json) -> list[str]:
        texts: list[str] = []
        for alone in ({}, _HOT):
            others, tries = {*TEXTS}, attempts
            while others and tries:
                tries -= 1
                bare, full = _sampled(api, alone, 11), _sampled(api, values | alone, 11)
                others &= {text for text, a, b in zip(TEXTS, bare, full, strict=True) if a != b}
            texts += sorted(others)
        return texts

    least = min(map(differing, candidates), key=len)
    required = f"answers as with {candidates[0]}, where none of these is sent"
    require(not least, required, f"{len(least)} others", evidence=least)
    answers = {tuple(_sampled(api, _HOT)) for _ in range(2)}
    require(len(answers) > 1, "other answers each time where no seed is sent", "the same")


def _sampled(api: Api, options: Json, seed: int | None = None) -> list[str]:
    body = {"temperature": None, "max_tokens": 24, "ignore_eos": True, **options}
    choices = api.complete([*TEXTS], **body, **({} if seed is None else {"seed": seed}))["choices"]
    return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
