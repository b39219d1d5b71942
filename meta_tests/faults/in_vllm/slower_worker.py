"""Runs inside vLLM's worker: every forward pass takes longer, by the share in ``SLOWED_BY``. vLLM
is started with ``--worker-extension-cls slower_worker.Slower``. Imports nothing of the suite."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_SHARE = float(os.environ.get("SLOWED_BY", "0"))


class Slower:
    """Nothing to call: what is patched is patched when the worker's module is loaded."""


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
