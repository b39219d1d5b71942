"""OpenAI's compatibility test for gpt-oss: tool calls with both APIs, k attempts per question.

Source: https://github.com/openai/gpt-oss/tree/main/compatibility-test, runCase.ts and analysis.ts.
The APIs are chat completions and Responses. As in the published test, an attempt does not fail if
the arguments match the schema, but are not the expected ones. Such attempts are only counted.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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

#: The maximum number of turns per attempt, as in the published test. Each turn sends the outputs of
#: the calls.
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


@dataclass(frozen=True)
class _CallWithResult:
    """A call of a tool."""

    #: The function, with ``name`` and ``arguments``.
    function: Json
    #: The message or item that sends back the tool's output.
    result: Json


@dataclass(frozen=True)
class _Turn:
    """One answer of the server."""

    #: The messages or items to send back.
    items: list[Json]
    has_reasoning: bool
    calls: list[_CallWithResult]


@dataclass
class _Attempt:
    """One conversation. Its fields are written to the report."""

    #: The path of the API.
    api: str
    question: str
    messages: list[Json]
    #: Why the attempt failed; None if it succeeded.
    why: str | None = None
    #: Whether the conversation has reasoning where the published test requires it.
    is_valid: bool = False
    #: Whether the arguments of the first call differ from the expected ones.
    other_arguments: bool = False


def judge_scores(api: Api, profile: Profile, folder: Path, remark: Callable[[str], object]) -> None:
    """Judge each score of the profile that has ``tries``, with chat completions and with Responses.

    The bound applies to the 95 % interval of pass^k, the fraction of questions for which all k
    attempts succeed.

    Args:
        api: The API of the server.
        profile: ``correctness.scores`` has the bounds.
        folder: The folder to which the attempts are written.
        remark: Called with a text with the figures of each score.

    Raises:
        Unmet: The questions for which all attempts led to a correct call are too few.
        Inconclusive: The bound is inside the interval, or the time limit was exceeded.
        NotRun: The profile has no such score, or the server does not support tools in one of the
            two APIs.
    """
    scores = [score for score in profile.correctness.scores if score.tries]
    if not scores:
        raise NotRun(
            f"profile {profile.name} has no entry of correctness.scores with the field tries"
        )
    folder.mkdir(exist_ok=True)

    def is_reached(score: Score, path: str) -> None:
        about = f"{score.task} by {path}"
        try:
            attempts = _run_attempts(api, score, path)
        except NotRun as error:
            raise NotRun(f"{about}: {error}") from error
        lines = [json.dumps(asdict(attempt), ensure_ascii=False) + "\n" for attempt in attempts]
        write_text("".join(lines), folder / f"{score.task}{path.replace('/', '-')}.jsonl")
        _judge_attempts(score, about, attempts, remark)

    pairs = itertools.product(scores, (CHAT, RESPONSES))
    require_each(is_reached, *zip(*pairs, strict=True))


def _judge_attempts(
    score: Score, about: str, attempts: Sequence[_Attempt], remark: Callable[[str], object]
) -> None:
    """Compare pass^k with the bound of a score."""
    tries = score.tries or 1
    tasks = [attempts[first : first + tries] for first in range(0, len(attempts), tries)]
    some_right = 0
    all_right = 0
    for task in tasks:
        right = [attempt.why is None for attempt in task]
        some_right += any(right)
        all_right += all(right)
    pass_at_k = interval_of(some_right, len(tasks))
    pass_all_k = interval_of(all_right, len(tasks))
    invalid = sum(not attempt.is_valid for attempt in attempts)
    others = sum(attempt.other_arguments for attempt in attempts)
    figures = (
        f"pass@{tries}: {pass_at_k}; pass^{tries}: {pass_all_k}; of {len(attempts)} answers "
        f"{invalid} are invalid, {others} have other arguments"
    )
    remark(f"{about}, effort {score.effort}: {figures}; {score.source}")
    failed = [f"{a.question!r}: {a.why}" for a in attempts if a.why is not None]
    evidence = failed[0] if failed else ""
    required = f"pass^{score.tries} of at least {score.at_least:.1%}"
    pass_all_k.hold(score.at_least, Fact(required, figures, about, evidence=evidence))


def _run_attempts(api: Api, score: Score, path: str) -> list[_Attempt]:
    """Return all attempts with one API, grouped by question."""
    file = data_file.load(f"scores/{score.task}.toml", _File)
    if len(file.cases) < score.questions:
        raise NotRun(f"expected {score.questions} questions, got {len(file.cases)}")
    deadline = time.monotonic() + score.within_s

    def attempt(case: _Case) -> _Attempt:
        if time.monotonic() > deadline:
            raise Inconclusive(Fact(f"an end within {score.within_s:.0f} s", "none", score.task))
        return _converse(api, score, path, case, file.tools[case.tool])

    repeated: list[_Case] = []
    for case in file.cases[: score.questions]:
        repeated += [case] * (score.tries or 1)
    return together(attempt, repeated)


def _converse(api: Api, score: Score, path: str, case: _Case, tool: _Tool) -> _Attempt:
    """Send a question, and then the outputs of its calls, until an answer has no call.

    Raises NotRun if the server has no parser of tool calls.
    """
    attempt = _Attempt(path, case.question, [{"role": "user", "content": case.question}])
    function = {
        "name": case.tool,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    ask = _ask_by_chat if path == CHAT else _ask_by_responses
    is_called = False
    try:
        for number in range(_TURNS):
            turn = ask(api, score, attempt.messages, function, tool.output)
            # As in the published test, only the first answer of Responses counts.
            if turn.has_reasoning and (number == 0 or path == CHAT):
                attempt.is_valid = True
            attempt.messages += turn.items
            for call in turn.calls:
                _require_right_call(call.function, function)
                if not is_called:
                    arguments = json.loads(call.function["arguments"])
                    attempt.other_arguments = arguments != case.arguments
                is_called = True
                attempt.messages.append(call.result)
            if not turn.calls:
                break
        require(not turn.calls, f"an answer within {_TURNS} turns", "calls alone")
        require(is_called, f"a call of {case.tool}", "none")
        require(attempt.is_valid, "reasoning in the answer", "none")
    except Unmet as error:
        reason = tools.refused(api, error) if isinstance(error, Refused) else error
        if isinstance(reason, NotRun):
            raise reason from error
        attempt.why = str(error)
    return attempt


def _require_right_call(call: Json, function: Json) -> None:
    """Require a call of the offered tool, with arguments that match its schema."""
    require(call["name"] == function["name"], f"a call of {function['name']}", call["name"])
    errors = invariants.arguments(call["arguments"])
    violation = errors or tools.misfit(call, [{"function": function}])
    require(not violation, "arguments that match its schema", violation)


def _ask_by_chat(
    api: Api, score: Score, messages: list[Json], function: Json, output: str
) -> _Turn:
    options = {"max_tokens": score.answer_tokens, "reasoning_effort": score.effort}
    offered = [{"type": "function", "function": function}]
    answer = api.send_chat(messages, tools=offered, temperature=None, **options)
    message = answer["choices"][0]["message"]
    reasoning_field = api.capabilities.file.reasoning_field or "reasoning"
    names = ("role", "content", "tool_calls", reasoning_field)
    item = {name: message[name] for name in names if message.get(name)}
    calls = []
    for call in message.get("tool_calls") or ():
        result = {"role": "tool", "tool_call_id": call["id"], "content": output}
        calls.append(_CallWithResult(call["function"], result))
    return _Turn([item], bool(message.get(reasoning_field)), calls)


def _ask_by_responses(
    api: Api, score: Score, items: list[Json], function: Json, output: str
) -> _Turn:
    options = {"max_output_tokens": score.answer_tokens, "reasoning": {"effort": score.effort}}
    offered = [{"type": "function", **function}]
    answer = api.send_response(items, tools=offered, temperature=None, **options)["output"]
    thoughts = []
    calls = []
    for item in answer:
        if item["type"] == "reasoning":
            thoughts += [part.get("text") for part in item.get("content") or []]
        elif item["type"] == "function_call":
            call_id = item["call_id"]
            result = {"type": "function_call_output", "call_id": call_id, "output": output}
            calls.append(_CallWithResult(item, result))
    return _Turn(answer, bool(thoughts) and all(thoughts), calls)
