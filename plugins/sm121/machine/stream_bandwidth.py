"""Measure the memory bandwidth and the matrix rate of the CPU (numpy) or a GPU (torch).

Decoding reads every active weight once per token. It is limited by the bandwidth of reading, not of
copying; therefore a reduction is measured. Prefill is limited by the rate of matrix products.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sm121.core.architecture import gpu_number, opened_nvml
from sm121.core.errors import Sm121Error
from sm121.measure.statistics import Floats

#: The minimum duration of one timing on a CPU, in seconds. Small buffers are read several times.
_SHORTEST_S = 0.02
#: The number of timings in one attempt on a CPU.
_REPETITIONS = 7
#: The number of attempts on a CPU, of which the fastest is used.
_ATTEMPTS = 3
#: The pause between two attempts, in seconds.
_PAUSE_S = 0.3
#: The duration of work after which a GPU's clocks are stable, in seconds.
_GPU_WARM_S = 1.0
#: The duration of one timing on a GPU, in seconds.
_GPU_TIMING_S = 0.1
#: The number of timings on a GPU.
_GPU_TIMINGS = 10
#: The duration of the load of matrix products while NVML is read, in seconds.
_LOADED_S = 1.0
#: The number of columns of the matrix that a GPU reads. Rows in gpt-oss's layers have about this
#: length.
_COLUMNS = 8192
#: The number of rows and of columns of the matrices that a GPU multiplies.
_GPU_MATRIX = 8192
#: The number of rows and of columns of the matrices that a CPU multiplies.
_CPU_MATRIX = 1024
#: The time between two readings of NVML, in seconds.
_NVML_EVERY_S = 0.05
#: NVML's reasons for throttling that show a defect.
_HARMFUL_REASONS = (
    "HwSlowdown",
    "SwThermalSlowdown",
    "HwThermalSlowdown",
    "HwPowerBrakeSlowdown",
)


@dataclass(frozen=True)
class Bandwidth:
    """The measured bandwidth of reading a buffer."""

    #: The bandwidth of each repetition in GB/s (1e9).
    samples: tuple[float, ...]
    method: str

    @property
    def gb_s(self) -> float:
        """The median, in GB/s (1e9)."""
        return float(np.median(self.samples))

    @property
    def best_gb_s(self) -> float:
        """The bandwidth of the fastest repetition, which other processes disturbed least."""
        return max(self.samples)


def read_bandwidth(size_bytes: int, *, device: str = "cpu") -> Bandwidth:
    """Measure the bandwidth of reading a buffer repeatedly.

    Args:
        size_bytes: The size of the buffer: several times the cache to measure the memory's
            bandwidth, or the bytes that an engine reads per token to measure the bandwidth that the
            engine can reach.
        device: ``cpu``, with a thread for each core, or a torch device such as ``cuda:0``.

    Raises:
        Sm121Error: torch, the device or enough memory is missing.
    """
    try:
        if device == "cpu":
            return _read_cpu(size_bytes, os.cpu_count() or 1)
        return _read_gpu(size_bytes, device)
    except MemoryError as error:
        raise Sm121Error(
            f"memory bandwidth: expected {size_bytes >> 20} MiB of free memory for "
            "the buffer, got less"
        ) from error


def matrix_rate(device: str) -> tuple[list[float], str]:
    """Measure the rate of square matrix products: float32 (numpy, CPU) or bfloat16 (torch, GPU).

    Args:
        device: ``cpu`` or a torch device.

    Returns:
        The rate of each repetition in TFLOP/s (1e12), and the method.

    Raises:
        Sm121Error: torch or the device is missing.
    """
    if device == "cpu":
        size = _CPU_MATRIX
        method = f"numpy float32 {size}^3"
        seconds = _cpu_matrix_seconds(size)
    else:
        size = _GPU_MATRIX
        method = f"torch bf16 {size}^3"
        torch = gpu_torch(device)
        first = torch.randn((size, size), dtype=torch.bfloat16, device=device)
        second = torch.randn((size, size), dtype=torch.bfloat16, device=device)
        seconds = gpu_seconds(torch, lambda: torch.matmul(first, second))
    return [2.0 * size**3 / duration_s / 1e12 for duration_s in seconds], method


def _cpu_matrix_seconds(size: int) -> list[float]:
    """Return the seconds of each matrix product on the CPU, after a warm-up product."""
    generator = np.random.default_rng(0)
    first = generator.random((size, size), dtype=np.float32)
    second = generator.random((size, size), dtype=np.float32)

    def multiply() -> object:
        return np.matmul(first, second)

    _seconds(multiply, 1)
    return [_seconds(multiply, 1) for _ in range(_REPETITIONS)]


def last_level_cache_bytes() -> int:
    """Return the size of this CPU's largest cache; 32 MiB if the kernel does not report it."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text("ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 << 20)


