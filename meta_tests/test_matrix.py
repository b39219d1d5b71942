"""Axes, covering arrays, smallest failing sets: what needs no server."""

import functools
import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_rows import from_data, text_file

from sm121 import cli
from sm121.core import data_file, profile, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.server import Endpoint, Server
from sm121.engines import managed, pool
from sm121.engines.attached import attach
from sm121.engines.life import ServerDied
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.matrix import (
    axes,
    cost,
    covering,
    examine,
    feature_matrix,
    isolation,
    level,
    plan,
    state,
)
from sm121.matrix.axes import Space
from sm121.matrix.outcome import CellOutcome, CellRate, CellRecord, Step, worst
from sm121.measure.measurement import Invalidity

SM121 = axes.load("sm121")
SHIPPED = {name: file.read_text("utf-8") for name, file in data_file.shipped("matrix").items()}


def load_text(text: str, origin: str) -> axes.AxesFile:
    return data_file.parse(text, axes.AxesFile, f"matrix {origin}")


CPU = axes.load("cpu")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(axes, "cpu_flags", str)  # this machine's are not what is tested
    SPACES = [
        Space(CPU, "vllm", "0.32.0"),
        Space(SM121, "vllm", "0.32.0"),
        Space(SM121, "vllm", "0.33.0"),
        Space(SM121, "vllm", "0.14.0+mxfp4"),
        Space(SM121, "sglang", "0.5.23"),
        Space(axes.load("cpu-llama-cpp"), "llama-cpp"),
    ]
NAMES = ["cpu", "0.32", "0.33", "mxfp4", "sglang", "llama"]


@pytest.fixture(autouse=True)
def a_cpu_without_fp8(monkeypatch):
    monkeypatch.setattr(axes, "cpu_flags", str)


@functools.cache
def array_of(number: int, strength: int) -> covering.Array:
    return covering.build(SPACES[number], strength)


def counted(space: Space, cells: list[dict[str, str]], strength: int) -> tuple[int, int]:
    """Allowed combinations and those that occur, by the full product alone."""
    allowed, seen = set(), set()
    for names in itertools.combinations(space.axes, strength):
        for cell in space.full():
            allowed.add(tuple((a, cell[a]) for a in names))
        for cell in cells:
            seen.add(tuple((a, cell[a]) for a in names))
    return len(allowed), len(allowed & seen)


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(SPACES)), ids=NAMES)
def test_every_allowed_combination_is_in_the_array(number, strength):
    space, array = SPACES[number], array_of(number, strength)
    cells = [planned.cell for planned in array.cells]
    found = covering.coverage(space, cells, strength)
    assert not found.missing and found.covered == found.allowed
    assert len(cells) >= covering.lower_bound(space, strength)
    assert not any(space.excluded(cell) for cell in cells)
    assert len({tuple(cell.items()) for cell in cells}) == len(cells)
    if space.product <= 2000:
        assert counted(space, cells, strength) == (found.allowed, found.covered)


def test_the_arrays_are_small_and_the_same_every_time():
    space = SPACES[2]
    first, second = (covering.build(space, 2) for _ in range(2))
    assert first.cells == second.cells
    assert covering.bare(space, 2) <= 1.25 * covering.lower_bound(space, 2)
    assert covering.bare(SPACES[0], 2) <= 8  # eight axes of two values: six at best


def test_full_is_all_of_it_and_none_is_nothing():
    space = SPACES[0]
    assert len(covering.build(space, "full").cells) == space.product == 384
    assert len(covering.build(space, "none").cells) == 1
    assert SPACES[1].product_allowed() == 2304


def test_named_cells_are_always_in():
    for number, activation in ((2, "mxfp8"), (3, None)):  # a release, the effort's own build
        space = SPACES[number]
        for strength in (1, 2):
            array = covering.build(space, strength)
            found = {why: planned.cell for planned in array.cells for why in planned.why}
            assert found["Test-B"]["moe"] == "cutlass" and found["Test-C"]["graphs"] == "off"
            assert found["Test-B"].get("activation") == activation
        whys = {why for planned in array.cells for why in planned.why}
        assert {"moe=cutlass + activation=mxfp8 + spec=eagle3-short"} <= whys
        assert array.cells[0].cell == space.baseline


