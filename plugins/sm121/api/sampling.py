"""Check the effects of sampling parameters (temperature, seed, logit_bias), and their defaults.

vLLM documents that the defaults come from the checkpoint's generation_config.json, or else from
OpenAI's API.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sm121.answers import exam
from sm121.api.client import Api, Json
from sm121.api.sample_source import TEXTS
from sm121.api.sdk import PROMPT, Sdk, first_that
from sm121.client.completion_json import parse
from sm121.core.level_settings import Correctness
from sm121.core.server import Server
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

Form = Literal["streamed completion", "streamed chat", "response"]
#: The maximum number of requests of each form.
_TIMES = 8
#: Texts with many plausible continuations. The first is for completions, the second for chats.
_OPEN = "The capital"
_OPEN_CHAT = "1, 2, 3, 4, 5,"
#: Maximum number of tokens of an answer.
_LIMIT = 20
#: If repeated answers are equal, and a correct server would repeat them with less than this
#: probability, the equality counts as a fault.
_CHANCE = 1e-6
#: Maximum number of samples of a likely text; enough for a text with a probability of 0.8.
_MOST_SAMPLES = 64
#: The seed of repeated requests.
_SEED = 1234
#: OpenAI's defaults, which do not change the distribution.
NEUTRAL: Json = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: Options of vLLM that override the checkpoint's defaults.
_OWN_DEFAULTS = ("--generation-config", "--override-generation-config")
#: A temperature at which different answers are likely.
_HOT: Json = {"temperature": 2.0}


def seed_repeats_itself(sdk: Sdk, attempts: int) -> None:
    """Require that the same seed gives the same tokens in at least one of several attempts.

    Args:
        sdk: The client of the server.
        attempts: The number of attempts. Several are needed, because kernels may round in several
            ways.

    Raises:
        Unmet: All attempts differ from the first answer.
    """

    def sample_ids() -> Any:
        options: Json = {"max_tokens": 24, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
        ids = sdk.complete(seed=_SEED, **options).choices[0].token_ids
        require(len(ids) == 24, "24 token ids", len(ids))
        return ids

    _require_repeated(sample_ids(), sample_ids, attempts, "tokens")


def chat_obeys_temperature_and_seed(sdk: Sdk, correctness: Correctness, attempts: int) -> None:
    """At temperature 2, require different texts for different seeds, and equal texts for one seed.

    Only the longest text is requested again. At this temperature, many answers violate harmony's
    format and have no text, and two empty texts are always equal.

    Args:
        sdk: The client of the server.
        correctness: The question of its first chat is sent.
        attempts: The number of attempts to repeat a text.

    Raises:
        Unmet: Six seeds give the same text, or all attempts differ from the first answer.
    """

    def sample_text(seed: int) -> str:
        answer = sdk.chat(correctness.chats[0].question, 12, temperature=2.0, seed=seed)
        return reasoning_and_content(answer.choices[0].message.model_dump())

    texts = {seed: sample_text(seed) for seed in range(6)}
    several = set(texts.values())
    require(
        len(several) > 1,
        "different texts for different seeds at temperature 2",
        f"{several} for all six seeds",
    )
    longest = max(texts, key=lambda seed: len(texts[seed]))
    _require_repeated(texts[longest], lambda: sample_text(longest), attempts, "text")


def form_obeys_temperature_and_top_p(api: Api, form: Form) -> None:
    """Require different answers at temperature 1, and mostly equal ones at temperature 0.

    A tiny top_p must also give mostly equal answers. Not all answers must be equal, because kernels
    may round in several ways, and tokens may be equally likely.

    Args:
        api: The API of the server.
        form: The form of the request.

    Raises:
        Unmet: Answers that should be equal differ, or answers that should differ are equal.
        NotRun: One text is so likely at temperature 1 that equal answers show nothing.
    """

    def ask(options: Json) -> str:
        if form == "streamed completion":
            parts = api.stream_completion(_OPEN, max_tokens=_LIMIT, **options).chunks
        elif form == "streamed chat":
            parts = api.stream_chat(_OPEN_CHAT, max_tokens=_LIMIT, **options).chunks
        else:
            parts = (api.send_response(_OPEN_CHAT, max_output_tokens=_LIMIT, **options),)
        return parse(*parts).text

    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1e-6}):
        texts = counted_until(mostly_alike, functools.partial(ask, options))
        about = f"{form}, {options}"
        require(mostly_alike(texts), "mostly the same text", "others", about, evidence=f"{texts}")
    sample = functools.partial(ask, {"temperature": 1.0})
    hot = counted_until(differing, sample)
    if not differing(hot):
        (text,) = hot
        for _ in range(_further_samples(api, form, text)):
            hot[sample()] += 1
            if differing(hot):
                break
    require(differing(hot), "different texts at temperature 1", "one", form, evidence=f"{[*hot]}")


def _further_samples(api: Api, form: Form, text: str) -> int:
    """Return how many more equal samples are needed to show that a temperature of 1 is ignored.

    Args:
        api: The API of the server.
        form: The form of the request.
        text: The text of all samples so far.

    Raises:
        NotRun: The text is too likely.
    """
    likelihood = _likelihood(api, form, text)
    if not likelihood:
        return 0
    needed = math.inf
    if likelihood < 1.0:
        needed = math.log(_CHANCE) / math.log(likelihood)
    if needed > _MOST_SAMPLES:
        raise NotRun(
            f"{form}: at temperature 1, the model gives {text!r} with probability "
            f"{likelihood:.3g}: equal answers do not show that the temperature is ignored"
        )
    return max(0, math.ceil(needed) - _TIMES + 1)


def _likelihood(api: Api, form: Form, text: str) -> float | None:
    """Return the probability of a text by the server's own log-probabilities.

    The request is not streamed, and has temperature 1, since an engine may report the
    log-probabilities after the temperature was applied.

    Returns:
        The probability. None if the engine sends no log-probabilities before sampling, or no sample
        has this text.
    """
    options: Json = {"max_tokens": _LIMIT, "temperature": 1.0}
    completes = form == "streamed completion"
    if not api.capabilities.can("logprobs" if completes else "chat_logprobs"):
        return None
    for _ in range(_TIMES):
        if completes:
            answer = api.complete(_OPEN, logprobs=1, **options)
        else:
            answer = api.send_chat(_OPEN_CHAT, logprobs=True, **options)
        sample = parse(answer)
        if sample.text.strip() == text.strip() and sample.positions:
            values = [position.log_probability for position in sample.positions]
            # Some engines report log-probabilities after sampling: they are 0 for each token.
            if not all(map(math.isfinite, values)) or not any(values):
                return None
            return min(1.0, math.exp(math.fsum(values)))
    return None


def counted_until(decided: Callable[[Counter[str]], bool], ask: Callable[[], str]) -> Counter[str]:
    """Collect texts until a condition on them is true, but at most `_TIMES` texts.

    Args:
        decided: Returns whether the condition is true. Once it is true, more texts do not change
            it.
        ask: Requests one text.

    Returns:
        How often each text was returned.
    """
    texts = Counter[str]()
    for _ in range(_TIMES):
        texts[ask()] += 1
        if decided(texts):
            break
    return texts


def mostly_alike(texts: Counter[str]) -> bool:
    """Return whether at least half of `_TIMES` texts are the same.

    Args:
        texts: How often each text was returned; at least one text.
    """
    return 2 * max(texts.values()) >= _TIMES


def differing(texts: Counter[str]) -> bool:
    """Return whether there are at least two different texts.

    Args:
        texts: How often each text was returned.
    """
    return len(texts) > 1


def reasoning_and_content(message: Json) -> str:
    """Return the reasoning and content of a message.

    Args:
        message: The message. The field for reasoning has one of two names (vLLM 0.14 sends both).
    """
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return f"{reasoning}{message.get('content') or ''}"


def logit_bias_is_obeyed(api: Api) -> None:
    """Require that a bias of -100 bans the likeliest token, and one of 50 forces another token.

    Args:
        api: The API of the server.

    Raises:
        Unmet: A bias has no effect.
    """
    continuation = api.complete(PROMPT, max_tokens=1)["choices"][0]["text"]
    likeliest = api.ids(PROMPT + continuation)[-1]
    other = api.ids(PROMPT + " London")[-1]

    def ask(bias: dict[str, int]) -> int:
        answer = api.complete(PROMPT, max_tokens=1, logit_bias=bias, return_token_ids=True)
        return int(answer["choices"][0]["token_ids"][0])

    required = f"another token than {likeliest}"
    ban = {str(likeliest): -100}
    token = ask(ban)
    require(token != likeliest, required, token, f"logit_bias {ban}")
    force = {str(other): 50}
    token = ask(force)
    require(token == other and token != likeliest, required, token, f"logit_bias {force}")


def answers_belong_to_their_prompts(api: Api, correctness: Correctness) -> None:
    """Require the known answer to each prompt, in two single requests and in one batch request.

    Args:
        api: The API of the server.
        correctness: Its exam has the prompts and the beginnings of their answers.

    Raises:
        Unmet: An answer begins differently.
    """
    facts = exam.load(correctness.exam).completions
    answered = []
    for _ in range(2):
        for fact in facts:
            answered.append((fact, api.complete(fact.prompt, max_tokens=8)["choices"][0]))
    many = [*facts, *reversed(facts), *facts]
    answer = api.complete([fact.prompt for fact in many], max_tokens=8)
    for choice in answer["choices"]:
        answered.append((many[choice["index"]], choice))
    for fact, choice in answered:
        right = choice["text"].startswith(fact.begins)
        require(right, repr(fact.begins), repr(choice["text"]), f"{fact.prompt!r}")


def _require_repeated(
    first: object, sample: Callable[[], object], attempts: int, quantity: str
) -> None:
    """Require that one of several attempts repeats the first answer."""
    second = first_that((sample() for _ in range(attempts)), lambda answer: answer == first)
    # The message does not contain the answers, because they differ in each run, and --against
    # compares messages.
    require(first == second, f"the same {quantity} with the same seed", f"others, {attempts} times")


def documented_defaults(api: Api, server: Server) -> list[Json]:
    """Return the documented defaults of the sampling parameters.

    Args:
        api: The API of the server.
        server: The server.

    Returns:
        The possible defaults. They are those of the checkpoint and, for an attached server, also
        `NEUTRAL`, because it may have been started without the checkpoint's defaults.

    Raises:
        NotRun: The engine documents no defaults, the server was started with other defaults, or the
            checkpoint of an attached server is not on this machine.
    """
    if api.capabilities.engine != "vllm":
        raise NotRun("the engine does not document the defaults of its parameters")
    started = server.configuration
    if started is None:
        roots = {entry["id"]: entry.get("root") for entry in api.models()["data"]}
        model = roots.get(api.model)
        file = Path(model or "") / "generation_config.json"
        if not file.is_file():
            raise NotRun(
                f"the server's checkpoint is not on this machine ({model}): its defaults are "
                "unknown"
            )
        return [_checkpoint_defaults(file), NEUTRAL]
    if any(option.startswith(_OWN_DEFAULTS) for option in started.arguments):
        raise NotRun(f"the server was started with {' or '.join(_OWN_DEFAULTS)}")
    return [_checkpoint_defaults(Path(started.model) / "generation_config.json")]


def _checkpoint_defaults(file: Path) -> Json:
    """Return `NEUTRAL`, updated with the values of a generation_config.json if that exists."""
    defaults = dict(NEUTRAL)
    if file.is_file():
        values = json.loads(file.read_text("utf-8"))
        for name in NEUTRAL:
            if values.get(name) is not None:
                defaults[name] = values[name]
    return defaults


def defaults_hold(api: Api, candidates: list[Json], attempts: int) -> None:
    """Require the same answers to requests with the explicit defaults and without them.

    With the same seed, each text must get the same answer in both cases, also if both requests
    contain a high temperature. Without a seed, answers must differ.

    Args:
        api: The API of the server.
        candidates: The possible defaults, one of which must be right.
        attempts: The number of attempts to get the same answer.

    Raises:
        Unmet: No candidate gives the same answers, or answers are equal without a seed.
    """

    def differing_texts(values: Json) -> list[str]:
        texts: list[str] = []
        for alone in ({}, _HOT):
            left = set(TEXTS)
            for _ in range(attempts):
                without = _answers(api, alone, seed=11)
                explicit = _answers(api, values | alone, seed=11)
                answers = zip(TEXTS, without, explicit, strict=True)
                left &= {text for text, mine, other in answers if mine != other}
                if not left:
                    break
            texts += sorted(left)
        return texts

    least = min(map(differing_texts, candidates), key=len)
    required = f"the answers with {candidates[0]} if none of these fields is sent"
    require(not least, required, f"{len(least)} others", evidence=least)
    first = _answers(api, _HOT)
    second = _answers(api, _HOT)
    require(first != second, "different answers if no seed is sent", "the same")


def _answers(api: Api, options: Json, seed: int | None = None) -> list[str]:
    """Return a sampled answer to each of `TEXTS`, without the default parameters of `Api`."""
    body = {"temperature": None, "max_tokens": 24, "ignore_eos": True, **options}
    if seed is not None:
        body["seed"] = seed
    choices = api.complete([*TEXTS], **body)["choices"]
    return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
