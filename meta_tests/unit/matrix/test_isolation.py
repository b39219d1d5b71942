"""The smallest failing sets of values are found and reported.

No server is started in these tests.
"""

import itertools
import random

import pytest

from meta_tests.unit.matrix.test_axes import SPACES, array_of
from sm121.matrix import axes, covering, feature_matrix, isolation, plan
from sm121.matrix.space import Space, identity
from sm121.run.cell_record import CellOutcome, CellRate, CellRecord, CellStep, worst

pytestmark = pytest.mark.usefixtures("a_cpu_without_fp8")
SPACE = SPACES[0]
PASS = CellOutcome.PASS
FAIL = CellOutcome.FAIL
CRASH = CellOutcome.CRASH
SLOWER = CellOutcome.SLOWER
INVALID = CellOutcome.INVALID


def record(space: Space, cell: dict[str, str], outcome: CellOutcome, isolating=False) -> CellRecord:
    return CellRecord(
        id=identity(space, cell), values=dict(cell), why=[], configuration="c", arguments=[],
        outcome=outcome, reason="planted" if outcome.broken else "", isolating=isolating,
        log="server-matrix.log", boot_s=2.0, took_s=3.0,
    )  # fmt: skip


def ended(outcome: CellOutcome, isolating: bool = False, **values: str) -> CellRecord:
    """Return the record of a cell of `SPACE` that differs from the baseline in these values."""
    return record(SPACE, {**SPACE.baseline, **values}, outcome, isolating)


def has(cell: dict[str, str], choice: axes.Choice) -> bool:
    """Return whether a cell has all values of a choice."""
    return all(cell[axis] == value for axis, value in choice)


class Engine:
    """An engine with injected faults. It counts the cells that were run to isolate them."""

    def __init__(self, space: Space, faults: dict[axes.Choice, CellOutcome]) -> None:
        self.space = space
        self.faults = faults
        self.boots = 0

    def outcome(self, cell: dict[str, str]) -> CellOutcome:
        ranks = list(CellOutcome)
        hit = [outcome for choice, outcome in self.faults.items() if has(cell, choice)]
        return min(hit, key=ranks.index, default=PASS)

    def run(self, cell: dict[str, str], isolating: bool = False) -> CellRecord:
        self.boots += isolating
        return record(self.space, cell, self.outcome(cell), isolating)

    def records(self, *changes: dict[str, str]) -> list[CellRecord]:
        return [self.run({**self.space.baseline, **values}) for values in changes]

    def sets(self, strength: int = 2) -> list[isolation.FailingSet]:
        array = array_of(SPACES.index(self.space), strength)
        return self.isolated([self.run(planned.cell) for planned in array.cells])

    def isolated(self, records: list[CellRecord], *tell) -> list[isolation.FailingSet]:
        return isolation.smallest(self.space, records, lambda cell: self.run(cell, True), *tell)


def unisolated(records: list[CellRecord]) -> list[isolation.FailingSet]:
    """Return the message about failing sets if no further cell can be run."""
    return isolation.smallest(SPACE, records, lambda _cell: None)


@pytest.mark.parametrize("seed", range(40))
def test_planted_sets_are_found_exactly(seed):
    """One or two injected faults, of one or two values each, are found and confirmed, and no other
    set."""
    generator = random.Random(seed)
    space = SPACES[generator.choice([0, 2, 3])]
    faults: dict[axes.Choice, CellOutcome] = {}
    while len(faults) < generator.choice([1, 1, 2]):
        names = sorted(generator.sample(space.axes, generator.choice([1, 2])), key=space.axes.index)
        changed = {}
        for axis in names:
            others = [value for value in space.values(axis) if value != space.baseline[axis]]
            changed[axis] = generator.choice(others)
        choice = tuple(changed.items())
        cell = {**space.baseline, **changed}
        nested = any({*c} <= {*choice} or {*choice} <= {*c} for c in faults)
        if space.excluded(cell) is None and not nested:
            kind = generator.choice([CRASH, FAIL, CellOutcome.FALLBACK])
            faults[choice] = kind
    engine = Engine(space, faults)
    confirmed = {one.choice: one.outcome for one in engine.sets() if one.confirmed}
    assert confirmed.items() <= faults.items(), "what is confirmed was planted"
    for planned in array_of(SPACES.index(space), 2).cells:
        if any(has(planned.cell, choice) for choice in confirmed):
            continue
        for choice, outcome in faults.items():
            is_shown = has(planned.cell, choice) and engine.outcome(planned.cell) is outcome
            assert not is_shown, "what showed itself is found"
    assert engine.boots <= 30


