"""Judge whether the machine is in a state in which its timings are meaningful.

Two readings, before and after the measurements, are compared with the readings of a healthy machine
of the same architecture (the profile's ``[box]``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sm121.core import level_settings, verdict
from sm121.core.profile_fields import Sourced
from sm121.machine.box import BoxState, Device, Reading

#: The share of samples with a power cap above which the cap is a defect. A cap only at the start of
#: a load is harmless.
_MOSTLY = 0.5
#: The share of the required SM clock below which a power limit is no explanation. Instead of the
#: required 2,050 MHz, a GB10 has 1,890 MHz at 100 W, and 799 MHz in its stuck state.
_STUCK = 0.5


@dataclass(frozen=True)
class BoxJudgement:
    """The state of the machine, and the verdicts on timings that it invalidates."""

    state: BoxState
    reason: str
    #: The verdicts on timings that the state of the machine makes invalid. If the machine only
    #: became faster, PASS stays valid.
    refuted: frozenset[verdict.Verdict] = frozenset()
    #: The first thing to do if the machine is DEGRADED.
    remedy: str | None = None


def judge_machine(
    reference: level_settings.Box | None,
    before: Reading | None,
    after: Reading | None = None,
    *,
    load_during: float | None = None,
) -> BoxJudgement:
    """Judge the state of the machine by its readings.

    Args:
        reference: The readings of a healthy machine; None if the profile has none.
        before: The reading before the measurements.
        after: The reading after the measurements.
        load_during: The share of the CPU that other processes used during the measurements; None:
            unknown.
    """
    if reference is None:
        return BoxJudgement(
            BoxState.UNKNOWN, "the profile has no [box] to compare this machine with"
        )
    taken = {"before": before, "after": after}
    readings = {name: reading for name, reading in taken.items() if reading is not None}
    if not readings:
        return BoxJudgement(BoxState.UNKNOWN, "the machine was not measured")
    defects = []
    for name, reading in readings.items():
        # A load by other processes that was measured after the measurements counts only if their
        # load during the measurements is unknown.
        counts_load = name == "before" or load_during is None
        for line in _defects(reference, reading, load=counts_load):
            defects.append(f"{name} the measurements: {line}")
    if load_during is not None and load_during > reference.max_other_load:
        defects.append(
            "other processes worked during the measurements: expected at most "
            f"{reference.max_other_load:.0%} of the CPU, got {load_during:.0%}"
        )
    changes = _changes(reference, before, after)
    if defects or changes.lines:
        refuted = {verdict.Verdict.FAIL, verdict.Verdict.INCONCLUSIVE}
        lines = defects + changes.lines
        if defects or changes.got_slower:
            refuted.add(verdict.Verdict.PASS)
        else:
            lines.append("the machine became faster, so the earlier measurements are too slow")
        remedy = _remedy(reference, list(readings.values()), load_during)
        return BoxJudgement(BoxState.DEGRADED, "; ".join(lines), frozenset(refuted), remedy)
    for name, reading in readings.items():
        if reading.device is None:
            return BoxJudgement(BoxState.UNKNOWN, f"{name} the measurements: {reading.problem}")
    return BoxJudgement(BoxState.QUALIFIED, _describe(reference, list(readings.values())))


def _remedy(
    reference: level_settings.Box, readings: Sequence[Reading], load_during: float | None
) -> str:
    """Return the remedy for a DEGRADED machine's first defect; it may have caused the others."""
    devices = [reading.device for reading in readings if reading.device is not None]
    clocks = [device.sm_clock_mhz for device in devices if device.sm_clock_mhz is not None]
    lowest = min(clocks, default=math.inf)
    required = reference.sm_clock_mhz.value if reference.sm_clock_mhz is not None else 0.0
    is_throttled = any(device.throttled for device in devices)
    if reference.sm_clock_remedy and lowest < _STUCK * required and not is_throttled:
        return reference.sm_clock_remedy
    loads = [reading.other_load for reading in readings]
    if load_during is not None:
        loads = [readings[0].other_load, load_during]
    if max(loads) > reference.max_other_load or any(reading.gpu_others for reading in readings):
        return "end the other work on this machine"
    is_limited = lowest < required or is_throttled
    if not reference.runs_at_its_power_limit:
        is_limited = is_limited or any(map(_defects_of_power, devices))
    if is_limited:
        return "remove the limit of the GPU (nvidia-smi -q -d PERFORMANCE,POWER,CLOCK)"
    least = reference.memory_available_gib
    if least is not None and min(each.memory_available_gib for each in readings) < least.value:
        return "free memory (end other servers and containers)"
    return "wait until `sm121 box` reports QUALIFIED"


def _describe(reference: level_settings.Box, readings: Sequence[Reading]) -> str:
    """Describe the first reading of a QUALIFIED machine, with remarks on all readings."""
    first = readings[0].device
    assert first is not None
    parts = [f"{first.bandwidth_gb_s:.4g} GB/s", f"{first.matrix_tflop_s:.3g} TFLOP/s"]
    if first.sm_clock_mhz:
        parts.append(f"{first.sm_clock_mhz} MHz under load")
    parts.append(f"{readings[0].other_load:.0%} of the CPU used by other processes")
    remarks = [", ".join(parts)]
    for reading in readings:
        for remark in (reading.cannot_tell, capped(reference, reading)):
            if remark and remark not in remarks:
                remarks.append(remark)
    return "; ".join(remarks)


