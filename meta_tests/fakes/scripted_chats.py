"""A scripted server for `/v1/chat/completions`, over real HTTP."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.two_steps import in_two_steps
from sm121.answers.exam import Document, Section
from sm121.core.server import Endpoint

Json = dict[str, Any]
#: The answer to a request: a text, a call ("-> NAME ARGUMENTS"), several calls, or None.
ScriptedAnswer = str | Sequence[str] | None
Script = Callable[[Json], ScriptedAnswer]
MODEL = "gpt-oss-120b"
_CALL = "-> "


def script_of(section: Section, answers: Mapping[str, Sequence[ScriptedAnswer]]) -> Script:
    """Return a script that gives the answers of each question one after the other.

    Args:
        section: The questions.
        answers: The answers by the id of a question.
    """
    questions = {question.turns[0].user: question for question in section.questions}

    def script(request: Json) -> ScriptedAnswer:
        messages = [m for m in request["messages"] if m["role"] != "system"]
        question = questions[messages[0]["content"]]
        scripted_turns = sum(turn.given is not None for turn in question.turns)
        turn_number = sum(message["role"] == "assistant" for message in messages) - scripted_turns
        return answers[question.id][turn_number]

    return script


@in_two_steps
def reader(
    request: Json, document: Document, forgets: Callable[[str], str] = lambda text: text
) -> ScriptedAnswer:
    """Return the scripted answer to a question about a document.

    `forgets` removes the parts of the document that the scripted model does not remember."""
    text = forgets(request["messages"][0]["content"].rpartition("\n")[0])
    values = {
        needle.id: needle.text.rstrip(".").rpartition(" ")[2]
        for needle in document.needles
        if needle.text in text
    }
    if "keeper" in values:
        values["keeper"] = "Odile Brandt"
    question = request["messages"][0]["content"].rpartition("\n")[2]
    if question == document.question:
        return json.dumps(values)
    needle = next(needle for needle in document.needles if needle.question == question)
    return values.get(needle.id, "The log does not say.")


def _message(answer: ScriptedAnswer, number: int) -> tuple[Json, str]:
    lines = [answer] if isinstance(answer, str) else answer or []
    calls = [line.removeprefix(_CALL).split(" ", 1) for line in lines if line.startswith(_CALL)]
    if not calls:
        text = answer if isinstance(answer, str) else None
        return {"role": "assistant", "content": text, "reasoning": "Hm."}, "stop"
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [
        {"id": f"call_{number}_{n}", "type": "function", "function": function}
        for n, function in enumerate(functions)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made, "reasoning": "Hm."}
    return message, "tool_calls"


@contextmanager
def scripted(
    script: Script,
    *,
    finish: str | None = None,
    context: int | None = 131_072,
    prompt_tokens: Callable[[str], int] = lambda text: len(re.findall(r"\S+", text)),
    requests: list[Json] | None = None,
) -> Iterator[Endpoint]:
    """Serve the answers of a script.

    `finish` is the finish_reason of all answers, `context` the longest sequence in the list of
    models, `prompt_tokens` the usage of a prompt, and `requests` a list that records the requests.
    """

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            listed = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "vllm"}
            if self.path == "/version":
                self.say({"version": "0.32.0"})
            else:
                self.say({"object": "list", "data": [{**listed, "max_model_len": context}]})

        def do_POST(self) -> None:
            body = self.asked()
            if requests is not None:
                requests.append(body)
            message, ended = _message(script(body), len(body["messages"]))
            prompt = prompt_tokens("".join(m["content"] or "" for m in body["messages"]))
            usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
            choice = {"index": 0, "message": message, "logprobs": None}
            choice["finish_reason"] = finish or ended
            fields = {"id": "chatcmpl-1", "object": "chat.completion", "model": MODEL}
            self.say({**fields, "created": 1_700_000_000, "choices": [choice], "usage": usage})

    with serving(Handler) as url:
        yield Endpoint(url, "key", MODEL)
