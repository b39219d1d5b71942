"""OpenAI's compatibility test of gpt-oss: tools are called by chat and by Responses, k times each.
Source: https://github.com/openai/gpt-oss/tree/main/compatibility-test, runCase.ts and analysis.ts.
As there, arguments that fit the schema and are not the expected ones are only counted."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Json as Parsed

from sm121.answers.accuracy import interval_of
from sm121.api import invariants, tools
from sm121.api.client import CHAT, RESPONSES, Api, Json, Refused, together
from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.core.files import write_text
from sm121.core.level_settings import Score
from sm121.core.profile import Profile
from sm121.core.unmet import Fact, Unmet, require, require_each
from sm121.core.verdict import Inconclusive, NotRun

#: Turns of an attempt, as the published test allows: each call is answered by its tool's output.
_TURNS = 10


class _Tool(DataTable):
    description: str
    parameters: Parsed[dict[str, Any]]
    output: str


class _Case(DataTable):
    tool: str
    question: str
    arguments: Parsed[dict[str, Any]]


class _File(DataTable):
    tools: dict[str, _Tool]
    cases: tuple[_Case, ...]


#: What a server answered once: items to send back, whether reasoning is there, and each call with
#: its result.
_Turn = tuple[list[Json], bool, list[tuple[Json, Json]]]


@dataclass
class _Attempt:
    """One conversation. ``why`` it failed; ``is_valid``: it has reasoning where it must be."""

    api: str
    question: str
    messages: list[Json]
    why: str | None = None
    is_valid: bool = False
    other_arguments: bool = False


def judge(api: Api, profile: Profile, folder: Path, remark: Callable[[str], object]) -> None:
    """Each score of the profile that has ``tries``: pass^k by its 95 % interval, which pass@k is
    never below. `folder`: for the attempts. Raises Unmet: too few tools were called; Inconclusive:
    the bound lies in the interval, or it took too long; NotRun: the profile has no such score, or
    the server cannot be asked in one of the two ways."""
    if not (scores := [score for score in profile.correctness.scores if score.tries]):
        raise NotRun(f"profile {profile.name} has no correctness.scores with tries")
    folder.mkdir(exist_ok=True)

    def is_reached(score: Score, path: str) -> None:
        about = f"{score.task} by {path}"
        try:
            attempts = _attempts(api, score, path)
        except NotRun as error:
            raise NotRun(f"{about}: {error}") from error
        lines = [json.dumps(vars(attempt), ensure_ascii=False) + "\n" for attempt in attempts]
        write_text("".join(lines), folder / f"{score.task}{path.replace('/', '-')}.jsonl")
        tries, right = score.tries or 1, [attempt.why is None for attempt in attempts]
        tasks = [right[first : first + tries] for first in range(0, len(right), tries)]
        some, every = (interval_of(sum(map(holds, tasks)), len(tasks)) for holds in (any, all))
        invalid = sum(not attempt.is_valid for attempt in attempts)
        others = sum(attempt.other_arguments for attempt in attempts)
        counts = f"{invalid} are invalid, {others} have other arguments"
        figures = f"pass@{tries}: {some}; pass^{tries}: {every}; of {len(right)} answers {counts}"
        remark(f"{about}, effort {score.effort}: {figures}; {score.source}")
        failed = [f"{a.question!r}: {a.why}" for a in attempts if a.why is not None]
        required = f"pass^{score.tries} of at least {score.at_least:.1%}"
        every.hold(score.at_least, Fact(required, figures, about, evidence="".join(failed[:1])))

    require_each(is_reached, *zip(*itertools.product(scores, (CHAT, RESPONSES)), strict=True))


def _attempts(api: Api, score: Score, path: str) -> list[_Attempt]:
    """All of an API, each question's one after the other. Raises NotRun; Inconclusive."""
    file = data_file.load(f"scores/{score.task}.toml", _File)
    if len(file.cases) < score.questions:
        raise NotRun(f"expected {score.questions} questions, there are {len(file.cases)}")
    deadline = time.monotonic() + score.within_s

    def attempt(case: _Case) -> _Attempt:
        if time.monotonic() > deadline:
            raise Inconclusive(Fact(f"done in {score.within_s:.0f} s", "not done", score.task))
        return _converse(api, score, path, case, file.tools[case.tool])

    repeated = [c for c in file.cases[: score.questions] for _ in range(score.tries or 1)]
    return together(attempt, repeated)


def _converse(api: Api, score: Score, path: str, case: _Case, tool: _Tool) -> _Attempt:
    """Ask until no tool is called any more. Raises NotRun: the server cannot be asked so."""
    attempt = _Attempt(path, case.question, [{"role": "user", "content": case.question}])
    function = {"name": case.tool, **tool.model_dump(include={"description", "parameters"})}
    ask, is_called = _by_chat if path == CHAT else _by_responses, False
    try:
        for number in range(_TURNS):
            items, has_reasoning, calls = ask(api, score, attempt.messages, function, tool.output)
            # Of Responses the first answer alone counts, as in the published test.
            attempt.is_valid |= has_reasoning and (number == 0 or path == CHAT)
            attempt.messages += items
            for call, result in calls:
                require(call["name"] == case.tool, f"a call of {case.tool}", call["name"])
                offered, no_json = [{"function": function}], invariants.arguments(call["arguments"])
                wrong = no_json or tools.misfit(call, offered)
                require(not wrong, "arguments by its schema", wrong)
                if not is_called:
                    attempt.other_arguments = json.loads(call["arguments"]) != case.arguments
                is_called = True
                attempt.messages.append(result)
            if not calls:
                break
        require(not calls, f"an answer within {_TURNS} turns", "calls alone")
        require(is_called, f"a call of {case.tool}", "none")
        require(attempt.is_valid, "reasoning in the answer", "none")
    except Unmet as error:
        reason = tools.refused(api, error) if isinstance(error, Refused) else error
        if isinstance(reason, NotRun):
            raise reason from error
        attempt.why = str(error)
    return attempt


def _by_chat(api: Api, score: Score, messages: list[Json], function: Json, output: str) -> _Turn:
    limits = {"max_tokens": score.answer_tokens, "reasoning_effort": score.effort}
    offered = [{"type": "function", "function": function}]
    answer = api.send_chat(messages, tools=offered, temperature=None, **limits)
    message = answer["choices"][0]["message"]
    reasoning = api.capabilities.file.reasoning_field or "reasoning"
    names = ("role", "content", "tool_calls", reasoning)
    item = {name: message[name] for name in names if message.get(name)}
    calls = [
        (call["function"], {"role": "tool", "tool_call_id": call["id"], "content": output})
        for call in message.get("tool_calls") or ()
    ]
    return [item], bool(message.get(reasoning)), calls


def _by_responses(api: Api, score: Score, items: list[Json], function: Json, output: str) -> _Turn:
    limits = {"max_output_tokens": score.answer_tokens, "reasoning": {"effort": score.effort}}
    offered = [{"type": "function", **function}]
    answer = api.send_response(items, tools=offered, temperature=None, **limits)["output"]
    thoughts = [item.get("content") or [] for item in answer if item["type"] == "reasoning"]
    texts = [part.get("text") for content in thoughts for part in content]
    calls = [
        (item, {"type": "function_call_output", "call_id": item["call_id"], "output": output})
        for item in answer
        if item["type"] == "function_call"
    ]
    return answer, bool(texts) and all(texts), calls
