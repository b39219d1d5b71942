"""Arguments and variables request parts of the kernel path from a build of vLLM.

The result depends on the build's version and on the names of backends that it knows."""

import pytest

from meta_tests.fakes.servers import configuration
from meta_tests.logs import read_lines
from meta_tests.unit.engines.request_reports import CORE, compared, differences, states
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart

pytestmark = pytest.mark.usefixtures("known")

BUILD = "0.14.0rc1.dev375+g8409484b4"

CUTLASS = "FLASHINFER_CUTLASS_MXFP4_MXFP8"


@pytest.mark.parametrize(
    ("version", "build", "variable", "argument"),
    [
        pytest.param("0.13.2", None, "different", (), id="0.13.2, different"),
        pytest.param("0.18.0", None, None, ("different",), id="0.18.0, different"),
        # a build counts as the release on which it is based, whatever its name is
        pytest.param(
            "0.14.0rc1.dev375+g8409484b4",
            None,
            "different",
            (),
            id="0.14.0rc1.dev375+g8409484b4, different",
        ),
        pytest.param(
            "0.1.dev12770+g045293d82.d20260810",
            None,
            "different",
            (),
            id="0.1.dev12770+g045293d82.d20260810, different",
        ),
        pytest.param(
            "0.1.dev1+g0000000", "mxfp4", "different", (), id="0.1.dev1+g0000000, mxfp4, different"
        ),
        # an unknown build does not count as the newest release: it accepted the argument, but may
        # not read the variable
        pytest.param(
            "0.1.dev16581+g0a1b2c3",
            None,
            "not_proven",
            ("different",),
            id="0.1.dev16581+g0a1b2c3, not_proven, different",
        ),
        pytest.param(None, None, "not_proven", ("different",), id="not_proven, different"),
    ],
)
def test_version_ranges_use_the_version_of_the_build(version, build, variable, argument):
    path = KernelPath(
        attention="TRITON_ATTN", moe="MARLIN", log=LogStart(version=version, build=build)
    )
    of_variable = states(path, VLLM_ATTENTION_BACKEND="FLASHINFER")
    assert of_variable == ([variable] if variable else [])
    assert states(path, "--moe-backend", "cutlass") == [*argument]


@pytest.mark.parametrize(
    ("arguments", "environment", "moe", "state"),
    [
        pytest.param(
            ("--mxfp4-backend", "CUTLASS"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="--mxfp4-backend CUTLASS",
        ),
        pytest.param(
            ("--mxfp4-backend", "gemm"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="--mxfp4-backend gemm, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "marlin"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "different",
            id="--mxfp4-backend marlin, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "CUTLASS"),
            {},
            None,
            "different",
            id="--mxfp4-backend CUTLASS, different",
        ),
        pytest.param(
            ("--mxfp4-backend", "gemv"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="--mxfp4-backend gemv, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            ("--mxfp4-backend", "CUTLAS"),
            {},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="--mxfp4-backend CUTLAS, FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "cutlass"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_MXFP4_BACKEND cutlass",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "cutlass"},
            "MARLIN",
            "different",
            id="VLLM_MXFP4_BACKEND cutlass, MARLIN, different",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_BACKEND": "gemv"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_BACKEND gemv",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_MOE_KERNEL": "gemm"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_MXFP4_MOE_KERNEL gemm",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_MOE_KERNEL": "gemv"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_MOE_KERNEL gemv",
        ),
        pytest.param(
            (),
            {"VLLM_MXFP4_ACTIVATION": "mxfp8"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="VLLM_MXFP4_ACTIVATION mxfp8",
        ),
        pytest.param(
            (),
            {"FLASHINFER_MOE_TILE": "128x128"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "not_applicable",
            id="FLASHINFER_MOE_TILE 128x128",
        ),
        pytest.param(
            (),
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"},
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "resolved",
            id="VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 1",
        ),
    ],
)
def test_requested_values_of_the_mxfp4_build(arguments, environment, moe, state):
    """The MXFP4 build reads its own variables although its list of variables does not contain them.

    It warns about none of them."""
    path = KernelPath(moe=moe, log=LogStart(version=BUILD))
    (report,) = compared(path, *arguments, **environment)
    assert report.state == state
    wrong = state != "resolved"
    assert bool(differences(configuration(*arguments, **environment), path, environment)) == wrong
    assert ("no effect in this build" in report.message) == (state == "not_applicable")


def test_an_unknown_name_replaced_by_auto_is_a_difference():
    unknown = "Unknown backend 'CUTLAS' from --mxfp4-backend. Valid options: cutlass. Using auto."
    lines = (unknown, "SM121 auto-selected: cutlass")
    path = read_lines([f"{CORE}[mxfp4.py:1] [MXFP4] {line}" for line in lines])
    (wrong,) = differences(configuration("--mxfp4-backend", "CUTLAS"), path, {})
    assert "Unknown backend 'CUTLAS'" in wrong
