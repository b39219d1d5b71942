"""Send the questions of the profile's exam to a server, and judge the answers."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jsonschema

from sm121.answers import exam_judging, exam_text
from sm121.answers.exam import (
    Document,
    Exam,
    ExamCall,
    Form,
    Needle,
    Question,
    Section,
    SectionName,
    Turn,
)
from sm121.api import cases, harmony, rendering, tools
from sm121.api.client import Api, Json, together
from sm121.core.server import require_context
from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import NotRun

#: The number of prompt tokens that are reserved for harmony's own messages and the question.
_QUESTION_TOKENS = 512


class Outcome(NamedTuple):
    """The outcome of a question.

    At most one field is set. If no field is set, the answer is correct.
    """

    #: Why the answer is broken (`exam_judging`).
    broken: str | None = None
    #: Why the answer is a miss (`exam_judging`).
    missed: str | None = None
    #: If the question was not sent because the server lacks a capability, the reason.
    unasked: str | None = None


_RIGHT = Outcome()


@dataclass(frozen=True)
class Candidate:
    """A server that takes an exam."""

    api: Api
    #: Records the known deviation of engines that leave a special token in formatted answers.
    judge: cases.Judge
    exam: Exam
    #: Called with each remark.
    remark: Callable[[str], object]

    def passes(self, name: SectionName) -> None:
        """Require that a section has no broken answers, and no more misses than allowed.

        Args:
            name: The name of the section.

        Raises:
            Unmet: An answer is broken, or too many answers are misses.
            NotRun: The exam does not have the section. Or the engine lacks a capability that some
                questions need, and the answers to the other questions pass.
        """
        section = self.exam.section(name)
        outcomes = together(lambda question: self._outcome(section, question), section.questions)
        broken = []
        missed = []
        unasked = []
        for question, outcome in zip(section.questions, outcomes, strict=True):
            if outcome.broken:
                broken.append(f"{question.id}: {outcome.broken}")
            if outcome.missed:
                missed.append(f"{question.id}: {outcome.missed}")
            if outcome.unasked:
                unasked.append(f"{question.id}: {outcome.unasked}")
        require(not broken, f"{name}: whole answers", "; ".join(broken))
        total = len(outcomes) - len(unasked)
        right = f"{total - len(missed)} of {total} right"
        least = f"{name}: at least {total - section.misses} of {total} right"
        require(len(missed) <= section.misses, least, f"{right}: {'; '.join(missed)}")
        self.remark("; ".join([f"exam {self.exam.name}: {name}: {right}", *missed]))
        if unasked:
            raise NotRun(
                f"{len(unasked)} of {len(outcomes)} questions cannot be asked; of the "
                f"others, {right}. The first that cannot be asked: {unasked[0]}"
            )

    def recalls(self, tokens: int) -> None:
        """Require that the server finds every needle of a document.

        The first question is about all needles. If the answer lacks a needle, another question
        about only this needle is sent.

        Args:
            tokens: The length of the document, in tokens.

        Raises:
            Unmet: A needle is not found, an answer is broken, or the usage is wrong for this
                length.
            NotRun: The exam has no document, or the context is too short.
        """
        document = self._document()
        self.api.capabilities.require("context_length")
        require_context(
            self.api.context_length(), tokens + _QUESTION_TOKENS, self.exam.answer_tokens
        )
        text = document.text(tokens, rendering.count)
        patient = replace(self, api=replace(self.api, timeout_s=document.within_s))

        def ask(question: str) -> str:
            return patient._ask_about(text, tokens, question, document.effort)

        first = exam_text.parsed(ask(document.question))
        missing = document.not_in(first if isinstance(first, dict) else {})
        lost = []
        for needle in missing:
            reason = _judge_needle(needle, ask(needle.question))
            if reason is not None:
                lost.append(f"{needle.id} (depth {needle.depth:g}): {reason}")
        require(not lost, f"all {len(document.needles)} needles", "; ".join(lost))
        line = f"exam {self.exam.name}: a document of {tokens} tokens: all needles found"
        alone = [f"{needle.id} was found only in a separate request" for needle in missing]
        self.remark("; ".join([line, *alone]))

    def _document(self) -> Document:
        if self.exam.document is None:
            raise NotRun(f"exam {self.exam.name} has no section document")
        return self.exam.document

    def _ask_about(self, text: str, tokens: int, question: str, effort: str) -> str:
        """Return the answer to a question about a document; raise Unmet if it is broken."""
        messages = [{"role": "user", "content": f"{text}\n{question}"}]
        answer = self._chat(messages, effort)
        counted = answer["usage"]["prompt_tokens"]
        whole = tokens - _QUESTION_TOKENS < counted < tokens + _QUESTION_TOKENS
        require(whole, f"the whole document, {tokens} tokens", f"usage of {counted}")
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        reason = exam_judging.broken(content, choice["finish_reason"])
        require(reason is None, "a whole answer", reason, f"{question!r}")
        return str(content)

    def converses(self, tokens: int) -> None:
        """Send all questions of the tools section in one chat, with long texts in tool results.

        Args:
            tokens: The total length of all tool results, in tokens. Questions, calls and answers
                add to the length of the chat.

        Raises:
            NotRun: The exam has no document, or the context is too short.
            Unmet: An answer is empty, truncated or a loop. A miss is only a remark, because in such
                a long chat, a healthy model may answer a question wrongly.
        """
        document = self._document()
        self.api.capabilities.require("tools", "context_length")
        section = self.exam.section("tools")
        turns = []
        for question in section.questions:
            turns += [(question, turn) for turn in question.turns]
        prompt = tokens + _QUESTION_TOKENS * len(turns)
        require_context(self.api.context_length(), prompt, self.exam.answer_tokens)
        of_each = tokens // sum(len(turn.calls) for _, turn in turns)
        entries = document.entries()
        messages: list[Json] = []
        broken: list[str] = []
        missed: list[str] = []
        for question, turn in turns:
            before = len(messages)
            messages.append({"role": "user", "content": turn.user})
            calls = tuple(_with_log(call, entries, of_each) for call in turn.calls)
            long_turn = turn.model_copy(update={"calls": calls})
            try:
                outcome = self._turn(section, question, long_turn, messages)
            except Unmet as error:
                outcome = Outcome(broken=str(error))
            if outcome.broken is not None:
                broken.append(f"{question.id}, after {before} messages: {outcome.broken}")
            if outcome.missed is not None:
                missed.append(f"{question.id}: {outcome.missed}")
            if outcome != _RIGHT:
                del messages[before:]
        require(not broken, "a chat with long results: whole answers", "; ".join(broken))
        right = f"{len(turns) - len(missed)} of {len(turns)} right"
        line = f"exam {self.exam.name}: a chat with {tokens} tokens of results: {right}"
        self.remark("; ".join([line, *missed]))

    def _outcome(self, section: Section, question: Question) -> Outcome:
        """Send a question in its own chat, and judge the answers."""
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
                if outcome != _RIGHT:
                    return outcome
        except Unmet as error:
            return Outcome(broken=str(error))
        except NotRun as error:
            return Outcome(unasked=str(error))
        return _RIGHT

    def _turn(
        self, section: Section, question: Question, turn: Turn, messages: list[Json]
    ) -> Outcome:
        """Request the answer to one turn, with its tool calls, and add the messages to the chat."""
        waiting = list(turn.calls)
        functions = list(section.functions)
        while True:
            choice = self._choice(section, question, messages)
            message = choice["message"]
            messages.append(self._sent_back(message))
            calls = message.get("tool_calls") or []
            for call in calls:
                function = call["function"]
                arguments = json.loads(function["arguments"])
                expected = exam_judging.met(waiting, function["name"], arguments)
                if expected is None or tools.misfit(function, functions) is not None:
                    observed = f"{function['name']}({function['arguments']})"
                    return Outcome(missed=f"{Fact(_required(waiting), observed)}")
                waiting.remove(expected)
                result = {"tool_call_id": call["id"], "content": expected.result}
                messages.append({"role": "tool", **result})
            if not calls:
                break
        content = self._without_known_leaks(message["content"], question.form)
        reason = exam_judging.broken(content, choice["finish_reason"])
        reason = reason or _form_fault(question.form, content)
        if reason is not None:
            if waiting:
                reason = f"{reason}; {tools.no_call(self.api, choice)}"
            return Outcome(broken=reason)
        if waiting:
            observed = tools.no_call(self.api, choice)
            return Outcome(missed=f"{Fact(_required(waiting), observed)}")
        return Outcome(missed=exam_judging.miss(turn, str(content), section.unsure))

    def _choice(self, section: Section, question: Question, messages: list[Json]) -> Json:
        """Send the messages with the section's tools, if any, and return the first choice."""
        functions = list(section.functions)
        if not functions:
            answer = self._chat(messages, section.effort, question)
            return dict(answer["choices"][0])
        limit = self.exam.answer_tokens
        return tools.ask(self.api, messages, functions, limit, reasoning_effort=section.effort)

    def _sent_back(self, message: Json) -> Json:
        """Return an assistant's message in the form in which the next request contains it.

        Reasoning is kept only with tool calls.
        """
        reply: Json = {"role": "assistant", "content": message["content"]}
        calls = message.get("tool_calls")
        if calls:
            reply["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")} for call in calls
            ]
            reasoning_field = self.api.capabilities.file.reasoning_field
            if reasoning_field and message.get(reasoning_field):
                reply[reasoning_field] = message[reasoning_field]
        return reply

    def _chat(self, messages: list[Json], effort: str, question: Question | None = None) -> Json:
        """Send a chat.

        If the question has a format, request that the server enforces this format.
        """
        options = {"max_tokens": self.exam.answer_tokens, "reasoning_effort": effort}
        if question is None or question.form is None:
            return self.api.chat(messages, **options)
        return self.api.send_chat(messages, **options, **self._form_options(question))

    def _form_options(self, question: Question) -> dict[str, Any]:
        """Return the fields of a request that enforce the format of a question."""
        form = question.form
        assert form is not None
        if form.json_schema is not None:
            schema = {"name": question.id, "schema": form.json_schema}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if form.regex is not None:
            return dict(self.api.capabilities.structured("regex", form.regex))
        return dict(self.api.capabilities.structured("choice", list(form.choice or ())))

    def _without_known_leaks(self, content: str | None, form: Form | None) -> str | None:
        """Remove special tokens that this engine is known to leave in formatted answers."""
        if content is None or form is None:
            return content
        leaks = harmony.leaked(content)
        if not leaks or not self.judge.known("choice-in-a-chat", "special_token", repr(content)):
            return content
        for leak in leaks:
            content = content.replace(leak, "")
        return content


