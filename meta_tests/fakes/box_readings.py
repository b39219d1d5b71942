"""Readings of a machine's state for tests: those of a healthy GB10, except for the given values."""

from sm121.core import profile
from sm121.machine.box import Device, Reading

GB10 = profile.load("sm121-gpt-oss-120b").box
DEVICE = Device(
    device="cuda:0", bandwidth_gb_s=226.0, bandwidth_spread=0.01, bandwidth_best_gb_s=229.0,
    bandwidth_method="", buffer_mib=1024.0, matrix_tflop_s=88.0, matrix_spread=0.01,
    matrix_method="", sm_clock_mhz=2418,
)  # fmt: skip


def reading(**fields) -> Reading:
    device = DEVICE.model_copy(update={k: v for k, v in fields.items() if k in Device.model_fields})
    whole = {"memory_available_gib": 50.0, "other_load": 0.01, "seconds": 3.0}
    whole |= {k: v for k, v in fields.items() if k in Reading.model_fields and k != "device"}
    return Reading(device=None if "problem" in fields else device, **whole)
