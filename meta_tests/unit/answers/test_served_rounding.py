"""A server's rounding beyond the checkpoint is derived from its kernel path and its arguments."""

import tomllib

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import path_with
from sm121.answers.served_rounding import rounding_of
from sm121.core import engine_arguments, engine_settings, profile
from sm121.core.verdict import NotRun

GPT_OSS = {"quantization_config": {"quant_method": "mxfp4"}}
SERVERS = tomllib.loads((DATA / "served-roundings.toml").read_text())


def read(server, path, required=None) -> str:
    row = SERVERS[server]
    options = engine_arguments.parse_options(row["arguments"].split())
    evidence = path_with(row["path"] | (path or {}))
    return rounding_of(options, required or engine_settings.PathValues(), evidence, GPT_OSS).formats


# `served-roundings.toml` has the same rows. `path` adds values to the path.
@pytest.mark.parametrize(
    ("server", "path", "formats"),
    [
        pytest.param(
            "effort",
            None,
            "qkv=mxfp4-ceil,o=mxfp4-ceil,lm_head=mxfp4-ceil,kv=fp8,experts=mxfp8-identity",
            id="effort",
        ),
        pytest.param(
            "effort",
            {"requantised": ["qkv", "o"], "requantised_is_whole": True},
            "qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8,experts=mxfp8-identity",
            id="effort, requantised qkv o requantised_is_whole True",
        ),
        pytest.param(
            "effort",
            {"requantised": [], "kv_cache_dtype": "auto", "moe": "MARLIN"},
            "checkpoint",
            id="effort, requantised kv_cache_dtype auto moe MARLIN",
        ),
        pytest.param(
            "linear-fp8",
            None,
            "qkv=fp8-channel,o=fp8-channel,kv=fp8,experts=mxfp8",
            id="linear-fp8",
        ),
        ("cpu", None, "kv=fp8-cut"),
        pytest.param(
            "cpu",
            {"kv_cache_dtype": "bfloat16"},
            "checkpoint",
            id="cpu, kv_cache_dtype bfloat16, checkpoint",
        ),
        ("plain cpu", None, "checkpoint"),
        ("silent", None, "checkpoint"),
    ],
)
def test_the_path_shows_it(server, path, formats):
    assert read(server, path) == formats


@pytest.mark.parametrize(
    ("server", "path", "message"),
    [
        pytest.param(
            "silent",
            {"requantised": ["qkv"], "build": "mxfp4"},
            "the format of qkv",
            id="silent, requantised qkv build mxfp4, the format of qkv",
        ),
        ("fp4ish", None, "the format of quantisation at load"),
        pytest.param(
            "effort",
            {"version": "0.33.0", "build": ""},
            "how mxfp4 rounds in 0.33.0",
            id="effort, version 0.33.0 build, how mxfp4 rounds in 0.33.0",
        ),
        pytest.param(
            "plain cpu",
            {"kv_cache_dtype": "fp8_e5m2"},
            "how fp8_e5m2 rounds",
            id="plain cpu, kv_cache_dtype fp8_e5m2, how fp8_e5m2 rounds",
        ),
        pytest.param(
            "cpu",
            {"version": "0.40.0"},
            "how fp8 rounds in 0.40.0",
            id="cpu, version 0.40.0, how fp8 rounds in 0.40.0",
        ),
        ("computed scales", None, "scales that are computed"),
        pytest.param(
            "silent",
            {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8"},
            "rounds in an unknown release",
            id="silent, moe FLASHINFER_CUTLASS_MXFP4_MXFP8, rounds in",
        ),
        pytest.param(
            "plain cpu",
            {"moe": "TRITON_INT8"},
            "how TRITON_INT8 rounds",
            id="plain cpu, moe TRITON_INT8, how TRITON_INT8 rounds",
        ),
    ],
)
def test_unknown_formats_are_not_run(server, path, message):
    with pytest.raises(NotRun, match=f"does not show .*{message}.* name it with --rounding LIST"):
        read(server, path)


def test_a_profile_with_one_format_gives_it_for_a_path_without_evidence():
    """A profile with one format gives this format if there is no evidence.

    A profile that accepts two formats does not show which one ran."""
    marlin = profile.load("sm121-gpt-oss-120b").path_of("marlin")
    assert read("silent", {}, marlin.model_copy(update={"moe": ("MARLIN",)})) == "checkpoint"
    either = marlin.model_copy(update={"moe": ("MARLIN", "FLASHINFER_CUTLASS_MXFP4_MXFP8")})
    with pytest.raises(NotRun, match="which of MARLIN, FLASHINFER_CUTLASS_MXFP4_MXFP8 runs"):
        read("silent", {"version": "0.33.0"}, either)
