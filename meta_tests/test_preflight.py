"""Preflight: every check finds the fault that it exists for, and is silent without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.core.data_file import DataFileError, parse
from sm121.core.profile import Needs
from sm121.engines.preflight import PreflightData, PreflightFinding, inspect, load_preflight

GOOD_ARGUMENTS = ["--model", "m", "--attention-backend", "TRITON_ATTN", "--moe-backend", "marlin"]
GOOD_ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "HND", "VLLM_LOGGING_LEVEL": "DEBUG"}
MXFP8 = ["--quantization-config", '{"moe":{"activation":"mxfp8"}}']
ARCH_LIST = ("12.1a", "12.1f")


def found(
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    *,
    arch: str = "sm121",
    needs: Needs | None = None,
    directory: Path = Path(),
) -> list[PreflightFinding]:
    return inspect(
        arch,
        GOOD_ARGUMENTS if arguments is None else arguments,
        GOOD_ENVIRONMENT if environment is None else environment,
        needs=needs or Needs(),
        directory=directory,
    )


def checks(findings: list[PreflightFinding]) -> set[str]:
    return {finding.check for finding in findings}


HIT: dict[str, tuple[list[str], dict[str, str]]] = {
    "moe_trtllm": (["--moe-backend=flashinfer-trtllm"], {}),
    "moe_trtllm_environment": ([], {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"}),
    "moe_cutlass_without_mxfp8": (["--moe-backend", "flashinfer_cutlass"], {}),
    "moe_not_for_gpt_oss": (["--moe-backend", "flashinfer_b12x"], {}),
    "moe_deep_gemm": (["--kernel-config.moe_backend", "deep_gemm"], {}),
    "moe_emulation": (["--moe-backend", "emulation"], {}),
    "moe_triton": (["--moe_backend", "triton"], {}),
    "attention_fa3": (["--attention-config.flash_attn_version=3"], {}),
    "attention_fa3_environment": ([], {"VLLM_FLASH_ATTN_VERSION": "3"}),
    "attention_without_sinks": (["--attention-backend", "FLASH_ATTN"], {}),
    "attention_trtllm_off": (
        ["--attention-backend", "FLASHINFER", "--attention-config.use_trtllm_attention=0"],
        {},
    ),
    "attention_given_twice": (
        ["--attention-backend", "FLASHINFER", "--attention-config", '{"backend":"FLASHINFER"}'],
        {},
    ),
    "attention_needs_network": (["--attention-backend", "FLASHINFER"], {}),
    "attention_by_network": (["--model", "m"], {}),
    "attention_environment": ([], {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}),
    "environment_without_effect": ([], {"VLLM_MXFP4_MOE_KERNEL": "cutlass"}),
    "fork_arguments": (["--mxfp4-backend", "CUTLASS"], {}),
    "quantization_nvfp4": (["--quantization", "modelopt_fp4"], {}),
    "kv_layout_unknown": ([], {"VLLM_KV_CACHE_LAYOUT": "DNH"}),
    "kv_layout_not_hnd": ([], {"VLLM_KV_CACHE_LAYOUT": "NHD"}),
    "kv_layout_sm100": ([], {"VLLM_KV_CACHE_LAYOUT": "NHD"}),
    "load_fastsafetensors": (["--load-format", "fastsafetensors"], {}),
    "memory_utilization": (["--gpu-memory-utilization", "0.95"], {}),
    "window_fp8_speculation": (["--speculative-config", "{}", "--kv-cache-dtype", "fp8"], {}),
}

NEAR_MISS: dict[str, tuple[list[str], dict[str, str]]] = {
    "moe_cutlass_without_mxfp8": (["--moe-backend", "flashinfer_cutlass", *MXFP8], {}),
    "moe_not_for_gpt_oss": (["--moe-backend", "flashinfer_cutlass", *MXFP8], {}),
    "moe_trtllm_environment": ([], {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "0"}),
    "attention_fa3": (["--attention-config.flash_attn_version=2"], {}),
    "attention_needs_network": (
        ["--attention-backend", "FLASHINFER"],
        {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
    ),
    "attention_given_twice": (["--attention-config", '{"backend":"FLASHINFER"}'], {}),
    "attention_without_sinks": (["--attention-backend", "FLASHINFER"], {}),
    "memory_utilization": (["--gpu-memory-utilization", "0.85"], {}),
    "window_fp8_speculation": (["--kv-cache-dtype", "fp8"], {}),
    "quantization_nvfp4": (["--quantization", "mxfp4"], {}),
    "kv_layout_unknown": ([], {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}),
    "kv_layout_not_hnd": ([], {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}),
}


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in load_preflight().rule} == set(HIT)


@pytest.mark.parametrize("rule", sorted(HIT))
def test_rule_hits(rule: str) -> None:
    arguments, environment = HIT[rule]
    arch = "sm100" if rule == "kv_layout_sm100" else "sm121"
    finding = next(item for item in found(arguments, environment, arch=arch) if item.check == rule)
    assert finding.remedy
    if rule != "attention_by_network":  # which speaks of what is not there
        assert "seen: " in finding.message


def test_hopper_has_an_attention_with_sinks_of_its_own() -> None:
    arguments, environment = HIT["attention_by_network"]
    assert "attention_by_network" not in checks(found(arguments, environment, arch="sm90"))


@pytest.mark.parametrize("rule", sorted(NEAR_MISS))
def test_rule_does_not_hit_what_is_right(rule: str) -> None:
    assert rule not in checks(found(*NEAR_MISS[rule]))


def test_good_choice_passes_silently() -> None:
    assert found() == []


def test_rules_of_an_architecture_stay_there() -> None:
    assert "moe_trtllm" not in checks(
        found(["--moe-backend", "flashinfer_trtllm"], {}, arch="sm100")
    )
    assert found([], {}, arch="cpu") == []
    assert "fork_arguments" in checks(found(["--mxfp4-layers", "qkv"], {}, arch="cpu"))


def test_errors_come_first() -> None:
    findings = found(["--moe-backend", "flashinfer_trtllm", "--load-format", "fastsafetensors"], {})
    ranks = [{"error": 0, "warning": 1, "note": 2}[finding.severity] for finding in findings]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0


def test_memory() -> None:
    assert found(needs=Needs(memory_gib=0.001)) == []
    (finding,) = found(needs=Needs(memory_gib=1e6))
    assert (finding.check, finding.severity) == ("memory", "error")
    assert "1000000.0 GiB" in finding.message


def test_disk(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "yet"
    assert found(needs=Needs(disk_gib=0.001), directory=place) == []
    (finding,) = found(needs=Needs(disk_gib=1e9), directory=place)
    assert (finding.check, finding.severity) == ("disk", "error")
    assert not place.exists()


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1a", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.1f", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.0a", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1a,12.0f", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1 12.1a", "warning"),
        ("TORCH_CUDA_ARCH_LIST", "9.0;12.1a+PTX", None),
        ("TORCH_CUDA_ARCH_LIST", "12.1", "warning"),
    ],
)
def test_arch_lists(name: str, value: str, severity: str | None) -> None:
    findings = found(environment={name: value}, needs=Needs(arch_list=ARCH_LIST))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    for finding in findings:
        assert finding.check == "arch_list"
        assert repr(value) in finding.message
        assert finding.remedy is not None
        assert "12.1a" in finding.remedy


def test_arch_list_is_not_checked_when_nothing_is_asked() -> None:
    assert found(environment={"FLASHINFER_CUDA_ARCH_LIST": "12.1"}) == []


def build(base: Path, arch: str, module: str) -> None:
    folder = base / ".cache" / "flashinfer" / "0.7.2" / arch / "cached_ops" / module
    folder.mkdir(parents=True)
    (folder / f"{module}.so").touch()


JIT = Needs(jit_modules=("fused_moe_120", "batch_prefill_*"))


def jit(base: Path, **more: str) -> dict[tuple[str, str], PreflightFinding]:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "MAX_JOBS": "1", **more}
    return {(item.check, item.severity): item for item in found(environment=environment, needs=JIT)}


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=64_000_000_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)


@pytest.mark.usefixtures("roomy")
class TestJitCache:
    def test_cold(self, tmp_path: Path) -> None:
        finding = jit(tmp_path)["jit_cache", "note"]
        assert "cold" in finding.message
        assert "minutes" in finding.message
        assert "fused_moe_120" in finding.message

    @pytest.mark.parametrize("arch", ["121a", "121f", "120f_121a"])
    def test_warm(self, tmp_path: Path, arch: str) -> None:
        build(tmp_path, arch, "fused_moe_120")
        build(tmp_path, arch, "batch_prefill_attention_sink_bf16")
        assert jit(tmp_path) == {}

    def test_incomplete_names_what_is_missing(self, tmp_path: Path) -> None:
        build(tmp_path, "121a", "fused_moe_120")
        finding = jit(tmp_path)["jit_cache", "note"]
        assert "incomplete" in finding.message
        assert "batch_prefill_*" in finding.message
        assert "fused_moe_120" not in finding.message

    def test_directory_without_library_is_not_built(self, tmp_path: Path) -> None:
        build(tmp_path, "121a", "fused_moe_120")
        next(tmp_path.rglob("*.so")).unlink()
        assert "cold" in jit(tmp_path)["jit_cache", "note"].message

    @pytest.mark.parametrize("arch", ["90a", "121", "120a"])
    def test_wrong_architecture(self, tmp_path: Path, arch: str) -> None:
        build(tmp_path, arch, "fused_moe_120")
        findings = jit(tmp_path)
        assert arch in findings["jit_cache", "warning"].message
        assert ("jit_cache", "note") in findings

    def test_home_is_the_default_place(self, tmp_path: Path) -> None:
        build(tmp_path, "121a", "fused_moe_120")
        build(tmp_path, "121a", "batch_prefill_x")
        assert found(environment={"HOME": str(tmp_path)}, needs=JIT) == []

    @pytest.mark.parametrize(
        ("jobs", "severity", "remedy"),
        [
            ("1", None, None),
            ("4", None, None),
            ("8", "warning", "MAX_JOBS=4"),
            ("32", "warning", "MAX_JOBS=4"),
            ("0", "error", "MAX_JOBS=4"),
            ("many", "error", "MAX_JOBS=4"),
        ],
    )
    def test_max_jobs(
        self, tmp_path: Path, jobs: str, severity: str | None, remedy: str | None
    ) -> None:
        findings = [
            item for key, item in jit(tmp_path, MAX_JOBS=jobs).items() if key[0] == "max_jobs"
        ]
        assert [(item.severity, item.remedy) for item in findings] == (
            [] if severity is None else [(severity, remedy)]
        )

    def test_unset_max_jobs_means_one_a_core(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 20)
        finding = jit(tmp_path, MAX_JOBS="")["max_jobs", "warning"]
        assert "20 jobs" in finding.message
        assert "200 GB" in finding.message

    def test_warm_cache_needs_no_jobs(self, tmp_path: Path) -> None:
        build(tmp_path, "121a", "fused_moe_120")
        build(tmp_path, "121a", "batch_prefill_x")
        assert jit(tmp_path, MAX_JOBS="64") == {}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('severity = "error"', 'severity = "fatal"', "severity"),
        ("arguments = '--x'", "", "arguments or environment is needed"),
        ("arguments = '--x'", "arguments = '('", "regular expression"),
        ('arch = ["sm121"]', 'arch = ["sm999"]', "sm999"),
        ("jobs = 2", "jobs = 0", "jobs"),
        ('message = "m"', 'message = "m"\ncolour = 1', "colour"),
        ("[[rule]]", "[[rule", "expected TOML"),
    ],
)
def test_wrong_data_is_refused(old: str, new: str, expected: str) -> None:
    text = """
[[architecture]]
name = "sm121"
target = "12.1"
codes = ["121a"]
bare = "b"
[[max_jobs]]
jobs = 2
peak_gb = 20
[[rule]]
id = "one"
arch = ["sm121"]
severity = "error"
arguments = '--x'
message = "m"
remedy = "r"
source = "s"
"""
    assert parse(text, PreflightData, "mine.toml").rule[0].id == "one"
    with pytest.raises(DataFileError, match=expected) as error:
        parse(text.replace(old, new), PreflightData, "mine.toml")
    assert "mine.toml" in str(error.value)