def capped(reference: level_settings.Box | None, reading: Reading) -> str | None:
    """Describe a cap of the SM clock with which the machine can still qualify; None without a cap.

    Args:
        reference: The readings of a healthy machine.
        reading: The reading.
    """
    if reference is None or reading.device is None:
        return None
    least = reference.sm_clock_uncapped_mhz
    clock = reading.device.sm_clock_mhz
    if least is None or clock is None or clock >= least.value:
        return None
    return (
        f"the SM clock is capped: {clock} MHz under load, {clock / least.value:.0%} of the least "
        f"without a cap ({least.value:g} MHz: {least.source}); the measured rates apply to this "
        "clock"
    )


class _Minimum(NamedTuple):
    """A quantity, its value, the minimum of a healthy machine, and the unit of both."""

    quantity: str
    value: float | None
    least: Sourced | None
    unit: str


def _defects(reference: level_settings.Box, reading: Reading, *, load: bool) -> list[str]:
    """Return the defects in a reading.

    ``load`` says whether the CPU use of other processes is judged.
    """
    defects = []
    memory = reading.memory_available_gib
    minimums = [_Minimum("available memory", memory, reference.memory_available_gib, "GiB")]
    device = reading.device
    if device is not None:
        minimums += [
            _Minimum("memory bandwidth", device.bandwidth_gb_s, reference.bandwidth_gb_s, "GB/s"),
            _Minimum("matrix rate", device.matrix_tflop_s, reference.matrix_tflop_s, "TFLOP/s"),
            _Minimum("SM clock under load", device.sm_clock_mhz, reference.sm_clock_mhz, "MHz"),
        ]
        defects += _defects_of_spread(reference, device)
        if device.throttled:
            defects.append("the GPU's clocks are throttled")
        if not reference.runs_at_its_power_limit:
            defects += _defects_of_power(device)
    for quantity, value, least, unit in minimums:
        if value is not None and least is not None and value < least.value:
            defects.append(
                f"{quantity}: expected {least.value:g} {unit} ({least.source}), got {value:g}"
            )
    if load and reading.other_load > reference.max_other_load:
        names = f" ({', '.join(reading.others)})" if reading.others else ""
        defects.append(
            f"other processes are working: expected at most {reference.max_other_load:.0%} of "
            f"the CPU, got {reading.other_load:.0%}{names}"
        )
    if reading.gpu_others:
        defects.append(f"other processes use the GPU: {reading.gpu_others}")
    return defects


def _defects_of_spread(reference: level_settings.Box, device: Device) -> list[str]:
    """Return a line for each quantity whose repeated readings differ too much."""
    spreads = {"memory bandwidth": device.bandwidth_spread, "matrix rate": device.matrix_spread}
    defects = []
    for quantity, spread in spreads.items():
        if spread > reference.max_spread:
            defects.append(
                f"{quantity} is unsteady: expected a spread of at most "
                f"{reference.max_spread:.0%}, got {spread:.0%}"
            )
    return defects


def _defects_of_power(device: Device) -> list[str]:
    """Return a line for each power limit that a healthy GPU does not have."""
    defects = []
    limit = device.power_limit_w
    default = device.power_limit_default_w
    if limit is not None and default is not None and limit < default:
        defects.append(
            f"the GPU's power is limited: expected its default of {default:g} W, got {limit:g} W"
        )
    if device.power_capped is not None and device.power_capped > _MOSTLY:
        power = f" at {device.power_w:g} W" if device.power_w is not None else ""
        defects.append(
            "a power cap slows the GPU: expected no such throttle reason under load, got "
            f"one in {device.power_capped:.0%} of the samples{power}"
        )
    return defects


class _Changes(NamedTuple):
    """The changes of a device between two readings, and whether it got slower."""

    lines: list[str]
    got_slower: bool


def _changes(
    reference: level_settings.Box, before: Reading | None, after: Reading | None
) -> _Changes:
    """Return the changes of the device that exceed the tolerance."""
    lines: list[str] = []
    got_slower = False
    if before is None or after is None or before.device is None or after.device is None:
        return _Changes(lines, got_slower)
    for quantity, first, last in (
        ("memory bandwidth", before.device.bandwidth_gb_s, after.device.bandwidth_gb_s),
        ("matrix rate", before.device.matrix_tflop_s, after.device.matrix_tflop_s),
    ):
        change = abs(last / first - 1.0)
        if change > reference.max_drift:
            got_slower = got_slower or last < first
            lines.append(
                f"{quantity} changed from {first:g} to {last:g} during the measurements ("
                f"{change:.0%}, {reference.max_drift:.0%} allowed)"
            )
    return _Changes(lines, got_slower)