def _read_cpu(size_bytes: int, threads: int) -> Bandwidth:
    """Read a buffer on the CPU with one thread or with several, whichever is faster.

    numpy releases the interpreter lock while it reads. With few cores, one thread can be faster
    than a pool of threads.
    """
    # Write the pages, so that they are mapped.
    buffer: Floats = np.ones(size_bytes // 8, dtype=np.float64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:

        def read_alone() -> object:
            return buffer.sum()

        def read_together() -> object:
            return list(pool.map(np.sum, parts))

        used = 1
        best: Callable[[], object] = read_alone
        # Compare the fastest of several passes, so that the choice does not depend on chance.
        if threads > 1 and _fastest(read_together) <= _fastest(read_alone):
            used = threads
            best = read_together
        passes = max(1, int(np.ceil(_SHORTEST_S / max(_seconds(best, 1), 1e-7))))
        samples: tuple[float, ...] = ()
        # Make several attempts, because threads may share a core for a fraction of a second. The
        # fastest attempt is used.
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S)
            seconds = [_seconds(best, passes) for _ in range(_REPETITIONS)]
            rates = tuple(size_bytes * passes / duration_s / 1e9 for duration_s in seconds)
            if not samples or np.median(rates) > np.median(samples):
                samples = rates
    return Bandwidth(samples, f"numpy sum of float64, {used} threads")


