"""What did not hold, as a value: what was required, what was observed, how much, where it shows.
People read `str` of it, and that text is made here alone. Programs compare the fields."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sm121.core import numbers, verdict

#: Two measured numbers are near each other within this factor.
_FACTOR = 2.0
#: Keys of an answer whose values differ from one answer to the next.
_BY_CHANCE = frozenset({
    "id", "call_id", "tool_call_id", "item_id", "response_id", "created", "created_at",
    "completed_at", "system_fingerprint",
})  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One thing that does not hold."""

    required: str
    """In words; of a number ``limit`` has it: ``at most``. Empty where somebody else's check
    failed: ``observed`` is all that it said, and ``kind`` its exception's type."""
    observed: str = ""
    """What was there instead. Two runs are compared by it, character by character: it has no path,
    port, id, time or measured number."""
    about: str = ""
    """A metric, a request, an operation; empty where the test's name says it."""
    kind: str = ""
    """What is required as an identifier that stays when the words change; empty: ``required``."""
    value: float | None = None
    """The measured number, in ``unit``."""
    limit: float | None = None
    """What the value is compared with, in ``unit``."""
    unit: str = ""
    evidence: str = ""
    """What helps to understand it and differs by chance: ids, paths, times, other numbers."""

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):  # JSON has no such number
            object.__setattr__(self, "observed", f"{self.value} {self.observed}".rstrip())
            object.__setattr__(self, "value", None)

    def __str__(self) -> str:
        return (f"{self.about}: " if self.about else "") + self.reason

    @property
    def reason(self) -> str:
        """The text without what it is about."""
        if self.required:
            return f"required: {self.requirement}, seen: {self.observation}"
        return (f"{self.kind}: " if self.kind else "") + self.observation

    @property
    def requirement(self) -> str:
        """What is required, with its number."""
        limit = "" if self.limit is None else f" {numbers.apart(self.limit, None)}{self._unit}"
        return f"{self.required}{limit}"

    @property
    def observation(self) -> str:
        """What was observed, with its number and the evidence."""
        value = "" if self.value is None else f"{numbers.apart(self.value, self.limit)}{self._unit}"
        observed = " ".join(filter(None, (value, self.observed))) or "none"
        return f"{observed} ({self.evidence})" if self.evidence else observed

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def mapped(self, change: Callable[[str], str]) -> "Fact":
        """With each text as `change` makes it."""
        return replace(
            self,
            required=change(self.required),
            observed=change(self.observed),
            about=change(self.about),
            evidence=change(self.evidence),
        )

    @property
    def case(self) -> str:
        """Which case of its test it is, as a waiver names it."""
        return self.about or self.kind or self.required

    @property
    def identity(self) -> tuple[str, ...]:
        """What two runs have in common if they fail in the same way, whatever was measured."""
        return (self.about, self.kind or self.required, self.observed, self.unit)


class Unmet(AssertionError):
    """A check failed: these facts do not hold. ``severity``: where only the failure shows it;
    ``never_waived``: what it is that no waiver tolerates, such as "a crash"."""

    def __init__(
        self, *facts: Fact, severity: verdict.Severity | None = None, never_waived: str = ""
    ) -> None:
        super().__init__(*facts)
        self.facts, self.severity, self.never_waived = facts, severity, never_waived

    def __str__(self) -> str:
        return text(self.facts)


def noted(facts: Sequence[Fact], evidence: str) -> list[Fact]:
    """The facts with more evidence, which is of the last one."""
    *others, last = facts
    return [*others, replace(last, evidence="; ".join(filter(None, (last.evidence, evidence))))]


def facts_of(error: BaseException) -> list[Fact]:
    """The facts that an error carries; of one that has none, its text is the fact."""
    facts = [each for each in error.args if isinstance(each, Fact)]
    return facts or [Fact("", str(error) or f"{type(error).__qualname__} without a message")]


def of(about: str, facts: Iterable[Fact]) -> list[Fact]:
    """The facts as being about something, as a whole."""
    return [replace(f, about=": ".join(filter(None, (about, f.about)))) for f in facts]


def text(facts: Iterable[Fact]) -> str:
    """Several facts on one line."""
    return "; ".join(map(str, facts))


def steady(answer: Any) -> Any:
    """A JSON value without the ids and times that differ from one answer to the next."""
    if isinstance(answer, dict):
        return {key: steady(value) for key, value in answer.items() if key not in _BY_CHANCE}
    return [steady(value) for value in answer] if isinstance(answer, list) else answer


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
    """Go on only if something holds; the rest are the fields of `Fact`. `observed`: as text; of
    JSON without the ids and times that `steady` leaves out. Raises Unmet: it does not hold."""
    if not holds:
        fact = Fact(f"{required}", f"{steady(observed)}", about, evidence=f"{evidence}")
        raise Unmet(replace(fact, value=value, limit=limit, unit=unit))


def require_none(facts: Sequence[Fact], evidence: object = "") -> None:
    """Go on only if there are no facts. `evidence`: of all of them. Raises Unmet: some are."""
    if facts:
        raise Unmet(*noted(facts, f"{evidence}"))


def require_each(check: Callable[..., None], *cases: Iterable[Any]) -> None:
    """Check each case, also behind one that fails. `cases`: of each argument of the check. Raises
    Unmet: some fail; what several say alike is one fact, and one with a severity, or never waived,
    ends the check. Undecided: cases are, and none fails; of several verdicts the gravest."""
    facts, undecided = dict[tuple[str, ...], Fact](), list[verdict.Undecided]()
    for case in zip(*cases, strict=True):
        try:
            check(*case)
        except Unmet as unmet:
            if unmet.severity is not None or unmet.never_waived:
                raise
            facts |= {fact.identity: fact for fact in unmet.facts}
        except verdict.Undecided as error:
            undecided.append(error)
    require_none([*facts.values()])
    if undecided:
        gravest = verdict.worst(error.verdict for error in undecided)
        of_it = [error for error in undecided if error.verdict is gravest]
        first = min(of_it, key=lambda error: isinstance(error, verdict.Inapplicable))
        alike = [error for error in of_it if type(error) is type(first)]
        raise type(first)(*dict.fromkeys(part for e in alike for part in e.args)) from first


def same_kind(earlier: Sequence[Fact], later: Sequence[Fact]) -> bool:
    """Whether a later failure of a test has nothing new, whatever was measured."""
    return _within(earlier, later, lambda _a, _b: True)


def alike(earlier: Sequence[Fact], later: Sequence[Fact]) -> bool:
    """Whether a later failure has nothing new, and what was measured is within a factor of 2."""
    return _within(earlier, later, lambda a, b: _near(a.value, b.value) and _near(a.limit, b.limit))


def _within(
    earlier: Sequence[Fact], later: Sequence[Fact], same: Callable[[Fact, Fact], bool]
) -> bool:
    # Of a failure whose fields nobody knows, the text is compared.
    if not all(fact.required for fact in (*earlier, *later)) and text(earlier) == text(later):
        return True
    return len(later) <= len(earlier) and all(
        any(a.identity == b.identity and same(a, b) for a in earlier) for b in later
    )


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return one * other > 0.0 and 1 / _FACTOR <= one / other <= _FACTOR