def test_three_values_that_fail_together_need_the_third_strength():
    triple = (("graphs", "compiled"), ("spec", "ngram"), ("seqs", "1"))
    (one,) = Engine(SPACE, {triple: FAIL}).sets(strength=3)
    assert one.choice == triple and one.confirmed
    assert (
        str(one) == "graphs=compiled + spec=ngram + seqs=1: FAIL; each part alone passes (planted)"
    )


def test_without_further_starts_the_candidates_are_listed():
    engine = Engine(SPACE, {(("graphs", "compiled"), ("spec", "ngram")): CRASH})
    sets = unisolated([engine.run(planned.cell) for planned in array_of(0, 2).cells])
    assert sets and not any(one.confirmed for one in sets)
    for one in sets:
        assert "not isolated" in str(one)


def test_a_failed_baseline_is_the_only_failing_set():
    no_help = lambda _cell: pytest.fail("no cell helps")  # noqa: E731
    (one,) = isolation.smallest(SPACE, [ended(CRASH)], no_help)
    assert one.choice == () and str(one).startswith("baseline: CRASH")


def again_as(*outcomes, **changed):
    """Return the failing set of a cell whose further starts have these outcomes."""
    ends = itertools.chain(outcomes, itertools.repeat(outcomes[-1]))

    def again(cell):
        outcome = next(ends)
        return outcome and record(SPACE, cell, outcome, True)

    (one,) = isolation.smallest(SPACE, [ended(PASS), ended(FAIL, **changed)], again)
    return one


@pytest.mark.parametrize("changed", [{"graphs": "compiled"}, {"graphs": "compiled", "seqs": "1"}])
@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        pytest.param(PASS, "failed once, and not in a second start", id="PASS, failed once"),
        pytest.param(
            CellOutcome.NOT_RUN,
            "the second start ended with NOT_RUN",
            id="CellOutcome.NOT_RUN, the second start ended with NOT_RUN",
        ),
        (None, "not isolated"),
    ],
)
def test_a_failure_that_does_not_recur_is_no_failing_set(outcome, says, changed):
    one = again_as(outcome, **changed)
    assert not one.confirmed and says in str(one)


def test_a_second_start_that_fails_otherwise_may_be_the_last():
    """If a second start fails differently, it may be the last start of the level.

    It excludes every set of the first failure, and no time is left to test a set alone.
    """
    one = again_as(SLOWER, None, graphs="compiled", seqs="1")
    assert not one.confirmed and one.choice == (("graphs", "compiled"),)


@pytest.mark.parametrize(
    ("of_part", "of_pair", "sets"),
    [
        pytest.param(
            INVALID,
            SLOWER,
            ("spec=ngram + load=eager: SLOWER; load=eager alone: INVALID (planted)",),
            id="INVALID, SLOWER, spec=ngram + load=eager: SLOWER",
        ),
        pytest.param(
            FAIL,
            CRASH,
            (
                "load=eager: FAIL (planted)",
                "spec=ngram + load=eager: CRASH; load=eager alone: FAIL (planted)",
            ),
            id="FAIL, CRASH, load=eager: FAIL (planted) spec=ngram +",
        ),
    ],
)
def test_a_part_with_another_outcome_is_named(of_part, of_pair, sets):
    """If a part of the set has another outcome, it is reported.

    Neither INVALID nor another failure shows that the part passes alone."""
    pair = {"spec": "ngram", "load": "eager"}
    engine = Engine(SPACE, {(("load", "eager"),): of_part, tuple(pair.items()): of_pair})
    isolated = engine.isolated(engine.records({}, {"spec": "ngram"}, pair))
    assert isolated[-1].confirmed and [str(one) for one in isolated] == [*sets]


def test_failing_sets_are_reported_when_they_are_found():
    engine = Engine(SPACE, {(("graphs", "compiled"),): FAIL, (("seqs", "1"),): CRASH})
    labels: list[list[str]] = []
    engine.isolated(
        engine.records({}, {"graphs": "compiled"}, {"seqs": "1"}),
        lambda sets: labels.append([axes.label(one.choice) for one in sets]),
    )
    assert labels == [["graphs=compiled"], ["graphs=compiled", "seqs=1"]]


