"""Structured output: every sample is valid, also where the model would rather say another thing."""

from __future__ import annotations

import json
import re
from typing import Literal

import jsonschema

from sm121.api import harmony
from sm121.api.cases import Judge
from sm121.api.client import Api, together
from sm121.api.sdk import PROMPT
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require, require_each

_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Tokyo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_SAMPLES = 4
# The schema binds the final message only. At 1.0 a small model may end in a call of its own making,
# or with another token that ends a text, and has then said nothing that the schema is about.
_CALM = 0.3


def keeps_json_schema(api: Api, correctness: Correctness) -> None:
    """Samples of a chat each have a final message, which is JSON by a schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}
    options = {"max_tokens": correctness.max_answer_tokens, "temperature": _CALM}
    api.capabilities.require("json_schema")
    question = correctness.chats[0].question
    answers = together(
        lambda seed: api.chat(question, response_format=schema, seed=seed, **options),
        range(_SAMPLES),
    )
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    require(None not in contents, "a final message in each answer", answers)

    def fits(content: str) -> None:
        try:
            jsonschema.validate(json.loads(content), _CITY)
        except (ValueError, jsonschema.ValidationError) as error:
            require(False, "JSON by the schema", f"{content!r} ({error})")

    require_each(fits, contents)


def keeps_choice_in_a_chat(api: Api, judge: Judge, correctness: Correctness) -> None:
    """The final message of a chat is one of two choices."""
    choices = ["Paris", "Rome"]
    body = api.capabilities.structured("choice", choices)
    exchange = api.send_chat(
        correctness.chats[0].question, max_tokens=correctness.max_answer_tokens, **body
    )
    content = exchange["choices"][0]["message"]["content"]
    leaks = harmony.leaked(content)
    excused = leaks and judge.known("choice-in-a-chat", "special_token", repr(content))
    require(content in choices or excused, f"one of {choices}", repr(content))


def keeps(api: Api, kind: Literal["regex", "choice"], value: str | list[str]) -> None:
    """Texts of a completion that is sampled several times match a regex, or are choices.

    Raises:
        NotRun: the engine cannot.
    """
    body = api.capabilities.structured(kind, value)
    answers = together(
        # Seeded: what is wrong is wrong in the same way in every run.
        lambda seed: api.complete(PROMPT, max_tokens=32, temperature=1.0, seed=seed, **body),
        range(_SAMPLES),
    )
    texts = [answer["choices"][0]["text"] for answer in answers]
    required = f"a match of {value}" if isinstance(value, str) else f"one of {value}"
    pattern = value if isinstance(value, str) else "|".join(value)
    wrong = [text for text in texts if not re.fullmatch(pattern, text)]
    require(not wrong, required, wrong)
