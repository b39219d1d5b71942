"""Finds the questions of the shipped exams that a server answers correctly three times."""

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from sm121.answers import exam, exam_judging
from sm121.answers.exam import ExamCompletion, Question
from sm121.api.client import together
from sm121.api.tools import tools
from sm121.core import profile
from sm121.core.level_settings import Chat, ToolCall
from sm121.core.server import Endpoint

#: The number of rounds, in each of which an answer must be correct.
ROUNDS = 3
#: The exams and the profile whose questions are sent.
_EXAMS = ("gpt-oss-120b", "canary")
_PROFILE = "cpu-tiny-gpt-oss"
#: Number of concurrent requests.
_CONCURRENCY = 4
#: The time limit of an answer, in seconds.
_WITHIN_S = 600.0
#: The maximum number of characters of a refusal in the profile.
_REFUSAL = 160
_Item = TypeVar("_Item")
_Json = dict[str, Any]


@dataclass(frozen=True)
class KnownAnswers:
    """The questions that were answered correctly in each round."""

    completions: tuple[ExamCompletion, ...]
    facts: tuple[Question, ...]
    chats: tuple[Chat, ...]
    tool_calls: tuple[ToolCall, ...]
    #: The number of questions about facts that were sent.
    asked: int
    #: Whether the server separates reasoning from the answer.
    reasons: bool
    #: The number of tokens of the longest answer to a fact.
    longest: int
    #: Why none of the questions needs a tool call; empty if some need one.
    why_no_tools: str = ""


@dataclass
class ExamClient:
    """Sends questions to one server.

    Args:
        endpoint: The server.
        limit: Maximum number of tokens of an answer.
        reasoning_field: The engine's field of reasoning; None if it has none.
        say: Receives a line of progress.
    """

    endpoint: Endpoint
    limit: int
    reasoning_field: str | None
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._reasons = False
        self._longest = 1
        self._why_no_tools = "the model made another call, or none, in one of three rounds"

    def examine(self) -> KnownAnswers:
        """Send all questions in three rounds. Questions with a wrong answer are not sent again."""
        completions: list[ExamCompletion] = []
        facts: list[Question] = []
        for name in _EXAMS:
            shipped = exam.load(name)
            completions += shipped.completions
            if shipped.facts is not None:
                facts += [each for each in shipped.facts.questions if len(each.turns) == 1]
        shipped_profile = profile.load(_PROFILE).correctness
        asked = {each.turns[0].user: each for each in facts}
        texts = {each.prompt: each for each in completions}
        known = KnownAnswers(
            completions=tuple(self._kept([*texts.values()], self._continues, "texts")),
            facts=tuple(self._kept([*asked.values()], self._knows, "facts")),
            chats=tuple(self._kept(shipped_profile.chats, self._contains, "chats")),
            tool_calls=tuple(self._kept(shipped_profile.tool_calls, self._calls, "tool calls")),
            asked=len(asked),
            reasons=self._reasons,
            longest=self._longest,
        )
        if known.tool_calls:
            return known
        return KnownAnswers(**{**known.__dict__, "why_no_tools": self._why_no_tools})

    def _kept(
        self, items: Sequence[_Item], is_right: Callable[[_Item], bool], what: str
    ) -> list[_Item]:
        """Return the items that the server answers correctly in each round."""
        kept = list(items)
        for number in range(1, ROUNDS + 1):
            answers = together(is_right, kept, at_once=_CONCURRENCY)
            kept = [item for item, right in zip(kept, answers, strict=True) if right]
            self.say(f"{what}: round {number} of {ROUNDS}: {len(kept)} of {len(items)} are right")
        return kept

    def _continues(self, known: ExamCompletion) -> bool:
        body = {"prompt": known.prompt, "max_tokens": max(8, len(known.begins))}
        answer = self._post("/v1/completions", body)
        return bool(answer) and str(answer.get("text")).startswith(known.begins)

    def _knows(self, question: Question) -> bool:
        turn = question.turns[0]
        choice = self._chat([{"role": "user", "content": turn.user}])
        content = _content(choice)
        if exam_judging.broken(content, str(choice.get("finish_reason"))) is not None:
            return False
        return exam_judging.miss(turn, content or "", None) is None

    def _contains(self, chat: Chat) -> bool:
        choice = self._chat([{"role": "user", "content": chat.question}])
        return choice.get("finish_reason") == "stop" and chat.contains in (_content(choice) or "")

    def _calls(self, case: ToolCall) -> bool:
        question = {"role": "user", "content": case.question}
        message = self._chat([question], tools=tools()).get("message") or {}
        calls = message.get("tool_calls") or []
        try:
            made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        except (KeyError, TypeError, ValueError):
            return False
        if made != [(case.tool, case.arguments)]:
            return False
        called = {"role": "assistant", "content": None, "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": calls[0].get("id"), "content": case.result}
        content = _content(self._chat([question, called, result], tools=tools())) or ""
        if case.answer_contains in content:
            return True
        self._why_no_tools = (
            f"an answer lacks the call's result ({case.answer_contains!r}), got content "
            f"{content[:80]!r}"
        )
        return False

    def _chat(self, messages: list[_Json], **options: Any) -> _Json:
        body = {"messages": messages, "max_tokens": self.limit, **options}
        choice = self._post("/v1/chat/completions", body)
        message = choice.get("message") or {}
        if self.reasoning_field and message.get(self.reasoning_field):
            self._reasons = True
        return choice

    def _post(self, path: str, body: _Json) -> _Json:
        """Return the first choice of a greedy answer; empty if the request was refused."""
        request = {"model": self.endpoint.served_name, "temperature": 0.0, **body}
        with self.endpoint.http(timeout_s=_WITHIN_S) as http:
            try:
                answer = http.post(path, json=request)
                content = answer.json()
            except (httpx.HTTPError, ValueError):
                return {}
        if answer.status_code != 200:
            if "tools" in body:
                refusal = textwrap.shorten(answer.text, _REFUSAL, placeholder=" ...")
                self._why_no_tools = f"the server refuses tools: {refusal}"
            return {}
        usage = content.get("usage") or {}
        self._longest = max(self._longest, int(usage.get("completion_tokens") or 0))
        return dict(content["choices"][0])


def _content(choice: _Json) -> str | None:
    content = (choice.get("message") or {}).get("content")
    return content if isinstance(content, str) else None
