"""A plugin for pytest: the machine is slow from the start of a test whose id contains one of
SM121_META_SLOW_IN to the start of the next test, and otherwise healthy."""

import json
import os

from sm121.machine import box

_SLOW_IN = json.loads(os.environ["SM121_META_SLOW_IN"])
_HEALTHY = box.Device(
    device="cpu", bandwidth_gb_s=100.0, bandwidth_spread=0.01, bandwidth_best_gb_s=100.0,
    bandwidth_method="", buffer_mib=64.0, matrix_tflop_s=1.0, matrix_spread=0.01, matrix_method="",
)  # fmt: skip
_begun = [""]


def pytest_runtest_logstart(nodeid: str) -> None:
    _begun.append(nodeid)


def _read(_device: str, **_of_the_run: object) -> box.Reading:
    slow = any(part in _begun[-1] for part in _SLOW_IN)
    device = _HEALTHY.model_copy(update={"bandwidth_gb_s": 10.0} if slow else {})
    return box.Reading(device=device, memory_available_gib=50.0, other_load=0.0, seconds=0.0)


box.read_machine = _read
box.wait_until_idle = lambda _own, *, within_s: True
