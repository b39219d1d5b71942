"""Preflight checks which modules are not compiled yet, where the compilers are, and how many may
run."""

import pytest

from meta_tests.unit.engines.preflight_starts import CUTLASS, JIT, SPARK, available, build, jit
from sm121.compilation.jit import FlashInferModules, bounding_variables
from sm121.core import profile
from sm121.core.engine_settings import Needs

EXPERTS = "fused_moe_120"
SINK = "batch_prefill_attention_sink_bf16_swa_True_fa2"


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, SPARK)


@pytest.mark.usefixtures("spark")
def test_modules_of_another_version_or_architecture_are_cold(tmp_path):
    """Modules of another version or architecture do not count as compiled.

    A precompiled package does not help if its code does not run here."""
    build(tmp_path, "121a", EXPERTS)
    build(tmp_path, "121a", SINK)
    cache = tmp_path / ".cache" / "flashinfer"
    ahead = tmp_path / "ahead"
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
    """Compilers that need longer than the time limit of a cold start are reported.

    80 GiB have room for one job besides the weights, so the start would be stopped while it
    compiles."""
    available(monkeypatch, gib)
    findings = jit(tmp_path, cold_ready_within_s=2700)
    assert (("jit_time", "error") in findings) == refused
    if refused:
        finding = findings["jit_time", "error"]
        assert "a cold start may take 45" in finding.message
        assert "sm121 warm" in str(finding.remedy)


@pytest.mark.parametrize(("text", "refused"), [("21", False), ("90", False), ("120", True)])
def test_more_compilers_than_cores_are_refused_by_the_memory_alone(
    monkeypatch, tmp_path, text, refused
):
    """More compilers than cores are refused only because of the memory.

    A Spark has 20 cores. 1,000 GiB without the weights have room for about 100 jobs."""
    available(monkeypatch, 1000)
    assert (("max_jobs", "error") in jit(tmp_path, MAX_JOBS=text)) == refused


@pytest.mark.usefixtures("spark")
def test_compilers_where_flashinfer_finds_them(tmp_path):
    """Compilers are found in the same places in which FlashInfer looks for them.

    As the earlier rows show, CUDA_HOME has priority."""
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
        # two compilers run in one job
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
def test_number_of_compiler_jobs_of_a_start(monkeypatch, gib, needs, arguments, variables, bounds):
    """The number of compile jobs of a start depends on the memory besides the weights.

    The compilers of the attention need little memory, so there is one per core. If nothing is
    compiled, nothing is set, and the user's values stay."""
    available(monkeypatch, gib or SPARK)
    assert bounding_variables(needs or JIT, arguments or CUTLASS, variables or {}) == bounds


def test_a_start_gets_its_bounds():
    """A start gets limits for its compilers. With the shipped profile, the suite chooses them."""
    gb10 = profile.load("sm121-gpt-oss-120b")
    arguments = [*gb10.engine.arguments, *gb10.configurations["cutlass"].arguments]
    added = bounding_variables(gb10.engine.needs, arguments, gb10.engine.environment)
    assert set(added) == {"MAX_JOBS", "FLASHINFER_NVCC_THREADS"}
