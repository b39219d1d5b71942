"""Measure the machine: bandwidth, matrix rate, clocks, memory, and other processes.

A reading takes a few seconds. Values that a device does not report (many of NVML's values are N/A
on a GB10) are null, and are not judged. `sm121.machine.box_judgement` judges the readings.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import psutil
from pydantic import Field, ValidationError

from sm121.compilation import child
from sm121.core import architecture, data_file, waiting
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.printable import printable
from sm121.engines import device_memory
from sm121.machine import stream_bandwidth
from sm121.machine.cpu_use import CpuUse, processes_of_run
from sm121.machine.stream_bandwidth import last_level_cache_bytes, matrix_rate, read_bandwidth

#: An engine that uses fewer cores than this counts as idle.
_IDLE_CORES = 0.3
#: The interval over which the engine's CPU use is measured, in seconds.
_IDLE_OVER_S = 0.5
#: The size of the buffer that a GPU reads, in bytes.
_GPU_BUFFER = 1 << 30
#: The maximum size of the buffer that a CPU reads, in bytes.
_CPU_BUFFER_AT_MOST = 256 << 20
#: The minimum interval over which the CPU use of other processes is measured, in seconds.
_WATCHED_S = 2.0
#: The timeout of the process that measures a GPU, in seconds.
_CHILD_WITHIN_S = 120.0
#: The timeout of ``sm121 box`` on another machine, in seconds. It usually takes half a minute.
_NODE_WITHIN_S = 300.0
#: The maximum length of the output of ``sm121 box`` on another machine, in characters. The output
#: usually has a few hundred.
_NODE_LIMIT = 8192
#: The maximum length of another process's output line in a message, in characters.
_MOST_OF_A_LINE = 300


class BoxState(StrEnum):
    """Whether performance can currently be judged on this machine."""

    QUALIFIED = "QUALIFIED"
    DEGRADED = "DEGRADED"
    UNKNOWN = "UNKNOWN"


class Device(data_file.Record):
    """The current bandwidth, matrix rate and clocks of the device."""

    device: str
    bandwidth_gb_s: float
    bandwidth_spread: float
    bandwidth_best_gb_s: float
    bandwidth_method: str
    buffer_mib: float
    matrix_tflop_s: float
    matrix_spread: float
    matrix_method: str
    #: The median SM clock under load, in MHz.
    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    #: Whether the clocks are throttled for another reason than idleness or a power cap.
    throttled: bool | None = None
    #: The share of the samples under load in which a power cap throttled the clocks.
    power_capped: float | None = None
    #: The power limit in force, in watts.
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None


#: The largest share of the CPU that other processes may use on a quiet machine.
_QUIET = 0.1


class Reading(data_file.Record):
    """One reading of the machine."""

    device: Device | None
    memory_available_gib: float
    #: The share of the CPU that processes outside the run used.
    other_load: float
    #: The busiest processes outside the run.
    others: list[str] = Field(default_factory=list)
    #: Processes outside the run on the GPU; null without NVML, or if they cannot be attributed.
    gpu_others: list[int] | None = None
    #: Processes on the GPU, if it is unknown which of them are the server's; else null.
    gpu_unattributed: list[int] | None = None
    seconds: float
    #: The reason why the device could not be measured.
    problem: str | None = None

    @property
    def is_of_busy_cpu(self) -> bool:
        """Whether the bandwidth of a CPU was measured while other processes used the CPU."""
        is_of_cpu = self.device is not None and self.device.device == "cpu"
        return is_of_cpu and self.other_load > _QUIET

    @property
    def cannot_tell(self) -> str | None:
        """The reason why processes on the GPU cannot be attributed; None if they can."""
        if self.gpu_unattributed is None:
            return None
        users = "nobody"
        if self.gpu_unattributed:
            users = f"processes {self.gpu_unattributed}"
        return (
            f"cannot tell which process uses the GPU: expected a process of the server, got {users}"
        )


def _no_processes() -> Iterable[psutil.Process]:
    return ()


def read_machine(
    device: str,
    *,
    own: Callable[[], Iterable[psutil.Process]] = _no_processes,
    serving: bool = False,
) -> Reading:
    """Read the state of the machine.

    Args:
        device: ``cpu`` or ``cuda:0``.
        own: Returns the processes of the run, besides this process and its children.
        serving: Whether a server of the run is running. If none of ``own`` is on a GPU, the
            processes there may be the server's, and count as unattributed.
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
    users = _NO_GPU_USERS
    if device != "cpu":
        users = _gpu_users(device, own, serving)
    return Reading(
        device=measured,
        memory_available_gib=round(psutil.virtual_memory().available / 2**30, 2),
        other_load=round(other, 3),
        others=names,
        gpu_others=users.others,
        gpu_unattributed=users.unattributed,
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
    is_cpu = device == "cpu"
    size = _GPU_BUFFER
    if is_cpu:
        size = min(4 * last_level_cache_bytes(), _CPU_BUFFER_AT_MOST)
    bandwidth = read_bandwidth(size, device=device)
    rates, method = matrix_rate(device)
    clocks: dict[str, Any] = {}
    if not is_cpu:
        clocks = stream_bandwidth.under_load(device)
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


def _measure_apart(device: str) -> Device:
    """Measure in a separate process, so that the memory that CUDA allocates is freed at its end."""
    command = [sys.executable, "-m", "sm121", "box", "--device-only", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHILD_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Sm121Error(f"measuring {device} took more than {_CHILD_WITHIN_S:g} s") from error
    lines = done.stdout.strip().splitlines()
    answer = ""
    if done.returncode == 0 and lines:
        answer = lines[-1]
    try:
        return Device.model_validate_json(answer)
    except ValidationError as error:
        errors = done.stderr.strip().splitlines() or ["no output"]
        raise Sm121Error(f"measuring {device}: {errors[-1][:_MOST_OF_A_LINE]}") from error


class _GpuUsers(NamedTuple):
    """The processes on the server's GPUs that do not belong to the run, or may not belong to it.

    One of the two fields is None. Without NVML, both are None.
    """

    others: list[int] | None
    unattributed: list[int] | None


_NO_GPU_USERS = _GpuUsers(None, None)


def _gpu_users(
    device: str, own: Callable[[], Iterable[psutil.Process]], serving: bool
) -> _GpuUsers:
    """Return the processes on the server's GPUs."""
    users = device_memory.read_computing_pids()
    if users is None:
        return _NO_GPU_USERS
    run_pids = {process.pid for process in processes_of_run(own)}
    server_pids = {process.pid for process in own()}
    gpus = {gpu for gpu, pids in users.items() if pids & server_pids}
    if serving and not gpus:
        return _GpuUsers(None, sorted(set().union(*users.values()) - run_pids))
    if not gpus:
        gpus = {architecture.gpu_number(device)}
    pids: set[int] = set()
    for gpu in gpus:
        pids |= users.get(gpu, set())
    return _GpuUsers(sorted(pids - run_pids), None)


def of_node(command: str, profile: str) -> tuple[int, str]:
    """Run ``sm121 box`` on another machine.

    Args:
        command: The command that runs Python on that machine.
        profile: The profile that describes a healthy machine.

    Returns:
        The exit status, and the printed rows.

    Raises:
        UsageError: The command takes too long, or the suite is not installed on that machine.
    """
    name = printable(command)
    try:
        words = [*shlex.split(command), "-m", "sm121", "box", "--profile", profile]
        ended = child.run(words, timeout_s=_NODE_WITHIN_S)
    except (OSError, ValueError, child.TookTooLong) as error:
        raise UsageError(f"--node-command {name}: {error}") from error
    lines = [printable(line) for line in ended.output[:_NODE_LIMIT].splitlines()]
    if ended.status not in (0, 1) or not lines or len(ended.output) >= _NODE_LIMIT:
        last = lines[-1][:_MOST_OF_A_LINE] if lines else "it wrote nothing"
        how = f"it ended with {ended.status}; the last line of its output: {last}"
        raise UsageError(
            f"--node-command {name}: the state of that machine could not be read: {how}"
        )
    return ended.status, "\n".join(["", name, *lines, ""])


def wait_until_idle(own: Callable[[], Iterable[psutil.Process]], *, within_s: float) -> bool:
    """Wait until the engine no longer uses the CPU.

    vLLM's processes spin on their queues for several seconds after the last request.

    Args:
        own: Returns the engine's processes.
        within_s: The timeout in seconds.

    Returns:
        Whether the engine became idle in time.
    """

    def is_idle() -> bool:
        before = _used(own)
        time.sleep(_IDLE_OVER_S)
        return _used(own) - before < _IDLE_CORES * _IDLE_OVER_S

    return waiting.until(is_idle, within_s, every_s=0.0)


def _used(own: Callable[[], Iterable[psutil.Process]]) -> float:
    """Return the CPU seconds that the processes have used."""
    seconds = 0.0
    for process in own():
        with suppress(psutil.Error):  # the process has ended
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def _quartile_spread(samples: Sequence[float]) -> float:
    """Return the distance between the quartiles, as a fraction of the median."""
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle)
