"""A server in its profile's exam: what it answers, and whether that counts as right."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jsonschema

from sm121.answers import exam
from sm121.answers.exam import Call, Exam, Form, Needle, Question, Section, SectionName, Turn
from sm121.api import cases, harmony, rendering, tools
from sm121.api.client import Api, Json, together
from sm121.core.server import require_context
from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import NotRun

#: Of a prompt, beside the document: harmony's own messages, and the question.
_BESIDE = 512


class Outcome(NamedTuple):
    """Of a question: why its answer is broken, or else a miss, or why it cannot be asked. None of
    them: it is right."""

    broken: str | None = None
    missed: str | None = None
    unasked: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A server that sits an exam."""

    api: Api
    judge: cases.Judge
    exam: Exam
    remark: Callable[[str], object]

    def passes(self, name: SectionName) -> None:
        """No answer of a section is broken, and no more are missed than it allows. Raises NotRun:
        the server cannot do what some question needs, and the others are right."""
        section = self.exam.section(name)
        outcomes = together(lambda question: self._outcome(section, question), section.questions)
        pairs = list(zip(section.questions, outcomes, strict=True))
        broken, missed, unasked = (
            [f"{q.id}: {getattr(outcome, kind)}" for q, outcome in pairs if getattr(outcome, kind)]
            for kind in Outcome._fields
        )
        require(not broken, f"{name}: whole answers", "; ".join(broken))
        total = len(outcomes) - len(unasked)
        right = f"{total - len(missed)} of {total} right"
        least = f"{name}: at least {total - section.misses} of {total} right"
        require(len(missed) <= section.misses, least, f"{right}: {'; '.join(missed)}")
        self.remark("; ".join([f"exam {self.exam.name}: {name}: {right}", *missed]))
        if unasked:
            raise NotRun(
                f"{len(unasked)} of {len(outcomes)} cannot be asked ({right}): {unasked[0]}"
            )

    def recalls(self, tokens: int) -> None:
        """Every needle of a document of so many tokens is found: all in one answer, and one that is
        not in it when asked for alone. Raises NotRun: no document, or the context is too short."""
        if (document := self.exam.document) is None:
            raise NotRun(f"exam {self.exam.name} has no section document")
        self.api.capabilities.require("context_length")
        require_context(self.api.context_length(), tokens + _BESIDE, self.exam.answer_tokens)
        text = document.text(tokens, rendering.count)
        patient = replace(self, api=replace(self.api, timeout_s=document.within_s))

        def ask(question: str) -> str:
            messages = [{"role": "user", "content": f"{text}\n{question}"}]
            answer = patient._chat(messages, document.effort)
            counted, choice = answer["usage"]["prompt_tokens"], answer["choices"][0]
            whole = tokens - _BESIDE < counted < tokens + _BESIDE
            require(whole, f"the whole document, {tokens} tokens", f"usage of {counted}")
            content = choice["message"]["content"]
            why = exam.broken(content, choice["finish_reason"])
            require(why is None, "a whole answer", why, f"{question!r}")
            return str(content)

        first = exam.parsed(ask(document.question))
        missing = document.not_in(first if isinstance(first, dict) else {})

        def alone(needle: Needle) -> str | None:
            turn = Turn(user=needle.question, right=needle.right)
            return exam.miss(turn, ask(needle.question), None)

        lost = [f"{n.id} (depth {n.depth:g}): {why}" for n in missing if (why := alone(n))]
        require(not lost, f"all {len(document.needles)} needles", "; ".join(lost))
        line = f"exam {self.exam.name}: a document of {tokens} tokens: all needles found"
        self.remark("; ".join([line, *(f"{needle.id} only alone" for needle in missing)]))

    def converses(self, tokens: int) -> None:
        """Ask all questions of the tools section in one chat, whose results have long logs.

        Args:
            tokens: of all results together. The chat is longer by questions, calls and answers.

        Raises:
            NotRun: the exam has no document, or the context is too short.
            Unmet: an answer is empty, cut off or a loop. A miss is a remark: in so long a chat a
                healthy model may mistake a question.
        """
        if (document := self.exam.document) is None:
            raise NotRun(f"exam {self.exam.name} has no section document")
        self.api.capabilities.require("tools", "context_length")
        section, entries = self.exam.section("tools"), document.entries()
        turns = [(question, turn) for question in section.questions for turn in question.turns]
        prompt = tokens + _BESIDE * len(turns)
        require_context(self.api.context_length(), prompt, self.exam.answer_tokens)
        of_each = tokens // sum(len(turn.calls) for _, turn in turns)

        def with_log(call: Call) -> Call:
            lines = [call.result]
            room = of_each
            while room > 0:
                lines.append(next(entries).rstrip("\n"))
                room -= rendering.count(lines[-1])
            return call.model_copy(update={"result": "\n".join(lines)})

        messages: list[Json] = []
        broken: list[str] = []
        missed: list[str] = []
        for question, turn in turns:
            before = len(messages)
            messages.append({"role": "user", "content": turn.user})
            long = turn.model_copy(update={"calls": tuple(map(with_log, turn.calls))})
            try:
                outcome = self._turn(section, question, long, messages)
            except Unmet as error:
                outcome = Outcome(broken=str(error))
            if outcome.broken is not None:
                broken.append(f"{question.id}, after {before} messages: {outcome.broken}")
            if outcome.missed is not None:
                missed.append(f"{question.id}: {outcome.missed}")
            if outcome != Outcome():
                del messages[before:]
        require(not broken, "a chat with long results: whole answers", "; ".join(broken))
        right = f"{len(turns) - len(missed)} of {len(turns)} right"
        line = f"exam {self.exam.name}: a chat with {tokens} tokens of results: {right}"
        self.remark("; ".join([line, *missed]))

    def _outcome(self, section: Section, question: Question) -> Outcome:
        messages: list[Json] = []
        if question.instructions is not None:
            messages.append({"role": "system", "content": question.instructions})
        try:
            for turn in question.turns:
                messages.append({"role": "user", "content": turn.user})
                if turn.given is not None:
                    messages.append({"role": "assistant", "content": turn.given})
                    continue
                outcome = self._turn(section, question, turn, messages)
                if outcome != Outcome():
                    return outcome
        except Unmet as error:
            return Outcome(broken=str(error))
        except NotRun as error:
            return Outcome(unasked=str(error))
        return Outcome()

    def _turn(
        self, section: Section, question: Question, turn: Turn, messages: list[Json]
    ) -> Outcome:
        """Ask for one turn, with its calls; what was said is added to the messages."""
        waiting = list(turn.calls)
        while True:
            if functions := list(section.functions):
                limit, effort = self.exam.answer_tokens, section.effort
                choice = tools.ask(self.api, messages, functions, limit, reasoning_effort=effort)
            else:
                choice = self._chat(messages, section.effort, question)["choices"][0]
            message = choice["message"]
            messages.append(self._as_said(message))
            calls = message.get("tool_calls") or []
            for call in calls:
                function = call["function"]
                expected = exam.met(waiting, function["name"], json.loads(function["arguments"]))
                if expected is None or tools.misfit(function, functions) is not None:
                    observed = f"{function['name']}({function['arguments']})"
                    return Outcome(missed=f"{Fact(_required(waiting), observed)}")
                waiting.remove(expected)
                result = {"tool_call_id": call["id"], "content": expected.result}
                messages.append({"role": "tool", **result})
            if not calls:
                break
        content = self._without_known(message["content"], question.form)
        why = exam.broken(content, choice["finish_reason"]) or _misformed(question.form, content)
        if why is not None:
            return Outcome(broken=f"{why}; {tools.no_call(self.api, choice)}" if waiting else why)
        if waiting:
            observed = tools.no_call(self.api, choice)
            return Outcome(missed=f"{Fact(_required(waiting), observed)}")
        return Outcome(missed=exam.miss(turn, str(content), section.unsure))

    def _as_said(self, message: Json) -> Json:
        """A message of the assistant, as it is sent back. Reasoning goes with a call alone."""
        reply: Json = {"role": "assistant", "content": message["content"]}
        if calls := message.get("tool_calls"):
            reply["tool_calls"] = [{k: c[k] for k in ("id", "type", "function")} for c in calls]
            field = self.api.capabilities.file.reasoning_field
            if field and message.get(field):
                reply[field] = message[field]
        return reply

    def _chat(self, messages: list[Json], effort: str, question: Question | None = None) -> Json:
        options = {"max_tokens": self.exam.answer_tokens, "reasoning_effort": effort}
        form = question.form if question is not None else None
        if question is None or form is None:
            return self.api.chat(messages, **options)
        if form.json_schema is not None:
            schema = {"name": question.id, "schema": form.json_schema}
            form_options: Any = {"response_format": {"type": "json_schema", "json_schema": schema}}
        elif form.regex is not None:
            form_options = self.api.capabilities.structured("regex", form.regex)
        else:
            form_options = self.api.capabilities.structured("choice", list(form.choice or ()))
        return self.api.send_chat(messages, **options, **form_options)

    def _without_known(self, content: str | None, form: Form | None) -> str | None:
        """An answer in a form, without special tokens that this engine is known to leave in it."""
        if form is None or not (leaks := harmony.leaked(content)):
            return content
        if not self.judge.known("choice-in-a-chat", "special_token", repr(content)):
            return content
        for leak in leaks:
            content = (content or "").replace(leak, "")
        return content


def _required(waiting: Sequence[Call]) -> str:
    return "a call of " + " and ".join(map(str, waiting)) if waiting else "no call"


def _misformed(form: Form | None, content: str | None) -> str | None:
    content = content or ""
    if leaks := harmony.leaked(content):
        return str(Fact("no special token", f"{leaks[0]} in {content!r:.200}"))
    if form is None:
        return None
    observed = f"{content!r:.200}"
    if form.json_schema is not None:
        try:
            jsonschema.validate(json.loads(content), form.json_schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return str(Fact("JSON by the schema", observed, evidence=f"{error!s:.200}"))
    elif form.regex is not None and not re.fullmatch(form.regex, content):
        return str(Fact(f"a match of {form.regex}", observed))
    elif form.choice is not None and content not in form.choice:
        return str(Fact(f"one of {form.choice}", observed))
    return None
