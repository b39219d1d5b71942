"""What NVML says of a GPU while matrices are multiplied on it."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sm121.core.architecture import opened_nvml
from sm121.measure.stream_bandwidth import gpu_second, gpu_torch

_LOADED_S = 1.0


def under_load(device: str) -> dict[str, Any]:
    """Clock, power, temperature and throttling by NVML, while matrices are multiplied."""
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


def _answer(index: int, name: str, *arguments: Any) -> Any:
    """What NVML's function of that name says of a device; None where it gives no answer."""
    import pynvml

    try:
        return getattr(pynvml, name)(pynvml.nvmlDeviceGetHandleByIndex(index), *arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


_LIMITS = ("EnforcedPowerLimit", "PowerManagementDefaultLimit")


def _nvml_while(working: Callable[[], bool], index: int) -> dict[str, Any]:
    """Nothing without NVML."""
    import pynvml

    ask = functools.partial(_answer, index)
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
                reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
                if reasons is not None:
                    throttled = bool(throttled) or bool(reasons & harmful)
                    capped.append(bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap))
                time.sleep(0.05)
            temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
            limits = [ask(f"nvmlDeviceGet{name}") for name in _LIMITS]
    except pynvml.NVMLError:
        return {}
    power = max(watts, default=0)
    clocks = [clock for clock in clocks if clock]
    in_force, default = (round(each / 1000, 1) if each else None for each in limits)
    return {
        "sm_clock_mhz": int(np.median(clocks)) if clocks else None,
        "power_w": round(power / 1000, 1) if power else None,
        "temperature_c": temperature,
        "throttled": throttled,
        "power_capped": round(sum(capped) / len(capped), 2) if capped else None,
        "power_limit_w": in_force,
        "power_limit_default_w": default,
    }
