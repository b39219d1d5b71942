"""Memory bandwidth and matrix rate, of the CPU (numpy) or a GPU (torch).

Decoding reads every active weight once per token. Its bound is how fast memory can be read, not
copied, so the read is a reduction. The rate of matrices bounds prefill.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sm121.core.architecture import opened_nvml
from sm121.core.errors import Sm121Error
from sm121.measure.statistics import Floats

#: Least seconds of one timing on a CPU. Small buffers are read several times for it.
_SHORTEST_S = 0.02
#: Timings of one attempt on a CPU.
_REPETITIONS = 7
#: Attempts on a CPU, of which the fastest counts.
_ATTEMPTS = 3
#: Seconds between them.
_PAUSE_S = 0.3
#: Seconds of work after which a GPU's clocks have settled.
_GPU_WARM_S = 1.0
#: Seconds of one timing on a GPU.
_GPU_TIMING_S = 0.1
#: Timings on a GPU.
_GPU_TIMINGS = 10
#: Seconds of matrix products while NVML is read.
_LOADED_S = 1.0
#: Columns of the matrix that a GPU reads: the rows of a layer of gpt-oss are about as long.
_COLUMNS = 8192
#: Rows and columns of the matrices that a GPU multiplies.
_GPU_MATRIX = 8192
#: Rows and columns of the matrices that a CPU multiplies.
_CPU_MATRIX = 1024


@dataclass(frozen=True)
class Bandwidth:
    """How fast a buffer was read."""

    #: Bytes per second / 1e9 of each repetition.
    samples: tuple[float, ...]
    method: str

    @property
    def gb_s(self) -> float:
        """The median, in GB/s (1e9)."""
        return float(np.median(self.samples))

    @property
    def best_gb_s(self) -> float:
        """The fastest repetition: what the memory can do, whatever else went on."""
        return max(self.samples)


def read_bandwidth(size_bytes: int, *, device: str = "cpu") -> Bandwidth:
    """Read a buffer again and again.

    Args:
        size_bytes: Its size: several caches for the memory's own bandwidth, or what an engine reads
            per token for the bandwidth that this engine can have.
        device: ``cpu``, with a thread for each core, or a torch device such as ``cuda:0``.

    Raises:
        Sm121Error: torch, the device or enough memory is missing.
    """
    try:
        if device == "cpu":
            return _read_cpu(size_bytes, os.cpu_count() or 1)
        return _read_gpu(size_bytes, device)
    except MemoryError as error:
        raise Sm121Error(f"memory bandwidth: no {size_bytes >> 20} MiB for the buffer") from error


def matrix_rate(device: str) -> tuple[list[float], str]:
    """Multiply square matrices: float32 by numpy's BLAS on the CPU, bfloat16 by torch on a GPU.

    Args:
        device: ``cpu`` or a torch device.

    Returns:
        Floating point operations per second / 1e12 of each repetition, and the method.

    Raises:
        Sm121Error: torch or the device is missing.
    """
    if device == "cpu":
        size, method = _CPU_MATRIX, f"numpy float32 {_CPU_MATRIX}^3"
        generator = np.random.default_rng(0)
        first = generator.random((size, size), dtype=np.float32)
        second = generator.random((size, size), dtype=np.float32)
        timed = [_seconds(lambda: np.matmul(first, second), 1) for _ in range(_REPETITIONS + 1)]
        seconds = timed[1:]  # the first one warms
    else:
        size, method = _GPU_MATRIX, f"torch bf16 {_GPU_MATRIX}^3"
        torch = gpu_torch(device)
        first, second = (
            torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        seconds = gpu_seconds(torch, lambda: torch.matmul(first, second))
    return [2.0 * size**3 / each / 1e12 for each in seconds], method


def last_level_cache_bytes() -> int:
    """Return the size of this CPU's largest cache; 32 MiB if the kernel does not have it."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text("ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 << 20)


