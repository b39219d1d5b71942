"""Preflight: every check finds the fault that it exists for, and is silent without it."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meta_tests.folders import DATA
from sm121.compilation.jit import FlashInferModules, bounding_variables
from sm121.core import profile
from sm121.core.engine_settings import Needs
from sm121.engines import preflight
from sm121.engines.preflight import Preflight, PreflightFinding, load_preflight

GOOD_ARGUMENTS = ["--model", "m", "--attention-backend", "TRITON_ATTN", "--moe-backend", "marlin"]
GOOD_ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "HND", "VLLM_LOGGING_LEVEL": "DEBUG"}
MXFP8 = ["--quantization-config", '{"moe":{"activation":"mxfp8"}}']


def found(
    arguments=GOOD_ARGUMENTS, environment=GOOD_ENVIRONMENT, *, flashinfer=None, beside=(), **options
):
    fields = {"arch": "sm121", "needs": Needs(), "directory": Path(), **options}
    if flashinfer is not None:
        fields["modules"] = FlashInferModules(flashinfer, fields["directory"], beside=dict(beside))
    start = Preflight(fields.pop("arch"), arguments, environment, **fields)
    return start.findings()


def found_of(row: dict[str, Any], **options: Any) -> list[PreflightFinding]:
    return found(**{"arguments": [], "environment": {}, **options, **row})


def checks(findings: list[PreflightFinding]) -> set[str]:
    return {finding.check for finding in findings}


_DATA = tomllib.loads((DATA / "preflight.toml").read_text("utf-8"))
HIT, NEAR_MISS = _DATA["hit"], _DATA["near_miss"]


def test_every_rule_has_a_case():
    assert {rule.id for rule in load_preflight().rule} == set(HIT)


@pytest.mark.parametrize("rule", sorted(HIT))
def test_rule_hits(rule):
    findings = found_of(HIT[rule], flashinfer="0.6.15.post1")
    finding = next(item for item in findings if item.check == rule)
    assert finding.remedy
    if rule != "attention_by_network":  # which speaks of what is not there
        assert "seen: " in finding.message


@pytest.mark.parametrize("rule", sorted(NEAR_MISS))
def test_rule_does_not_hit_what_is_right(rule):
    assert rule not in checks(found_of(NEAR_MISS[rule]))


#: christopherowen/spark-vllm-mxfp4-docker and eugr/spark-vllm-docker, as far as rules speak of it.
RECIPE = (
    (
        "--quantization",
        "mxfp4",
        "--mxfp4-backend=CUTLASS",
        "--mxfp4-layers",
        "moe,qkv,o,lm_head",
        "--attention-backend",
        "FLASHINFER",
        "--kv-cache-dtype",
        "fp8",
    ),
    {
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1",
        "VLLM_MXFP4_BACKEND": "CUTLASS",
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
    },
)


@pytest.mark.parametrize("backend", ["CUTLAS", "Cutlass", "gemv", "CUTLASS_MXFP8", "auto"])
def test_a_backend_that_the_build_lacks_is_named_before_a_start(backend):
    """One that is left to the build is no mistake."""
    for start in ((["--mxfp4-backend", backend], {}), ([], {"VLLM_MXFP4_BACKEND": backend})):
        findings = found(*start, version="0.14.0+mxfp4")
        wrong = [each for each in findings if each.severity == "error"]
        assert len(wrong) == (backend != "auto"), wrong
        for each in wrong:
            assert backend in each.message
            assert "CUTLASS, MARLIN or TRITON" in (each.remedy or "")


@pytest.mark.parametrize(
    ("start", "options", "tells", "tells_not", "exactly"),
    [
        pytest.param(None, None, None, None, (), id="a good choice"),
        pytest.param(
            (("--model", "m"), {}),
            {"arch": "sm90"},
            None,
            ("attention_by_network",),
            None,
            id="Hopper has an attention with sinks of its own",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            {"flashinfer": "0.6.16"},
            None,
            ("attention_old_flashinfer",),
            None,
            id="FlashInfer 0.6.16 has sinks",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            {"flashinfer": "0.7.2.post1"},
            None,
            ("attention_old_flashinfer",),
            None,
            id="FlashInfer 0.7.2 has sinks",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            None,
            None,
            ("attention_old_flashinfer",),
            None,
            id="which FlashInfer is not known",
        ),
        pytest.param(
            RECIPE,
            {"flashinfer": "0.6.3", "version": "0.14.0+mxfp4"},
            None,
            None,
            ("attention_needs_network", "sink_module_shared_cache"),
            id="the effort's recipe for its own build",
        ),
        pytest.param(
            RECIPE,
            {"flashinfer": "0.6.3", "version": "0.33.0"},
            ("fork_arguments", "environment_without_effect", "attention_old_flashinfer"),
            None,
            None,
            id="the effort's recipe for a release",
        ),
        pytest.param(
            (("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"), {}),
            {"flashinfer": "0.7.4"},
            None,
            ("sink_module_two_caches", "sink_module_shared_cache"),
            None,
            id="FlashInfer 0.7.4 names its module after the cache",
        ),
        pytest.param(
            (
                (
                    "--kv-cache-dtype",
                    "fp8",
                    "--kv-cache-dtype-skip-layers",
                    "0",
                    "--attention-backend",
                    "TRITON_ATTN",
                ),
                {},
            ),
            {"flashinfer": "0.7.2.post1"},
            None,
            ("sink_module_two_caches", "sink_module_shared_cache"),
            None,
            id="two kinds of cache, attention by Triton",
        ),
        pytest.param(
            (("--attention-backend", "flash_attn"),),
            None,
            ("attention_without_sinks",),
            None,
            None,
            id="a backend in lower case",
        ),
        pytest.param(
            (("--attention-backend=flashinfer",),),
            None,
            ("attention_needs_network",),
            None,
            None,
            id="another backend in lower case",
        ),
        pytest.param(
            (("--moe-backend", "flashinfer_trtllm"), {}),
            {"arch": "sm100"},
            None,
            ("moe_trtllm",),
            None,
            id="TRT-LLM's experts on SM100",
        ),
        pytest.param(((), {}), {"arch": "cpu"}, None, None, (), id="nothing asked of a CPU"),
        pytest.param(
            (("--mxfp4-layers", "qkv"), {}),
            {"arch": "cpu"},
            ("fork_arguments",),
            None,
            None,
            id="the effort's options on a CPU",
        ),
    ],
)
def test_what_is_told_of_a_start(start, options, tells, tells_not, exactly):
    """Rules of a build, a release and an architecture stay there. `start`: its arguments and its
    environment, else good ones."""
    names = checks(found(*start or (), **options or {}))
    assert names >= {*(tells or ())} and not names & {*(tells_not or ())}
    assert exactly is None or names == {*exactly}


def test_errors_come_first():
    findings = found(["--moe-backend", "flashinfer_trtllm", "--load-format", "fastsafetensors"], {})
    ranks = [["error", "warning", "note"].index(finding.severity) for finding in findings]
    assert ranks == sorted(ranks) and ranks[0] == 0


def test_memory():
    assert found(needs=Needs(memory_gib=0.001)) == []
    (finding,) = found(needs=Needs(memory_gib=1e6))
    assert (finding.check, finding.severity) == ("memory", "error")
    assert "1000000.0 GiB" in finding.message


@pytest.mark.parametrize(
    ("available_gib", "expected"),
    [
        pytest.param(
            5.0,
            ("error: node 1 (spark2): 9.0 GiB of memory are needed, 5.0",),
            id="5.0, error: node 1 (spark2): 9.0 GiB of memory are",
        ),
        pytest.param(
            8.9, ("error: node 1 (spark2): 9.0 GiB",), id="8.9, error: node 1 (spark2): 9.0 GiB"
        ),
        pytest.param(9.0, (), id="9.0"),
    ],
)
def test_memory_of_another_node(available_gib, expected):
    other = {"available_bytes": int(available_gib * 2**30)}
    facts = {"node 0 (spark1)": {**other, "available_bytes": 0}, "node 1 (spark2)": other}
    findings = [*preflight.of_nodes(Needs(memory_gib=9), facts)]
    assert len(findings) == len(expected), findings
    for each, start in zip(findings, expected, strict=True):
        assert f"{each.severity}: {each.message}".startswith(start)


def test_disk(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    assert found(needs=Needs(disk_gib=0.001), directory=folder) == []
    (finding,) = found(needs=Needs(disk_gib=1e9), directory=folder)
    assert (finding.check, finding.severity) == ("disk", "error")
    assert not folder.exists()


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
def test_arch_lists(name, value, severity):
    findings = found(environment={name: value}, needs=Needs(arch_list=("12.1a", "12.1f")))
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for finding in findings:
        assert finding.check == "arch_list"
        assert repr(value) in finding.message and "12.1a" in finding.remedy
    assert found(environment={name: value}) == [], "nothing is asked"


def build(base: Path, arch: str, module: str, version: str = "0.7.2") -> None:
    folder = base / ".cache" / "flashinfer" / version / arch / "cached_ops" / module
    folder.mkdir(parents=True)
    if "attention_sink" in module:
        generated = folder.parents[1] / "generated" / module
        generated.mkdir(parents=True)
        (generated / "batch_prefill_config.inc").write_text("using DTypeKV = nv_bfloat16;\n")
    (folder / f"{module}.so").touch()


EXPERTS, SINK = "fused_moe_120", "batch_prefill_attention_sink_bf16_swa_True_fa2"
JIT = Needs(jit_modules=("experts", "attention_sink_window"), weights_gib=65)
CUTLASS = ["--moe-backend", "flashinfer_cutlass", *MXFP8, "--attention-backend=FLASHINFER"]
#: GiB that are available on a Spark: beside 65 + 4, four jobs of 9.3 GiB fit.
SPARK = 112


def tools(base: Path) -> Path:
    folder = base / "cuda" / "bin"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for name in ("nvcc", "ninja"):
            (folder / name).touch(0o755)
    return folder


def jit(
    base: Path, arguments: list[str] = CUTLASS, modules=None, cold_ready_within_s=None, **more: str
) -> dict[tuple[str, str], PreflightFinding]:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "PATH": str(tools(base)), **more}
    limits = {} if cold_ready_within_s is None else {"cold_ready_within_s": cold_ready_within_s}
    start = Preflight(
        "sm121", arguments, environment, needs=JIT, directory=base, modules=modules, **limits
    )
    rules = {rule.id for rule in load_preflight().rule}
    return {(f.check, f.severity): f for f in start.findings() if f.check not in rules}


def available(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("os.cpu_count", lambda: 20)
    monkeypatch.setattr("sm121.engines.preflight._DEFAULT_NVCC", "/nowhere/nvcc")


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, SPARK)


@pytest.mark.parametrize(
    ("gib", "built", "without", "arguments", "variables", "found", "said", "not_said"),
    [
        pytest.param(
            None,
            None,
            None,
            None,
            None,
            ("jit_cache note",),
            ("cold", "67 minutes of one core", "fused_moe_120", "sm121 warm"),
            None,
            id="cold",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"), ("121a", "batch_prefill_attention_sink_bf16_swa_True_fa2")),
            None,
            None,
            None,
            (),
            None,
            None,
            id="warm, built for 121a",
        ),
        pytest.param(
            None,
            (("121f", "fused_moe_120"), ("121f", "batch_prefill_attention_sink_bf16_swa_True_fa2")),
            None,
            None,
            None,
            (),
            None,
            None,
            id="warm, built for 121f",
        ),
        pytest.param(
            None,
            (
                ("120f_121a", "fused_moe_120"),
                ("120f_121a", "batch_prefill_attention_sink_bf16_swa_True_fa2"),
            ),
            None,
            None,
            None,
            (),
            None,
            None,
            id="warm, built for 120f_121a",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"),),
            None,
            None,
            None,
            ("jit_cache note",),
            ("incomplete", "batch_prefill_attention_sink_bf16*_swa_True_fa2"),
            ("fused_moe_120",),
            id="incomplete",
        ),
        pytest.param(
            None,
            (("121a", "batch_prefill_attention_sink_bf16_swa_True_fa2"),),
            None,
            ("--moe-backend", "marlin", "--attention-backend", "FLASHINFER"),
            None,
            (),
            None,
            None,
            id="Marlin needs no experts of FlashInfer",
        ),
        pytest.param(
            None,
            None,
            None,
            ("--moe-backend", "marlin", "--attention-backend", "TRITON_ATTN"),
            None,
            (),
            None,
            None,
            id="TRITON_ATTN needs no attention of it",
        ),
        pytest.param(
            None,
            None,
            None,
            ("--moe-backend", "marlin"),
            None,
            ("jit_cache note",),
            None,
            None,
            id="an attention that is left to the engine may need it",
        ),
        pytest.param(
            None,
            (("90a", "fused_moe_120"),),
            None,
            None,
            None,
            ("jit_cache note", "jit_cache warning"),
            ("90a",),
            None,
            id="built for 90a",
        ),
        pytest.param(
            None,
            (("121", "fused_moe_120"),),
            None,
            None,
            None,
            ("jit_cache note", "jit_cache warning"),
            ("121",),
            None,
            id="built for 121",
        ),
        pytest.param(
            None,
            (("120a", "fused_moe_120"),),
            None,
            None,
            None,
            ("jit_cache note", "jit_cache warning"),
            ("120a",),
            None,
            id="built for 120a",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"), ("121a", "batch_prefill_attention_sink_bf16_swa_True_fa2")),
            None,
            None,
            {"FLASHINFER_WORKSPACE_BASE": "", "HOME": "HERE"},
            (),
            None,
            None,
            id="HOME is the default place",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": ""},
            ("jit_cache note",),
            None,
            None,
            id="no jobs that the user gave",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "1"},
            ("jit_cache note",),
            None,
            None,
            id="1 jobs that the user gave",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "4"},
            ("jit_cache note",),
            None,
            None,
            id="4 jobs that the user gave",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "5"},
            ("jit_cache note", "max_jobs error"),
            ("4 fit", "112.0 GiB are available", "sm121 warm"),
            None,
            id="5 jobs, more than fit",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "16"},
            ("jit_cache note", "max_jobs error"),
            ("4 fit", "112.0 GiB are available", "sm121 warm"),
            None,
            id="16 jobs, more than fit",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "0"},
            ("jit_cache note", "max_jobs error"),
            ("'0'",),
            None,
            id="0 is no number of jobs",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"MAX_JOBS": "many"},
            ("jit_cache note", "max_jobs error"),
            ("'many'",),
            None,
            id="many is no number of jobs",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"), ("121a", "batch_prefill_attention_sink_bf16_swa_True_fa2")),
            None,
            None,
            {"MAX_JOBS": "64"},
            (),
            None,
            None,
            id="a warm cache needs no jobs",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"),),
            "*.so",
            None,
            None,
            ("jit_cache note",),
            ("cold",),
            None,
            id="a directory without its library",
        ),
        pytest.param(
            None,
            (("121a", "fused_moe_120"), ("121a", "batch_prefill_attention_sink_bf16_swa_True_fa2")),
            "nvcc",
            None,
            {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
            (),
            None,
            None,
            id="a warm cache needs no compiler",
        ),
        pytest.param(
            None,
            None,
            "nvcc",
            None,
            {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
            ("jit_cache note", "jit_tools error"),
            ("there is no nvcc ", "switches off vLLM's own look", "CUDA_HOME"),
            None,
            id="nvcc is missing, FlashInfer is asked for with 1",
        ),
        pytest.param(
            None,
            None,
            "nvcc",
            None,
            {"VLLM_HAS_FLASHINFER_CUBIN": "0"},
            ("jit_cache note", "jit_tools error"),
            ("there is no nvcc ", "must be compiled", "CUDA_HOME"),
            None,
            id="nvcc is missing, FlashInfer is asked for with 0",
        ),
        pytest.param(
            None,
            None,
            "nvcc",
            ("--moe-backend", "marlin"),
            None,
            ("jit_cache note", "jit_tools note"),
            None,
            None,
            id="nvcc is missing, and is vLLM's own choice",
        ),
        pytest.param(
            None,
            None,
            "nvcc",
            ("--moe-backend", "marlin"),
            {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
            ("jit_cache note", "jit_tools error"),
            None,
            None,
            id="nvcc is missing, and vLLM does not look",
        ),
        pytest.param(
            None,
            None,
            "ninja",
            None,
            {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
            ("jit_cache note", "jit_tools error"),
            ("there is no ninja ", "switches off vLLM's own look", "CUDA_HOME"),
            None,
            id="ninja is missing, FlashInfer is asked for with 1",
        ),
        pytest.param(
            None,
            None,
            "ninja",
            None,
            {"VLLM_HAS_FLASHINFER_CUBIN": "0"},
            ("jit_cache note", "jit_tools error"),
            ("there is no ninja ", "must be compiled", "CUDA_HOME"),
            None,
            id="ninja is missing, FlashInfer is asked for with 0",
        ),
        pytest.param(
            None,
            None,
            "ninja",
            ("--moe-backend", "marlin"),
            None,
            ("jit_cache note", "jit_tools note"),
            None,
            None,
            id="ninja is missing, and is vLLM's own choice",
        ),
        pytest.param(
            None,
            None,
            "ninja",
            ("--moe-backend", "marlin"),
            {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
            ("jit_cache note", "jit_tools error"),
            None,
            None,
            id="ninja is missing, and vLLM does not look",
        ),
        pytest.param(
            None,
            None,
            None,
            None,
            {"CUDA_HOME": "HERE/elsewhere"},
            ("jit_cache note", "jit_tools error"),
            None,
            None,
            id="a compiler where CUDA_HOME leads nowhere",
        ),
        pytest.param(
            75,
            None,
            None,
            None,
            None,
            ("jit_cache note", "jit_memory error"),
            ("9.3 GiB", "65 GiB", "75.0 GiB are available", "sm121 warm"),
            None,
            id="what cannot fit beside the weights",
        ),
        pytest.param(
            75,
            (("121a", "fused_moe_120"),),
            None,
            None,
            None,
            ("jit_cache note",),
            None,
            None,
            id="the attention's compilers need half a GiB",
        ),
    ],
)
def test_what_a_cache_of_compiled_modules_and_the_jobs_come_to(
    tmp_path, monkeypatch, gib, built, without, arguments, variables, found, said, not_said
):
    """More jobs than fit are refused before anything starts; they are never changed. vLLM looks for
    a compiler, unless VLLM_HAS_FLASHINFER_CUBIN is set, and does without FlashInfer where that is
    its own choice. `without`: a file that is not there."""
    available(monkeypatch, gib or SPARK)
    for arch, module in built or ():
        build(tmp_path, arch, module)
    tools(tmp_path)
    if without:
        next(tmp_path.rglob(without)).unlink()
    variables = {k: v.replace("HERE", str(tmp_path)) for k, v in (variables or {}).items()}
    findings = jit(tmp_path, CUTLASS if arguments is None else [*arguments], **variables)
    assert sorted(" ".join(key) for key in findings) == [*found]
    text = "\n".join(f"{finding.message} {finding.remedy}" for finding in findings.values())
    assert all(part in text for part in said or ()), text
    assert not any(part in text for part in not_said or ()), text


@pytest.mark.usefixtures("spark")
def test_modules_of_another_version_or_architecture_are_cold(tmp_path):
    """A package that was compiled ahead is no help where its code does not run."""
    build(tmp_path, "121a", EXPERTS)
    build(tmp_path, "121a", SINK)
    cache, ahead = tmp_path / ".cache" / "flashinfer", tmp_path / "ahead"
    assert jit(tmp_path, modules=FlashInferModules("0.7.2", cache)) == {}
    finding = jit(tmp_path, modules=FlashInferModules("0.7.3", cache))["jit_cache", "note"]
    assert "cold" in finding.message and "0.7.3" in finding.message
    for module in (EXPERTS, SINK):
        (ahead / module).mkdir(parents=True)
        (ahead / module / f"{module}.so").write_bytes(b"no device code")
    modules = FlashInferModules("0.7.2", tmp_path / "none", (ahead,))
    assert ("jit_cache", "note") in jit(tmp_path, modules=modules)


@pytest.mark.parametrize(("gib", "refused"), [(80.0, True), (SPARK, False)])
def test_compilers_that_need_longer_than_a_cold_start_has(monkeypatch, tmp_path, gib, refused):
    """Beside the weights one job fits into 80 GiB: the start would be ended while it works."""
    available(monkeypatch, gib)
    findings = jit(tmp_path, cold_ready_within_s=2700)
    assert (("jit_time", "error") in findings) == refused
    if refused:
        finding = findings["jit_time", "error"]
        assert "a cold start may take 45" in finding.message
        assert "sm121 warm" in str(finding.remedy)


@pytest.mark.usefixtures("spark")
def test_compilers_where_flashinfer_finds_them(tmp_path):
    """CUDA_HOME comes first: see the rows above."""
    assert ("jit_tools", "error") not in jit(tmp_path)
    ninja = tmp_path / "ninja" / "bin"
    ninja.mkdir(parents=True)
    (ninja / "ninja").touch(0o755)
    elsewhere = {"PATH": str(ninja), "CUDA_HOME": str(tmp_path / "cuda")}
    assert ("jit_tools", "error") not in jit(tmp_path, **elsewhere)


@pytest.mark.parametrize(
    ("gib", "needs", "arguments", "variables", "bounds"),
    [
        pytest.param(
            112,
            None,
            None,
            None,
            {"MAX_JOBS": "4", "FLASHINFER_NVCC_THREADS": "1"},
            id="112, MAX_JOBS 4 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            100,
            None,
            None,
            None,
            {"MAX_JOBS": "3", "FLASHINFER_NVCC_THREADS": "1"},
            id="100, MAX_JOBS 3 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            88,
            None,
            None,
            None,
            {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1"},
            id="88, MAX_JOBS 2 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            79,
            None,
            None,
            None,
            {"MAX_JOBS": "1", "FLASHINFER_NVCC_THREADS": "1"},
            id="79, MAX_JOBS 1 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            60,
            None,
            None,
            None,
            {"MAX_JOBS": "1", "FLASHINFER_NVCC_THREADS": "1"},
            id="60, MAX_JOBS 1 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            1000,
            None,
            None,
            None,
            {"MAX_JOBS": "20", "FLASHINFER_NVCC_THREADS": "1"},
            id="1000, MAX_JOBS 20 FLASHINFER_NVCC_THREADS 1",
        ),
        pytest.param(
            None,
            None,
            ("--moe-backend", "marlin", "--attention-backend", "FLASHINFER"),
            None,
            {"MAX_JOBS": "20", "FLASHINFER_NVCC_THREADS": "1"},
            id="--moe-backend marlin --attention-backend FLASHINFER",
        ),
        pytest.param(
            None,
            None,
            ("--moe-backend", "marlin", "--attention-backend", "TRITON_ATTN"),
            None,
            {},
            id="--moe-backend marlin --attention-backend TRITON_ATTN",
        ),
        pytest.param(None, Needs(), None, None, {}, id="Needs"),
        pytest.param(
            None,
            None,
            None,
            {"MAX_JOBS": "16"},
            {"FLASHINFER_NVCC_THREADS": "1"},
            id="MAX_JOBS 16, FLASHINFER_NVCC_THREADS 1",
        ),
        # two at once in a job
        pytest.param(
            None,
            None,
            None,
            {"FLASHINFER_NVCC_THREADS": "4", "FLASHINFER_CUDA_ARCH_LIST": "12.0f 12.1a"},
            {"MAX_JOBS": "2"},
            id="FLASHINFER_NVCC_THREADS 4 FLASHINFER_CUDA_ARCH_LIST",
        ),
    ],
)
def test_how_many_compilers_a_start_may_run_at_the_same_time(
    monkeypatch, gib, needs, arguments, variables, bounds
):
    """By the memory beside the weights; the attention's compilers are small: one a core. Where
    nothing is compiled, nothing is set, and what the user gave stays."""
    available(monkeypatch, gib or SPARK)
    assert bounding_variables(needs or JIT, arguments or CUTLASS, variables or {}) == bounds


def test_a_start_gets_its_bounds():
    """The shipped profile leaves it to the suite."""
    gb10 = profile.load("sm121-gpt-oss-120b")
    arguments = [*gb10.engine.arguments, *gb10.configurations["cutlass"].arguments]
    added = bounding_variables(gb10.engine.needs, arguments, gb10.engine.environment)
    assert set(added) == {"MAX_JOBS", "FLASHINFER_NVCC_THREADS"}


def test_a_version_that_is_none_is_of_another_release():
    findings = found(flashinfer="0.6.14", beside={"flashinfer-cubin": "unknown"})
    assert "cubin_of_another_release_0_6" in checks(findings)
