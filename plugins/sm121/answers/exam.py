r"""An exam: what a model must know, as JSONL (``fixtures/exams``).

Each line is one JSON object: first the exam itself, then texts that the model continues, then the
sections, each followed by its questions:

    {"exam": "mine", "answer_tokens": 500}
    {"prompt": "The capital of France is", "begins": " Paris"}
    {"section": "facts", "effort": "low", "misses": 1}
    {"id": "product", "turns": [{"user": "What is 17 times 23?", "right": "\\b391\\b"}]}

Without the first line, the exam has the name of its file. Questions before any section belong to
the facts. An answer is broken if no capable model gives it (empty, cut off, `!!!!`), and a miss if
it is whole and not right. A section allows some misses, since a rule may not know a right phrase;
a broken answer is never allowed.
"""

import functools
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.answers import sanity
from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Pattern, Regex
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint
from sm121.core.unmet import Fact
from sm121.core.verdict import NotRun

Json = dict[str, Any]
Effort = Literal["low", "medium", "high"]
SectionName = Literal["facts", "dialogues", "tools", "formats"]

#: Minus signs, hyphens and dashes; the fraction slash; quotation marks.
_SIGNS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\u2044\u2018\u2019\u201c\u201d", "------/''\"\""
)
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|operatorname|ce)\s*\{([^{}]*)\}")
_LATEX_SPACES = re.compile(r"\\[()\[\],;:! ]")
_SUBSCRIPT = re.compile(r"_\{?(\d+)\}?")
_MARKUP = re.compile(r"[*`$]|(?<!\w)_|_(?!\w)")
_GROUPS = re.compile(r"(?<=\d)[ ,'](?=\d{3}(?!\d))")
_FENCE = re.compile(r"\A\s*```\w*\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class Completion(DataTable):
    """A text, and how its greedy continuation must begin (case-sensitive)."""

    prompt: str = Field(min_length=1)
    begins: str = Field(min_length=1)


class Call(DataTable):
    """A call that must be made, and what comes of it."""

    function: str = Field(min_length=1)
    #: The same keys and values. A text is a pattern that the whole value matches (`plain`).
    arguments: Json
    result: str = Field(min_length=1)

    def __str__(self) -> str:
        return f"{self.function}({json.dumps(self.arguments)})"


class Turn(DataTable):
    """What the user says, and what counts as right of the answer."""

    user: str = Field(min_length=1)
    #: The assistant's answer, put into the chat as it is; else the model gives it.
    given: str | None = None
    #: Patterns that must be, and must not be, somewhere in the answer (`plain`).
    right: Regex | None = None
    wrong: Regex | None = None
    #: Calls before the answer, in any order; none: a call is wrong.
    calls: tuple[Call, ...] = ()
    #: The answer is this JSON object; texts are patterns, as in `Call.arguments`.
    content: Json | None = None

    @property
    def is_judged(self) -> bool:
        """Whether something counts as right."""
        return bool(self.right or self.content or self.calls)

    @model_validator(mode="after")
    def _given_or_judged(self) -> "Turn":
        if self.given is not None and (self.is_judged or self.wrong):
            raise ValueError("expected given, or what counts as right, not both")
        return self


class Form(DataTable):
    """The form that the server must give an answer: one of the three."""

    json_schema: Json | None = None
    regex: Pattern | None = None
    choice: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one(self) -> "Form":
        if len(self.model_fields_set) != 1:
            raise ValueError("expected one of json_schema, regex and choice")
        return self


class Question(DataTable):
    """A chat. It is right when each of its turns is."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    instructions: str | None = None
    turns: tuple[Turn, ...] = Field(min_length=1)
    form: Form | None = None

    @model_validator(mode="after")
    def _ends_in_what_is_judged(self) -> "Question":
        if not self.turns[-1].is_judged:
            raise ValueError("turns: expected right, calls or content in the last one")
        return self


class Section(DataTable):
    """Questions of one kind, and how many of them may be missed."""

    effort: Effort = "low"
    misses: Annotated[int, Field(ge=0)] = 0
    #: Why so many misses are allowed.
    source: str = ""
    #: An answer in which this is found is a miss, whatever else it says.
    unsure: Regex | None = None
    #: Functions that every question of the section may call, as a JSON schema each.
    functions: tuple[Json, ...] = ()
    questions: Entries[Question]


class Needle(DataTable):
    """A fact in the document, and the question about it alone."""

    id: str = Field(pattern=r"^[a-z]+$")
    #: Share of the document that is before it.
    depth: Annotated[float, Field(ge=0, le=1)]
    text: str = Field(min_length=1)
    question: str = Field(min_length=1)
    right: Regex


class Document(DataTable):
    """A text of any length: numbered entries, made of words, with needles between them."""

    effort: Effort
    source: str = Field(min_length=3)
    within_s: Annotated[float, Field(gt=0)]
    opening: str
    #: An entry, with {number} and the names of ``words``.
    entry: str
    words: dict[str, tuple[str, ...]]
    #: Asks for all needles at once, as one JSON object with their ids as keys.
    question: str
    needles: Entries[Needle]

    def text(self, tokens: int, count: Callable[[str], int]) -> str:
        """The document. The same for the same number of tokens. `count`: of the tokens of a text
        that ends with a line."""
        lines = [f"{self.opening}\n"]
        waiting = sorted(self.needles, key=lambda needle: needle.depth)
        room = tokens - count(lines[0]) - sum(count(f"{needle.text}\n") for needle in waiting)
        whole = room
        for line in self.entries():
            while waiting and whole - room >= waiting[0].depth * whole:
                lines.append(f"{waiting.pop(0).text}\n")
            if (room := room - count(line)) < 0:
                break
            lines.append(line)
        return "".join([*lines, *(f"{needle.text}\n" for needle in waiting)])

    def entries(self) -> Iterator[str]:
        """Yield the entries without needles, a line each, without end."""
        number = 0
        while True:
            number += 1
            digest = hashlib.sha256(str(number).encode()).digest()
            chosen = {
                name: words[digest[position] % len(words)]
                for position, (name, words) in enumerate(self.words.items())
            }
            yield self.entry.format(number=number, **chosen) + "\n"

    def not_in(self, answers: Mapping[str, Any]) -> list[Needle]:
        """The needles that a JSON object of all of them misses."""
        return [n for n in self.needles if not n.right.search(plain(str(answers.get(n.id, ""))))]


class Exam(DataTable):
    """All questions for a model."""

    schema_version: Literal[1] = 1
    name: str
    #: Of its text.
    license: str | None = None
    source: str = ""
    #: The most tokens that an answer may have, with its reasoning.
    answer_tokens: Annotated[int, Field(ge=1)] = 1536
    completions: Annotated[tuple[Completion, ...], Field(min_length=1)]
    facts: Section | None = None
    dialogues: Section | None = None
    tools: Section | None = None
    formats: Section | None = None
    document: Document | None = None

    def section(self, name: SectionName) -> Section:
        """Return one of its sections.

        Raises:
            NotRun: the exam has no such section.
        """
        section: Section | None = getattr(self, name)
        if section is None:
            raise NotRun(f'exam {self.name} has no section {name}: add {{"section": "{name}"}}')
        return section


@functools.cache
def load(name_or_path: str) -> Exam:
    """Return a shipped exam, or a file's.

    Raises:
        UsageError: there is no such exam, or it is wrong; one line.
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
    # Not splitlines(): U+2028 and its like may stand in a JSON text, and end no line of it.
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
    """Return the lines of a file as one table, each in the part that its first key names."""
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


def unknown(endpoint: Endpoint, completions: Sequence[Completion]) -> dict[str, str]:
    """Return what a server said, by the prompt, for each text that it continues wrongly."""
    import openai

    wrong = {}
    with endpoint.openai() as client:
        for each in completions:
            try:
                answer = client.completions.create(
                    model=endpoint.served_name,
                    prompt=each.prompt,
                    max_tokens=max(4, len(each.begins)),
                    temperature=0.0,
                )
            except openai.OpenAIError as error:
                wrong[each.prompt] = f"{type(error).__name__}: {error}"[:200]
                continue
            text = (answer.choices[0].text if answer.choices else "") or ""
            if not text.startswith(each.begins):
                wrong[each.prompt] = repr(text[:80])
    return wrong


def plain(text: str) -> str:
    """A text without what is form alone: markup, LaTeX's frames, thin spaces and groups of digits,
    raised and lowered digits, upper case, lines."""
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    for _ in range(3):  # frames in frames
        text = _LATEX.sub(r"\1", text)
    text = _SUBSCRIPT.sub(r"\1", _LATEX_SPACES.sub(" ", text))
    text = " ".join(_MARKUP.sub("", text).split())
    return _GROUPS.sub("", text).casefold()


def parsed(text: str) -> Any:
    """The JSON of an answer, also between fences; None where it is none."""
    fenced = _FENCE.match(text)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None


def agrees(expected: Any, seen: Any) -> bool:
    """Whether a JSON value is the expected one: see `Call.arguments`."""
    if isinstance(expected, str):
        return isinstance(seen, str) and bool(re.fullmatch(expected, plain(seen), re.IGNORECASE))
    if isinstance(expected, bool) or isinstance(seen, bool):
        return expected is seen
    if isinstance(expected, int | float):
        return isinstance(seen, int | float) and math.isclose(expected, seen, rel_tol=1e-6)
    if isinstance(expected, dict):
        same = isinstance(seen, dict) and expected.keys() == seen.keys()
        return same and all(agrees(value, seen[key]) for key, value in expected.items())
    same = isinstance(seen, list) and len(expected) == len(seen)
    return same and all(map(agrees, expected, seen))


def broken(content: str | None, finish_reason: str) -> str | None:
    """Why an answer is none that a capable model gives."""
    if finish_reason != "stop":
        return str(Fact("finish_reason stop", f"{finish_reason} after {content!r:.200}"))
    if not (content or "").strip():
        return str(Fact("a final message"))
    if signs := sanity.signs(str(content)):
        return str(Fact("an answer", f"{'; '.join(signs)} in {content!r:.200}"))
    return None


def miss(turn: Turn, content: str, unsure: re.Pattern[str] | None) -> str | None:
    """Why a whole answer is not right."""
    text, observed = plain(content), f"{content!r:.300}"
    if turn.right and not turn.right.search(text):
        return str(Fact(turn.right.pattern, observed))
    for pattern in filter(None, (turn.wrong, unsure if turn.is_judged else None)):
        if pattern.search(text):
            return str(Fact(f"nothing of {pattern.pattern}", observed))
    if turn.content is not None and not agrees(turn.content, parsed(content)):
        return str(Fact(f"{turn.content}", observed))
    return None


def met(waiting: Sequence[Call], function: str, arguments: Any) -> Call | None:
    """The call of those that wait that this one is."""
    named = (call for call in waiting if call.function == function)
    return next((call for call in named if agrees(call.arguments, arguments)), None)