def _read_cpu(size_bytes: int, threads: int) -> Bandwidth:
    buffer: Floats = np.ones(size_bytes // 8, dtype=np.float64)  # touched: each page is there
    parts = np.array_split(buffer, threads)

    with ThreadPoolExecutor(threads) as pool:
        alone: Callable[[], object] = buffer.sum
        # numpy lets go of the interpreter meanwhile. On few cores one thread can be the faster
        # reader: the pool costs more than it gives. One pass of each would let chance choose.
        ways = (lambda: [*pool.map(np.sum, parts)], alone) if threads > 1 else (alone,)
        best = min(ways, key=lambda read: min(_seconds(read, 1) for _ in range(_REPETITIONS)))
        passes = max(1, int(np.ceil(_SHORTEST_S / max(_seconds(best, 1), 1e-7))))
        # For a fraction of a second the threads may share a core: it is the machine that is read.
        samples: tuple[float, ...] = ()
        for attempt in range(_ATTEMPTS):
            time.sleep(_PAUSE_S if attempt else 0.0)
            again = [
                size_bytes * passes / _seconds(best, passes) / 1e9 for _ in range(_REPETITIONS)
            ]
            if not samples or np.median(again) > np.median(samples):
                samples = tuple(again)
    used = 1 if best is alone else threads
    return Bandwidth(samples, f"numpy sum of float64, {used} threads")


def _seconds(read: Callable[[], object], passes: int) -> float:
    start = time.perf_counter()
    for _ in range(passes):
        read()
    return time.perf_counter() - start


def _read_gpu(size_bytes: int, device: str) -> Bandwidth:
    torch = gpu_torch(device)
    rows = max(size_bytes // (2 * _COLUMNS), 1)
    try:
        matrix = torch.ones((rows, _COLUMNS), dtype=torch.bfloat16, device=device)
        vector = torch.ones(_COLUMNS, dtype=torch.bfloat16, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError from error
    read = matrix.numel() * 2
    samples: tuple[float, ...] = ()
    method = ""
    for name, kernel in (
        ("torch bf16 matrix-vector product", lambda: torch.mv(matrix, vector)),
        ("torch bf16 maximum", lambda: torch.amax(matrix)),
    ):
        # The second one is tried at the clocks that the first one has left.
        if not samples or read / gpu_second(torch, kernel) / 1e9 > np.median(samples):
            method = name
            samples = tuple(read / each / 1e9 for each in gpu_seconds(torch, kernel))
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
    """Return the seconds of one call of a kernel, as an estimate to plan by."""
    for _ in range(3):  # choice of the kernel
        kernel()
    torch.cuda.synchronize()
    return max(_timed(torch, kernel, 3) / 3, 1e-7)


def gpu_seconds(torch: Any, kernel: Callable[[], Any]) -> list[float]:
    """Return the seconds of one call of a kernel, per timing, by the device's own events.

    The device works without a pause until its clocks have settled, and through all timings. Calls
    right after a rest depend on the clocks of that moment.

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
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(passes):
        kernel()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def under_load(device: str) -> dict[str, Any]:
    """Return clock, power, temperature and throttling by NVML under a load of matrix products."""
    torch = gpu_torch(device)
    matrix = torch.randn((8192, 8192), dtype=torch.bfloat16, device=device)
    each = gpu_second(torch, lambda: torch.matmul(matrix, matrix))
    for _ in range(max(1, int(_LOADED_S / each))):
        torch.matmul(matrix, matrix)  # queued: the device works while we look
    number = device.partition(":")[2]
    index = int(number) if number.isdigit() else 0
    readings = _nvml_while(lambda: not torch.cuda.current_stream().query(), index)
    torch.cuda.synchronize()
    return readings


def _nvml_while(working: Callable[[], bool], index: int) -> dict[str, Any]:
    import pynvml

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(pynvml.nvmlDeviceGetHandleByIndex(index), *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    clocks, watts, capped = [], [], []
    throttled: bool | None = None
    harmful = 0
    for reason in ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"):
        harmful |= getattr(pynvml, f"nvmlClocksThrottleReason{reason}", 0)
    try:
        with opened_nvml():
            while working():
                clocks.append(ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM) or 0)
                watts.append(ask("nvmlDeviceGetPowerUsage") or 0)
                if (reasons := ask("nvmlDeviceGetCurrentClocksThrottleReasons")) is not None:
                    throttled = bool(throttled) or bool(reasons & harmful)
                    capped.append(bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap))
                time.sleep(0.05)
            temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
            milliwatts = {
                "power_w": max(watts, default=0),
                "power_limit_w": ask("nvmlDeviceGetEnforcedPowerLimit"),
                "power_limit_default_w": ask("nvmlDeviceGetPowerManagementDefaultLimit"),
            }
    except pynvml.NVMLError:
        return {}
    clocks = [clock for clock in clocks if clock]
    return {
        "sm_clock_mhz": int(np.median(clocks)) if clocks else None,
        "temperature_c": temperature,
        "throttled": throttled,
        "power_capped": round(sum(capped) / len(capped), 2) if capped else None,
        **{name: round(each / 1000, 1) if each else None for name, each in milliwatts.items()},
    }
