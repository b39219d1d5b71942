"""Plans: rows of a profile that say how much is asked, and what a run says of the one it had."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from sm121.core import profile
from sm121.core.data_file import DataFileError, parse
from sm121.core.errors import UsageError
from sm121.core.profile import FULL, Profile
from sm121.measure import comparison
from sm121.measure.plan import Plan
from sm121.plugin import selection
from sm121.run.fingerprint import Fingerprint

TESTS = Path(__file__).parents[1] / "tests"
CPU = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
ROWS = [(name, plan) for name in profile.shipped() for plan in profile.load(name).plans]


def level_module(level: str):
    spec = importlib.util.spec_from_file_location(f"test_{level}", TESTS / f"test_{level}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def level_modules():
    return {level: level_module(level) for level in profile.LEVELS}


def test_every_shipped_profile_has_the_plans():
    assert all({*profile.load(name).plans} == {"quick", "merge"} for name in profile.shipped())


@pytest.mark.parametrize(("name", "plan"), ROWS, ids="-".join)
def test_a_shipped_plan_names_tests_that_there_are(name, plan, level_modules):
    row = profile.load(name).plan(plan)
    assert {level: selection.strange_names(row, level_modules[level]) for level in row.tests} == {
        level: [] for level in row.tests
    }


def planned(**rows) -> Profile:
    """The CPU's profile with a plan of these rows, ``nightly``."""
    own = "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
    text = CPU.replace("\n[certify]", f'\n[plans.nightly]\npurpose = "a try"\n{own}\n\n[certify]')
    return parse(text, Profile, "cpu.toml")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"depths": [0, 4096]}, r"plans.nightly.depths: expected .*\(0, 512\), got 4096"),
        ({"generated_tokens": [64]}, r"plans.nightly.generated_tokens: expected .*32, 128"),
        ({"concurrency": [3]}, r"plans.nightly.concurrency: expected .*2, 4, 8"),
        ({"levels": ["smok"]}, "plans.nightly.levels"),
        ({"levels": ["smoke"], "tests.kernel": ["test_x"]}, "tests.kernel: expected a level of"),
        ({"rouns": 3}, "plans.nightly.rouns: unknown key"),
    ],
)
def test_a_wrong_row_is_refused_when_the_profile_is_loaded(rows, said):
    with pytest.raises(DataFileError, match=said):
        planned(**rows)


def test_a_profile_cannot_make_full_smaller():
    text = CPU.replace("[plans.quick]", "[plans.full]").replace("plans.quick", "plans.full")
    with pytest.raises(DataFileError, match=r"plans.full: expected another name"):
        parse(text, Profile, "cpu.toml")


def test_a_plan_asks_by_name_and_by_marker():
    row = planned(
        levels=["kernel", "smoke"], **{"tests.kernel": ["never_waived", "test_moe_*"]}
    ).plan("nightly")
    assert row.asks("smoke", "test_health", ())
    assert row.asks("kernel", "test_any", {"never_waived"})
    assert row.asks("kernel", "test_moe_routing", ())
    assert not row.asks("kernel", "test_routing", {"kernel"})
    assert not row.asks("stress", "test_moe_routing", {"never_waived"})


def test_the_measuring_plan_is_the_row_s_and_options_are_on_top():
    own = planned(depths=[512], generated_tokens=[32], concurrency=[8], rounds=7)
    found = Plan.of(own, plan="nightly")
    assert (found.depths, found.generated_tokens, found.measuring.concurrency) == (
        (512,),
        (32,),
        (8,),
    )
    assert found.measuring.rounds == 7
    over = Plan.of(own, plan="nightly", depths=(0,), rounds=3)
    assert (over.depths, over.measuring.rounds) == ((0,), 3)
    assert Plan.of(own).depths == (0, 512)


def test_an_unknown_plan_names_those_that_there_are():
    with pytest.raises(UsageError, match="--plan nightly: expected one of profile cpu"):
        profile.load("cpu-tiny-gpt-oss").plan("nightly")


def test_plans_differ_in_the_fingerprint_and_are_not_compared():
    one, other = Fingerprint(profile="d"), Fingerprint(profile="d", plan="quick")
    assert [tuple(found) for found in one.differences(other)] == [("plan", FULL, "quick")]
    asked = [
        comparison.Source(name, "e", "m", "sm121", (), (), comparison._asked(found, "p"))
        for name, found in (
            ("old", {"profile": "d"}),
            ("all", one.model_dump()),
            ("quick", other.model_dump()),
        )
    ]
    comparison.refuse_mixed(asked[:2])  # an older file has no plan: it asked all
    with pytest.raises(UsageError, match="differ in plan: full and quick"):
        comparison.refuse_mixed(asked[1:])


def test_a_run_says_its_plan_and_what_it_leaves_out(run_pytest, tmp_path):
    """By the real selection: nothing is started, since no test that was selected can run here."""
    status, run = run_pytest("--collect-only", "-q", "--plan", "quick")
    asked = re.findall(r"^tests/test_\w+\.py::\S+", run.output, re.M)
    assert status == 0, run.output
    assert any("test_decode_rate[d512-tg32]" in test for test in asked)
    assert not any("tg128" in test or "test_stress" in test for test in asked)
    assert re.search(r"\d+ tests are not in plan quick; --plan full asks them", run.output)


def test_what_an_option_asks_for_is_in_every_plan(run_pytest):
    arguments = ("--collect-only", "-q", "--plan", "quick", "--matrix", "1", "--soak", "30s")
    _, run = run_pytest(*arguments, "tests/test_matrix.py", "tests/test_stress.py")
    asked = re.findall(r"^tests/test_\w+\.py::\w+", run.output, re.M)
    assert "tests/test_matrix.py::test_cell" in asked
    assert [test for test in asked if "stress" in test] == ["tests/test_stress.py::test_soak"]


def test_a_plan_that_names_no_test_is_refused_when_it_is_collected(run_pytest, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(CPU.replace('"test_known_answers"', '"test_knwon_answers"', 1), "utf-8")
    arguments = ("--profile", str(own), "--plan", "quick")
    status, run = run_pytest(*arguments, "tests/test_correctness.py")
    assert (status, run.left()) == (4, [])
    said = next(line for line in run.output.splitlines() if line.startswith("ERROR"))
    assert "plans.quick.tests" in said and said.endswith("got test_knwon_answers")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("qiuck", "--plan qiuck: expected one of profile cpu-tiny-gpt-oss: quick, merge, full"),
        ("quick", "--plan quick: expected a run of all levels"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(run_pytest, plan, said):
    certify = ("--certify",) if plan == "quick" else ()
    status, run = run_pytest("--plan", plan, *certify)
    assert (status, run.left()) == (4, [])
    assert said in run.output
