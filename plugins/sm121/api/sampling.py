"""What the parameters of sampling do: temperature, seed, logit_bias, n."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from sm121.api.client import Api, Json
from sm121.api.sdk import PROMPT, Sdk, first_that
from sm121.client.completions import parse
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require

Form = Literal["streamed completion", "streamed chat", "response"]
#: Each form is asked so often, for so many tokens, after a text that can go on in many ways.
_TIMES, _OPEN, _OPEN_CHAT = 8, "The capital", "1, 2, 3, 4, 5,"
_LIMIT: Json = {"max_tokens": 20}


def seed_repeats_itself(sdk: Sdk, attempts: int) -> None:
    """One seed gives the same tokens again, at the latest at the last attempt."""

    options: Json = {"max_tokens": 24, "temperature": 1.0, "extra_body": {"ignore_eos": True}}

    def sampled() -> Any:
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
    sent = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0}]
    greedy, cut, hot = (
        Counter(parse(*asks[form](options)).text for _ in range(_TIMES)) for options in sent
    )
    for texts, options in zip((greedy, cut), sent, strict=False):
        alike, about = 2 * max(texts.values()) >= _TIMES, f"{form}, {options}"
        require(alike, "mostly the same text", "others", about, evidence=f"{texts}")
    require(len(hot) > 1, "texts that differ at temperature 1", "one", form, evidence=f"{[*hot]}")


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
