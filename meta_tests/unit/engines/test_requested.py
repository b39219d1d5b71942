"""What was asked for is compared with what ran: every difference is named, nothing is believed."""

import pytest

from meta_tests.fakes.servers import configuration
from meta_tests.logs import read_lines
from meta_tests.texts import text_file
from sm121.core import profile
from sm121.core.versions import within
from sm121.engines import request_rules, requested
from sm121.engines.requested import compare, different
from sm121.evidence import variables
from sm121.evidence.kernel_path import KernelPath, mistaken_environment
from sm121.evidence.metrics import with_metrics

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "
GB10_LOG = text_file("gb10-cutlass.log").splitlines()


def differences(configuration_, path, environment) -> list[str]:
    return different(compare(configuration_, path, environment))


def compared(path: KernelPath, *arguments: str, **environment: str):
    """What becomes of each request, with no other variables than those given."""
    return compare(configuration(*arguments, **environment), path, environment)


def states(path: KernelPath, *arguments: str, **environment: str) -> list[str]:
    return [report.state for report in compared(path, *arguments, **environment)]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that knows what 0.18 knew, so that no interpreter is asked."""
    names = {
        "VLLM_": (
            "VLLM_ATTENTION_BACKEND",
            "VLLM_KV_CACHE_LAYOUT",
            "VLLM_MXFP4_USE_MARLIN",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
        ),
        "FLASHINFER_": ("FLASHINFER_CUDA_ARCH_LIST",),
    }

    def ask(_python, _environment, registries):
        return {r.prefix: variables.Knowledge(True, frozenset(names[r.prefix])) for r in registries}

    monkeypatch.setattr(variables, "ask", ask)


FULFILLED = (
    ("--attention-backend", "FLASHINFER"),
    ("--attention-backend=flashinfer",),
    ("--attention_backend", "FLASHINFER"),
    ("--attention-config.backend", "FLASHINFER"),
    ("--attention-config", '{"backend": "FLASHINFER"}'),
    ("--moe-backend", "flashinfer_cutlass"),
    ("--quantization-config", '{"moe":{"activation":"mxfp8"}}'),
    ("--quantization", "mxfp4"),
    ("--dtype", "bfloat16"),
    ("--enable-prefix-caching",),
    ("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'),
    ("-cc.cudagraph_mode=FULL",),
    ("--no-enforce-eager", "--attention-backend", "FLASHINFER"),
)


@pytest.mark.parametrize("arguments", FULFILLED, ids=" ".join)
def test_what_ran_as_asked_is_no_difference(arguments):
    path = read_lines(GB10_LOG)
    assert states(path, *arguments) == ["resolved"]


@pytest.mark.parametrize(
    ("arguments", "field", "resolved"),
    [
        pytest.param(
            ("--attention-backend", "TRITON_ATTN"),
            "attention",
            "FLASHINFER",
            id="--attention-backend TRITON_ATTN, attention, FLASHINFER",
        ),
        pytest.param(
            ("--attention-backend", "FLASHINFER", "--attention-backend=FLASH_ATTN"),
            "attention",
            None,
            id="--attention-backend FLASHINFER",
        ),
        pytest.param(
            ("--moe-backend", "marlin"),
            "moe",
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            id="--moe-backend marlin, moe",
        ),
        pytest.param(("--moe-backend", "b12x"), "moe", None, id="--moe-backend b12x, moe"),
        pytest.param(
            ("--quantization-config", '{"moe":{"activation":"bf16"}}'),
            "moe",
            None,
            id='--quantization-config {"moe":{"activation":"bf16"}}, moe',
        ),
        pytest.param(
            ("--enforce-eager",), "cuda_graphs", "True", id="--enforce-eager, cuda_graphs, True"
        ),
        pytest.param(
            ("--compilation-config.cudagraph_mode", "NONE"),
            "cuda_graphs",
            "True",
            id="--compilation-config.cudagraph_mode NONE, cuda_graphs",
        ),
        pytest.param(
            ("--no-enable-prefix-caching",),
            "prefix_caching",
            "True",
            id="--no-enable-prefix-caching, prefix_caching, True",
        ),
        pytest.param(
            ("--kv-cache-dtype", "fp8"),
            "kv_cache_dtype",
            None,
            id="--kv-cache-dtype fp8, kv_cache_dtype",
        ),
        pytest.param(
            ("--speculative-config", '{"method": "eagle3", "model": "m"}'),
            "speculative",
            "none",
            id='--speculative-config {"method": "eagle3", "model"',
        ),
        pytest.param(
            ("--load-format", "fastsafetensors"),
            "load_format",
            None,
            id="--load-format fastsafetensors, load_format",
        ),
        pytest.param(("--dtype", "half"), "dtype", "bfloat16", id="--dtype half, dtype, bfloat16"),
        pytest.param(
            ("--quantization", "fp8"),
            "quantization",
            "gpt_oss_mxfp4",
            id="--quantization fp8, quantization, gpt_oss_mxfp4",
        ),
    ],
)
def test_what_did_not_run_as_asked_is_named(arguments, field, resolved):
    path = read_lines(GB10_LOG)
    (wrong,) = differences(configuration(*arguments), path, {})
    assert field in wrong
    assert arguments[0].replace("--no-", "--").partition("=")[0].partition(".")[0] in wrong
    assert resolved is None or resolved in wrong


@pytest.mark.parametrize(
    ("name", "moe", "wrong"),
    [
        pytest.param(
            "cutlass",
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            (),
            id="cutlass, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param("marlin", "MARLIN", (), id="marlin, MARLIN"),
        pytest.param(
            "cutlass",
            "FLASHINFER_CUTLASS_MXFP4_BF16",
            ("--quantization-config",),
            id="cutlass, FLASHINFER_CUTLASS_MXFP4_BF16",
        ),
        pytest.param(
            "cutlass",
            "MARLIN",
            ("--moe-backend", "--quantization-config"),
            id="cutlass, MARLIN, --moe-backend --quantization-config",
        ),
        pytest.param(
            "marlin",
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("--moe-backend",),
            id="marlin, FLASHINFER_CUTLASS_MXFP4_MXFP8, --moe-backend",
        ),
    ],
)
def test_both_configurations_of_gb10(name, moe, wrong):
    """As the profile asks for them, on the log that each should write and on the other's."""
    gb10 = profile.load("sm121-gpt-oss-120b").judging(name, "0.33.0")
    chosen = gb10.configurations[name]
    started = configuration(*gb10.engine.arguments, *chosen.arguments)
    environment = {"VLLM_KV_CACHE_LAYOUT": chosen.environment["VLLM_KV_CACHE_LAYOUT"]}
    log = [line.replace("load_format=auto", "load_format=fastsafetensors") for line in GB10_LOG]
    log[3] = CORE + f"[mxfp4.py:499] Using '{moe}' Mxfp4 MoE backend."
    wrong_lines = differences(started, read_lines(log), environment)
    assert tuple(line.split()[0].partition(".")[0] for line in wrong_lines) == wrong
    assert len(compare(started, read_lines(log), environment)) >= 5


