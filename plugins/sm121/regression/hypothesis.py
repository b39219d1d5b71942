"""A feature's hypothesis: criteria that are evaluated on an A/B run in which B has the feature.

A criterion on a metric is PASS if the whole interval is on the right side of the bound, and FAIL if
the whole interval is on the wrong side.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Pattern
from sm121.core.node_id import function_of
from sm121.core.numbers import number
from sm121.core.profile_fields import Level
from sm121.core.verdict import Verdict, worst
from sm121.regression.ab import Visit
from sm121.regression.change import Change
from sm121.regression.start_pairs import difference_of_pairs, verdict_of
from sm121.run.verdict_file import TestReport

Phase = Literal["P1", "P2", "P3", "P4", "P5", "P6"]


class Criterion(DataTable):
    """One criterion of exactly one kind."""

    #: The metric that is bounded; None for criteria without a bound.
    metric: str | None = None
    #: The bounds on B / A - 1, as a fraction: 0.10 for 10 % more.
    change_at_least: float | None = None
    change_at_most: float | None = None
    #: The bound on B - A, in the metric's unit.
    difference_at_most: float | None = None
    #: The bounds on B alone, in the metric's unit.
    value_at_least: float | None = None
    value_at_most: float | None = None
    #: A level that must pass in the same run.
    level: Level | None = None
    #: A test that must pass in the same run, with each of its parameters.
    test: str | None = Field(default=None, pattern=r"^test_\w+$")
    #: The experts' kernel that B's log must show.
    moe: Pattern | None = None
    #: The experts' kernel that B's log must not show.
    moe_not: Pattern | None = None
    #: Whether every start of B must serve to the end.
    no_crash: Literal[True] | None = None
    source: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> "Criterion":
        others = ("level", "test", "moe", "moe_not", "no_crash")
        bounds = [name for name in _BOUNDS if getattr(self, name) is not None]
        kinds = bounds + [name for name in others if getattr(self, name)]
        if len(kinds) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join((*_BOUNDS, *others))}; "
                f"got {', '.join(kinds) or 'none'}"
            )
        if bool(bounds) != (self.metric is not None):
            raise ValueError("expected both a metric and a bound on it, or neither")
        return self

    @property
    def bound(self) -> "MetricBound | None":
        """The bound on a metric; None for criteria without a bound."""
        for name in _BOUNDS:
            value = getattr(self, name)
            if value is not None:
                return MetricBound(name, value)
        return None

    @property
    def is_of_pairs(self) -> bool:
        """Whether the bound compares B with A, so that more pairs narrow its interval."""
        return self.bound is not None and self.bound.name not in _OF_B_ALONE

    def __str__(self) -> str:
        if self.bound is not None:
            figure = self.bound.value
            if self.bound.name in _OF_THE_RATIO:
                figure *= 100
            return f"{self.metric} {_BOUNDS[self.bound.name].format(figure)}"
        if self.level:
            return f"level {self.level} holds"
        if self.test:
            return f"{self.test} passes"
        if self.moe:
            return f"the experts run on {self.moe}"
        if self.moe_not:
            return f"the experts do not run on {self.moe_not}"
        return "no start crashes"


#: The bounds on a metric, and the text of each.
_BOUNDS = {
    "change_at_least": "changes by at least {:+.3g} %",
    "change_at_most": "changes by at most {:+.3g} %",
    "difference_at_most": "grows by at most {:g}",
    "value_at_least": "is at least {:g}",
    "value_at_most": "is at most {:g}",
}
#: The bounds on B / A - 1.
_OF_THE_RATIO = frozenset({"change_at_least", "change_at_most"})
#: The bounds on B's values alone.
_OF_B_ALONE = frozenset({"value_at_least", "value_at_most"})
#: The lower bounds.
_LOWER = frozenset({"change_at_least", "value_at_least"})


@dataclass(frozen=True)
class MetricBound:
    """A bound on a metric."""

    #: A key of `_BOUNDS`.
    name: str
    value: float

    def judge(self, low: float, high: float) -> Verdict:
        """Return the verdict on an interval.

        Args:
            low: The lower end of the interval of B / A, B - A or B, depending on the bound.
            high: Its upper end.
        """
        bound = self.value
        if self.name in _OF_THE_RATIO:
            bound += 1.0
        if self.name in _LOWER:
            return verdict_of(holds=low >= bound, fails=high < bound)
        return verdict_of(holds=high <= bound, fails=low > bound)


#: A sentence has at least this many words, so that a placeholder ("TBD", "none", "will be written
#: later") is none.
_SENTENCE = 6
_WORD = re.compile(r"\S*\w\S*")


def _name(text: str) -> str:
    """Return a text without surrounding spaces; raise ValueError if it has no word."""
    if not _WORD.search(text):
        raise ValueError(f"expected a name, got {text!r}")
    return text.strip()


def _sentence(text: str) -> str:
    """Return a text without surrounding spaces; raise ValueError if it has too few words."""
    if len(_WORD.findall(text)) < _SENTENCE:
        raise ValueError(
            f"expected a sentence of at least {_SENTENCE} words, got {text!r}. If there is nothing "
            "to write, write the reason: none, because ..."
        )
    return text.strip()


_Sentence = Annotated[str, AfterValidator(_sentence)]
_Sentences = Annotated[tuple[_Sentence, ...], Field(min_length=1)]


class Review(DataTable):
    """The critical review that the plan requires of each feature: sentences in each list."""

    #: Assumptions that must hold for the feature to help.
    assumptions: _Sentences
    #: Remaining waste of the feature: memory accesses, launches, copies.
    inefficiencies: _Sentences
    #: Alternatives to the feature.
    alternatives: _Sentences
    #: Changes that the feature still needs in FlashInfer or vLLM.
    upstream_todos: _Sentences
    #: Experiments that would show whether the feature helps.
    experiments: _Sentences


class Hypothesis(DataTable):
    """The content of a feature's file, as given with ``--hypothesis``."""

    feature: Annotated[str, AfterValidator(_name)]
    #: "This should improve <metric> by <X %> because <reason>."
    hypothesis: _Sentence
    #: The phase of the plan whose gate is also evaluated.
    phase: Phase | None = None
    criteria: tuple[Criterion, ...] = Field(min_length=1)
    files_changed: tuple[str, ...] = ()
    environment_added: tuple[str, ...] = ()
    review: Review


