"""What a server rounds beyond the checkpoint, by its kernel path and its arguments."""

import tomllib
from pathlib import Path

import pytest
from data_rows import from_data

from sm121.answers.served_rounding import rounding_of
from sm121.core import engine_arguments, engine_settings, profile
from sm121.core.verdict import NotRun
from sm121.evidence.kernel_path import KernelPath

GPT_OSS = {"quantization_config": {"quant_method": "mxfp4"}}
SERVERS = tomllib.loads((Path(__file__).parent / "data" / "served-roundings.toml").read_text())


def read(server, path, required=None) -> str:
    row = SERVERS[server]
    options = engine_arguments.read(row["arguments"].split())
    evidence = KernelPath.model_validate(row["path"] | (path or {}))
    return rounding_of(options, required or engine_settings.PathValues(), evidence, GPT_OSS).formats


@from_data
def test_the_path_shows_it(server, path, formats):
    assert read(server, path) == formats


@from_data
def test_it_is_not_guessed(server, path, message):
    with pytest.raises(NotRun, match=f"does not show .*{message}.* tell it: --rounding LIST"):
        read(server, path)


def test_a_profile_tells_what_a_silent_path_must_show():
    """Also that one of two ways runs, which is not to know which."""
    marlin = profile.load("sm121-gpt-oss-120b").path_of("marlin")
    assert read("silent", {}, marlin.model_copy(update={"moe": ("MARLIN",)})) == "checkpoint"
    either = marlin.model_copy(update={"moe": ("MARLIN", "FLASHINFER_CUTLASS_MXFP4_MXFP8")})
    with pytest.raises(NotRun, match="which of MARLIN, FLASHINFER_CUTLASS_MXFP4_MXFP8 runs"):
        read("silent", {"version": "0.33.0"}, either)