def test_every_rule_is_seen_to_fail():
    for engine in ("vllm", "sglang", "llama-cpp"):
        for rule in request_rules.load_requests(engine).request:
            value = next(iter(rule.accepts), "true" if rule.field == "prefix_caching" else "VALUE")
            pattern = rule.pattern(value)
            version = "0.32" if within("0.32", rule.versions) else "0.14"
            if rule.without_effect is not None and not rule.accepts:
                report = requested._judge(rule, "by", value, KernelPath(version=version))
                assert (report.state, pattern) == ("not_applicable", None), rule.id
                continue
            assert pattern is not None, rule.id
            other = False if rule.field in ("cuda_graphs", "prefix_caching") else "SOMETHING_ELSE"
            other = [other] if rule.field == "requantised" else other
            if other is False and pattern.fullmatch("False"):
                other = True
            fields = {rule.field: other, "evidence": {}, "version": version}
            path = KernelPath.model_construct(**fields)
            report = requested._judge(rule, "by", value, path)
            if rule.field != "moe" or not pattern.fullmatch("SOMETHING_ELSE"):
                assert report.state == "different", rule.id
            silent = requested._judge(rule, "by", value, KernelPath(version=version))
            assert silent.state == ("different" if rule.always_shown else "not_proven"), rule.id


