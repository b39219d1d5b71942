r"""Exams: files of questions that a model must answer (JSONL, ``fixtures/exams``).

Each line is a JSON object. The first line describes the exam. Lines with texts that the model must
continue follow, and then the sections, each followed by its questions:

    {"exam": "mine", "answer_tokens": 500}
    {"prompt": "The capital of France is", "begins": " Paris"}
    {"section": "facts", "effort": "low", "misses": 1}
    {"id": "product", "turns": [{"user": "What is 17 times 23?", "right": "\\b391\\b"}]}

If the first line is missing, the exam has the name of its file. Questions before the first section
belong to the section ``facts``. `exam_judging` has the rules for broken and missed answers.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.answers.exam_text import plain
from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Pattern, Regex
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun

#: The maximum number of characters to store of a server's answer or error.
_KEPT = 80
_KEPT_ERROR = 200
#: Minimum number of tokens that are requested for a continuation.
_LEAST_TOKENS = 4

Json = dict[str, Any]
Effort = Literal["low", "medium", "high"]
SectionName = Literal["facts", "dialogues", "tools", "formats"]


class ExamCompletion(DataTable):
    """A text that the model continues."""

    prompt: str = Field(min_length=1)
    #: The text with which the greedy continuation must begin (case-sensitive).
    begins: str = Field(min_length=1)


class ExamCall(DataTable):
    """A function call that the model must make, and its result."""

    function: str = Field(min_length=1)
    #: The required keys and values. A text value is a pattern for the whole value (see `plain`).
    arguments: Json
    #: The result of the call, which is sent back to the model.
    result: str = Field(min_length=1)

    def __str__(self) -> str:
        return f"{self.function}({json.dumps(self.arguments)})"


class Turn(DataTable):
    """A message of the user, and the conditions of a correct answer."""

    user: str = Field(min_length=1)
    #: The assistant's answer, if the exam provides it. If None, the model generates it.
    given: str | None = None
    #: A pattern that the answer must contain (see `plain`).
    right: Regex | None = None
    #: A pattern that the answer must not contain (see `plain`).
    wrong: Regex | None = None
    #: The function calls that the model must make before the answer, in any order. If empty, the
    #: model must not call functions.
    calls: tuple[ExamCall, ...] = ()
    #: The JSON object that the answer must be. Texts in it are patterns, as in
    #: `ExamCall.arguments`.
    content: Json | None = None

    @property
    def is_judged(self) -> bool:
        """Whether the turn has a condition of a correct answer."""
        return bool(self.right or self.content or self.calls)

    @model_validator(mode="after")
    def _given_or_judged(self) -> "Turn":
        if self.given is not None and (self.is_judged or self.wrong):
            raise ValueError(
                "expected either an answer (given) or the conditions of a correct answer (right, "
                "wrong, content, calls), got both"
            )
        return self


class Form(DataTable):
    """The output format that the server must enforce. Exactly one field is set."""

    json_schema: Json | None = None
    regex: Pattern | None = None
    choice: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one(self) -> "Form":
        if len(self.model_fields_set) != 1:
            raise ValueError("expected one of json_schema, regex and choice")
        return self


class Question(DataTable):
    """A chat. It is answered correctly if each of its turns is."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    instructions: str | None = None
    turns: tuple[Turn, ...] = Field(min_length=1)
    form: Form | None = None

    @model_validator(mode="after")
    def _ends_in_what_is_judged(self) -> "Question":
        if not self.turns[-1].is_judged:
            raise ValueError("turns: expected the field right, calls or content in the last turn")
        return self


class Section(DataTable):
    """Questions of one kind."""

    effort: Effort = "low"
    #: The number of allowed misses (complete, but not correct answers).
    misses: Annotated[int, Field(ge=0)] = 0
    #: Why this number of misses is allowed.
    source: str = ""
    #: An answer that contains this pattern is a miss.
    unsure: Regex | None = None
    #: The functions that the model may call in each question of the section, as JSON schemas.
    functions: tuple[Json, ...] = ()
    questions: Entries[Question]


class Needle(DataTable):
    """A fact that is hidden in the document ("needle"), and a question about only this fact."""

    id: str = Field(pattern=r"^[a-z]+$")
    #: The position of the fact, as the fraction of the document that precedes it.
    depth: Annotated[float, Field(ge=0, le=1)]
    text: str = Field(min_length=1)
    question: str = Field(min_length=1)
    right: Regex


