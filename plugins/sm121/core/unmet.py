"""Failed requirements as objects with fields: required, observed, measured number, evidence.

The text for people is the `str` of a fact, and only this module makes it. Programs compare the
fields.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from sm121.core import numbers, verdict

#: If two measured numbers differ by at most this factor, two failures with these numbers count as
#: the same failure.
_FACTOR = 2.0
#: The ``kind`` of a requirement on the kernel path of a run.
OF_PATH = "kernel path"
#: Keys of an answer whose values differ from answer to answer.
_BY_CHANCE = frozenset(
    {
        "id",
        "call_id",
        "tool_call_id",
        "item_id",
        "response_id",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
    }
)


@dataclass(frozen=True)
class Fact:
    """One failed requirement."""

    #: The requirement in words. If it has a number, the number is in ``limit``, and the words end
    #: with, for example, ``at most``. Empty for an exception of another library: then ``observed``
    #: is its text, and ``kind`` its type.
    required: str
    #: The observation. Because runs are compared by this text, character by character, it must not
    #: contain a path, port, id, time or measured number.
    observed: str = ""
    #: The subject: a metric, a request or an operation; empty if the test's name identifies the
    #: subject.
    about: str = ""
    #: An identifier of the requirement, which stays the same if the text in ``required`` is
    #: reworded. If empty, ``required`` is the identifier.
    kind: str = ""
    #: The measured number, in ``unit``.
    value: float | None = None
    #: The number that the value is compared with, in ``unit``.
    limit: float | None = None
    #: The unit of ``value`` and ``limit``.
    unit: str = ""
    #: Details that differ from run to run: ids, paths, times, other numbers.
    evidence: str = ""

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):  # JSON has no NaN or infinity
            object.__setattr__(self, "observed", f"{self.value} {self.observed}".rstrip())
            object.__setattr__(self, "value", None)

    def __str__(self) -> str:
        return f"{self.about}: {self.reason}" if self.about else self.reason

    @property
    def reason(self) -> str:
        """The text of the fact without its subject."""
        if self.required:
            return f"expected {self.requirement}, got {self.observation}"
        return f"{self.kind}: {self.observation}" if self.kind else self.observation

    @property
    def requirement(self) -> str:
        """The text of the requirement, with its number."""
        if self.limit is None:
            return self.required
        return f"{self.required} {numbers.number(self.limit)}{self._unit}"

    @property
    def observation(self) -> str:
        """The text of the observation, with its number and the evidence."""
        parts = []
        if self.value is not None:
            parts.append(f"{numbers.apart(self.value, self.limit)}{self._unit}")
        if self.observed:
            parts.append(self.observed)
        observed = " ".join(parts) or "none"
        return f"{observed} ({self.evidence})" if self.evidence else observed

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def mapped(self, change: Callable[[str], str]) -> "Fact":
        """Return a copy of the fact with changed texts.

        Args:
            change: A function that is applied to each text except ``kind`` and ``unit``.
        """
        return replace(
            self,
            required=change(self.required),
            observed=change(self.observed),
            about=change(self.about),
            evidence=change(self.evidence),
        )

    @property
    def case(self) -> str:
        """The name of the failed case within its test, to which a waiver refers."""
        return self.about or self.kind or self.required

    @property
    def identity(self) -> tuple[str, ...]:
        """The fields that are equal if two runs have the same failure with different numbers."""
        return (self.about, self.kind or self.required, self.observed, self.unit)


class Unmet(AssertionError):
    """A check failed.

    Attributes:
        facts: The failed requirements.
        severity: The severity of this failure; None if it is the severity of the check.
        never_waived: What the failure is, for example "a crash", if no waiver can tolerate it; else
            empty.
    """

    def __init__(
        self, *facts: Fact, severity: verdict.Severity | None = None, never_waived: str = ""
    ) -> None:
        super().__init__(*facts)
        self.facts = facts
        self.severity = severity
        self.never_waived = never_waived

    def __str__(self) -> str:
        return facts_text(self.facts)


def noted(facts: Sequence[Fact], evidence: str) -> list[Fact]:
    """Return facts with additional evidence.

    Args:
        facts: At least one fact.
        evidence: Text to append to the evidence of the last fact.
    """
    *others, last = facts
    return [*others, replace(last, evidence=_joined("; ", last.evidence, evidence))]


def facts_of(error: BaseException) -> list[Fact]:
    """Return the facts of an error.

    Args:
        error: The error. If none of its arguments is a fact, its text becomes one fact.
    """
    facts = [argument for argument in error.args if isinstance(argument, Fact)]
    if facts:
        return facts
    return [Fact("", str(error) or f"{type(error).__qualname__} without a message")]


def with_subject(about: str, facts: Iterable[Fact]) -> list[Fact]:
    """Put a common subject before the subjects of facts.

    Args:
        about: The common subject.
        facts: The facts.
    """
    return [replace(fact, about=_joined(": ", about, fact.about)) for fact in facts]


def _joined(separator: str, first: str, second: str) -> str:
    """Join two texts, of which either may be empty."""
    return separator.join(filter(None, (first, second)))


def facts_text(facts: Iterable[Fact]) -> str:
    """Return the text of several facts, on one line.

    Args:
        facts: The facts.
    """
    return "; ".join(map(str, facts))


def steady(answer: Any) -> Any:
    """Return JSON data without the ids and times that differ from answer to answer.

    Args:
        answer: The data, as a JSON parser returns them. They are not changed.
    """
    if isinstance(answer, dict):
        return {key: steady(value) for key, value in answer.items() if key not in _BY_CHANCE}
    if isinstance(answer, list):
        return [steady(value) for value in answer]
    return answer


def require(
    holds: object,
    required: object,
    observed: object = "",
    about: str = "",
    *,
    value: float | None = None,
    limit: float | None = None,
    unit: str = "",
    evidence: object = "",
) -> None:
    """Check a requirement.

    Args:
        holds: Whether the requirement is met.
        required: As in `Fact`.
        observed: As in `Fact`. JSON data are converted to text, without the ids and times that
            `steady` removes.
        about: As in `Fact`.
        value: As in `Fact`.
        limit: As in `Fact`.
        unit: As in `Fact`.
        evidence: As in `Fact`.

    Raises:
        Unmet: The requirement is not met.
    """
    if holds:
        return
    raise Unmet(
        Fact(
            required=str(required),
            observed=str(steady(observed)),
            about=about,
            value=value,
            limit=limit,
            unit=unit,
            evidence=str(evidence),
        )
    )


def require_none(facts: Sequence[Fact], evidence: object = "") -> None:
    """Check that no requirement failed.

    Args:
        facts: The failed requirements.
        evidence: Additional evidence, for all failed requirements.

    Raises:
        Unmet: A requirement failed.
    """
    if facts:
        raise Unmet(*noted(facts, f"{evidence}"))


def require_each(check: Callable[..., None], *cases: Iterable[Any]) -> None:
    """Check all cases, even if one of them fails.

    Args:
        check: A function that checks one case.
        *cases: For each argument of the check, its values for all cases. All have the same length.

    Raises:
        Unmet: Some cases failed. Equal facts of several cases are merged into one. A failure that
            has its own severity, or that can never be waived, is raised at once, and the other
            cases are not checked.
        Undecided: No case failed, but some are undecided. The error has the worst of their
            verdicts.
    """
    facts: dict[tuple[str, ...], Fact] = {}
    undecided: list[verdict.Undecided] = []
    for case in zip(*cases, strict=True):
        try:
            check(*case)
        except Unmet as unmet:
            if unmet.severity is not None or unmet.never_waived:
                raise
            for fact in unmet.facts:
                facts[fact.identity] = fact
        except verdict.Undecided as error:
            undecided.append(error)
    require_none([*facts.values()])
    if undecided:
        _raise_worst(undecided)


def _raise_worst(undecided: Sequence[verdict.Undecided]) -> NoReturn:
    """Raise the error with the worst verdict, with the texts of all errors of its type.

    NotRun counts as worse than Inapplicable, although both have the same verdict.
    """
    worst = verdict.worst(error.verdict for error in undecided)
    candidates = [error for error in undecided if error.verdict is worst]
    first = min(candidates, key=lambda error: isinstance(error, verdict.Inapplicable))
    texts: list[object] = []
    for error in candidates:
        if type(error) is type(first):
            texts.extend(error.args)
    raise type(first)(*dict.fromkeys(texts)) from first


def same_kind(earlier: Sequence[Fact], later: Sequence[Fact]) -> bool:
    """Check whether a later failure of a test has no new facts, ignoring measured numbers.

    Args:
        earlier: The facts of the earlier failure.
        later: The facts of the later failure of the same test.
    """
    return _has_no_new(earlier, later, lambda _before, _after: True)


def alike(earlier: Sequence[Fact], later: Sequence[Fact]) -> bool:
    """Check whether a later failure has no new facts, and its numbers are within a factor of 2.

    Args:
        earlier: The facts of the earlier failure.
        later: The facts of the later failure of the same test.
    """
    return _has_no_new(earlier, later, _has_near_numbers)


def _has_no_new(
    earlier: Sequence[Fact], later: Sequence[Fact], same: Callable[[Fact, Fact], bool]
) -> bool:
    """Return whether the later facts contain no new failure.

    Each later fact must have the `identity` of an earlier fact, and ``same`` must return true for
    the two facts.
    """
    # A failure that consists of an exception of another library has only the text of the exception.
    is_foreign = not all(fact.required for fact in (*earlier, *later))
    if is_foreign and facts_text(earlier) == facts_text(later):
        return True
    if len(later) > len(earlier):
        return False
    for after in later:
        candidates = [before for before in earlier if before.identity == after.identity]
        if not any(same(before, after) for before in candidates):
            return False
    return True


def _has_near_numbers(before: Fact, after: Fact) -> bool:
    return _near(before.value, after.value) and _near(before.limit, after.limit)


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return one * other > 0.0 and 1 / _FACTOR <= one / other <= _FACTOR