class PhaseGate(DataTable):
    """The gate at the end of a phase of the plan."""

    description: str
    criteria: tuple[Criterion, ...] = Field(min_length=1)


@dataclass(frozen=True)
class CriterionResult:
    """A criterion, its verdict, and the values of A and B as text, empty if there are none."""

    criterion: Criterion
    verdict: Verdict
    baseline: str = ""
    actual: str = ""
    note: str = ""


def load(path: Path) -> Hypothesis:
    """Read a feature's file.

    Args:
        path: The file of ``--hypothesis``.

    Raises:
        UsageError: The file is not valid; the message names the file and the key.
    """
    text = data_file.read_text(path, f"--hypothesis {path}")
    return data_file.parse(text, Hypothesis, f"hypothesis {path}")


def gate_behind(phase: Phase | None) -> PhaseGate | None:
    """Return the gate at the end of a phase of the plan.

    Args:
        phase: The phase; None without one.

    Returns:
        The gate; None without a phase, or if the phase has no gate.
    """
    if phase is None:
        return None
    gates = data_file.load_key("hypotheses/phases.toml", "phases", dict[Phase, PhaseGate])
    return gates.get(phase)


def evaluate(
    criteria: Sequence[Criterion],
    outcomes: Sequence[Change],
    visits: Sequence[Visit],
    levels: Mapping[str, Verdict],
    looks: int,
    tests: Sequence[TestReport] = (),
) -> list[CriterionResult]:
    """Evaluate criteria on the results of an A/B run.

    Args:
        criteria: The criteria.
        outcomes: The changes of B against A.
        visits: The starts of both sides.
        levels: The verdict of each level of the same run.
        looks: The number of interim tests: see `start_pairs.compare_starts`.
        tests: The tests of the same run that have ended.

    Returns:
        One result per criterion; NOT_RUN if it was not measured.
    """
    by_name = {outcome.metric: outcome for outcome in outcomes}
    results = []
    for criterion in criteria:
        if criterion.level is not None:
            verdict = levels.get(criterion.level, Verdict.NOT_RUN)
            note = "in the same run"
            result = CriterionResult(criterion, verdict, actual=verdict.value, note=note)
        elif criterion.test is not None:
            result = _evaluate_test(criterion, criterion.test, tests)
        elif criterion.no_crash:
            result = _evaluate_crashes(criterion, visits)
        elif criterion.bound is None:
            result = _evaluate_path(criterion, visits)
        else:
            result = _evaluate_metric(criterion, criterion.bound, by_name, visits, looks)
        results.append(result)
    return results