def _fastest(read: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several passes."""
    return min(_seconds(read, 1) for _ in range(_REPETITIONS))


def _seconds(read: Callable[[], object], passes: int) -> float:
    """Return the seconds of some passes on the CPU."""
    start = time.perf_counter()
    for _ in range(passes):
        read()
    return time.perf_counter() - start


def _read_gpu(size_bytes: int, device: str) -> Bandwidth:
    """Read a buffer on a GPU with the faster of two kernels."""
    torch = gpu_torch(device)
    rows = max(size_bytes // (2 * _COLUMNS), 1)
    try:
        matrix = torch.ones((rows, _COLUMNS), dtype=torch.bfloat16, device=device)
        vector = torch.ones(_COLUMNS, dtype=torch.bfloat16, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError from error
    size_gb = matrix.numel() * 2 / 1e9
    kernels = {
        "torch bf16 matrix-vector product": lambda: torch.mv(matrix, vector),
        "torch bf16 maximum": lambda: torch.amax(matrix),
    }
    samples: tuple[float, ...] = ()
    method = ""
    for name, kernel in kernels.items():
        # Try the second kernel while the clocks are still at the level of the first one.
        if not samples or size_gb / gpu_second(torch, kernel) > np.median(samples):
            method = name
            samples = tuple(size_gb / duration_s for duration_s in gpu_seconds(torch, kernel))
    return Bandwidth(samples, method)


def gpu_torch(device: str) -> Any:
    """Return torch, if it is installed and has a GPU.

    Args:
        device: The torch device, for the message.

    Raises:
        Sm121Error: torch cannot be imported, or has no GPU.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Sm121Error(f"measuring {device} needs torch, which cannot be imported") from error
    if not torch.cuda.is_available():
        raise Sm121Error(f"measuring {device}: torch {torch.__version__} sees no GPU")
    return torch


def gpu_second(torch: Any, kernel: Callable[[], Any]) -> float:
    """Estimate the seconds of one call of a kernel.

    Args:
        torch: The torch module.
        kernel: The kernel.
    """
    for _ in range(3):  # the library may choose between kernels in the first calls
        kernel()
    torch.cuda.synchronize()
    return max(_timed(torch, kernel, 3) / 3, 1e-7)


def gpu_seconds(torch: Any, kernel: Callable[[], Any]) -> list[float]:
    """Return, for each timing, the seconds of one call of a kernel, measured with CUDA events.

    The device works without a pause until its clocks are stable, and during all timings. The
    duration of calls directly after a pause would depend on the clocks at that time.

    Args:
        torch: The torch module.
        kernel: The kernel.
    """
    passes = max(1, int(np.ceil(_GPU_TIMING_S / gpu_second(torch, kernel))))
    worked = 0.0
    while worked < _GPU_WARM_S:
        worked += _timed(torch, kernel, passes)
    return [_timed(torch, kernel, passes) / passes for _ in range(_GPU_TIMINGS)]


def _timed(torch: Any, kernel: Callable[[], Any], passes: int) -> float:
    """Return the seconds of some calls of a kernel, measured with CUDA events."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(passes):
        kernel()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def under_load(device: str) -> dict[str, Any]:
    """Read clock, power, temperature and throttling from NVML under a load of matrix products.

    Args:
        device: The torch device, such as ``cuda:0``.

    Returns:
        The fields of `box.Device` on clocks and power; empty without NVML.

    Raises:
        Sm121Error: torch or the device is missing.
    """
    torch = gpu_torch(device)
    matrix = torch.randn((_GPU_MATRIX, _GPU_MATRIX), dtype=torch.bfloat16, device=device)
    duration_s = gpu_second(torch, lambda: torch.matmul(matrix, matrix))
    for _ in range(max(1, int(_LOADED_S / duration_s))):
        torch.matmul(matrix, matrix)  # asynchronous: the device works during the readings
    index = gpu_number(device)
    readings = _nvml_while(lambda: not torch.cuda.current_stream().query(), index)
    torch.cuda.synchronize()
    return readings


class _NvmlDevice:
    """An NVML device, whose missing values are None."""

    def __init__(self, index: int) -> None:
        self._index = index

    def get(self, name: str, *arguments: Any) -> Any:
        """Return the value of an NVML function; None if the device does not support it."""
        import pynvml

        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            return getattr(pynvml, name)(handle, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    def watts(self, name: str) -> float | None:
        """Return the value of an NVML function that returns milliwatts, in watts."""
        return _watts(self.get(name))


def _watts(milliwatts: int | None) -> float | None:
    return round(milliwatts / 1000, 1) if milliwatts else None


def _nvml_while(working: Callable[[], bool], index: int) -> dict[str, Any]:
    """Read a device's values while it works; the result is empty without NVML."""
    import pynvml

    device = _NvmlDevice(index)
    clocks: list[int] = []
    power: list[int] = []
    capped: list[bool] = []
    throttled: bool | None = None
    harmful = 0
    for reason in _HARMFUL_REASONS:
        harmful |= getattr(pynvml, f"nvmlClocksThrottleReason{reason}", 0)
    readings: dict[str, Any] = {}
    try:
        with opened_nvml():
            while working():
                clock = device.get("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
                if clock:
                    clocks.append(clock)
                power.append(device.get("nvmlDeviceGetPowerUsage") or 0)
                reasons = device.get("nvmlDeviceGetCurrentClocksThrottleReasons")
                if reasons is not None:
                    throttled = bool(throttled) or bool(reasons & harmful)
                    capped.append(bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap))
                time.sleep(_NVML_EVERY_S)
            readings["temperature_c"] = device.get(
                "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU
            )
            readings["power_limit_w"] = device.watts("nvmlDeviceGetEnforcedPowerLimit")
            readings["power_limit_default_w"] = device.watts(
                "nvmlDeviceGetPowerManagementDefaultLimit"
            )
    except pynvml.NVMLError:
        return {}
    readings["power_w"] = _watts(max(power, default=0))
    readings["sm_clock_mhz"] = int(np.median(clocks)) if clocks else None
    readings["throttled"] = throttled
    readings["power_capped"] = round(sum(capped) / len(capped), 2) if capped else None
    return readings
