"""Structured output: every sample is valid, also where the model would rather say another thing."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Literal

import jsonschema

from sm121.api import cases, harmony, sdk
from sm121.api.client import Api, Json, together
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require, require_each

_SAMPLES = 4
# The schema binds the final message only. At 1.0 a small model may end in a call of its own making,
# or with another token that ends a text, and has then said nothing that the schema is about.
_CALM = 0.3


def keeps_json_schema(api: Api, correctness: Correctness) -> None:
    """Samples of a chat each have a final message, which is JSON by a schema, or an object. Forms
    with a bias are of greedy completions, which it makes break each limit that is not kept."""
    options = {"max_tokens": correctness.max_answer_tokens, "temperature": _CALM}
    api.capabilities.require("json_schema")
    text = (files("sm121.fixtures") / "api" / "response_formats.json").read_text("utf-8")
    rows = json.loads(text)
    forms = [form for form in rows if "bias" not in form for _ in range(_SAMPLES)]
    biased = [form for form in rows if "bias" in form]
    question = correctness.chats[0].question
    answers = together(
        lambda seed: api.chat(question, response_format=forms[seed], seed=seed, **options),
        range(len(forms)),
    )
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    can = api.capabilities.can
    if can("choice") and can("logit_bias") and can("penalties") and can("token_ids"):
        signs = {sign: api.ids(sign)[-1] for form in biased for sign in form["bias"]}
        contents += together(lambda form: _biased(api, form, signs), biased)

    def fits(form: Json, content: str | None) -> None:
        require(content is not None, "a final message in each answer", "none")
        schema = form.get("json_schema", {}).get("schema", {"type": "object"})
        try:
            jsonschema.validate(json.loads(content or ""), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            require(False, "JSON by the schema", f"{content!r} ({error})")

    require_each(fits, [*forms, *biased][: len(contents)], contents)


def _biased(api: Api, form: Json, signs: Mapping[str, int]) -> str:
    """A completion in a form, biased by the ids of some signs; no space comes again and again."""
    bias = {str(signs[sign]): value for sign, value in form["bias"].items()}
    form = {name: value for name, value in form.items() if name != "bias"}
    options: Json = {"logit_bias": bias, "frequency_penalty": 1.0, "max_tokens": 48}
    return str(api.complete(sdk.PROMPT, response_format=form, **options)["choices"][0]["text"])


def keeps_choice_in_a_chat(api: Api, judge: cases.Judge, correctness: Correctness) -> None:
    """The final message of a chat is one of two choices."""
    choices = ["Paris", "Rome"]
    body = api.capabilities.structured("choice", choices)
    body["max_tokens"] = correctness.max_answer_tokens
    exchange = api.send_chat(correctness.chats[0].question, **body)
    content = exchange["choices"][0]["message"]["content"]
    leaks = harmony.leaked(content)
    excused = leaks and judge.known("choice-in-a-chat", "special_token", repr(content))
    require(content in choices or excused, f"one of {choices}", repr(content))


def keeps(api: Api, kind: Literal["regex", "choice"], value: str | list[str]) -> None:
    """Sampled texts match a regex, or are choices. Raises NotRun: the engine cannot."""
    body = api.capabilities.structured(kind, value)
    answers = together(
        # Seeded: what is wrong is wrong in the same way in every run.
        lambda seed: api.complete(sdk.PROMPT, max_tokens=32, temperature=1.0, seed=seed, **body),
        range(_SAMPLES),
    )
    texts = [answer["choices"][0]["text"] for answer in answers]
    required = f"a match of {value}" if isinstance(value, str) else f"one of {value}"
    pattern = value if isinstance(value, str) else "|".join(map(re.escape, value))
    wrong = [text for text in texts if not re.fullmatch(pattern, text)]
    require(not wrong, required, wrong)