@pytest.mark.parametrize(("undecided", "works"), [("performance", True), ("equivalence", False)])
def test_without_a_decision_values_are_not_known_to_work(undecided, works):
    names = ("start", "path", "answers", "equivalence", "stress", "alive", "performance")
    invalid = ended(INVALID, graphs="compiled", seqs="1")
    invalid.steps = [CellStep(name=name, outcome=PASS) for name in names]
    invalid.steps[names.index(undecided)].outcome = INVALID
    records = [ended(PASS), invalid]
    file = feature_matrix.build(SPACE, covering.build(SPACE, 1), records, [], profile="p")
    outcome = feature_matrix.pairs(SPACE, file)[("graphs", "compiled"), ("seqs", "1")]
    assert outcome == ("works" if works else "unknown")
    # These values may also cause another failure.
    sets = unisolated([*records, ended(FAIL, graphs="compiled", seqs="1", load="eager")])
    others = {sets[0].choice, *sets[0].alternatives}
    assert ((("seqs", "1"),) in others) is not works
    assert "passes all checks but has an invalid rate" in feature_matrix.markdown(SPACE, file)


@pytest.mark.parametrize("interrupted", [True, False])
def test_failures_are_listed_before_their_cause_is_isolated(interrupted):
    slower = ended(SLOWER, graphs="compiled")
    records = [ended(PASS), slower]
    array = covering.build(SPACE, 1)

    def built(records, sets=(), **more):
        return feature_matrix.build(SPACE, array, records, [*sets], profile="p", **more)

    file = built(records, interrupted=interrupted)
    text = feature_matrix.markdown(SPACE, file)
    assert "No executed cell" not in text
    assert f"- SLOWER: `{slower.id}`, planted" in text
    assert ("**Interrupted: " in text) is interrupted
    assert f"{len(file.not_run)} of" in text
    explained = feature_matrix.markdown(SPACE, built(records, unisolated(records)))
    assert "were not searched for" not in explained
    passed = built([*records, ended(PASS, True, graphs="compiled")])
    assert feature_matrix.unexplained(passed) == []
    whole = file.model_copy(update={"not_run": [], "interrupted": False})
    assert feature_matrix.incomplete(whole) is None


# ----------------------------------------------------------------------------- Order, state and
# report


def test_cells_of_one_start_up_are_neighbours():
    cells = list(covering.build(SPACE, 2).cells)
    key = lambda planned: planned.cell["graphs"] + planned.cell["dtype"]  # noqa: E731
    ordered = plan.ordered(SPACE, cells, key)
    assert ordered[0].cell == SPACE.baseline and sorted(map(id, ordered)) == sorted(map(id, cells))
    assert len([*itertools.groupby(ordered, key)]) == len({*map(key, ordered)})


def test_the_worst_step_decides():
    outcomes = {"start": PASS, "performance": SLOWER, "stress": FAIL}
    steps = [CellStep(name=name, outcome=outcome) for name, outcome in outcomes.items()]
    assert worst(steps) is steps[2] and worst(steps[:1]) is None


def test_the_report_lists_isolated_and_open_failures():
    array = covering.build(SPACE, 2)
    fault = (("graphs", "compiled"), ("spec", "ngram"))
    engine = Engine(SPACE, {fault: FAIL})
    records = [engine.run(planned.cell) for planned in array.cells]
    records[0].rate = CellRate(metric="tg32@d0", samples=[1.0, 2.0], value=1.5)

    def tried(cell: dict[str, str]) -> CellRecord:
        records.append(engine.run(cell, True))
        return records[-1]

    sets = isolation.smallest(SPACE, list(records), tried)
    file = feature_matrix.build(SPACE, array, records, sets, profile="p")
    text = feature_matrix.markdown(SPACE, file, command="make it")
    assert "Made by `make it`." in text and "each part alone passes" in text
    assert "| 2 | 126 | 126 | 126 | 0 |" in text
    states = feature_matrix.pairs(SPACE, file)
    sizes = itertools.combinations([len(SPACE.values(axis)) for axis in SPACE.axes], 2)
    assert len(states) == sum(one * other for one, other in sizes) == 126
    assert states[fault] == "broken" and set(states.values()) <= {"broken", "works", "unknown"}
    assert feature_matrix.MatrixFile.model_validate_json(file.model_dump_json()) == file
    space, together = feature_matrix.merged([file, file])
    first_starts = []
    for each in (together, file):
        first_starts.append([c.id for c in each.cells if not c.isolating])
    assert first_starts[0] == first_starts[1] and space.axes == SPACE.axes
