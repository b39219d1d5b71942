"""A feature's hypothesis: what it promised, against what an A/B run showed (B has the feature).
PASS when a whole interval is on the right side, FAIL when all of it is on the wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Pattern
from sm121.core.numbers import number
from sm121.core.profile_fields import Level
from sm121.core.verdict import Verdict
from sm121.regression.ab import Visit
from sm121.regression.change import Change
from sm121.regression.trend import difference_of_pairs, verdict_of

Phase = Literal["P1", "P2", "P3", "P4", "P5", "P6"]


class Criterion(DataTable):
    """One promise. Exactly one kind of it."""

    metric: str | None = None
    #: Of B against A, as a fraction: 0.10 for 10 % more.
    change_at_least: float | None = None
    change_at_most: float | None = None
    #: B - A, in the metric's unit.
    difference_at_most: float | None = None
    #: Of B itself.
    value_at_least: float | None = None
    value_at_most: float | None = None
    level: Level | None = None
    #: What B's log must say of its experts, and must not.
    moe: Pattern | None = None
    moe_not: Pattern | None = None
    #: Every start of B serves to the end.
    no_crash: Literal[True] | None = None
    source: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> "Criterion":
        others = ("level", "moe", "moe_not", "no_crash")
        bounds = [name for name in _BOUNDS if getattr(self, name) is not None]
        kinds = [*bounds, *(name for name in others if getattr(self, name))]
        if len(kinds) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join((*_BOUNDS, *others))}; "
                f"got {', '.join(kinds) or 'none'}"
            )
        if bool(bounds) != (self.metric is not None):
            raise ValueError("expected metric together with a bound on it, and only then")
        return self

    @property
    def is_of_pairs(self) -> bool:
        """Whether more pairs narrow its interval: it is on B against A."""
        return any(getattr(self, name) is not None for name in _BOUNDS if "value" not in name)

    def __str__(self) -> str:
        for name, text in _BOUNDS.items():
            if (bound := getattr(self, name)) is not None:
                figure = bound * 100 if name.startswith("change") else bound
                return f"{self.metric} {text.format(figure)}"
        if self.level:
            return f"level {self.level} holds"
        if self.moe:
            return f"the experts run on {self.moe}"
        return f"the experts do not run on {self.moe_not}" if self.moe_not else "no start crashes"


#: The criteria on a metric, and how each is written.
_BOUNDS = {
    "change_at_least": "changes by at least {:+.3g} %",
    "change_at_most": "changes by at most {:+.3g} %",
    "difference_at_most": "grows by at most {:g}",
    "value_at_least": "is at least {:g}",
    "value_at_most": "is at most {:g}",
}


class Hypothesis(DataTable):
    """A feature's file."""

    feature: str = Field(min_length=3)
    #: "This should improve <metric> by <X %> because <reason>."
    hypothesis: Annotated[str, Field(min_length=20)]
    #: Of the plan: the gate behind this phase is asked too.
    phase: Phase | None = None
    criteria: tuple[Criterion, ...] = Field(min_length=1)
    files_changed: tuple[str, ...] = ()
    environment_added: tuple[str, ...] = ()
    improvements: tuple[str, ...] = ()


class _Gate(DataTable):
    description: str
    criteria: tuple[Criterion, ...] = Field(min_length=1)


@dataclass(frozen=True)
class CriterionResult:
    """A criterion, and what came of it."""

    criterion: Criterion
    verdict: Verdict
    baseline: str
    actual: str
    note: str


def load(path: Path) -> Hypothesis:
    """Read a feature's file. Raises UsageError: it is not valid; names file and key."""
    text = data_file.read_text(path, f"--hypothesis {path}")
    return data_file.parse(text, Hypothesis, f"hypothesis {path}")


def gate_behind(phase: Phase) -> tuple[str, tuple[Criterion, ...]]:
    gate = data_file.load_key("hypotheses/phases.toml", "phases", dict[Phase, _Gate]).get(phase)
    return (gate.description, gate.criteria) if gate else ("", ())


def evaluate(
    criteria: Sequence[Criterion],
    outcomes: Sequence[Change],
    visits: Sequence[Visit],
    levels: Mapping[str, Verdict],
    looks: int,
) -> list[CriterionResult]:
    """Each criterion against what was measured; what was not measured is NOT_RUN. ``looks``: as of
    `trend.compare_starts`."""
    by_name = {outcome.metric: outcome for outcome in outcomes}
    return [
        CriterionResult(criterion, *_answer(criterion, by_name, visits, levels, looks))
        for criterion in criteria
    ]


def _answer(
    criterion: Criterion,
    outcomes: Mapping[str, Change],
    visits: Sequence[Visit],
    levels: Mapping[str, Verdict],
    looks: int,
) -> tuple[Verdict, str, str, str]:
    if criterion.level is not None:
        verdict = levels.get(criterion.level, Verdict.NOT_RUN)
        return verdict, "", verdict.value, "in the same run"
    if criterion.no_crash:
        crashed = [v.failure for v in visits if v.side == "B" and v.failure]
        if not any(visit.side == "B" for visit in visits):
            return Verdict.NOT_RUN, "", "", "B was not started"
        verdict = Verdict.FAIL if crashed else Verdict.PASS
        return verdict, "", f"{len(crashed)} crashed", "; ".join(crashed)
    if criterion.metric is None:
        return _path(criterion, visits)
    outcome = outcomes.get(criterion.metric)
    if outcome is None:
        measured = ", ".join(outcomes) or "nothing"
        return Verdict.NOT_RUN, "", "", f"not measured on both sides; measured: {measured}"
    low, high, note = outcome.ci_low, outcome.ci_high, outcome.text
    sides = number(outcome.a), number(outcome.b)
    if low is None or high is None:  # too few pairs for an interval
        return Verdict.INCONCLUSIVE, *sides, note
    if criterion.difference_at_most is not None:
        delta, low, high = difference_of_pairs(visits, criterion.metric, looks)
        assert low is not None and high is not None  # as of the ratio
        note = f"B - A = {number(delta)} [{number(low)}, {number(high)}] {outcome.unit}"
    elif criterion.value_at_least is not None or criterion.value_at_most is not None:
        values = [v.metrics[criterion.metric].value for v in visits if v.side == "B"]
        low, high = min(values), max(values)
        note = f"B from {number(low)} to {number(high)} {outcome.unit}"
    (name,) = (name for name in _BOUNDS if getattr(criterion, name) is not None)
    bound = getattr(criterion, name) + (1.0 if name.startswith("change") else 0.0)  # of B / A
    if name.endswith("at_least"):
        return verdict_of(low >= bound, high < bound), *sides, note
    return verdict_of(high <= bound, low > bound), *sides, note


def _path(criterion: Criterion, visits: Sequence[Visit]) -> tuple[Verdict, str, str, str]:
    experts = sorted({str(v.path["moe"]) for v in visits if v.side == "B" and v.path.get("moe")})
    if not experts:
        return Verdict.NOT_RUN, "", "", "B's log does not show its experts"
    pattern = re.compile(criterion.moe or criterion.moe_not or "")
    matches = [bool(pattern.search(name)) for name in experts]
    holds = all(matches) if criterion.moe else not any(matches)
    return Verdict.PASS if holds else Verdict.FAIL, "", ", ".join(experts), "B's log"


def cell(value: object) -> str:
    """What stands in a table of Markdown for a value."""
    return str(value).replace("|", "\\|").replace("\n", " ")
