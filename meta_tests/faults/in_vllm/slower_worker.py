"""Lengthen every forward pass by the fraction ``SLOWED_BY``. This module runs in vLLM's worker.

vLLM is started with ``--worker-extension-cls slower_worker.Slower``. This module imports nothing
from the suite."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_SHARE = float(os.environ.get("SLOWED_BY", "0"))


class Slower:
    """An empty class. The patch is made when the worker imports this module."""


def _slower(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = forward(*arguments, **keywords)
        time.sleep(_SHARE * (time.perf_counter() - started))
        return result

    return run


if _SHARE:
    GPUModelRunner.execute_model = _slower(GPUModelRunner.execute_model)
