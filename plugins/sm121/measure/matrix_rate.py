"""How fast matrices are multiplied: the other bound, that of prefill."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from sm121.measure.stream_bandwidth import gpu_seconds, gpu_torch

_GPU_SIZE = 8192
_CPU_SIZE = 1024


@dataclass(frozen=True)
class MatrixRate:
    """A matrix product's rate."""

    #: Floating point operations per second / 1e12 of each repetition.
    samples: tuple[float, ...]
    method: str

    @property
    def tflop_s(self) -> float:
        """The median."""
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.samples) - min(self.samples)) / self.tflop_s


def matrix_rate(*, device: str = "cpu", repetitions: int = 7) -> MatrixRate:
    """Multiply square matrices: float32 by numpy's BLAS on the CPU, bfloat16 by torch on a GPU.

    Raises:
        Sm121Error: no torch or no such device.
    """
    if device == "cpu":
        return _cpu(repetitions)
    torch = gpu_torch(device)
    shape = (_GPU_SIZE, _GPU_SIZE)
    left = torch.randn(shape, dtype=torch.bfloat16, device=device)
    right = torch.randn(shape, dtype=torch.bfloat16, device=device)
    seconds = gpu_seconds(torch, lambda: torch.matmul(left, right), repetitions)
    samples = tuple(2.0 * _GPU_SIZE**3 / each / 1e12 for each in seconds)
    return MatrixRate(samples, f"torch bf16 {_GPU_SIZE}^3")


def _cpu(repetitions: int) -> MatrixRate:
    generator = np.random.default_rng(0)
    left = generator.random((_CPU_SIZE, _CPU_SIZE), dtype=np.float32)
    right = generator.random((_CPU_SIZE, _CPU_SIZE), dtype=np.float32)
    samples = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        np.matmul(left, right)
        samples.append(2.0 * _CPU_SIZE**3 / (time.perf_counter() - start) / 1e12)
    return MatrixRate(tuple(samples[1:]), f"numpy float32 {_CPU_SIZE}^3")  # the first one warms