@pytest.mark.parametrize(
    ("path", "arguments", "environment", "becomes"),
    [
        pytest.param(
            {"moe": "FLASHINFER_TRTLLM_MXFP4_MXFP8"},
            None,
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"},
            ("resolved",),
            id="moe FLASHINFER_TRTLLM_MXFP4_MXFP8",
        ),
        pytest.param(
            {"moe": "MARLIN"},
            None,
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"},
            ("different",),
            id="moe MARLIN, VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 1",
        ),
        pytest.param(
            {"moe": "FLASHINFER_TRTLLM_MXFP4_MXFP8"},
            None,
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "1"},
            ("different",),
            id="moe FLASHINFER_TRTLLM_MXFP4_MXFP8 (2)",
        ),
        pytest.param(
            {"moe": "FLASHINFER_CUTLASS_MXFP4_BF16"},
            None,
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1"},
            ("resolved",),
            id="moe FLASHINFER_CUTLASS_MXFP4_BF16",
        ),
        pytest.param(
            {"moe": "MARLIN"},
            None,
            {"VLLM_MXFP4_USE_MARLIN": "1"},
            ("resolved",),
            id="moe MARLIN, VLLM_MXFP4_USE_MARLIN 1, resolved",
        ),
        pytest.param(
            {"moe": "MARLIN"},
            None,
            {"VLLM_MXFP4_USE_MARLIN": "0"},
            ("different",),
            id="moe MARLIN, VLLM_MXFP4_USE_MARLIN 0, different",
        ),
        pytest.param(
            {"moe": "TRITON"},
            None,
            {"VLLM_MXFP4_USE_MARLIN": "0"},
            ("resolved",),
            id="moe TRITON, VLLM_MXFP4_USE_MARLIN 0, resolved",
        ),
        pytest.param(
            {"moe": "MARLIN"},
            None,
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "0"},
            (),
            id="moe MARLIN, VLLM_USE_FLASHINFER_MOE_MXFP4_BF16 0",
        ),
        pytest.param(
            {"kv_layout": "LBHNC"},
            None,
            {"VLLM_KV_CACHE_LAYOUT": "HND"},
            ("resolved",),
            id="kv_layout LBHNC, VLLM_KV_CACHE_LAYOUT HND, resolved",
        ),
        pytest.param(
            {"kv_layout": "LBNHC"},
            None,
            {"VLLM_KV_CACHE_LAYOUT": "NHD"},
            ("resolved",),
            id="kv_layout LBNHC, VLLM_KV_CACHE_LAYOUT NHD, resolved",
        ),
        pytest.param(
            {"kv_layout": "NHD"},
            None,
            {"VLLM_KV_CACHE_LAYOUT": "HND"},
            ("different",),
            id="kv_layout NHD, VLLM_KV_CACHE_LAYOUT HND, different",
        ),
        pytest.param(
            {"attention": "TRITON_ATTN", "version": "0.11.2"},
            None,
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            ("different",),
            id="a rule speaks of its versions only: 0.11.2",
        ),
        pytest.param(
            {"attention": "TRITON_ATTN", "version": "0.13.2"},
            None,
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            ("different",),
            id="a rule speaks of its versions only: 0.13.2",
        ),
        pytest.param(
            {"attention": "TRITON_ATTN", "version": "0.18"},
            None,
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            (),
            id="a rule speaks of its versions only: 0.18",
        ),
        pytest.param(
            {"version": "0.14.0rc1.dev375+g8409484b4", "moe_variant": "unfused"},
            None,
            {"VLLM_MXFP4_FUSE_ACTIVATION": "0"},
            ("resolved",),
            id="version 0.14.0rc1.dev375+g8409484b4 moe_variant",
        ),
        pytest.param(
            {"version": "0.14.0rc1.dev375+g8409484b4", "moe_variant": "fused"},
            None,
            {"VLLM_MXFP4_FUSE_ACTIVATION": "0"},
            ("different",),
            id="version 0.14.0rc1.dev375+g8409484b4 moe_variant fused",
        ),
        pytest.param(
            {"version": "0.14.0rc1.dev375+g8409484b4"},
            None,
            {"VLLM_MXFP4_FUSE_ACTIVATION": "1"},
            ("not_proven",),
            id="version 0.14.0rc1.dev375+g8409484b4",
        ),
        pytest.param(
            {"version": "0.33.0"},
            None,
            {"VLLM_MXFP4_FUSE_ACTIVATION": "1"},
            ("not_applicable",),
            id="version 0.33.0, VLLM_MXFP4_FUSE_ACTIVATION 1",
        ),
        pytest.param(
            {"requantised": ["lm_head", "o", "qkv"]},
            ("--mxfp4-layers", "moe,qkv,o,lm_head"),
            None,
            ("resolved",),
            id="requantised lm_head o qkv, --mxfp4-layers",
        ),
        pytest.param(
            {"requantised": ["lm_head"]},
            ("--mxfp4-layers", "moe,qkv,o,lm_head"),
            None,
            ("not_proven",),
            id="requantised lm_head, --mxfp4-layers moe,qkv,o,lm_head",
        ),
        pytest.param(
            {},
            ("--mxfp4-layers", "moe,qkv"),
            None,
            ("not_proven",),
            id="--mxfp4-layers moe,qkv, not_proven",
        ),
        pytest.param(
            {"requantised": ["lm_head"]},
            ("--mxfp4-layers", "moe,qkv"),
            None,
            ("different",),
            id="requantised lm_head, --mxfp4-layers moe,qkv, different",
        ),
        pytest.param(
            {"requantised": []},
            ("--mxfp4-layers", "moe,lm_head"),
            None,
            ("not_proven",),
            id="requantised, --mxfp4-layers moe,lm_head, not_proven",
        ),
    ],
)
def test_what_becomes_of_a_request(path, arguments, environment, becomes):
    """Of variables of the experts, both names of a layout, layers that are proven, and so on."""
    assert states(KernelPath(**path), *arguments or (), **environment or {}) == [*becomes]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            (
                "[config.py:1] FULL is not supported with this backend; setting "
                "cudagraph_mode=PIECEWISE"
            ),
            id="(config.py:1) FULL is not supported with this backend",
        ),
        pytest.param(
            "[compilation.py:1] Overriding cudagraph_mode from FULL to PIECEWISE",
            id="(compilation.py:1) Overriding cudagraph_mode from FULL",
        ),
    ],
)
def test_graphs_of_another_mode_are_not_those_asked_for(line):
    """That graphs were captured is true of both modes."""
    full = ("--compilation-config.cudagraph_mode", "FULL")
    assert states(read_lines(GB10_LOG), *full) == ["resolved"]
    path = read_lines([*GB10_LOG, CORE + line])
    assert states(path, *full) == ["different"]
    assert "PIECEWISE" in differences(configuration(*full), path, {})[0]