def _judge_needle(needle: Needle, answer: str) -> str | None:
    """Return why the answer to a question about one needle is wrong; None if it is correct."""
    turn = Turn(user=needle.question, right=needle.right)
    return exam_judging.miss(turn, answer, None)


def _with_log(call: ExamCall, entries: Iterator[str], tokens: int) -> ExamCall:
    """Return a call whose result is followed by entries of about the given number of tokens."""
    lines = [call.result]
    room = tokens
    while room > 0:
        lines.append(next(entries).rstrip("\n"))
        room -= rendering.count(lines[-1])
    return call.model_copy(update={"result": "\n".join(lines)})


def _required(waiting: Sequence[ExamCall]) -> str:
    if not waiting:
        return "no call"
    return "a call of " + " and ".join(map(str, waiting))


def _form_fault(form: Form | None, content: str | None) -> str | None:
    """Return a fault if an answer contains a special token or violates the required format."""
    content = content or ""
    observed = f"{content!r:.200}"
    leaks = harmony.leaked(content)
    if leaks:
        return str(Fact("no special token", f"{leaks[0]} in {observed}"))
    if form is None:
        return None
    if form.json_schema is not None:
        try:
            jsonschema.validate(json.loads(content), form.json_schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return str(Fact("JSON according to the schema", observed, evidence=f"{error!s:.200}"))
    elif form.regex is not None and not re.fullmatch(form.regex, content):
        return str(Fact(f"a match of {form.regex}", observed))
    elif form.choice is not None and content not in form.choice:
        return str(Fact(f"one of {form.choice}", observed))
    return None
