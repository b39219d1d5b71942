"""The page for readers of the original documents contains each name that these documents use."""

import pytest

from meta_tests.folders import ROOT

PAGE = (ROOT / "docs" / "from-the-plan.md").read_text("utf-8")

SCRIPTS = """
    benchmark_matrix.py collect_benchmark_metadata.sh flashinfer_benchmark.py profile_decode_only.py
    profile_sm121_decode_performance.py setup_mxfp4_v2.sh sm121_mxfp4_moe_gemm_bench.py
    sm121_vllm_test_harness.sh test_attention_sink.py test_fused_moe.py test_level1_smoke.sh
    test_level1.5_kernel_validation.sh test_level2_correctness.sh test_level3_stress.sh
    test_level4_benchmark.sh test_level5_regression.sh test_level6_matrix.sh validate_kernel_path.py
    verify_mxfp4_moe_kernel.py verify_sm121_mxfp4_moe_fa2_sinks.py
"""
FILES = """
    Dockerfile Dockerfile.dev backend_summary.log baseline_decode.nsys-rep baseline_kernels.txt
    crash_diagnostics_ decode_profile.nsys-rep decorators_ngc.patch dmesg.log docker-compose.dev.yml
    docker-compose.yml fastsafetensors.patch flashinfer_api.log marlin_flashinfer_profile.nsys-rep
    mxfp4_sm121.patch nvidia_smi.log perf_artifacts processes.log profile_outputs server_log.txt
"""
DOCUMENTS = """
    AGENTS.md BENCHMARK_RESULTS.md CLAUDE.md FEATURE_<name>.md FEATURE_<name>_<date>.md
    FEATURE_CUTLASS_GEMM.md FEATURE_MATRIX.md FEATURE_RUNNER_CACHING.md FEATURE_TEMPLATE.md
    FLASH_ATTN_SM121_BUILD.md GEMV_IMPLEMENTATION_PLAN.md LLAMA_CPP_ANALYSIS.md MXFP4_V2_PLAN.md
    PERFORMANCE_GAP_ANALYSIS.md SGLANG_ANALYSIS.md SM120_MOE_TILE_EXPANSION.md
    SM121_MOE_FUSE_BF16_TO_FP8_EXPAND_PLAN.md SM121_TESTING_README.md TEST_LOGS
    TYPE_TRANSFORMATION_ANALYSIS.md UPSTREAM_TODOS.md VLLM_BASELINE_ANALYSIS.md
"""
COMMANDS = """
    cuobjdump llama-benchy nsys-ui show-config warmup_jit_cache FLASHINFER_LOGLEVEL
    FLASHINFER_MOE_TILE
    DEBUG_MODE MAX_JOBS STRESS_CONCURRENCY STRESS_REQUESTS VLLM_MXFP4_ACTIVATION
    VLLM_MXFP4_MOE_KERNEL is_blackwell_class --kv-layout --output-dir --regime --require-fp4
    --skip-server
"""


@pytest.mark.parametrize("name", [*SCRIPTS.split(), *FILES.split(), *DOCUMENTS.split()])
def test_each_file_of_the_original_documents_has_its_row(name):
    assert name in PAGE


@pytest.mark.parametrize("name", COMMANDS.split())
def test_each_command_of_the_original_documents_has_its_row(name):
    assert name in PAGE
