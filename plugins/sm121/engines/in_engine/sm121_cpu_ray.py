"""Run vLLM's executor for Ray on the CPU, which no release of vLLM supports.

vLLM's CPU platform does not name the Ray resource that a rank needs. This file adds two things; the
rest is vLLM's own code:

- the name of a Ray resource, of which each rank takes one unit
- a class for ranks without a GPU

It runs inside vLLM, without the suite.
"""

import os
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

KEY = "sm121_rank"
current_platform.ray_device_key = KEY


class CpuRayWorkerProc(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """A rank without a GPU."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the id of the node, and no GPU."""
        return ray.get_runtime_context().get_node_id(), []


class CpuRayExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """An executor whose ranks are `CpuRayWorkerProc`."""

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
        super()._init_executor()

    def _build_runtime_env(self) -> dict[str, Any]:
        environment: dict[str, Any] = super()._build_runtime_env()
        variables = environment.setdefault("env_vars", {})
        # PYTHONPATH contains the folder of this file.
        variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        return environment