BUILD = "0.14.0rc1.dev375+g8409484b4"
CUTLASS = "FLASHINFER_CUTLASS_MXFP4_MXFP8"


@pytest.mark.parametrize(
    ("version", "build", "variable", "argument"),
    [
        pytest.param("0.13.2", None, "different", (), id="0.13.2, different"),
        pytest.param("0.18.0", None, None, ("different",), id="0.18.0, different"),
        # a build goes by the release that it is based on, whatever it calls itself
        pytest.param(
            "0.14.0rc1.dev375+g8409484b4",
            None,
            "different",
            (),
            id="0.14.0rc1.dev375+g8409484b4, different",
        ),
        pytest.param(
            "0.1.dev12770+g045293d82.d20260810",
            None,
            "different",
            (),
            id="0.1.dev12770+g045293d82.d20260810, different",
        ),
        pytest.param(
            "0.1.dev1+g0000000", "mxfp4", "different", (), id="0.1.dev1+g0000000, mxfp4, different"
        ),
        # unknown is never the newest: it took the argument, and may not read the variable
        pytest.param(
            "0.1.dev16581+g0a1b2c3",
            None,
            "not_proven",
            ("different",),
            id="0.1.dev16581+g0a1b2c3, not_proven, different",
        ),
        pytest.param(None, None, "not_proven", ("different",), id="not_proven, different"),
    ],
)
def test_a_range_goes_by_what_the_engine_is(version, build, variable, argument):
    path = KernelPath(attention="TRITON_ATTN", moe="MARLIN", version=version, build=build)
    of_variable = states(path, VLLM_ATTENTION_BACKEND="FLASHINFER")
    assert of_variable == ([variable] if variable else [])
    assert states(path, "--moe-backend", "cutlass") == [*argument]