def test_what_upstream_does_not_have_is_not_applicable():
    upstream = SPACES[1]
    assert "tile" not in upstream.axes and "sinks" not in upstream.axes
    assert "no release has such a backend" in upstream.absent["moe", "gemv"]
    array = covering.build(upstream, 2)
    assert "not applicable" in array.absent["Test-F"]
    assert array.absent["Test-B"] == "tried without sinks=on, which is not applicable here"


def test_a_build_has_its_own_knobs_and_no_release_has_them():
    build, before = SPACES[3], Space(SM121, "vllm", "0.14.0")
    assert build.given({**build.baseline, "moe": "cutlass", "dense": "all", "kv": "fp8"})[0] == (
        *("--mxfp4-backend", "CUTLASS", "--attention-backend", "FLASHINFER"),
        *("--mxfp4-layers", "moe,qkv,o,lm_head", "--kv-cache-dtype", "fp8"),
    )
    assert not build.given(build.baseline)[1]
    for changes_nothing in (("activation", "mxfp8"), ("tile", "64x128"), ("moe", "gemv")):
        assert changes_nothing in build.absent and changes_nothing not in build.unproven()
    assert "changes nothing" in build.absent["activation", "fp6"]
    given = [s.arguments for values in before.settings.values() for s in values.values()]
    assert not any("--mxfp4" in word for arguments in given for word in arguments)
    assert before.absent["dense", "fp8"].startswith("before vLLM 0.30 it is taken")
    own = profile.load("sm121-gpt-oss-120b")
    for version, options in (
        ("0.14.0rc1.dev375+g8409484b4", None),
        ("0.1.dev12770+g045293d82", None),
        ("a1b2c3", {"--mxfp4-backend"}),
    ):
        assert plan.space_of(own, version=version, options=options).settings == build.settings


def test_an_unknown_build_has_what_its_parser_takes_and_never_the_newest():
    """`options` is what its parser said; None is ``sm121 matrix`` without an engine."""
    unknown = "0.1.dev16581+g0a1b2c3"
    asked = {"--attention-backend", "--kv-cache-dtype", "--enforce-eager", "--load-format"}
    own = Space(SM121, "vllm", unknown, options=asked)
    assert set(own.axes) == {"attention", "graphs", "kv", "load"}
    assert own.settings["attention"]["triton"].arguments == ("--attention-backend", "TRITON_ATTN")
    newer = Space(SM121, "vllm", unknown, options={*asked, "--quantization-config"})
    assert newer.values("dense") == ("bf16", "fp8", "mxfp8", "qkv-o")
    assert "moe" in Space(SM121, "vllm", unknown).axes
    released = Space(SM121, "vllm", "0.33.0", options=())
    assert released.axes == SPACES[2].axes


_ONLY_ONE = text_file("axis-without-a-choice.toml")


def test_a_rule_about_an_axis_without_a_choice_counts():
    """The axis is at its baseline; what is ruled out with that is ruled out."""
    space = Space(load_text(SHIPPED["cpu"] + _ONLY_ONE, "mine.toml"), "vllm", "0.32.0")
    assert "only" not in space.axes and space.fixed["only"] == "here"
    assert not space.allowed((("dtype", "bfloat16"), ("seqs", "1")))
    assert space.allowed((("graphs", "compiled"),))
    cells = [planned.cell for planned in covering.build(space, 2).cells]
    assert not any(cell["dtype"] == "bfloat16" and cell["seqs"] == "1" for cell in cells)


def test_one_axis_alone_has_each_value():
    text = "".join(SHIPPED["cpu"].partition("[axes.graphs]")[0])
    space = Space(load_text(text, "mine.toml"), "vllm", "0.32.0")
    cells = [planned.cell["dtype"] for planned in covering.build(space, 1).cells]
    assert cells == ["float32", "bfloat16"]


def test_what_is_switched_is_seen_or_said_to_be_unseen():
    text = SHIPPED["cpu"] + "\n" + text_file("axis-unproven.toml")
    with pytest.raises(UsageError, match=r"axes\.mine.*values\.on: vllm: expected evidence"):
        load_text(text, "mine.toml")
    reason = "no line of the log names it"
    space = Space(load_text(f'{text}unproven = "{reason}"\n', "mine.toml"), "vllm", "0.32.0")
    assert space.unproven() == {"mine=on": reason}
    file = feature_matrix.build(space, covering.build(space, 1), [], [], profile="p")
    assert f"- `mine=on`: {reason}" in feature_matrix.markdown(space, file)


