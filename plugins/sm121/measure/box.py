"""The state of the machine: whether its timings count today.

Two readings, before and after the measurements, take a few seconds each: memory bandwidth, matrix
rate, the SM clock under load, free memory, and other processes. They are compared with a healthy
machine of the architecture (the profile's ``[box]``). Values that a device does not have (much of
GB10's NVML is N/A) are null and decide nothing.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import psutil
from pydantic import Field, ValidationError

from sm121.compilation import child
from sm121.core import data_file, level_settings, verdict, waiting
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.printable import printable
from sm121.engines import device_memory
from sm121.measure import stream_bandwidth
from sm121.measure.cpu_use import CpuUse, processes_of_run
from sm121.measure.stream_bandwidth import last_level_cache_bytes, matrix_rate, read_bandwidth

#: An engine that uses less than this many cores is idle.
_IDLE_CORES = 0.3
#: Seconds over which its use is measured.
_IDLE_OVER_S = 0.5
#: Bytes of the buffer that a GPU reads.
_GPU_BUFFER = 1 << 30
#: Most bytes of the buffer that a CPU reads.
_CPU_BUFFER_AT_MOST = 256 << 20
#: Seconds over which the use of the CPU is watched.
_WATCHED_S = 2.0
#: Timeout of the process that measures a GPU, in seconds.
_CHILD_WITHIN_S = 120.0
#: Timeout of a box on another machine, in seconds. It takes half a minute.
_NODE_WITHIN_S = 300.0
#: Most characters of its output. It has a few hundred.
_NODE_LIMIT = 8192
#: Share of the samples under load that is a power cap. A cap at the start of a load costs nothing.
_MOSTLY = 0.5


class BoxState(StrEnum):
    """Whether performance can be judged on this machine now."""

    QUALIFIED = "QUALIFIED"
    DEGRADED = "DEGRADED"
    UNKNOWN = "UNKNOWN"


class Device(data_file.Record):
    """What the device can do now."""

    device: str
    bandwidth_gb_s: float
    bandwidth_spread: float
    bandwidth_best_gb_s: float
    bandwidth_method: str
    buffer_mib: float
    matrix_tflop_s: float
    matrix_spread: float
    matrix_method: str
    #: The median under load.
    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    #: Whether the clocks are slowed for another reason than idleness or a power cap.
    throttled: bool | None = None
    #: Share of the samples under load in which a power cap slowed the clocks.
    power_capped: float | None = None
    #: The limit in force.
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None


#: Share of the CPU that other processes take on a machine that counts as quiet.
_QUIET = 0.1


class Reading(data_file.Record):
    """One look at the machine."""

    device: Device | None
    memory_available_gib: float
    #: Share of the CPU that processes of others took.
    other_load: float
    #: The busiest of them.
    others: list[str] = Field(default_factory=list)
    #: Processes of others on the GPU; null without NVML, or if they cannot be attributed.
    gpu_others: list[int] | None = None
    #: Processes on the GPU that may be the server's, since it has no known one there; else null.
    gpu_unattributed: list[int] | None = None
    seconds: float
    #: Why the device could not be measured.
    problem: str | None = None

    @property
    def is_of_busy_cpu(self) -> bool:
        """Whether the bandwidth of a CPU was measured while other processes used it."""
        is_of_cpu = self.device is not None and self.device.device == "cpu"
        return is_of_cpu and self.other_load > _QUIET

    @property
    def cannot_tell(self) -> str | None:
        """Why processes on the GPU cannot be attributed; None if they can."""
        if self.gpu_unattributed is None:
            return None
        users = f"processes {self.gpu_unattributed}" if self.gpu_unattributed else "nobody"
        return (
            f"cannot tell whose the GPU is: none of the server's processes is seen on it, seen "
            f"{users}"
        )


def read(
    device: str, *, own: Callable[[], Iterable[psutil.Process]] = lambda: (), serving: bool = False
) -> Reading:
    """Read the state of the machine.

    Args:
        device: ``cpu`` or ``cuda:0``.
        own: Returns processes of the run besides this one and its children.
        serving: Whether a server of the run is up. If none of ``own`` is on a GPU, the processes
            there may be the server's, and count as unattributed.
    """
    start = time.monotonic()
    before = CpuUse.take(own)
    measured: Device | None = None
    problem = None
    try:
        measured = measure(device) if device == "cpu" else _measure_apart(device)
    except Sm121Error as error:
        problem = str(error)
    time.sleep(max(0.0, _WATCHED_S - (time.monotonic() - start)))
    other, names = CpuUse.take(own).since(before)
    others: list[int] | None = None
    unattributed: list[int] | None = None
    if device != "cpu":
        others, unattributed = _gpu_users(device, own, serving)
    return Reading(
        device=measured,
        memory_available_gib=round(psutil.virtual_memory().available / 2**30, 2),
        other_load=round(other, 3),
        others=names,
        gpu_others=others,
        gpu_unattributed=unattributed,
        seconds=round(time.monotonic() - start, 2),
        problem=problem,
    )


def measure(device: str) -> Device:
    """Measure bandwidth, matrix rate and clocks in this process.

    Args:
        device: ``cpu`` or a torch device.

    Raises:
        Sm121Error: The device does not exist, or torch is missing.
    """
    on_cpu = device == "cpu"
    size = _GPU_BUFFER
    if on_cpu:
        size = min(4 * last_level_cache_bytes(), _CPU_BUFFER_AT_MOST)
    bandwidth = read_bandwidth(size, device=device)
    rates, method = matrix_rate(device)
    clocks: dict[str, Any] = {} if on_cpu else stream_bandwidth.under_load(device)
    return Device(
        device=device,
        bandwidth_gb_s=round(bandwidth.gb_s, 3),
        bandwidth_spread=round(_quartile_spread(bandwidth.samples), 4),
        bandwidth_best_gb_s=round(bandwidth.best_gb_s, 3),
        bandwidth_method=bandwidth.method,
        buffer_mib=size / 2**20,
        matrix_tflop_s=round(float(np.median(rates)), 5),
        matrix_spread=round(_quartile_spread(rates), 4),
        matrix_method=method,
        **clocks,
    )


@dataclass(frozen=True)
class Judgement:
    """The state of the machine, and which verdicts on timings do not count."""

    state: BoxState
    reason: str
    #: Verdicts on timings that do not count. A machine that became faster refutes no PASS.
    refuted: frozenset[verdict.Verdict] = frozenset()


def judge(
    reference: level_settings.Box | None,
    before: Reading | None,
    after: Reading | None = None,
    *,
    load_during: float | None = None,
) -> Judgement:
    """Judge the state of the machine by its readings.

    Args:
        reference: A healthy machine; None if the profile has none.
        before: The reading before the measurements.
        after: The reading after them.
        load_during: Share of the CPU that other processes took meanwhile; None: not known.
    """
    if reference is None:
        return Judgement(BoxState.UNKNOWN, "the profile has no [box] to compare this machine with")
    taken = {"before": before, "after": after}
    readings = {name: reading for name, reading in taken.items() if reading is not None}
    if not readings:
        return Judgement(BoxState.UNKNOWN, "the box was not measured")
    defects = []
    for name, reading in readings.items():
        # The load after the measurements counts only if the load during them is not known.
        counts_load = name == "before" or load_during is None
        for line in _defects(reference, reading, load=counts_load):
            defects.append(f"{name} the measurements: {line}")
    if load_during is not None and load_during > reference.max_other_load:
        defects.append(
            f"others worked here during the measurements: required {reference.max_other_load:.0%} "
            f"of the CPU at most, seen {load_during:.0%}"
        )
    changes, slower = _changes(reference, before, after)
    if defects or changes:
        refuted = {verdict.Verdict.FAIL, verdict.Verdict.INCONCLUSIVE}
        if defects or slower:
            refuted.add(verdict.Verdict.PASS)
        else:
            changes.append("it became faster: what was measured before was on the slower machine")
        return Judgement(BoxState.DEGRADED, "; ".join(defects + changes), frozenset(refuted))
    for name, reading in readings.items():
        if reading.device is None:
            return Judgement(BoxState.UNKNOWN, f"{name} the measurements: {reading.problem}")
    return Judgement(BoxState.QUALIFIED, _describe(reference, [*readings.values()]))


def _describe(reference: level_settings.Box, readings: Sequence[Reading]) -> str:
    """Return the first reading of a fit machine for people, and the remarks on all readings."""
    first = readings[0].device
    assert first is not None
    parts = [f"{first.bandwidth_gb_s:.4g} GB/s", f"{first.matrix_tflop_s:.3g} TFLOP/s"]
    if first.sm_clock_mhz:
        parts.append(f"{first.sm_clock_mhz} MHz under load")
    parts.append(f"{readings[0].other_load:.0%} of the CPU taken by others")
    remarks = [", ".join(parts)]
    for reading in readings:
        for remark in (reading.cannot_tell, capped(reference, reading)):
            if remark and remark not in remarks:
                remarks.append(remark)
    return "; ".join(remarks)


def capped(reference: level_settings.Box | None, reading: Reading) -> str | None:
    """Return how far the SM clock is capped, if the machine is still fit; None without a cap.

    Args:
        reference: A healthy machine.
        reading: The reading.
    """
    least = reference.sm_clock_uncapped_mhz if reference is not None else None
    clock = reading.device.sm_clock_mhz if reading.device is not None else None
    if least is None or clock is None or clock >= least.value:
        return None
    return (
        f"the SM clock is capped: {clock} MHz under load, {clock / least.value:.0%} of the least "
        f"without a cap ({least.value:g} MHz: {least.source}); the rates are of this clock"
    )


def _defects(reference: level_settings.Box, reading: Reading, *, load: bool) -> list[str]:
    defects = []
    required: list[tuple[str, float | None, Any, str]] = [
        ("available memory", reading.memory_available_gib, reference.memory_available_gib, "GiB")
    ]
    if (device := reading.device) is not None:
        required += [
            ("memory bandwidth", device.bandwidth_gb_s, reference.bandwidth_gb_s, "GB/s"),
            ("matrix rate", device.matrix_tflop_s, reference.matrix_tflop_s, "TFLOP/s"),
            ("SM clock under load", device.sm_clock_mhz, reference.sm_clock_mhz, "MHz"),
        ]
        for quantity, spread in (
            ("memory bandwidth", device.bandwidth_spread),
            ("matrix rate", device.matrix_spread),
        ):
            if spread > reference.max_spread:
                defects.append(
                    f"{quantity} is unsteady: required a spread of {reference.max_spread:.0%} at "
                    f"most, seen {spread:.0%}"
                )
        if device.throttled:
            defects.append("the GPU's clocks are throttled")
        if not reference.runs_at_its_power_limit:
            limit, default = device.power_limit_w, device.power_limit_default_w
            if limit is not None and default is not None and limit < default:
                defects.append(
                    f"the GPU's power is limited: required its default of {default:g} W, seen "
                    f"{limit:g} W"
                )
            if device.power_capped is not None and device.power_capped > _MOSTLY:
                power = f" at {device.power_w:g} W" if device.power_w is not None else ""
                defects.append(
                    "a power cap slows the GPU: required no such throttle reason under load, seen "
                    f"in {device.power_capped:.0%} of the samples{power}"
                )
    for quantity, value, least, unit in required:
        if value is not None and least is not None and value < least.value:
            defects.append(
                f"{quantity}: required {least.value:g} {unit} ({least.source}), seen {value:g}"
            )
    if load and reading.other_load > reference.max_other_load:
        names = f" ({', '.join(reading.others)})" if reading.others else ""
        defects.append(
            f"others work here: required {reference.max_other_load:.0%} of the CPU at most, seen "
            f"{reading.other_load:.0%}{names}"
        )
    if reading.gpu_others:
        defects.append(f"others are on the GPU: processes {reading.gpu_others}")
    return defects


def _changes(
    reference: level_settings.Box, before: Reading | None, after: Reading | None
) -> tuple[list[str], bool]:
    """Return the changes of the device beyond the tolerance, and whether it got slower."""
    if before is None or after is None or before.device is None or after.device is None:
        return [], False
    lines, slower = [], False
    for quantity, first, last in (
        ("memory bandwidth", before.device.bandwidth_gb_s, after.device.bandwidth_gb_s),
        ("matrix rate", before.device.matrix_tflop_s, after.device.matrix_tflop_s),
    ):
        change = abs(last / first - 1.0)
        if change > reference.max_drift:
            slower = slower or last < first
            lines.append(
                f"{quantity} changed from {first:g} to {last:g} during the measurements ("
                f"{change:.0%}, {reference.max_drift:.0%} allowed)"
            )
    return lines, slower


def _measure_apart(device: str) -> Device:
    """Measure in a process of its own, whose end frees the memory that CUDA takes."""
    command = [sys.executable, "-m", "sm121", "box", "--device-only", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHILD_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Sm121Error(f"measuring {device} took more than {_CHILD_WITHIN_S:g} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        return Device.model_validate_json(lines[-1] if done.returncode == 0 and lines else "")
    except ValidationError as error:
        last_line = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise Sm121Error(f"measuring {device}: {last_line[:300]}") from error


def _gpu_users(
    device: str, own: Callable[[], Iterable[psutil.Process]], serving: bool
) -> tuple[list[int] | None, list[int] | None]:
    """Return the pids of others on the server's GPUs, and the pids that cannot be attributed.

    One of the two is None; both are without NVML.
    """
    users = device_memory.read_computing_pids()
    if users is None:
        return None, None
    run_pids = {process.pid for process in processes_of_run(own)}
    server_pids = {process.pid for process in own()}
    gpus = {gpu for gpu, pids in users.items() if pids & server_pids}
    if serving and not gpus:
        return None, sorted(set().union(*users.values()) - run_pids)
    number = device.partition(":")[2]
    gpus = gpus or {int(number) if number.isdigit() else 0}
    pids: set[int] = set()
    for gpu in gpus:
        pids |= users.get(gpu, set())
    return sorted(pids - run_pids), None


def of_node(command: str, profile: str) -> tuple[int, str]:
    """Run ``sm121 box`` on another machine.

    Args:
        command: The command that runs Python there.
        profile: The profile with the healthy machine.

    Returns:
        The exit status and the rows.

    Raises:
        UsageError: The machine does not answer in time, or the suite is not installed there.
    """
    name = printable(command)
    try:
        words = [*shlex.split(command), "-m", "sm121", "box", "--profile", profile]
        ended = child.run(words, timeout_s=_NODE_WITHIN_S)
    except (OSError, ValueError, child.TookTooLong) as error:
        raise UsageError(f"--node-command {name}: {error}") from error
    lines = [printable(line) for line in ended.output[:_NODE_LIMIT].splitlines()]
    if ended.status not in (0, 1) or not lines or len(ended.output) >= _NODE_LIMIT:
        last = lines[-1][:300] if lines else "it wrote nothing"
        how = f"it ended with {ended.status}; last: {last}"
        raise UsageError(f"--node-command {name}: no box was read there: {how}")
    return ended.status, "\n".join(["", name, *lines, ""])


def wait_until_idle(own: Callable[[], Iterable[psutil.Process]], *, within_s: float) -> bool:
    """Wait until the engine itself leaves the CPU alone.

    vLLM's processes spin on their queues for seconds after the last request.

    Args:
        own: Returns the engine's processes.
        within_s: The timeout in seconds.

    Returns:
        Whether it was idle in time.
    """

    def is_idle() -> bool:
        before = _used(own)
        time.sleep(_IDLE_OVER_S)
        return _used(own) - before < _IDLE_CORES * _IDLE_OVER_S

    return waiting.until(is_idle, within_s, every_s=0.0)


def _used(own: Callable[[], Iterable[psutil.Process]]) -> float:
    seconds = 0.0
    for process in own():
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def _quartile_spread(samples: Sequence[float]) -> float:
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle)
