"""Plans: rows of a profile that say how much is asked, and what a run says of the one it had."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from data_rows import from_data, table

from sm121.cli import main
from sm121.compilation import jit
from sm121.core import data_file, engine_settings, errors, profile, profile_fields
from sm121.core.profile import FULL, Costs, Profile
from sm121.core.verdict import Verdict
from sm121.engines import choices
from sm121.measure import gate, machine
from sm121.measure.box import Device, Reading
from sm121.measure.plan import Plan, Sizes
from sm121.plugin import planning, selection
from sm121.run import verdict_file
from sm121.run.fingerprint import Fingerprint
from sm121.run.record import Target
from sm121.run.verdict_file import BoxReport, EngineReport, TestReport, VerdictFile
from sm121.session import forecast
from sm121.session.forecast import Check, Timed
from sm121.session.settings import Settings

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
    return {level: level_module(level) for level in profile_fields.LEVELS}


def test_every_shipped_profile_has_the_plans():
    assert all({*profile.load(name).plans} == {"quick", "merge"} for name in profile.shipped())


@pytest.mark.parametrize(("name", "plan"), ROWS, ids="-".join)
def test_a_shipped_plan_names_tests_that_there_are(name, plan, level_modules):
    row = profile.load(name).plan(plan)
    assert {level: selection.strange_names(row, level_modules[level]) for level in row.tests} == {
        level: [] for level in row.tests
    }


def planned(**rows) -> Profile:
    own = "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
    text = CPU.replace("\n[certify]", f'\n[plans.nightly]\npurpose = "a try"\n{own}\n\n[certify]')
    return data_file.parse(text, Profile, "cpu.toml")


def test_a_profile_cannot_make_full_smaller():
    text = CPU.replace("[plans.quick]", "[plans.full]").replace("plans.quick", "plans.full")
    with pytest.raises(data_file.DataFileError, match=r"plans.full: expected another name"):
        data_file.parse(text, Profile, "cpu.toml")


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
    over = Plan.of(own, plan="nightly", sizes=Sizes((16,), (0,), (64, 0), (4,), 3))
    assert (over.generated_tokens, over.depths) == ((16, 32), (0, 64)), "each gate keeps its number"
    beside = Plan.of(own, plan="nightly", sizes=Sizes(depths=(0, 512)))
    assert beside.depths == (512, 0), "loads are at the plan's first depth"
    assert (over.measuring.concurrency, over.measuring.rounds) == ((4, 8), 3)
    assert Plan.of(own).depths == (0, 512)


def test_gates_that_depths_leave_without_a_number_are_named():
    gb10 = profile.load("sm121-gpt-oss-120b")
    assert Settings(sizes=Sizes(depths=(64,))).without_number(gb10) == []
    assert Settings(sizes=Sizes(only_depths=gb10.performance.depths)).without_number(gb10) == []
    left = Settings(sizes=Sizes(only_depths=(0,))).without_number(gb10)
    assert "tg32@d4096" in left and "tg32@d0" not in left and "ttft_p99" not in left


def test_an_unknown_plan_names_those_that_there_are():
    with pytest.raises(errors.UsageError, match="--plan nightly: expected one of profile cpu"):
        profile.load("cpu-tiny-gpt-oss").plan("nightly")


def test_plans_differ_in_the_fingerprint():
    one, other = Fingerprint(profile="d"), Fingerprint(profile="d", plan="quick")
    assert [tuple(found) for found in one.differences(other)] == [("plan", FULL, "quick")]


def test_a_run_says_its_plan_and_what_it_leaves_out(run_pytest, tmp_path):
    """By the real selection: nothing is started, since no test that was selected can run here."""
    status, run = run_pytest("--collect-only", "-q", "--plan", "quick")
    asked = re.findall(r"^tests/test_\w+\.py::\S+", run.output, re.M)
    assert status == 0, run.output
    assert any("test_decode_rate[d512-tg32]" in test for test in asked)
    assert not any("tg128" in test or "test_stress" in test for test in asked)
    assert re.search(r"\d+ tests are not in plan quick; --plan full asks them", run.output)


def test_the_whole_plan_leaves_nothing_out(run_pytest):
    """A test whose parameter has the name of one of the plan's is not the plan's."""
    _, run = run_pytest("--collect-only", "-q", "--slow", "tests/test_correctness.py")
    assert "deselected" not in run.output and "test_token_counts_are_exact[1]" in run.output


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


# What a run costs, and what `sm121 plan` says of it.


def costs(**changed) -> Costs:
    return Costs.model_validate(table(__name__, "COSTS") | changed)


def costing(**changed) -> Profile:
    return profile.load("cpu-tiny-gpt-oss").model_copy(update={"costs": costs(**changed)})


def _costs():
    return data_file.load_key("costs.toml", "levels", dict[str, forecast._Row])


def forecast_of(*checks: Check, own: Profile | None = None, known: Timed | None = None):
    own = own or costing()
    return forecast.of(own, Plan.of(own, plan="quick"), checks, known or Timed())


def test_the_time_of_a_prompt_grows_with_what_is_before_its_tokens():
    own = costs()
    assert own.prompt_s(1000) == pytest.approx(1.5)  # from 1 ms to 2 ms a token
    assert own.token_s(0) == pytest.approx(0.1) and own.token_s(2000) == pytest.approx(0.3)
    assert own.gain(1) == 1 and own.gain(8) == 8 and own.gain(16) == 8


def test_the_whole_context_takes_as_long_on_gb10_as_was_computed_by_hand():
    assert 140 < profile.load("sm121-gpt-oss-120b").costs.prompt_s(131_072) < 170


def test_a_start_is_charged_where_it_happens_and_an_answer_by_its_length():
    server, baseline = frozenset({"server"}), frozenset({"servers"})
    forecasts = forecast_of(
        Check("1", "smoke", baseline),
        Check("2", "smoke", server),
        Check("3", "correctness", server),
    )
    smoke, correctness = forecasts["smoke"], forecasts["correctness"]
    assert (smoke.checks, smoke.starts, smoke.starts_s) == (2, 2, 200)
    answers = _costs()["correctness"].answers
    assert correctness.starts == 0 and correctness.generated == pytest.approx(74 * answers)


def test_the_minutes_of_requests_that_join_are_in_the_plan():
    other, joining = (Check(f"t::test_{name}", "stress") for name in ("x", "short_prompts_join_x"))
    seconds = (forecast_of(check)["stress"].other_s for check in (joining, other))
    assert next(seconds) - next(seconds) == costing().stress.joining_s.value > 0


def test_several_metrics_of_a_cell_cost_one_cell():
    rate = Check("1", "performance", depth=0, tokens=32)
    prefill = Check("2", "performance", depth=0)
    deeper = Check("3", "performance", depth=512)
    one, both, two = (
        forecast_of(*checks)["performance"].prompt
        for checks in ((rate,), (rate, prefill), (rate, prefill, deeper))
    )
    beside = _costs()["performance"].prompt
    assert both - one == beside and two - both > beside


def test_a_gate_costs_the_rounds_that_a_decision_takes():
    gated = profile_fields.Gate(metric="tg32@d0", unit="tok/s", minimum=5, source="a test")
    own = costing()
    measured = own.performance.model_copy(update={"gates": (gated,)})
    rate = Check("1", "performance", depth=0, tokens=32)
    plain, held = (
        forecast_of(rate, own=profile_)["performance"].generated
        for profile_ in (own, own.model_copy(update={"performance": measured}))
    )
    rounds = own.performance.measuring.rounds
    assert held - plain == pytest.approx((gate.STEADY_LOOK + 3 - rounds) * 32)


def test_a_check_that_was_timed_here_takes_as_long_as_it_did():
    start = Check("tests/test_smoke.py::x", "smoke", frozenset({"servers"}))
    found = forecast_of(start, known=Timed({start.id: 7.0}))["smoke"]
    assert (found.timed, found.starts, found.seconds) == (1, 0, 7.0)


def store(folder: Path, arch: str, name: str, asked: dict, **fields) -> None:
    """The verdict of a finished run of this machine, unless something else is asked."""
    fingerprint = Fingerprint(**{"machine": machine.identity(), **asked})
    engine = EngineReport(name="vllm", managed=True, model="m")
    whole = {"profile": name, "started": "2026-11-22T10:00:00", "finished": True, **fields}
    file = VerdictFile(arch=arch, engine=engine, fingerprint=fingerprint, **whole)
    verdict_file.write(file, folder / "verdict.json")


@from_data
def test_only_runs_of_this_machine_and_profile_say_how_long_a_check_takes(tmp_path, changed, taken):
    asked = {"configuration": "float32", "plan": "quick"} | changed
    of_run = {key: asked.pop(key) for key in ("profile", "finished") if key in asked}
    tests = [
        TestReport(id="a", level="smoke", verdict=Verdict.PASS, seconds=3),
        TestReport(id="p", level="performance", verdict=Verdict.FAIL, seconds=4),
        TestReport(id="n", level="smoke", verdict=Verdict.NOT_RUN),
    ]
    store(tmp_path, "cpu", "cpu-tiny-gpt-oss", asked, tests=tests, **of_run)
    found = forecast.timed(tmp_path, profile.load("cpu-tiny-gpt-oss"), "quick")
    assert {*found.seconds} == {*taken}


def planned_minutes(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "sm121", "plan", "--profile", name, "--report-dir", "none"]
    done = subprocess.run(
        command, cwd=TESTS.parent, capture_output=True, text=True, check=True, timeout=300
    )
    rows = re.findall(r"^\| (\w+) \| \d+ \|.* ([\d.]+) \|$", done.stdout, re.M)
    assert not (TESTS.parent / "none").exists()
    assert re.search(r"^machine: .*\n^target: .*\n^engine: ", done.stdout, re.M), done.stdout
    return {plan: float(minutes) for plan, minutes in rows}


def test_quick_takes_ten_minutes_on_a_gb10_and_merge_half_an_hour():
    found = planned_minutes("sm121-gpt-oss-120b")
    assert [*found] == ["quick", "merge", "full"]
    assert found["quick"] <= 10 and found["merge"] <= 30 < found["full"]


def test_a_run_says_at_its_head_what_it_asks_and_how_long_that_takes(run_pytest, fault_server):
    attached = ("--arch", "sm121", *fault_server().options)
    scenario = ("--served-model-name", "canary", "meta_tests/scenarios/measurements.py")
    samples = {"SM121_META_SAMPLES": json.dumps({"tg32@d0": [53.5] * 20})}
    _, run = run_pytest(*attached, *scenario, environment=samples)
    head = re.search(r"^plan full: (\d+) checks \(.*\), about \d+ \w+ \(0 of \1", run.output, re.M)
    assert head, run.output


def facts_of_a_start(tmp_path, **needs) -> list[str]:
    own = profile.load("cpu-tiny-gpt-oss")
    engine = own.engine.model_copy(update={"needs": engine_settings.Needs(**needs)})
    own = own.model_copy(update={"engine": engine})
    chosen = Target("cpu", profile=own, obstacle=None)
    return [*planning._start(Settings(profile=own, report_dir=tmp_path), chosen, own)]


def test_a_plan_says_what_stands_against_a_start(tmp_path):
    assert facts_of_a_start(tmp_path, memory_gib=0.01) == []
    (line,) = facts_of_a_start(tmp_path, memory_gib=1e6)
    assert re.match(r"start: error: .*GiB", line), line


@from_data
def test_a_plan_says_the_path_that_a_release_is_asked_for(version, said):
    own = profile.load("sm121-gpt-oss-120b").judging(None, version)
    chosen = Target("sm121", profile=own, obstacle="elsewhere")
    (line,) = planning._path(Settings(profile=own), chosen, own)
    assert line.startswith(said)


@from_data
def test_a_plan_says_why_nothing_can_be_certified(arch, more, kernels):
    own = profile.load("sm90-tiny-gpt-oss")
    chosen = Target(arch, profile=own, obstacle="elsewhere")
    lines = [*planning._certificate(Settings(profile=own, engine_arguments=more), chosen, own)]
    assert tuple(line.split()[2] for line in lines) == kernels
    assert all("would not be judged: " in line for line in lines)


def gates_said(configuration: str | None, identity: str, folder: Path, *more: str) -> list[str]:
    own = profile.load("sm121-gpt-oss-120b").judging(configuration, identity)
    chosen = Target("sm121", profile=own, obstacle="elsewhere")
    settings = Settings(profile=own, report_dir=folder, engine_arguments=more)
    return [*planning._gates(settings, chosen, own)]


def test_a_gate_above_the_bound_is_said_before_the_run(tmp_path):
    d0, d4096 = gates_said(None, "0.33.0", tmp_path)
    assert d0 == (
        "gate tg32@d0: 52 tok/s (asked of every build) is above the bound: configuration stock "
        "reads 5.17 GB a token: at most 45.4 tok/s on the fastest healthy machine (235 GB/s); "
        "configuration mxfp4 (--mxfp4-layers moe,qkv,o,lm_head --kv-cache-dtype fp8) reads 2.83"
    )
    assert d4096.startswith("gate tg32@d4096: 47 tok/s")
    for able in ((None, "0.14.0+mxfp4"), ("stock", "0.33.0"), ("cutlass", "0.33.0")):
        assert gates_said(*able, tmp_path) == [], able
    asked = ("--mxfp4-layers", "all")
    assert gates_said(None, "0.33.0", tmp_path, *asked) == [], "what the user adds counts"
    less = gates_said(None, "0.14.0+mxfp4", tmp_path, "--mxfp4-layers", "moe")
    assert less[0].partition(" reads ")[0].endswith("configuration mxfp4"), "and what is taken away"


@from_data
def test_the_bound_is_of_this_machine_where_a_run_has_measured_it(tmp_path, state, where):
    device = Device(
        device="cuda:0", bandwidth_gb_s=210, bandwidth_spread=0, bandwidth_best_gb_s=215,
        bandwidth_method="", buffer_mib=1, matrix_tflop_s=1, matrix_spread=0, matrix_method="",
    )  # fmt: skip
    reading = Reading(device=device, memory_available_gib=1, other_load=0, seconds=1)
    box = BoxReport(state=state, before=reading)
    store(tmp_path, "sm121", "sm121-gpt-oss-120b", {"plan": "quick"}, box=box)
    assert f"at most {where}" in gates_said(None, "0.33.0", tmp_path)[0]


def test_a_plan_says_whether_the_caches_are_warm(tmp_path, monkeypatch):
    """The same modules, asked of GB10: none is built, then each."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(jit.FlashInferModules, "of", lambda *_: jit.FlashInferModules("0.7", cache))
    cache = tmp_path / ".cache" / "flashinfer"
    own = profile.load("sm121-gpt-oss-120b")
    chosen = Target("sm121", profile=own, obstacle=None)
    settings = Settings(profile=own, report_dir=tmp_path)
    cold = [line for line in planning._start(settings, chosen, own) if "JIT cache" in line]
    assert len(cold) == 1 and "is cold" in cold[0]
    arguments = (*own.engine.arguments, *own.configurations[own.under_test].arguments)
    for module in jit.needed(own.engine.needs, arguments, {}):
        built = cache / "0.7" / "121a" / "cached_ops" / module.module.replace("*", "x") / "m.so"
        built.parent.mkdir(parents=True)
        built.touch()
    warm = [line for line in planning._start(settings, chosen, own) if "JIT cache" in line]
    assert warm == [f"start: the JIT cache in {cache} is warm"]


