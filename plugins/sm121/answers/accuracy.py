"""A slice of questions with known answers: exact match, its interval, and a paired comparison."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import Inconclusive, NotRun

Kind = Literal["begins", "exact", "contains", "number", "letter"]
SIGNIFICANT = 0.05
_AT_ONCE = 4


class Question(DataTable):
    """One line of the file. ``begins``: a text that is gone on from; the rest are chat questions,
    of whose answer the text (``exact``), a part of it (``contains``), the last number (``number``)
    or the first single capital letter (``letter``) counts."""

    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    kind: Kind = "exact"
    id: str | None = None

    @model_validator(mode="after")
    def _can_be_missed(self) -> "Question":
        """An answer that any content would match measures nothing."""
        if self.kind == "number":
            if _number(self.answer) is None:
                raise ValueError(f"expected a number as answer, got {self.answer!r}")
        elif self.kind == "letter":
            if not re.fullmatch("[A-Z]", self.answer.strip()):
                raise ValueError(f"expected one capital letter as answer, got {self.answer!r}")
        elif not _plain(self.answer):
            raise ValueError(f"expected an answer with a word in it, got {self.answer!r}")
        return self

    @property
    def key(self) -> str:
        """By which two runs' answers are paired."""
        return self.id or self.prompt


class Output(DataTable):
    """What came of a question; kept in the report directory."""

    key: str
    kind: Kind
    expected: str
    content: str
    right: bool
    completion_tokens: int | None = None


_Line = TypeVar("_Line", Question, Output)


@dataclass(frozen=True)
class Interval:
    """A share and where it lies with 95 % confidence."""

    right: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Right of all."""
        return self.right / self.total

    def hold(self, at_least: float, fact: Fact) -> None:
        """Go on only if the whole interval is at or above. Raises Unmet: it is below; Inconclusive:
        the bound is in it."""
        if self.high < at_least:
            raise Unmet(fact)
        if self.low < at_least:
            raise Inconclusive(fact)

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.total} right: {self.share:.1%}, "
            f"95 % interval {self.low:.1%} to {self.high:.1%}"
        )


@dataclass(frozen=True)
class Paired:
    """Two runs on the same questions (McNemar's test, exact)."""

    gained: int
    lost: int
    same: int
    p_value: float

    @property
    def worse(self) -> bool:
        """More was lost than gained, and chance explains it badly."""
        return self.lost > self.gained and self.p_value < SIGNIFICANT

    def __str__(self) -> str:
        return (
            f"{self.lost} lost, {self.gained} gained, {self.same} as before "
            f"(p = {self.p_value:.3g})"
        )


def load(path: Path, model: type[_Line], option: str) -> list[_Line]:
    """The lines of a JSONL file that an option names: questions, or what an earlier run kept.
    Raises UsageError: one line with the file, the line and what was expected."""
    text = data_file.read_text(path, f"{option} {path}")
    entries: dict[str, _Line] = {}
    # Not splitlines(): U+2028 and its like may stand in a JSON text, and end no line of it.
    for number, line in enumerate(text.split("\n"), start=1):
        origin = f"{option} {path}: line {number}"
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{origin}: expected JSON: {error}") from error
        entry = data_file.validated(content, origin, model)
        if entry.key in entries:
            raise UsageError(f"{origin}: {entry.key!r} is there twice")
        entries[entry.key] = entry
    if not entries:
        raise UsageError(f"{option} {path}: expected at least one line, it is empty")
    return list(entries.values())


def is_right(question: Question, content: str) -> bool:
    """Whether an answer counts as right."""
    expected = question.answer
    if question.kind == "begins":
        return content.strip().startswith(expected.strip())
    if question.kind == "contains":
        return expected.casefold() in content.casefold()
    if question.kind == "number":
        return _number(content) == _number(expected)
    if question.kind == "letter":
        letter = re.search(r"\b([A-Z])\b", content)
        return letter is not None and letter.group(1) == expected.strip()
    return _plain(content) == _plain(expected)


def run(
    questions: Iterable[Question], ask: Callable[[Question], tuple[str, int | None]]
) -> list[Output]:
    """Ask all of them, a few at a time; `ask` gives an answer's text and its number of tokens."""

    def one(question: Question) -> Output:
        content, tokens = ask(question)
        return Output(
            key=question.key,
            kind=question.kind,
            expected=question.answer,
            content=content,
            right=is_right(question, content),
            completion_tokens=tokens,
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, questions))


def keep(outputs: Iterable[Output], path: Path) -> None:
    """Write the outputs as JSONL."""
    # In ASCII: an answer may hold what is no UTF-8 (half of a surrogate pair).
    lines = [json.dumps(output.model_dump()) for output in outputs]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def interval(outputs: Iterable[Output]) -> Interval:
    """As `interval_of`, of outputs."""
    marks = [output.right for output in outputs]
    return interval_of(sum(marks), len(marks))


def interval_of(right: int, n: int) -> Interval:
    """Wilson's score interval (Wilson 1927) of the share that is right. Raises ValueError: there
    are no answers."""
    from scipy import stats  # half a second, which a run without questions need not spend

    bounds = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    return Interval(right, n, float(bounds.low), float(bounds.high))


def paired(before: Iterable[Output], now: Iterable[Output]) -> Paired:
    """Compare two runs question by question. Raises UsageError: they answer different questions."""
    old: Mapping[str, bool] = {output.key: output.right for output in before}
    new = {output.key: output.right for output in now}
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())[0]
        raise UsageError(
            "--questions-baseline: expected answers to the same questions; only one run has "
            f"{odd!r}"
        )
    from scipy import stats

    gained = sum(new[key] and not old[key] for key in old)
    lost = sum(old[key] and not new[key] for key in old)
    changed = gained + lost
    p_value = float(stats.binomtest(lost, changed).pvalue) if changed else 1.0
    return Paired(gained, lost, len(old) - changed, p_value)


def judge(
    path: Path,
    baseline: Path | None,
    ask: Callable[[Question, int], tuple[str, int | None]],
    profile: Profile,
    kept: Path,
    remark: Callable[[str], object],
) -> None:
    """Ask the questions of a file, keep the outputs as JSONL, and judge the share that is right.
    ``baseline``: outputs of an earlier run; ``ask`` gives an answer and its number of tokens, for
    the most that there may be. Raises AssertionError: too few are right, or the run is worse than
    the baseline; Inconclusive: the share that the profile requires is within the interval; NotRun:
    the profile requires none; UsageError: a file cannot be read."""
    limit = profile.correctness.max_answer_tokens
    questions = load(path, Question, "--questions")
    outputs = run(questions, lambda question: ask(question, limit))
    keep(outputs, kept)
    share_right = interval(outputs)
    remark(f"accuracy: {share_right}; outputs: {kept}")
    if baseline is not None:
        change = paired(load(baseline, Output, "--questions-baseline"), outputs)
        remark(f"accuracy against the baseline: {change}")
        require(not change.worse, "not worse than the baseline", change, evidence=kept)
    if (share := profile.correctness.accuracy) is None:
        raise NotRun(f"profile {profile.name} has no correctness.accuracy; seen: {share_right}")
    fact = Fact(f"at least {share.at_least:.1%}", f"{share_right}", evidence=f"{kept}")
    share_right.hold(share.at_least, fact)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .!\"'")


def _number(text: str) -> float | None:
    """The last number of a text, as GSM8K's answers are read."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