def _evaluate_test(criterion: Criterion, name: str, tests: Sequence[TestReport]) -> CriterionResult:
    """Evaluate a criterion on a test: each of its cases must pass."""
    ended = []
    for test in tests:
        if function_of(test.id) == name:
            ended.append(test)
    verdict = worst(test.verdict for test in ended)
    note = "in the same run"
    if not ended:
        note = "not selected in the same run"
    for test in ended:
        if test.verdict is verdict and test.message:
            note = test.message
    return CriterionResult(criterion, verdict, actual=verdict.value, note=note)


def _evaluate_crashes(criterion: Criterion, visits: Sequence[Visit]) -> CriterionResult:
    if not any(visit.side == "B" for visit in visits):
        return CriterionResult(criterion, Verdict.NOT_RUN, note="B was not started")
    crashed = [visit.failure for visit in visits if visit.side == "B" and visit.failure]
    return CriterionResult(
        criterion,
        Verdict.FAIL if crashed else Verdict.PASS,
        actual=f"{len(crashed)} crashed",
        note="; ".join(crashed),
    )


def _evaluate_path(criterion: Criterion, visits: Sequence[Visit]) -> CriterionResult:
    """Evaluate a criterion on the MoE backend, from the logs of B."""
    paths = [visit.path for visit in visits if visit.side == "B"]
    experts = sorted({str(path["moe"]) for path in paths if path.get("moe")})
    if not experts:
        note = "the log of B does not show the MoE backend"
        return CriterionResult(criterion, Verdict.NOT_RUN, note=note)
    pattern = re.compile(criterion.moe or criterion.moe_not or "")
    matches = [bool(pattern.search(name)) for name in experts]
    holds = all(matches) if criterion.moe else not any(matches)
    return CriterionResult(
        criterion,
        Verdict.PASS if holds else Verdict.FAIL,
        actual=", ".join(experts),
        note="according to B's log",
    )


def _evaluate_metric(
    criterion: Criterion,
    bound: MetricBound,
    outcomes: Mapping[str, Change],
    visits: Sequence[Visit],
    looks: int,
) -> CriterionResult:
    """Evaluate a bound on a metric, from its interval over the pairs or from B's values."""
    metric = criterion.metric or ""
    outcome = outcomes.get(metric)
    if outcome is None:
        measured = ", ".join(outcomes) or "nothing"
        note = f"not measured on both sides; measured on both: {measured}"
        return CriterionResult(criterion, Verdict.NOT_RUN, note=note)
    low = outcome.ci_low
    high = outcome.ci_high
    note = outcome.text
    verdict = Verdict.INCONCLUSIVE
    if low is not None and high is not None:  # otherwise there are too few pairs for an interval
        if bound.name == "difference_at_most":
            difference = difference_of_pairs(visits, metric, looks)
            low = difference.low
            high = difference.high
            assert low is not None and high is not None  # set, as for the ratio
            note = (
                f"B - A = {number(difference.value)} [{number(low)}, {number(high)}] {outcome.unit}"
            )
        elif bound.name in _OF_B_ALONE:
            values = [visit.metrics[metric].value for visit in visits if visit.side == "B"]
            low = min(values)
            high = max(values)
            note = f"B's values: {number(low)} to {number(high)} {outcome.unit}"
        verdict = bound.judge(low, high)
    return CriterionResult(criterion, verdict, number(outcome.a), number(outcome.b), note)


def cell(value: object) -> str:
    """Return a value as the text of a cell of a Markdown table.

    Args:
        value: Any object; its ``str`` is used.
    """
    return str(value).replace("|", "\\|").replace("\n", " ")