class Document(DataTable):
    """A text of any length.

    It consists of numbered, generated entries with needles between them.
    """

    effort: Effort
    source: str = Field(min_length=3)
    #: Timeout of an answer in seconds.
    within_s: Annotated[float, Field(gt=0)]
    #: The first line of the document.
    opening: str
    #: The template of an entry, with {number} and the names of ``words``.
    entry: str
    words: dict[str, tuple[str, ...]]
    #: The question about all needles, whose answer is a JSON object with their ids as keys.
    question: str
    needles: Entries[Needle]

    def text(self, tokens: int, count: Callable[[str], int]) -> str:
        """Return the document of a given length. The same length always gives the same text.

        Args:
            tokens: The maximum length of the document in tokens.
            count: Returns the number of tokens of a text that ends with a newline.
        """
        lines = [f"{self.opening}\n"]
        waiting = sorted(self.needles, key=lambda needle: needle.depth)
        of_needles = sum(count(f"{needle.text}\n") for needle in waiting)
        whole = tokens - count(lines[0]) - of_needles
        room = whole
        for line in self.entries():
            while waiting and whole - room >= waiting[0].depth * whole:
                lines.append(f"{waiting.pop(0).text}\n")
            room -= count(line)
            if room < 0:
                break
            lines.append(line)
        for needle in waiting:
            lines.append(f"{needle.text}\n")
        return "".join(lines)

    def entries(self) -> Iterator[str]:
        """Yield an endless sequence of entries, one line each, without needles."""
        for number in itertools.count(1):
            digest = hashlib.sha256(str(number).encode()).digest()
            chosen = {}
            for position, (name, words) in enumerate(self.words.items()):
                chosen[name] = words[digest[position] % len(words)]
            yield self.entry.format(number=number, **chosen) + "\n"

    def not_in(self, answers: Mapping[str, Any]) -> list[Needle]:
        """Return the needles that an answer to `question` lacks.

        Args:
            answers: The JSON object of the answer.
        """
        missing = []
        for needle in self.needles:
            text = plain(str(answers.get(needle.id, "")))
            if not needle.right.search(text):
                missing.append(needle)
        return missing


class Exam(DataTable):
    """All questions for a model."""

    schema_version: Literal[1] = 1
    name: str
    #: The license of the exam's text.
    license: str | None = None
    source: str = ""
    #: Maximum number of tokens of an answer, including its reasoning.
    answer_tokens: Annotated[int, Field(ge=1)] = 1536
    completions: Annotated[tuple[ExamCompletion, ...], Field(min_length=1)]
    facts: Section | None = None
    dialogues: Section | None = None
    tools: Section | None = None
    formats: Section | None = None
    document: Document | None = None

    def section(self, name: SectionName) -> Section:
        """Return a section.

        Args:
            name: The name of the section.

        Raises:
            NotRun: The exam does not have a section of this name.
        """
        section: Section | None = getattr(self, name)
        if section is None:
            raise NotRun(f'exam {self.name} has no section {name}: add {{"section": "{name}"}}')
        return section


@functools.cache
def load(name_or_path: str) -> Exam:
    """Load an exam.

    Args:
        name_or_path: The name of a shipped exam, or the path of a file.

    Raises:
        UsageError: The exam does not exist, or is not valid.
    """
    sources = data_file.shipped("exams", ".jsonl")
    source = sources.get(name_or_path, Path(name_or_path))
    if not source.is_file():
        raise UsageError(f"exam {source}: expected a file or one of {', '.join(sources)}")
    origin = f"exam {source}"
    text = data_file.read_text(source, origin)
    table = _table(_lines(text, origin), Path(name_or_path).stem, origin)
    return data_file.validated(table, origin, Exam)


def _lines(text: str, origin: str) -> Iterator[tuple[int, Json]]:
    """Yield the number of each line of an exam file, and the JSON object in it."""
    # Do not use splitlines(), because JSON strings may contain characters such as U+2028, at which
    # it would split.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{origin}: line {number}: expected JSON: {error}") from error
        if not isinstance(entry, dict):
            raise UsageError(f"{origin}: line {number}: expected a JSON object, got {line:.80}")
        yield number, entry


def _table(lines: Iterator[tuple[int, Json]], name: str, origin: str) -> Json:
    """Convert the lines of an exam file to one table with the fields of `Exam`."""
    table: Json = {"name": name, "completions": []}
    section = "facts"
    for number, entry in lines:
        if "exam" in entry and number == 1:
            table["name"] = entry.pop("exam")
            table |= entry
        elif "prompt" in entry:
            table["completions"].append(entry)
        elif "section" in entry:
            section = entry.pop("section")
            if section not in (*get_args(SectionName), "document") or section in table:
                names = ", ".join((*get_args(SectionName), "document"))
                raise UsageError(
                    f"{origin}: line {number}: section {section!r}: expected each of {names} once"
                )
            table[section] = entry if section == "document" else {**entry, "questions": []}
        elif "id" in entry and section != "document":
            table.setdefault(section, {"questions": []})["questions"].append(entry)
        else:
            raise UsageError(
                f"{origin}: line {number}: expected a key prompt, section or id, got "
                f"{', '.join(entry) or 'none'}"
            )
    if not table["completions"]:
        raise UsageError(
            f"{origin}: expected a text to continue, got none. Add a line "
            '{"prompt": "The capital of France is", "begins": " Paris"}.'
        )
    return table


def unknown(endpoint: Endpoint, completions: Sequence[ExamCompletion]) -> dict[str, str]:
    """Return the prompts that a server does not continue as expected.

    Args:
        endpoint: The server.
        completions: The prompts with their continuations.

    Returns:
        For each prompt that the server continues in another way, the beginning of its continuation,
        or its error.
    """
    import openai

    others = {}
    with endpoint.openai() as client:
        for completion in completions:
            try:
                answer = client.completions.create(
                    model=endpoint.served_name,
                    prompt=completion.prompt,
                    max_tokens=max(_LEAST_TOKENS, len(completion.begins)),
                    temperature=0.0,
                )
            except openai.OpenAIError as error:
                others[completion.prompt] = f"{type(error).__name__}: {error}"[:_KEPT_ERROR]
                continue
            text = (answer.choices[0].text if answer.choices else "") or ""
            if not text.startswith(completion.begins):
                others[completion.prompt] = repr(text[:_KEPT])
    return others
