"""Fixtures for the tests of engines."""

import pytest

from sm121.evidence import variables


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with the abilities of vLLM 0.18, so that no interpreter is started."""
    names = {
        "VLLM_": (
            "VLLM_ATTENTION_BACKEND",
            "VLLM_KV_CACHE_LAYOUT",
            "VLLM_MXFP4_USE_MARLIN",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
            "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
        ),
        "FLASHINFER_": ("FLASHINFER_CUDA_ARCH_LIST",),
    }

    def ask(_python, _environment, registries):
        return {r.prefix: variables.Knowledge(True, frozenset(names[r.prefix])) for r in registries}

    monkeypatch.setattr(variables, "ask", ask)
