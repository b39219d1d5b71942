"""Kernel: what ran is what was asked for.

When the kernel path contradicts what was asked for, numbers of that configuration are INVALID.
"""

from __future__ import annotations

import pytest

from sm121.compilation import libraries, modules, probes
from sm121.compilation.architecture import CodeArchitecture
from sm121.engines import interpreter
from sm121.evidence import requirement

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu", "gpu")]


def test_kernel_path_is_the_required_one(server, kernel_path, profile):
    """Attention, MoE and KV layout as the profile requires; no fallback, no unknown variable."""
    if server.log is None:
        pytest.skip("NOT_RUN: no log of the attached server; give --server-log")
    wrong = requirement.contradictions(
        profile.kernel_path, kernel_path, server.log, profile.under_test
    )
    assert not wrong, "; ".join(wrong) + f". Evidence: {server.log}"


# ------------------------------------------------------------------------------------ Compilation
# For GB10, on any machine with nvcc. Judged by machine instructions: the exit status is 0 for code
# that was replaced by software or by a trap.


def test_flashinfer_compiles_for_gb10(compilation):
    """FLASHINFER_CUDA_ARCH_LIST resolves to architectures that have FP4 instructions."""
    wrong = compilation.wrong_architectures()
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("probe", probes.names("probes"))
def test_fp4_instruction(compilation, probe):
    """Hardware on 120a, 121a, 120f, 121f; refused, or seen to be software, on plain 120 and 121."""
    wrong = compilation.wrong_outcomes(probe)
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("probe", probes.names("headers"))
def test_flashinfer_header(compilation, probe):
    """FlashInfer's own conversion and multiplication become the hardware's instructions."""
    wrong = compilation.wrong_outcomes(probe)
    assert not wrong, "; ".join(wrong)


@pytest.mark.slow("FlashInfer's modules take up to minutes each to compile")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", modules.names())
def test_flashinfer_module(compilation, module):
    """Attention, quantisation and the MoE of gpt-oss: what must be in their SASS is, no trap."""
    wrong = compilation.wrong_in_module(module)
    assert not wrong, "; ".join(wrong)


@pytest.mark.applies_to("gpu")
def test_engine_has_code_for_this_gpu(conformance, profile):
    """A wheel without machine code for the target is named before the first token is asked for."""
    configuration = conformance.managed_configuration(profile.under_test)
    origins = interpreter.import_origins(
        configuration.python, libraries.PACKAGES, conformance.engine_environment(configuration)
    )
    gpu = CodeArchitecture.parse(profile.arch).number
    wrong = libraries.without_code(configuration.engine, origins, gpu)
    assert not wrong, "; ".join(wrong)