def test_an_axes_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe\x00axes")
    with pytest.raises(UsageError, match="expected a text file in UTF-8") as seen:
        axes.load(str(file))
    assert "\n" not in str(seen.value)

    def refuse(*_args: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        axes.load(str(file))


def test_contradicting_incompatibilities_are_named():
    rules = "".join(
        f"\n[[incompatible]]\nwhen = {{ dtype = 'bfloat16', graphs = '{value}' }}\n"
        "reason = 'why'\nsource = 'the test'\n"
        for value in ("eager", "compiled")
    )
    file = load_text(SHIPPED["cpu"] + rules, "mine.toml")
    with pytest.raises(UsageError, match="no combination is left with dtype=bfloat16"):
        Space(file, "vllm", "0.32.0")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_strength_that_is_none(text):
    with pytest.raises(UsageError, match="expected 1, 2"):
        covering.parse_strength(text)
    with pytest.raises(UsageError, match="at most 8"):
        covering.build(SPACES[0], 9)


# ------------------------------------------------------------------------- smallest failing sets


def record(space: Space, cell: dict[str, str], outcome: CellOutcome, isolating=False) -> CellRecord:
    return CellRecord(
        id=axes.identity(space, cell), values=dict(cell), why=[], configuration="c", arguments=[],
        outcome=outcome, reason="planted" if outcome.broken else "", isolating=isolating,
    )  # fmt: skip


class Engine:
    """An engine with planted faults; counts the cells that are run to find them."""

    def __init__(self, space: Space, faults: dict[axes.Choice, CellOutcome]) -> None:
        self.space = space
        self.faults = faults
        self.boots = 0

    def outcome(self, cell: dict[str, str]) -> CellOutcome:
        ranks = list(CellOutcome)
        hit = [o for c, o in self.faults.items() if all(cell[a] == v for a, v in c)]
        return min(hit, key=ranks.index, default=CellOutcome.PASS)

    def run(self, cell: dict[str, str], isolating: bool = False) -> CellRecord:
        self.boots += isolating
        return record(self.space, cell, self.outcome(cell), isolating)

    def found(self, strength: int = 2) -> list[isolation.FailingSet]:
        cells = [planned.cell for planned in array_of(SPACES.index(self.space), strength).cells]
        return isolation.smallest(
            self.space, [self.run(cell) for cell in cells], lambda cell: self.run(cell, True)
        )


@pytest.mark.parametrize("seed", range(40))
def test_planted_sets_are_found_exactly(seed):
    """One or two faults of one or two values each, anywhere: found, confirmed, and no other."""
    generator = random.Random(seed)
    space = SPACES[generator.choice([0, 2, 3])]
    faults: dict[axes.Choice, CellOutcome] = {}
    while len(faults) < generator.choice([1, 1, 2]):
        names = sorted(generator.sample(space.axes, generator.choice([1, 2])), key=space.axes.index)
        choice = tuple(
            (a, generator.choice([v for v in space.values(a) if v != space.baseline[a]]))
            for a in names
        )
        cell = {**space.baseline, **dict(choice)}
        nested = any({*c} <= {*choice} or {*choice} <= {*c} for c in faults)
        if space.excluded(cell) is None and not nested:
            kind = generator.choice([CellOutcome.CRASH, CellOutcome.FAIL, CellOutcome.FALLBACK])
            faults[choice] = kind
    engine = Engine(space, faults)
    found = engine.found()
    confirmed = {one.choice: one.outcome for one in found if one.confirmed}
    assert confirmed.items() <= faults.items(), "what is confirmed was planted"
    hidden = [
        choice
        for choice, outcome in faults.items()
        if choice not in confirmed
        and any(engine.outcome(p.cell) is outcome and all(p.cell[a] == v for a, v in choice)
                and not any(all(p.cell[a] == v for a, v in c) for c in confirmed)
                for p in array_of(SPACES.index(space), 2).cells)
    ]  # fmt: skip
    assert not hidden, "what showed itself is found"
    assert engine.boots <= 30


def test_three_values_that_fail_together_need_the_third_strength():
    space = SPACES[0]
    triple = (("graphs", "compiled"), ("spec", "ngram"), ("seqs", "1"))
    (found,) = Engine(space, {triple: CellOutcome.FAIL}).found(strength=3)
    assert found.choice == triple and found.confirmed
    assert str(found) == "graphs=compiled + spec=ngram + seqs=1: FAIL; each alone passes (planted)"


def test_without_boots_the_candidates_are_said():
    space = SPACES[0]
    engine = Engine(space, {(("graphs", "compiled"), ("spec", "ngram")): CellOutcome.CRASH})
    cells = [planned.cell for planned in covering.build(space, 2).cells]
    found = isolation.smallest(space, [engine.run(cell) for cell in cells], lambda _cell: None)
    assert found and not any(one.confirmed for one in found)
    assert all("not isolated" in str(one) for one in found)


def test_a_broken_baseline_explains_everything():
    space = SPACES[0]
    records = [record(space, space.baseline, CellOutcome.CRASH)]
    (found,) = isolation.smallest(space, records, lambda _cell: pytest.fail("no cell helps"))
    assert found.choice == () and str(found).startswith("baseline: CRASH")


@pytest.mark.parametrize("changed", [{"graphs": "compiled"}, {"graphs": "compiled", "seqs": "1"}])
def test_a_failure_that_does_not_come_again_is_no_set(changed):
    space = SPACES[0]
    cell = {**space.baseline, **changed}
    broken = [
        record(space, space.baseline, CellOutcome.PASS),
        record(space, cell, CellOutcome.FAIL),
    ]
    (found,) = isolation.smallest(space, broken, lambda c: record(space, c, CellOutcome.PASS, True))
    assert not found.confirmed and "once, and not again" in str(found)
    (found,) = isolation.smallest(
        space, broken, lambda c: record(space, c, CellOutcome.NOT_RUN, True)
    )
    assert not found.confirmed and "started again, it came to NOT_RUN" in str(found)
    (found,) = isolation.smallest(space, broken, lambda _cell: None)
    assert not found.confirmed and "not isolated" in str(found)


def test_a_second_start_that_fails_otherwise_may_be_the_last():
    """It clears every set of the first failure, and no time is left to try one alone."""
    space = SPACES[0]
    cell = {**space.baseline, "graphs": "compiled", "seqs": "1"}
    broken = [
        record(space, space.baseline, CellOutcome.PASS),
        record(space, cell, CellOutcome.FAIL),
    ]
    starts = iter([record(space, cell, CellOutcome.SLOWER, True), None])
    (found,) = isolation.smallest(space, broken, lambda _cell: next(starts))
    assert not found.confirmed and found.choice == (("graphs", "compiled"),)


def test_a_part_that_ends_otherwise_is_named():
    """INVALID alone is no sign that it passes alone; neither is another failure."""
    space = SPACES[0]
    part, pair = (("load", "eager"),), (("spec", "ngram"), ("load", "eager"))
    engine = Engine(space, {part: CellOutcome.INVALID, pair: CellOutcome.SLOWER})
    cell = {**space.baseline, **dict(pair)}
    records = [engine.run(space.baseline), engine.run({**space.baseline, "spec": "ngram"}),
               engine.run(cell)]  # fmt: skip
    (found,) = isolation.smallest(space, records, lambda c: engine.run(c, True))
    assert found.confirmed and found.choice == pair
    assert str(found) == "spec=ngram + load=eager: SLOWER; load=eager alone: INVALID (planted)"
    engine = Engine(space, {part: CellOutcome.FAIL, pair: CellOutcome.CRASH})
    sets = isolation.smallest(
        space, [engine.run(space.baseline), engine.run(cell)], lambda c: engine.run(c, True)
    )
    assert [str(one) for one in sets] == [
        "load=eager: FAIL (planted)",
        "spec=ngram + load=eager: CRASH; load=eager alone: FAIL (planted)",
    ]


def test_sets_are_told_as_they_are_found():
    space = SPACES[0]
    engine = Engine(space, {(("graphs", "compiled"),): CellOutcome.FAIL,
                            (("seqs", "1"),): CellOutcome.CRASH})  # fmt: skip
    records = [engine.run({**space.baseline, **c})
               for c in ({}, {"graphs": "compiled"}, {"seqs": "1"})]  # fmt: skip
    told: list[list[str]] = []
    isolation.smallest(
        space, records, lambda c: engine.run(c, True),
        lambda sets: told.append([axes.label(one.choice) for one in sets]),
    )  # fmt: skip
    assert told == [["graphs=compiled"], ["graphs=compiled", "seqs=1"]]


def invalid(space: Space, cell: dict[str, str], step: str) -> CellRecord:
    one = record(space, cell, CellOutcome.INVALID)
    names = ("start", "path", "answers", "equivalence", "stress", "alive", "performance")
    one.steps = [
        Step(name=name, outcome=CellOutcome.INVALID if name == step else CellOutcome.PASS)
        for name in names
    ]
    return one


@pytest.mark.parametrize(("step", "works"), [("performance", True), ("equivalence", False)])
def test_without_a_decision_values_are_not_known_to_work(step, works):
    space = SPACES[0]
    cell = {**space.baseline, "graphs": "compiled", "seqs": "1"}
    records = [record(space, space.baseline, CellOutcome.PASS), invalid(space, cell, step)]
    file = feature_matrix.build(space, covering.build(space, 1), records, [], profile="p")
    state = feature_matrix.pairs(space, file)[("graphs", "compiled"), ("seqs", "1")]
    assert state == ("works" if works else "unknown")
    # Nor are they innocent of a failure elsewhere.
    failing = {**cell, "load": "eager"}
    sets = isolation.smallest(
        space, [*records, record(space, failing, CellOutcome.FAIL)], lambda _cell: None
    )
    others = {sets[0].choice, *sets[0].alternatives}
    assert ((("seqs", "1"),) in others) is not works
    assert "of which all but the rate was judged" in feature_matrix.markdown(space, file)


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_fails_is_told_before_it_is_known_why(interrupted):
    space = SPACES[0]
    slower = {**space.baseline, "graphs": "compiled"}
    records = [
        record(space, space.baseline, CellOutcome.PASS),
        record(space, slower, CellOutcome.SLOWER),
    ]
    array = covering.build(space, 1)
    file = feature_matrix.build(space, array, records, [], profile="p", interrupted=interrupted)
    text = feature_matrix.markdown(space, file)
    assert "Nothing of what was run" not in text
    assert f"- SLOWER: `{axes.identity(space, slower)}`, planted" in text
    assert ("**Interrupted: " in text) is interrupted
    assert f"{len(file.not_run)} of" in text
    sets = isolation.smallest(space, records, lambda _cell: None)
    known = feature_matrix.build(space, array, records, sets, profile="p")
    assert "was not looked for" not in feature_matrix.markdown(space, known)
    again = record(space, slower, CellOutcome.PASS, isolating=True)
    passed = feature_matrix.build(space, array, [*records, again], [], profile="p")
    assert feature_matrix.unexplained(passed) == []
    assert feature_matrix.incomplete(file.model_copy(
        update={"not_run": [], "interrupted": False}
    )) is None  # fmt: skip


# ----------------------------------------------------------------------- order, cost, state, report


def test_cells_of_one_start_up_are_neighbours():
    space = SPACES[0]
    cells = list(covering.build(space, 2).cells)
    key = {id(planned): planned.cell["graphs"] + planned.cell["dtype"] for planned in cells}
    found = plan.ordered(space, cells, lambda planned: key[id(planned)])
    keys = [key[id(planned)] for planned in found]
    assert found[0].cell == space.baseline and sorted(map(id, found)) == sorted(map(id, cells))
    assert len([k for k, _ in itertools.groupby(keys)]) == len(set(keys))


def test_cost_is_learned_and_foretold(tmp_path):
    space, own = SPACES[0], profile.load("cpu-tiny-gpt-oss").matrix
    cells = [space.baseline, {**space.baseline, "graphs": "compiled"}]
    first = cost.predict(space, cells, ["a", "b"], own, cost.Durations(tmp_path / "d.json"))
    assert first.boots == 2 and "nothing timed yet" in str(first)
    assert first.seconds == 2 * (own.boot_s.value + own.cell_s.value) + 30
    durations = cost.Durations(tmp_path / "d.json")
    one = record(space, space.baseline, CellOutcome.PASS)
    one.configuration, one.boot_s, one.took_s = "a", 10.0, 15.0
    one.steps = [Step(name="start", outcome=CellOutcome.PASS)]
    durations.learn([one])
    again = cost.Durations(tmp_path / "d.json")
    known = cost.predict(space, cells[:1], ["a"], own, again)
    assert known.seconds == 15.0 and "1 of 1 boots were timed" in str(known)
    running = cost.predict(space, cells[:1], ["a"], own, again, running="a")
    assert running.boots == 0 and running.seconds == 5.0
    (tmp_path / "d.json").write_text("no json")
    assert cost.Durations(tmp_path / "d.json").of("a") == {}


def test_state_survives_a_line_that_was_cut_off(tmp_path):
    space = SPACES[0]
    for cell in list(space.full())[:3]:
        state.add(record(space, cell, CellOutcome.PASS), tmp_path, {"profile": "p"})
    file = tmp_path / "state.jsonl"
    file.write_text(file.read_text()[:-20])
    found, why = state.read(tmp_path, {"profile": "p"})
    assert why is None and len(found) == 2 and all(one.resumed for one in found)
    assert state.read(tmp_path, {"profile": "q"}) == (
        [], "the earlier run was another one: profile differ"
    )  # fmt: skip
    assert state.read(tmp_path / "none", {})[1] == "there is no earlier state"


def test_the_worst_step_decides():
    steps = [
        Step(name="start", outcome=CellOutcome.PASS),
        Step(name="performance", outcome=CellOutcome.SLOWER),
        Step(name="stress", outcome=CellOutcome.FAIL),
    ]
    found = worst(steps)
    assert found is not None and found.name == "stress" and worst(steps[:1]) is None


def test_the_report_says_what_is_known(tmp_path):
    space = SPACES[0]
    array = covering.build(space, 2)
    fault = (("graphs", "compiled"), ("spec", "ngram"))
    engine = Engine(space, {fault: CellOutcome.FAIL})
    records = [engine.run(planned.cell) for planned in array.cells]
    records[0].rate = CellRate(metric="tg32@d0", samples=[1.0, 2.0], value=1.5)

    def tried(cell: dict[str, str]) -> CellRecord:
        records.append(engine.run(cell, True))
        return records[-1]

    sets = isolation.smallest(space, list(records), tried)
    file = feature_matrix.build(space, array, records, sets, profile="p")
    text = feature_matrix.markdown(space, file, command="make it")
    assert "Made by `make it`." in text and "each alone passes" in text
    assert "| 2 | 126 | 126 | 126 | 0 |" in text
    states = feature_matrix.pairs(space, file)
    sizes = itertools.combinations([len(space.values(axis)) for axis in space.axes], 2)
    assert len(states) == sum(one * other for one, other in sizes) == 126
    assert states[fault] == "broken" and set(states.values()) <= {"broken", "works", "unknown"}
    again = feature_matrix.MatrixFile.model_validate_json(file.model_dump_json())
    assert again == file
    both, together = feature_matrix.merged([file, file])
    assert [c.id for c in together.cells if not c.isolating] == [
        c.id for c in file.cells if not c.isolating
    ]
    assert both.axes == space.axes


def test_the_outlook_is_printed(capsys):
    assert cli.main(["matrix", "--profile", "sm121-gpt-oss-120b", "--version", "0.33.0"]) == 0
    text = capsys.readouterr().out
    assert "| 2 | 16 | 20 | 16 |" in text and "predicted hours" in text
    assert cli.main(["matrix", "--profile", "cpu-tiny-gpt-oss", "--strength", "2"]) == 0
    assert "126 of 126 allowed pairs (100%)" in capsys.readouterr().out


# --------------------------------------------------------------------------------- before any start


@from_data
def test_bad_input_is_named_before_the_first_start(run_matrix, tmp_path, arguments, why):
    status, run, _ = run_matrix(*arguments)
    assert status == 4 and why in run.output, run.output
    assert not (tmp_path / "boots.txt").exists()
    assert "Traceback" not in run.output


def test_an_axis_that_the_engine_refuses_is_named(run_matrix, tmp_path):
    text = (Path(__file__).parent / "data" / "matrix-axes.toml").read_text()
    mine = tmp_path / "axes.toml"
    mine.write_text(text.replace('"--window", "half"', '"--windows", "half"'))
    status, run, _ = run_matrix("--matrix-axes", str(mine))
    assert status == 4, run.output
    assert (
        "window=half (--windows half): vllm 0.33.0 refuses it: unrecognized arguments: --windows"
        in run.output
    )


def test_no_matrix_is_no_gap(run_matrix):
    status, run, _ = run_matrix("--matrix", "none", "--collect-only", "-q")
    assert status == 5 and "test_cell" not in run.output


def test_cells_are_collected_for_a_machine_that_is_not_here(run_pytest):
    status, run = run_pytest("--arch", "sm121", "tests/test_matrix.py", "--collect-only", "-q")
    assert status == 0 and "test_cell[moe=cutlass,activation=mxfp8]" in run.output


@pytest.mark.parametrize("value", [("scheduling", "sync"), ("seqs", "1"), ("load", "eager")])
def test_a_value_that_the_log_does_not_show_is_a_fallback(value):
    expected = SPACES[0].value(*value).expected
    said, where = text_file("vllm-given.log"), "=".join(value)
    assert expected.unmet(where, KernelPath(), said) == []
    silent = (
        said.replace(": False", ": True").replace("(eager)", "").replace("seqs': 1", "seqs': 16")
    )
    (wrong,) = expected.unmet(where, KernelPath(), silent)
    assert wrong.startswith(f"{where}: must see")


def test_a_setting_has_evidence_of_its_own():
    """The same value on another engine shows itself in another line."""
    vllm, sglang = SPACES[2], SPACES[4]
    assert vllm.settings["prefix"]["off"].expected.path == {"prefix_caching": "False"}
    assert sglang.settings["prefix"]["off"].expected.must_see == (
        "disable_radix_cache'?(=|: )True",
    )
    assert [*SPACES[3].unproven()] == ["dense=qkv-o"] and not vllm.unproven()


# ---------------------------------------------------------------------------------- the performance


def examiner(tmp_path: Path, alive) -> examine.Examiner:
    """One whose checks pass up to the performance sample."""
    own = profile.load("cpu-tiny-gpt-oss")
    assert own.matrix is not None
    server = Server(
        Endpoint("http://127.0.0.1:1", "", "canary"), True, "vllm", None, None, None, 1.0
    )
    harness = SimpleNamespace(
        profile=own, start=lambda _configuration: server, check_alive=alive,
        redact=lambda text: text, ledger=(), crashed=lambda error, _test: error.cause,
    )  # fmt: skip
    made = examine.Examiner(harness, SPACES[0], own.matrix, tmp_path / "matrix")
    for check in ("_path", "_known_answers", "_equivalence", "_stress"):
        setattr(made, check, lambda _record, _server: None)
    return made


def failed(_record, _server):
    return "tg64@d0", [], [Invalidity(reason="request_failed", evidence="5 of 5 requests: reset")]


def no_client(_record, _server):
    raise Sm121Error("the measuring client ended with 1")


@pytest.mark.parametrize("measure", [failed, no_client])
@pytest.mark.parametrize("dies", [True, False])
def test_what_a_performance_sample_shows(tmp_path, measure, dies):
    log = tmp_path / "server.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    cause = Cause(kind="oom", summary="out of memory", owner="the engine")
    asked: list[int] = []

    def alive(**_when: bool) -> None:
        asked.append(1)
        if dies and len(asked) > 1:  # before the sample it still lives
            raise ServerDied("it ended", cause, log)

    made = examiner(tmp_path, alive)
    made._measure = measure
    configuration = ServerConfiguration("n", "vllm", "python", "m", "canary", (), ())
    found = made.examine(covering.Planned(SPACES[0].baseline, ("baseline",)), configuration)
    if dies:
        assert found.outcome is CellOutcome.CRASH and found.kind == "oom"
        assert found.reason.startswith("alive: died (checking: performance): oom")
        assert (tmp_path / str(found.bundle) / "server.log").read_text() == log.read_text()
    elif measure is failed:
        assert found.outcome is CellOutcome.FAIL and "5 of 5 requests" in found.reason
    else:
        assert found.outcome is CellOutcome.INVALID and found.works
        assert found.reason == "performance: the measuring client ended with 1"


class AttachedHarness:
    """Has a server, and can start none."""

    aborted, pool, life, ledger = None, None, None, ()
    file = SimpleNamespace(fingerprint=None)

    def __init__(self, directory: Path, own: profile.Profile, attached: Server) -> None:
        self.configurations: dict[str, ServerConfiguration] = {}
        self.directory, self.profile, self.attached = directory, own, attached
        self.said: list[str] = []

    def server(self):
        return self.attached

    def obstacle(self):
        return None

    def check_alive(self, *, after_failure: bool = False):
        """It is nobody's here to watch."""

    def kernel_path(self, server):
        return read_log(server.log, "vllm")

    def say(self, _what, line):
        self.said.append(line)

    def redact(self, text):
        return text


@pytest.fixture
def serve_cell(tmp_path):
    """Start ``matrix_engine.py`` with a cell's arguments; its address and its log."""
    started = []

    def serve(*arguments: str) -> tuple[str, Path]:
        log = tmp_path / f"server-{len(started)}.log"
        with log.open("w") as stream:
            command = [sys.executable, str(Path(__file__).with_name("matrix_engine.py")),
                       "--port", "0", *arguments]  # fmt: skip
            environment = {**os.environ, "MATRIX_KEY": "key", "MATRIX_FAULTS": "slow:half"}
            started.append(subprocess.Popen(command, stdout=stream, env=environment))
        deadline = time.monotonic() + 30
        while "listening on " not in log.read_text():
            assert time.monotonic() < deadline and started[-1].poll() is None, log.read_text()
            time.sleep(0.05)
        return f"http://127.0.0.1:{log.read_text().split()[-1]}", log

    yield serve
    for process in started:
        process.kill()
        process.wait()


def attached_level(directory, own, serve_cell, *arguments, baseline=None, log=True):
    url, file = serve_cell(*arguments)
    server = attach(
        url, api_key="key", served_name=None, default_name="canary", log=file if log else None
    )
    harness = AttachedHarness(directory, own, server)
    return level.MatrixLevel(harness, plan.make_plan(own, strength="1"), baseline=baseline)


def test_cells_are_examined_on_attached_servers(tmp_path, matrix_profile, serve_cell):
    """A URL is taken for the baseline, and another one for a cell, as far as its log shows it."""
    own = profile.load(str(matrix_profile))
    first = attached_level(tmp_path / "first", own, serve_cell)
    record = first.examine(first.plan.cells[0])
    assert record.outcome is CellOutcome.PASS and record.rate is not None, record
    cell = covering.Planned({**first.space.baseline, "window": "half"}, ("mine",))
    with pytest.raises(verdict.NotRun, match="cannot be compared with itself"):
        attached_level(tmp_path / "alone", own, serve_cell, "--window", "half").examine(cell)
    second = attached_level(
        tmp_path / "second", own, serve_cell, "--window", "half", baseline=first.baseline
    )
    record = second.examine(cell)
    assert record.outcome is CellOutcome.SLOWER, record
    assert (tmp_path / "second" / "matrix" / "FEATURE_MATRIX.md").is_file()


def test_of_an_attached_server_without_a_log_nothing_is_taken_on_trust(
    tmp_path, matrix_profile, serve_cell
):
    own = profile.load(str(matrix_profile))
    silent = attached_level(tmp_path, own, serve_cell, log=False)
    record = silent.examine(silent.plan.cells[0])
    assert record.outcome is CellOutcome.NOT_RUN and record.reason.startswith("path: ")
    assert "the attached server's log is not known" in record.reason
    assert {step.name for step in record.steps if step.outcome is CellOutcome.PASS} == {
        "start", "answers", "equivalence", "stress", "drafts", "alive", "performance"
    }  # fmt: skip


def test_a_start_that_failed_can_be_made_again(tmp_path, monkeypatch):
    starts: list[str] = []

    class Once:
        """Does not start the first time."""

        stopped, pids_when_ready = None, frozenset()

        def __init__(self, configuration, *_more) -> None:
            self.configuration, self.secrets, self.running = configuration, (), True
            self.log = tmp_path / "server.log"
            self.log.write_text("")

        def start(self):
            starts.append("start")
            if len(starts) == 1:
                raise managed.StartError("no", Cause(kind="oom", summary="s", owner="o"), self.log)
            return SimpleNamespace(startup_s=1.0, compiled=())

        def stop(self):
            starts.append("stop")
            return SimpleNamespace(clean=True)

    monkeypatch.setattr(pool, "ManagedServer", Once)
    own = ServerConfiguration("n", "vllm", "python", "m", "canary", (), ())
    limits, silent = managed.StartLimits(1, 1, 1), lambda *_words: None
    servers = pool.ServerPool(limits=limits, directory=tmp_path, run_id="r", notify=silent)
    for _ in range(2):
        with pytest.raises(managed.StartError):
            servers.get(own)
    assert starts == ["start"]
    servers.forget(own)
    assert servers.get(own) is servers.get(own)
    servers.stop()
    servers.get(own)
    assert starts == ["start", "start", "stop", "start"]


@pytest.mark.parametrize("axes_of", ["sm121", "sm90"])
@pytest.mark.parametrize("printed", ["fp8", "fp8_e4m3", "float8_e4m3fn"])  # SGLang's pool: torch's
def test_fp8_of_the_kv_cache_is_known_by_each_engine_s_name(axes_of, printed):
    expected = axes.load(axes_of).axes["kv"].values["fp8"].expected.path["kv_cache_dtype"]
    assert re.fullmatch(expected, printed) and not re.fullmatch(expected, "fp8_e5m2")
