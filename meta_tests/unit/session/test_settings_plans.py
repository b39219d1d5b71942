"""Plans: rows of a profile that select checks, and what a run reports about its plan."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from meta_tests.fakes import checkpoints
from meta_tests.folders import ROOT
from sm121.cli import main
from sm121.compilation import jit
from sm121.core import architecture, data_file, engine_settings, errors, profile, profile_fields
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.engines.options import GivenEngine
from sm121.machine import this_machine
from sm121.machine.box import Device, Reading
from sm121.measure.plan import Plan, Sizes
from sm121.performance.options import MeasuringOptions
from sm121.plugin import planning, selection
from sm121.run import verdict_file
from sm121.run.fingerprint import Fingerprint
from sm121.run.machine_report import BoxReport
from sm121.run.record import Target
from sm121.run.verdict_file import EngineReport, VerdictFile
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

TESTS = ROOT / "tests"
CPU = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
ROWS = []
for name in profile.shipped():
    for plan in profile.load(name).plans:
        ROWS.append((name, plan))


def level_module(level: str):
    spec = importlib.util.spec_from_file_location(f"test_{level}", TESTS / f"test_{level}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def level_modules():
    return {level: level_module(level) for level in profile_fields.LEVELS}


def test_every_shipped_profile_has_the_plans():
    for name in profile.shipped():
        assert {*profile.load(name).plans} == {"quick", "merge"}


@pytest.mark.parametrize(("name", "plan"), ROWS, ids="-".join)
def test_a_shipped_plan_names_tests_that_there_are(name, plan, level_modules):
    row = profile.load(name).plan(plan)
    assert {level: selection.strange_names(row, level_modules[level]) for level in row.tests} == {
        level: [] for level in row.tests
    }


def planned(**rows) -> Profile:
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
    text = CPU.replace("\n[certify]", f'\n[plans.nightly]\npurpose = "a try"\n{lines}\n\n[certify]')
    return data_file.parse(text, Profile, "cpu.toml")


def test_a_profile_cannot_make_full_smaller():
    text = CPU.replace("[plans.quick]", "[plans.full]").replace("plans.quick", "plans.full")
    with pytest.raises(data_file.DataFileError, match=r"plans.full: expected another name"):
        data_file.parse(text, Profile, "cpu.toml")
    with pytest.raises(errors.UsageError, match="--plan nightly: expected one of profile cpu"):
        profile.load("cpu-tiny-gpt-oss").plan("nightly")


@pytest.mark.parametrize(
    ("marked", "name"),
    [
        pytest.param((), "cpu-tiny-gpt-oss", id="none"),
        pytest.param(("sm121",), "sm121-gpt-oss-120b", id="another machine's"),
        pytest.param(("cpu", "sm121"), "cpu-tiny-gpt-oss", id="this machine's, too"),
    ],
)
def test_the_expected_profile_is_of_the_architecture_that_a_marker_names(monkeypatch, marked, name):
    here = architecture.Detection(architecture.CPU, "no GPU")
    monkeypatch.setattr(architecture, "detect", lambda: here)
    assert Settings(target=GivenTarget(marked=marked)).expected_profile().name == name
    assert (
        Settings(target=GivenTarget(marked=marked, arch="cpu")).expected_profile().name
        == "cpu-tiny-gpt-oss"
    )


def test_a_plan_selects_by_name_and_by_marker():
    rows = {"levels": ["kernel", "smoke"], "tests.kernel": ["never_waived", "test_moe_*"]}
    row = planned(**rows).plan("nightly")
    assert row.asks("smoke", "test_health", ())
    assert row.asks("kernel", "test_any", {"never_waived"})
    assert row.asks("kernel", "test_moe_routing", ())
    assert not row.asks("kernel", "test_routing", {"kernel"})
    assert not row.asks("stress", "test_moe_routing", {"never_waived"})


def test_the_measuring_plan_is_the_row_s_and_options_are_on_top():
    settings = planned(depths=[512], generated_tokens=[32], concurrency=[8], rounds=7)

    def of_plan(*sizes, **more):
        plan = Plan.of(settings, plan="nightly", sizes=Sizes(*sizes, **more))
        measuring = plan.measuring
        return plan.generated_tokens, plan.depths, measuring.concurrency, measuring.rounds

    assert of_plan() == ((32,), (512,), (8,), 7)
    over = of_plan((16,), (0,), (64, 0), (4,), 3)
    assert over == ((16, 32), (0, 64), (4, 8), 3), "each gate keeps its number"
    assert of_plan(depths=(0, 512))[1] == (512, 0), "loads are at the plan's first depth"
    assert Plan.of(settings, plan=FULL).depths == (0, 512)


def test_gates_that_depths_leave_without_a_number_are_named():
    gb10 = profile.load("sm121-gpt-oss-120b")
    every = MeasuringOptions(only_depths=gb10.performance.depths)
    for given in (MeasuringOptions(depths=(64,)), every):
        assert Settings(measuring=given).without_number(gb10) == []
    missing = Settings(measuring=MeasuringOptions(only_depths=(0,))).without_number(gb10)
    assert "tg32@d4096" in missing and not {"tg32@d0", "ttft_p99"} & {*missing}


def test_plans_differ_in_the_fingerprint():
    one = Fingerprint(profile="d")
    other = Fingerprint(profile="d", plan="quick")
    (difference,) = one.differences(other)
    assert (difference.field, difference.one, difference.other) == ("plan", FULL, "quick")


def collected(run_pytest, *arguments):
    """Return the tests that would run. Nothing is started."""
    status, run = run_pytest("--collect-only", "-q", *arguments)
    assert status == 0, run.output
    return re.findall(r"^tests/test_\w+\.py::\S+", run.output, re.M), run.output


def test_a_run_says_its_plan_and_what_it_leaves_out(run_pytest):
    """A run reports its plan, and which tests the plan leaves out.

    The real selection decides which tests these are. The name of a parameter is no name in a plan.
    """
    tests, output = collected(run_pytest, "--plan", "quick")
    assert any("test_decode_rate[d512-tg32]" in test for test in tests)
    for test in tests:
        assert not ("tg128" in test or "test_stress" in test)
    for test in tests:
        assert "test_baseline_starts" not in test
    assert re.search(rf"^{len(tests)}/\d+ tests collected", output, re.M), output
    tests, output = collected(run_pytest, "--slow", "tests/test_correctness.py")
    assert not re.search(r"would not run: \d+ deselected", output)
    assert any("test_token_counts_are_exact[1]" in test for test in tests)


def test_tests_of_an_option_are_in_every_plan(run_pytest):
    options = ("--plan", "quick", "--matrix", "1", "--soak", "30s")
    tests, _ = collected(run_pytest, *options, "tests/test_matrix.py", "tests/test_stress.py")
    assert any(test.startswith("tests/test_matrix.py::test_cell") for test in tests)
    assert [test for test in tests if "stress" in test] == ["tests/test_stress.py::test_soak"]


def test_a_plan_that_names_no_test_is_refused_when_it_is_collected(run_pytest, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(CPU.replace('"test_known_answers"', '"test_knwon_answers"', 1), "utf-8")
    arguments = ("--profile", str(file), "--plan", "quick")
    status, run = run_pytest(*arguments, "tests/test_correctness.py")
    assert (status, run.left()) == (4, [])
    error = next(line for line in run.output.splitlines() if line.startswith("ERROR"))
    assert "plans.quick.tests" in error and error.endswith("got test_knwon_answers")


# The lines of `sm121 plan` about a start and about gates


def store(folder: Path, arch: str, name: str, changes: dict, **fields) -> None:
    """Store the verdict of a finished run, by default one of this machine."""
    fingerprint = Fingerprint(**{"machine": this_machine.identity(), **changes})
    engine = EngineReport(name="vllm", managed=True, model="m")
    whole = {"profile": name, "started": "2026-11-22T10:00:00", "finished": True, **fields}
    file = VerdictFile(arch=arch, engine=engine, fingerprint=fingerprint, **whole)
    verdict_file.write(file, folder / "verdict.json")


def facts_of_a_start(of: Profile, folder: Path) -> list[str]:
    chosen = Target(of.arch, profile=of, obstacle=None)
    return [
        *planning._start(Settings(target=GivenTarget(profile=of), report_dir=folder), chosen, of)
    ]


@pytest.mark.parametrize("gib", [0.01, 1e6])
def test_a_plan_shows_problems_that_prevent_a_start(tmp_path, gib):
    cpu = profile.load("cpu-tiny-gpt-oss")
    engine = cpu.engine.model_copy(update={"needs": engine_settings.Needs(memory_gib=gib)})
    lines = facts_of_a_start(cpu.model_copy(update={"engine": engine}), tmp_path)
    assert len(lines) == (gib > 1) and all(re.match(r"start: error: .*GiB", x) for x in lines)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        pytest.param(
            "0.24.0",
            "requested path: attention TRITON_ATTN, moe MARLIN",
            id="0.24.0, requested path: attention TRITON_ATTN",
        ),
        pytest.param(
            "0.32.0",
            "requested path: attention FLASHINFER or TRITON_ATTN, moe MARLIN, KV",
            id="0.32.0, requested path: attention FLASHINFER or",
        ),
    ],
)
def test_a_plan_says_the_path_that_a_release_is_asked_for(version, said):
    gb10 = profile.load("sm121-gpt-oss-120b").judging(None, version)
    chosen = Target("sm121", profile=gb10, obstacle="elsewhere")
    (line,) = planning._path(Settings(target=GivenTarget(profile=gb10)), chosen, gb10)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("arch", "more", "kernels"),
    [
        pytest.param("sm90", (), (), id="sm90"),
        pytest.param(
            "sm90",
            ("--attention-backend", "TRITON_ATTN"),
            (),
            id="sm90, --attention-backend TRITON_ATTN",
        ),
        pytest.param(
            "sm100",
            (),
            ("prefill_attention", "decode_attention"),
            id="sm100, prefill_attention decode_attention",
        ),
        pytest.param(
            "sm90", ("--moe-backend", "triton"), ("route",), id="sm90, --moe-backend triton, route"
        ),
    ],
)
def test_a_plan_says_why_nothing_can_be_certified(arch, more, kernels):
    tiny = profile.load("sm90-tiny-gpt-oss")
    chosen = Target(arch, profile=tiny, obstacle="elsewhere")
    lines = [
        *planning._certificate(
            Settings(target=GivenTarget(profile=tiny), engine=GivenEngine(arguments=more)),
            chosen,
            tiny,
        )
    ]
    assert tuple(line.split()[2] for line in lines) == kernels
    for line in lines:
        assert "would not be judged: " in line


def gates_said(configuration: str | None, identity: str, folder: Path, *more: str) -> list[str]:
    gb10 = profile.load("sm121-gpt-oss-120b").judging(configuration, identity)
    chosen = Target("sm121", profile=gb10, obstacle="elsewhere")
    settings = Settings(
        target=GivenTarget(profile=gb10), engine=GivenEngine(arguments=more), report_dir=folder
    )
    return [*planning._gates(settings, chosen, gb10)]


def test_a_gate_above_the_bound_is_reported_before_the_run(tmp_path):
    d0, d4096, time_per_token = gates_said(None, "0.33.0", tmp_path)
    assert d0 == (
        "gate tg32@d0: 52 tok/s (applies to every build) is above the bound: configuration stock "
        "reads 5.17 GB a token: at most 45.4 tok/s on the fastest healthy machine (235 GB/s); "
        "configuration mxfp4 (--mxfp4-layers moe,qkv,o,lm_head --kv-cache-dtype fp8) reads 2.83"
    )
    assert d4096.startswith("gate tg32@d4096: 47 tok/s")
    assert time_per_token.startswith("gate tpot_p50: 20 ms (applies to every build) is above")
    for able in ((None, "0.14.0+mxfp4"), ("stock", "0.33.0"), ("cutlass", "0.33.0")):
        assert gates_said(*able, tmp_path) == [], able
    more = ("--mxfp4-layers", "all")
    assert gates_said(None, "0.33.0", tmp_path, *more) == [], "what the user adds counts"
    less = gates_said(None, "0.14.0+mxfp4", tmp_path, "--mxfp4-layers", "moe")
    assert less[0].partition(" reads ")[0].endswith("configuration mxfp4"), "and what is taken away"


def memory_said(model: str, *arguments: str) -> list[str]:
    gb10 = profile.load("sm121-gpt-oss-120b").judging(None, "0.33.0")
    chosen = Target("sm121", profile=gb10, obstacle="elsewhere")
    given = GivenEngine(arguments=arguments)
    return [
        *planning._memory(
            Settings(target=GivenTarget(profile=gb10, model=model), engine=given), chosen, gb10
        )
    ]


def test_a_plan_forecasts_the_memory_of_a_start(tmp_path):
    model = str(checkpoints.load("openai/gpt-oss-120b").write(tmp_path))
    (line,) = memory_said(model)
    assert line.startswith(
        "memory: weights 65.9 GiB (file headers); --gpu-memory-utilization 0.7 takes 83.8 of "
        "119.7 GiB; left for the KV cache: 11.9 to 17.6 GiB, about "
    )
    _, wrong = memory_said(model, "--gpu-memory-utilization", "0.5")
    assert wrong.startswith("memory: error: the weights take 65.9 GiB")
    assert wrong.endswith(". raise --gpu-memory-utilization to 0.61")


@pytest.mark.parametrize(
    "words", [("--gpu-memory-utilization", "nan"), ("--tensor-parallel-size", "0")]
)
def test_a_plan_says_why_it_does_not_forecast_the_memory(words, tmp_path):
    model = str(checkpoints.load("openai/gpt-oss-120b").write(tmp_path))
    (line,) = memory_said(model, *words)
    assert line.startswith(f"memory: not forecast: {words[0]}: expected a ")


def test_a_plan_says_that_a_checkpoint_is_not_here():
    (line,) = memory_said("somebody/something")
    assert line.startswith("memory: not forecast: somebody/something: expected a folder")


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ("QUALIFIED", "41.5 tok/s on this machine (215 GB/s)"),
        pytest.param(
            "DEGRADED",
            "45.4 tok/s on the fastest healthy machine (235 GB/s)",
            id="DEGRADED, 45.4 tok/s on the fastest healthy machine",
        ),
    ],
)
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
    """The plan of a start reports whether the caches of compiled modules are cold or warm.

    For a GB10, none of the modules is built at first, and then each of them."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(jit.FlashInferModules, "of", lambda *_: jit.FlashInferModules("0.7", cache))
    cache = tmp_path / ".cache" / "flashinfer"
    gb10 = profile.load("sm121-gpt-oss-120b")
    (cold,) = (line for line in facts_of_a_start(gb10, tmp_path) if "JIT cache" in line)
    assert "is cold" in cold
    arguments = (*gb10.engine.arguments, *gb10.configurations[gb10.under_test].arguments)
    for module in jit.needed(gb10.engine.needs, arguments, {}):
        name = module.module.replace("*", "x")
        if module.generated is not None:
            sources = cache / "0.7" / "121a" / "generated" / name
            sources.mkdir(parents=True)
            (sources / "batch_prefill_config.inc").write_text(module.generated.pattern)
        built = cache / "0.7" / "121a" / "cached_ops" / name / "m.so"
        built.parent.mkdir(parents=True)
        built.touch()
    warm = [line for line in facts_of_a_start(gb10, tmp_path) if "JIT cache" in line]
    assert warm == [f"start: the JIT cache in {cache} is warm"]


@pytest.mark.slow("a collection more")
def test_plan_takes_what_a_run_takes(capsys):
    words = ["--profile=cpu-tiny-gpt-oss", "--engine-arg=--dtype=auto", "-k", "test_known_answers"]
    assert main(["plan", "--plan", "quick", *words]) == 0
    output = capsys.readouterr().out
    assert output.startswith("would run: 1 checks (correctness 1)"), output
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "the same arguments" in capsys.readouterr().out