@pytest.mark.parametrize(
    ("arguments", "environment", "moe", "state"),
    [
        pytest.param(
            ("--mxfp4-backend", "CUTLASS"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="--mxfp4-backend CUTLASS",
        ),
        pytest.param(
            ("--mxfp4-backend", "gemm"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="--mxfp4-backend gemm, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "marlin"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "different",
            id="--mxfp4-backend marlin, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "CUTLASS"),
            {},
            None,
            "different",
            id="--mxfp4-backend CUTLASS, different",
        ),
        pytest.param(
            ("--mxfp4-backend", "gemv"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="--mxfp4-backend gemv, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "CUTLAS"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="--mxfp4-backend CUTLAS, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "cutlass"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_MXFP4_BACKEND cutlass",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "cutlass"},
            "MARLIN",
            "different",
            id="VLLM_MXFP4_BACKEND cutlass, MARLIN, different",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "gemv"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_BACKEND gemv",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_MOE_KERNEL": "gemm"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_MXFP4_MOE_KERNEL gemm",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_MOE_KERNEL": "gemv"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_MOE_KERNEL gemv",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_ACTIVATION": "mxfp8"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_ACTIVATION mxfp8",
        ),
        pytest.param(
            (),
            {"FLASHINFER_MOE_TILE": "128x128"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="FLASHINFER_MOE_TILE 128x128",
        ),
        pytest.param(
            (),
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 1",
        ),
    ],
)
def test_what_the_mxfp4_build_is_asked_for(arguments, environment, moe, state):
    """Its own variables need not stand in its list of variables; it warns of none."""
    path = KernelPath(moe=moe, version=BUILD)
    (report,) = compared(path, *arguments, **environment)
    assert report.state == state
    wrong = state != "resolved"
    assert bool(differences(configuration(*arguments, **environment), path, environment)) == wrong
    assert ("no effect in this build" in report.message) == (state == "not_applicable")


def test_a_name_that_became_auto_is_named_by_its_line():
    unknown = "Unknown backend 'CUTLAS' from --mxfp4-backend. Valid options: cutlass. Using auto."
    lines = (unknown, "SM121 auto-selected: cutlass")
    path = read_lines([f"{CORE}[mxfp4.py:1] [MXFP4] {line}" for line in lines])
    (wrong,) = differences(configuration("--mxfp4-backend", "CUTLAS"), path, {})
    assert "Unknown backend 'CUTLAS'" in wrong


ASKED = "(APIServer pid=1) INFO 10-05 02:13:00 [utils.py:253] non-default args: "


def of_log(arguments: str, *lines: str) -> dict[str, str]:
    path = requested.of_log(read_lines([ASKED + arguments, *lines]), "vllm")
    assert path.differences == [r.message for r in path.requested if r.state == "different"]
    return {report.by: report.state for report in path.requested}


def test_a_log_says_what_its_server_was_asked_for():
    assert of_log(text_file("vllm-asked.txt").strip(), *GB10_LOG) == {
        "--attention-backend TRITON_ATTN": "different",
        "--enforce-eager true": "different",
        "--compilation-config.cudagraph_mode FULL": "resolved",
        "--kv-cache-dtype fp8": "not_proven",  # an excerpt may have left it out
        "--speculative-config.method eagle3": "different",
    }
    assert of_log("{'enforce_eager': False, 'kv_cache_dtype': 'auto'}", *GB10_LOG) == {}
    # What Python prints of an object that has no other form hides none of the others.
    eager = {"--enforce-eager true": "different"}
    for other in ("<function f at 0x7f00>", "<x.Y object at 0x7f>", "[<CUDAGraphMode.FULL: 2>]"):
        assert of_log(f"{{'x': {other}, 'enforce_eager': True}}", *GB10_LOG) == eager


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "{'attention_backend': 'TRITON_ATTN', 'model': ...",
            id="{'attention_backend': 'TRITON_ATTN', 'model': ...",
        ),
        pytest.param(
            "{'attention_backend': open('/etc/passwd').read(), **x}",
            id="{'attention_backend': open('/etc/passwd').read(), **x}",
        ),
        "{'attention_backend': __import__('os').getpid()}",
        "NESTED",
        "{'attention_backend' 'TRITON_ATTN'}}",
        "{1: 2, (3,): 'x'}",
        "{[]: 1}",
        "{x: 'y'}",
        "{}",
        "None",
    ],
)
def test_arguments_that_are_no_literal_ask_for_nothing(text):
    text = text.replace("NESTED", "{" + "{" * 20_000 + "}")
    assert of_log(text, *GB10_LOG) == {}


def test_what_nobody_asks_or_shows_is_no_difference():
    assert requested.of_log(read_lines(GB10_LOG), "vllm").requested == []
    assert requested.of_log(KernelPath(), "llama-cpp").requested == []
    (report,) = compared(KernelPath(), "--block-size", "64")
    assert report.state == "not_proven"
    assert differences(configuration("--block-size", "64"), KernelPath(), {}) == []


def test_metrics_show_what_the_log_does_not():
    metrics = (
        'vllm:cache_config_info{block_size="128",cache_dtype="fp8_e4m3",'
        'enable_prefix_caching="True",kv_cache_layout="None"} 1.0\n'
        'vllm:generation_tokens_total{engine="0"} 9.0\n'
    )
    path = with_metrics(KernelPath(), metrics)
    assert (path.block_size, path.kv_cache_dtype, path.prefix_caching) == ("128", "fp8_e4m3", True)
    assert path.kv_layout is None
    assert path.speculative == "none"  # no counters of drafts though it generated
    assert "cache_dtype" in path.evidence["kv_cache_dtype"]
    assert states(path, "--block-size", "64") == ["different"]
    assert states(path, "--kv-cache-dtype", "fp8") == ["resolved"]


def test_metrics_that_disagree_or_come_too_early_say_nothing():
    path = with_metrics(
        KernelPath(prefix_caching=False),
        'vllm:cache_config_info{enable_prefix_caching="True"} 1.0\n'
        'vllm:cache_config_info{block_size="16"} 1.0\nvllm:cache_config_info{block_size="32"} 1.0',
    )
    assert path.prefix_caching is False
    assert "True" in path.evidence["prefix_caching_also"]
    assert path.block_size is None  # two engines that do not agree
    text = 'vllm:generation_tokens_total{engine="0"} 0.0\n'
    assert with_metrics(KernelPath(), text).speculative is None
    drafting = 'vllm:generation_tokens_total 3\nvllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    assert with_metrics(KernelPath(), drafting).speculative is None


def test_unknown_variable_is_not_applicable_and_never_passes():
    path = read_lines([*GB10_LOG[:-2], CORE + "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."])
    variables_ = {"VLLM_MXFP4_BACKEND": "marlin", "FLASHINFER_MOE_TILE": "128x128"}
    reports = compared(path, **variables_)
    # Marlin ran, and not because of the variable.
    assert [report.state for report in reports] == ["not_applicable"] * 2
    wrong = differences(configuration(**variables_), path, variables_)
    assert all("not applicable" in line and "knows no such variable" in line for line in wrong)


def test_variables_that_images_set_are_no_request():
    harmless = {"VLLM_BUILD_COMMIT": "x", "VLLM_CPU_SERVICE_HOST": "y"}
    assert compared(KernelPath(), **dict.fromkeys(OF_SERVICES, "x")) == []
    assert compared(KernelPath(), **harmless) == []


#: Of the environments of images: NGC's, eugr's, and what vLLM's own build reads.
OF_IMAGES = (
    "VLLM_VERSION",
    "VLLM_FLASH_ATTN_SRC_DIR",
    "VLLM_BASE_DIR",
    "VLLM_CUTLASS_SRC_DIR",
    "VLLM_PRECOMPILED_WHEEL_COMMIT",
    "VLLM_VERSION_OVERRIDE",
    "VLLM_CPU_AVX512BF16",
    "VLLM_XPU_AOT_DEVICES",
    "VLLM_REQUIRE_RUST_FRONTEND",
    "VLLM_REF",
)
#: Kubernetes sets them in every pod beside a service that is named vllm, or vllm-server.
OF_SERVICES = (
    "VLLM_SERVICE_HOST",
    "VLLM_SERVICE_PORT",
    "VLLM_SERVICE_PORT_HTTP",
    "VLLM_PORT_8000_TCP",
    "VLLM_PORT_8000_TCP_ADDR",
    "VLLM_PORT_8000_TCP_PROTO",
    "VLLM_PORT_8000_UDP",
    "VLLM_SERVER_SERVICE_HOST",
    "VLLM_SERVER_PORT",
)
#: What reads like them, and is a mistake.
NOT_OF_IMAGES = (
    "VLLM_SERVICE",
    "VLLM_SERVICE_HOSTS",
    "VLLM_SERVICE_PORTS",
    "VLLM_PORT_8000",
    "VLLM_HOST_TCP",
    "VLLM_VERSION_CHECK",
    "VLLM_FLASH_ATTN_SRC",
    "VLLM_CPU_AVX512BF16_MOE",
    "VLLM_REFRESH",
    "VLLM_FLASH_ATTN_VERSIONS",
    "VLLM_MXFP4_BACKEND",
)


def test_what_a_build_was_told_is_no_mistake_of_the_server():
    """The engine warns of a variable that its image has from its build; a variable that merely
    looks so is the user's mistake."""
    path = KernelPath(unknown_env=[*OF_IMAGES, *OF_SERVICES, *NOT_OF_IMAGES])
    assert mistaken_environment(path) == [*NOT_OF_IMAGES]
    assert compared(KernelPath(), **dict.fromkeys(OF_IMAGES, "x")) == []


def test_secret_values_are_not_shown():
    (report,) = compared(KernelPath(), VLLM_MY_TOKEN="hf_" + "a" * 30)
    assert report.by == "VLLM_MY_TOKEN=[redacted]"
