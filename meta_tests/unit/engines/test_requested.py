"""Requested values are compared with resolved ones: each difference is named, and missing evidence
proves nothing."""

import pytest

from meta_tests.fakes.servers import configuration
from meta_tests.logs import path_with, read_lines
from meta_tests.unit.engines.request_reports import CORE, GB10_LOG, differences, states
from sm121.core import profile
from sm121.core.data_file import DataFileError
from sm121.core.versions import within
from sm121.engines import request_rules, requested
from sm121.engines.requested import compare
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart

pytestmark = pytest.mark.usefixtures("known")

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
def test_requested_values_that_ran_are_resolved(arguments):
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
def test_a_requested_value_that_did_not_run_is_named(arguments, field, resolved):
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
    """The requests of the GB10 profile are compared with each configuration's own log, and with the
    log of the other one."""
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
                report = requested._judge(
                    rule, "by", value, KernelPath(log=LogStart(version=version))
                )
                assert (report.state, pattern) == ("not_applicable", None), rule.id
                continue
            assert pattern is not None, rule.id
            other = False if rule.field in ("cuda_graphs", "prefix_caching") else "SOMETHING_ELSE"
            other = [other] if rule.field == "requantised" else other
            if other is False and pattern.fullmatch("False"):
                other = True
            fields = {rule.field: other, "evidence": {}, "log": LogStart(version=version)}
            path = KernelPath.model_construct(**fields)
            report = requested._judge(rule, "by", value, path)
            if rule.field != "moe" or not pattern.fullmatch("SOMETHING_ELSE"):
                assert report.state == "different", rule.id
            silent = requested._judge(rule, "by", value, KernelPath(log=LogStart(version=version)))
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
def test_state_of_each_requested_value(path, arguments, environment, becomes):
    """Each requested value has its state: variables of the experts, both names of a layout, proven
    layers, and others."""
    assert states(path_with(path), *arguments or (), **environment or {}) == [*becomes]


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
    """Graphs of another mode do not satisfy the request, although both modes capture graphs."""
    full = ("--compilation-config.cudagraph_mode", "FULL")
    assert states(read_lines(GB10_LOG), *full) == ["resolved"]
    path = read_lines([*GB10_LOG, CORE + line])
    assert states(path, *full) == ["different"]
    assert "PIECEWISE" in differences(configuration(*full), path, {})[0]


def test_the_log_of_an_engine_without_rules_is_read_and_its_start_is_refused():
    """The log of an engine without rules is read, and its start is refused.

    Log lines of an engine may be known before the rules for its arguments are written. Without
    rules, every request would count as satisfied."""
    path = KernelPath()
    assert requested.of_log(path, "an engine without rules") is path
    with pytest.raises(DataFileError, match="no such file"):
        request_rules.load_requests("an engine without rules")
