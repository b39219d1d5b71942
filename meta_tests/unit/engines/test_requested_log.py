"""The results of a server's requests are derived from its log, its metrics and its variables."""

import pytest

from meta_tests.fakes.servers import configuration
from meta_tests.logs import read_lines
from meta_tests.texts import text_file
from meta_tests.unit.engines.request_reports import CORE, GB10_LOG, compared, differences, states
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath, mistaken_environment
from sm121.evidence.metrics import with_metrics

pytestmark = pytest.mark.usefixtures("known")

ASKED = "(APIServer pid=1) INFO 10-05 02:13:00 [utils.py:253] non-default args: "


def of_log(arguments: str, *lines: str) -> dict[str, str]:
    path = requested.of_log(read_lines([ASKED + arguments, *lines]), "vllm")
    assert path.differences == [r.message for r in path.requested if r.state == "different"]
    return {report.by: report.state for report in path.requested}


def test_requested_values_are_read_from_a_log():
    assert of_log(text_file("vllm-asked.txt").strip(), *GB10_LOG) == {
        "--attention-backend TRITON_ATTN": "different",
        "--enforce-eager true": "different",
        "--compilation-config.cudagraph_mode FULL": "resolved",
        "--kv-cache-dtype fp8": "not_proven",  # the excerpt may not contain the line
        "--speculative-config.method eagle3": "different",
    }
    assert of_log("{'enforce_eager': False, 'kv_cache_dtype': 'auto'}", *GB10_LOG) == {}
    # The line may contain Python's default text for an object, which is not a literal. The other
    # arguments of the line are read nevertheless.
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


def test_values_neither_requested_nor_logged_are_no_difference():
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
    assert path.speculative == "none"  # tokens were generated, but there are no counters of drafts
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
    assert path.block_size is None  # two engines report different values
    text = 'vllm:generation_tokens_total{engine="0"} 0.0\n'
    assert with_metrics(KernelPath(), text).speculative is None
    drafting = 'vllm:generation_tokens_total 3\nvllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    assert with_metrics(KernelPath(), drafting).speculative is None


def test_unknown_variable_is_not_applicable_and_never_passes():
    path = read_lines([*GB10_LOG[:-2], CORE + "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."])
    variables_ = {"VLLM_MXFP4_BACKEND": "marlin", "FLASHINFER_MOE_TILE": "128x128"}
    reports = compared(path, **variables_)
    # Marlin ran, but the variable is not the cause.
    assert [report.state for report in reports] == ["not_applicable"] * 2
    wrong = differences(configuration(**variables_), path, variables_)
    for line in wrong:
        assert "not applicable" in line and "knows no such variable" in line


def test_variables_that_images_set_are_no_request():
    harmless = {"VLLM_BUILD_COMMIT": "x", "VLLM_CPU_SERVICE_HOST": "y"}
    assert compared(KernelPath(), **dict.fromkeys(OF_SERVICES, "x")) == []
    assert compared(KernelPath(), **harmless) == []


#: Variables that images set: NGC's, eugr's, and those that vLLM's own build reads.
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

#: Kubernetes sets these in every pod if a service is named vllm or vllm-server.
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

#: Variables that look similar but are mistakes.
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


def test_variables_set_by_an_image_are_no_mistake():
    """Variables that an image sets are no mistake.

    The engine warns about a variable that its image's build set. A variable that only looks similar
    is the user's mistake."""
    path = KernelPath(unknown_env=[*OF_IMAGES, *OF_SERVICES, *NOT_OF_IMAGES])
    assert mistaken_environment(path) == [*NOT_OF_IMAGES]
    assert compared(KernelPath(), **dict.fromkeys(OF_IMAGES, "x")) == []


def test_secret_values_are_not_shown():
    (report,) = compared(KernelPath(), VLLM_MY_TOKEN="hf_" + "a" * 30)
    assert report.by == "VLLM_MY_TOKEN=[redacted]"
