"""What a server rounds beyond the checkpoint, by its kernel path and its arguments."""

import pytest

from sm121.answers.served_rounding import rounding_of
from sm121.core import profile
from sm121.core.engine_settings import PathValues
from sm121.core.verdict import NotRun
from sm121.engines.requested import read_arguments
from sm121.evidence.kernel_path import KernelPath

GPT_OSS = {"quantization_config": {"quant_method": "mxfp4"}}
BUILD = {"version": "0.1.dev12770+g045293d82", "build": "mxfp4", "attention": "FLASHINFER"}
EFFORT = BUILD | {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8", "kv_cache_dtype": "fp8"}
EFFORTS = "--quantization mxfp4 --mxfp4-backend CUTLASS --mxfp4-layers moe,qkv,o,lm_head"
CPU = {"version": "0.32.0", "attention": "CPU_ATTN", "moe": "CPU"}


def read(arguments: str, required: PathValues, **path: object) -> str:
    options = read_arguments(arguments.split())
    return rounding_of(options, required, KernelPath.model_validate(path), GPT_OSS).formats


@pytest.mark.parametrize(
    ("arguments", "path", "formats"),
    [
        (
            EFFORTS,
            EFFORT,
            "qkv=mxfp4-ceil,o=mxfp4-ceil,lm_head=mxfp4-ceil,kv=fp8,experts=mxfp8-identity",
        ),
        (
            EFFORTS,
            EFFORT | {"requantised": ["qkv", "o"], "requantised_is_whole": True},
            "qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8,experts=mxfp8-identity",
        ),
        (EFFORTS, EFFORT | {"requantised": [], "kv_cache_dtype": "auto", "moe": "MARLIN"}, ""),
        (
            "--kv-cache-dtype fp8 --quantization-config "
            '{"linear":"fp8_per_channel","moe":{"activation":"mxfp8"}}',
            {
                "version": "0.33.0",
                "attention": "FLASHINFER",
                "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            },
            "qkv=fp8-channel,o=fp8-channel,kv=fp8,experts=mxfp8",
        ),
        ("--kv-cache-dtype=fp8", CPU, "kv=fp8-cut"),
        ("--kv-cache-dtype=fp8", CPU | {"kv_cache_dtype": "bfloat16"}, ""),
        ("--dtype float32", CPU, ""),
        ("", {}, ""),
    ],
)
def test_what_shows(arguments, path, formats):
    assert read(arguments, PathValues(), **path) == (formats or "checkpoint")


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [
        ("", BUILD | {"requantised": ["qkv"]}, "the format of qkv"),
        ("--quantization-config fp4ish", CPU, "the format of quantisation at load"),
        (EFFORTS, EFFORT | {"version": "0.33.0", "build": None}, "how mxfp4 rounds in 0.33.0"),
        ("", CPU | {"kv_cache_dtype": "fp8_e5m2"}, "how fp8_e5m2 rounds"),
        ("", CPU | {"kv_cache_dtype": "fp8", "version": "0.40.0"}, "how fp8 rounds in 0.40.0"),
        ("--kv-cache-dtype fp8 --calculate-kv-scales", CPU, "scales that are computed"),
        ("", {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8"}, "rounds in an unknown release"),
        ("", CPU | {"moe": "TRITON_INT8"}, "how TRITON_INT8 rounds"),
    ],
)
def test_what_does_not_show_is_not_guessed(arguments, path, message):
    with pytest.raises(NotRun, match=f"does not show .*{message}.* tell it: --rounding LIST"):
        read(arguments, PathValues(), **path)


def test_a_profile_tells_what_a_silent_path_must_show():
    """Also that one of two ways runs, which is not to know which."""
    gb10 = profile.load("sm121-gpt-oss-120b")
    marlin = gb10.path_of("marlin").model_copy(update={"moe": ("MARLIN",)})
    assert read("", marlin) == "checkpoint"
    either = marlin.model_copy(update={"moe": ("MARLIN", "FLASHINFER_CUTLASS_MXFP4_MXFP8")})
    with pytest.raises(NotRun, match="which of MARLIN, FLASHINFER_CUTLASS_MXFP4_MXFP8 runs"):
        read("", either, version="0.33.0")