@pytest.mark.slow("a collection more")
def test_plan_takes_what_a_run_takes(capsys):
    given = ["--profile=cpu-tiny-gpt-oss", "--engine-arg=--dtype=auto", "-k", "test_known_answers"]
    assert main(["plan", "--plan", "quick", *given]) == 0
    said = capsys.readouterr().out
    assert said.startswith("would run: 1 checks (correctness 1)"), said
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "the same arguments" in capsys.readouterr().out


@pytest.mark.slow
def test_the_prediction_of_quick_is_within_a_factor_of_two(run_pytest):
    """A real vLLM on the CPU, with nothing that was timed here before. Beside others it takes
    longer, and the run says that they were there."""
    predicted = planned_minutes("cpu-tiny-gpt-oss")["quick"]
    status, run = run_pytest("--plan", "quick", timeout_s=900)
    if run.verdict["box"]["state"] == "DEGRADED":
        pytest.skip(
            f"NOT_RUN: the prediction is of an idle machine: {run.verdict['box']['reason']}"
        )
    assert status == 0, run.output
    took = run.verdict["duration_s"] / 60
    assert predicted / 2 <= took <= predicted * 2


def test_what_a_release_was_seen_to_choose_is_said():
    """Of the same arguments and layout only; vLLM's own choice with and without a network."""
    release = choices.load("vllm", "sm121").at("0.33.0")
    stock = choices.chosen(release, (), {})
    assert [("FLASHINFER" in choice, "offline" in seen) for choice, seen in stock.items()] == [
        (True, False), (False, True),
    ]  # fmt: skip
    asked = (
        profile.load("sm121-gpt-oss-120b").judging("cutlass", "0.33.0").configurations["cutlass"]
    )
    (choice,) = choices.chosen(release, asked.arguments, asked.environment)
    assert "moe FLASHINFER_CUTLASS_MXFP4_MXFP8" in choice
    assert choices.chosen(release, asked.arguments, {"VLLM_KV_CACHE_LAYOUT": "NHD"}) == {}
