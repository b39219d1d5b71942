"""Each value of the required path is compared with the resolved one, in a real log of a GB10 with
one change."""

import re

import pytest

from meta_tests.folders import DATA
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.engines import requested
from sm121.evidence.kernel_path import read_log
from sm121.evidence.requirement import contradictions, not_shown

LOGS = DATA / "gb10"
BUILD = profile.load("sm121-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
STOCK = profile.load("sm121-gpt-oss-120b").judging(None, "0.33.0")
UNFUSED = "unfused_0804_clean.log"


def judged(tmp_path, *changes, log=UNFUSED, configuration="mxfp4", own=BUILD, arguments=()):
    """Return how a log with replaced texts contradicts the path that the profile requires."""
    text = (LOGS / log).read_text("utf-8")
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    file = tmp_path / "server.log"
    file.write_text(text)
    wants = ServerConfiguration("x", "vllm", "python", "m", "m", arguments=tuple(arguments))
    required = own.path_of(configuration, requested.patterns(wants))
    return [*map(str, contradictions(required, read_log(file), file, configuration))]


def without(log, *parts):
    """Return replacements that remove the lines of a log which contain one of these parts."""
    lines = (LOGS / log).read_text("utf-8").splitlines(keepends=True)
    found = []
    for line in dict.fromkeys(lines):
        if any(part in line for part in parts):
            found.append((line, ""))
    return found


EAGER = [
    ("enforce_eager=False", "enforce_eager=True"),
    *without(UNFUSED, "Graph capturing", "CUDA graph"),
]
CONTEXT = [("max model len 131072", "max model len 999"), ("max_seq_len=131072", "max_seq_len=999")]
BF16_KV = [("kv_cache_dtype=fp8", "kv_cache_dtype=auto"), *without(UNFUSED, "Using fp8 data type")]


def test_the_builds_own_log_is_as_its_configuration_says(tmp_path):
    assert judged(tmp_path) == []
    path = read_log(LOGS / UNFUSED)
    assert not_shown(BUILD.path_of("mxfp4"), path) == ["requantised o", "requantised qkv"]


@pytest.mark.parametrize(
    ("changes", "log", "says"),
    [
        pytest.param(
            EAGER,
            UNFUSED,
            "cuda_graphs: expected True, got False",
            id="EAGER, UNFUSED, cuda_graphs: expected True, got False",
        ),
        pytest.param(
            (("kv_cache_dtype=fp8", "kv_cache_dtype=fp8_e5m2"),),
            UNFUSED,
            "kv_cache_dtype: expected fp8 or fp8_e4m3, got fp8_e5m2",
            id="kv_cache_dtype=fp8 kv_cache_dtype=fp8_e5m2, UNFUSED",
        ),
        pytest.param(
            (("dtype=torch.bfloat16", "dtype=torch.float16"),),
            UNFUSED,
            "dtype: expected bfloat16, got float16",
            id="dtype=torch.bfloat16 dtype=torch.float16, UNFUSED",
        ),
        pytest.param(
            (
                (
                    "speculative_config=None",
                    "speculative_config=SpeculativeConfig(method='eagle3', x",
                ),
            ),
            UNFUSED,
            "speculative: expected none, got eagle3",
            id="speculative_config=None",
        ),
        pytest.param(
            (("enable_prefix_caching=True", "enable_prefix_caching=False"),),
            UNFUSED,
            "prefix_caching: expected True, got False",
            id="enable_prefix_caching=True enable_prefix_caching=False",
        ),
        pytest.param(
            CONTEXT,
            UNFUSED,
            "context: expected 131072, got 999",
            id="CONTEXT, UNFUSED, context: expected 131072, got 999",
        ),
        pytest.param(
            BF16_KV,
            UNFUSED,
            r"a line ' kv_cache_dtype=auto.*' that must not be there: .*Initializing",
            id="BF16_KV, UNFUSED, a line ' kv_cache_dtype=auto",
        ),
        pytest.param(
            (("quantization=mxfp4", "quantization=None"),),
            UNFUSED,
            "quantization: expected mxfp4, got none",
            id="quantization=mxfp4 quantization=None, UNFUSED",
        ),
        pytest.param(
            (("Using backend: CUTLASS", "Using backend: MARLIN"),),
            UNFUSED,
            "moe: expected FLASHINFER_CUTLASS_MXFP4_MXFP8, got MARLIN",
            id="Using backend: CUTLASS Using backend: MARLIN, UNFUSED",
        ),
        pytest.param(
            tuple(without(UNFUSED, "lm_head quantized")),
            UNFUSED,
            "^no line .*lm_head quantized",
            id="without UNFUSED lm_head quantized, UNFUSED, no line",
        ),
        pytest.param(
            (),
            "fused_0804_clean.log",
            "moe_variant: expected unfused, got fused",
            id="fused_0804_clean.log, moe_variant: required unfused",
        ),
    ],
)
def test_each_different_value_contradicts(tmp_path, changes, log, says):
    lines = judged(tmp_path, *changes, log=log)
    assert any(re.search(says, line) for line in lines), lines


def test_values_without_a_line_are_not_shown_and_contradict_nothing(tmp_path):
    silent = [(" kv_cache_dtype=fp8", ""), *BF16_KV[1:]]
    assert judged(tmp_path, *silent) == []
    path = read_log(tmp_path / "server.log")
    assert "kv_cache_dtype" in not_shown(BUILD.path_of("mxfp4"), path)


def test_arguments_override_values_but_not_required_features(tmp_path):
    """Arguments may change values of the kernel path, but not switch off required features.

    An owner may request float16 or drafts. If the owner switches off graphs that a configuration
    requires, the run does not test this configuration.
    """
    for change, arguments in (
        (("dtype=torch.bfloat16", "dtype=torch.float16"), ["--dtype", "float16"]),
        (("enable_prefix_caching=True", "enable_prefix_caching=False"),
         ["--no-enable-prefix-caching"]),
    ):  # fmt: skip
        assert judged(tmp_path, change), change
        assert judged(tmp_path, change, arguments=arguments) == [], change
    assert judged(tmp_path, *EAGER, arguments=["--enforce-eager"])
    fp8 = STOCK.path_of("stock", ())
    assert fp8.kv_cache_dtype == ("auto", "bfloat16") and fp8.cuda_graphs is True
    wants = ServerConfiguration(
        "x", "vllm", "p", "m", "m", arguments=("--kv-cache-dtype", "fp8", "--enforce-eager")
    )
    eased = STOCK.path_of("stock", requested.patterns(wants))
    assert (eased.kv_cache_dtype, eased.cuda_graphs) == (None, None)


def test_flashinfer_s_name_of_fp8_is_no_second_value(tmp_path):
    """FlashInfer's name of an FP8 KV cache does not count as a second value.

    Releases print the KV dtype twice: with the configuration's name and with torch's name."""
    other = "[selector.py:112] Using HND KV"
    line = (
        "[flashinfer.py:967] FlashInfer resolved query dtypes: prefill=torch.bfloat16, "
        "decode=torch.bfloat16, decode_backend=flashinfer-native, kv_cache_dtype=torch.{}, "
        "arch=sm121"
    )
    prefix = "(EngineCore_DP0 pid=55630) INFO 02-09 07:27:31 "

    def with_line(dtype):
        return (f"{prefix}{other}", f"{prefix}{line.format(dtype)}\n{prefix}{other}")

    for called in ("fp8", "fp8_e4m3"):
        changes = [with_line("float8_e4m3fn"), ("kv_cache_dtype=fp8", f"kv_cache_dtype={called}")]
        assert judged(tmp_path, *changes) == []
        arguments = ("--kv-cache-dtype", called)
        named = judged(tmp_path, *changes, configuration="stock", arguments=arguments)
        assert not [text for text in named if text.startswith("kv_cache_dtype")]
    assert any("got fp8 and bfloat16" in text for text in judged(tmp_path, with_line("bfloat16")))
