"""Check structured output: each sample must match its schema, regex or choices.

The questions are chosen so that the model would prefer an answer that does not match.
"""

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

#: Number of samples of each form.
_SAMPLES = 4
#: The temperature of chats. The schema applies only to the final message. At temperature 1.0, a
#: small model may not reach the final message, because it may end in a tool call or with another
#: token that ends the text.
_TEMPERATURE = 0.3


def keeps_json_schema(api: Api, correctness: Correctness) -> None:
    """Require that sampled chats with a JSON schema or JSON object have valid final messages.

    Response formats in ``fixtures/api/response_formats.json`` that have a bias are sent as greedy
    completions. If the engine does not enforce a limit of the schema, the bias causes a violation.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: A final message is missing or not valid.
        NotRun: The engine does not support JSON schemas.
    """
    options = {"max_tokens": correctness.max_answer_tokens, "temperature": _TEMPERATURE}
    api.capabilities.require("json_schema")
    text = (files("sm121.fixtures") / "api" / "response_formats.json").read_text("utf-8")
    forms = []
    biased = []
    for row in json.loads(text):
        if "bias" in row:
            biased.append(row)
        else:
            forms += [row] * _SAMPLES
    question = correctness.chats[0].question
    answers = together(
        lambda seed: api.chat(question, response_format=forms[seed], seed=seed, **options),
        range(len(forms)),
    )
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    can = api.capabilities.can
    if can("choice") and can("logit_bias") and can("penalties") and can("token_ids"):
        ids: dict[str, int] = {}
        for form in biased:
            for sign in form["bias"]:
                ids[sign] = api.ids(sign)[-1]
        contents += together(lambda form: _complete_biased(api, form, ids), biased)
        forms += biased
    require_each(_require_valid, forms, contents)


def _require_valid(form: Json, content: str | None) -> None:
    """Require JSON that matches the schema of a response format, or any object if it has none."""
    require(content is not None, "a final message in each answer", "none")
    schema = form.get("json_schema", {}).get("schema", {"type": "object"})
    try:
        jsonschema.validate(json.loads(content or ""), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        require(False, "JSON according to the schema", f"{content!r} ({error})")


def _complete_biased(api: Api, form: Json, ids: Mapping[str, int]) -> str:
    """Return a greedy completion in a response format, with a bias on some tokens.

    A penalty prevents an endless sequence of spaces.
    """
    bias = {str(ids[sign]): value for sign, value in form["bias"].items()}
    form = {name: value for name, value in form.items() if name != "bias"}
    options: Json = {"logit_bias": bias, "frequency_penalty": 1.0, "max_tokens": 48}
    return str(api.complete(sdk.PROMPT, response_format=form, **options)["choices"][0]["text"])


def keeps_choice_in_a_chat(api: Api, judge: cases.Judge, correctness: Correctness) -> None:
    """Require one of two choices as the final message of a chat.

    Args:
        api: The API of the server.
        judge: Records the known deviation of engines that leave a special token in the message.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: The message is not one of the choices.
        NotRun: The engine does not support choices.
    """
    choices = ["Paris", "Rome"]
    body = api.capabilities.structured("choice", choices)
    body["max_tokens"] = correctness.max_answer_tokens
    answer = api.send_chat(correctness.chats[0].question, **body)
    content = answer["choices"][0]["message"]["content"]
    excused = False
    if harmony.leaked(content):
        excused = judge.known("choice-in-a-chat", "special_token", repr(content))
    require(content in choices or excused, f"one of {choices}", repr(content))


def keeps(api: Api, kind: Literal["regex", "choice"], value: str | list[str]) -> None:
    """Require that sampled texts match a regex, or are one of several choices.

    Args:
        api: The API of the server.
        kind: The kind of structured output.
        value: The regex or the choices.

    Raises:
        Unmet: A text does not match.
        NotRun: The engine does not support this kind of structured output.
    """
    body = api.capabilities.structured(kind, value)
    answers = together(
        # Use seeds, so that the same samples fail in each run.
        lambda seed: api.complete(sdk.PROMPT, max_tokens=32, temperature=1.0, seed=seed, **body),
        range(_SAMPLES),
    )
    texts = [answer["choices"][0]["text"] for answer in answers]
    if isinstance(value, str):
        required = f"a match of {value}"
        pattern = value
    else:
        required = f"one of {value}"
        pattern = "|".join(map(re.escape, value))
    violations = [text for text in texts if not re.fullmatch(pattern, text)]
    require(not violations, required, violations)
