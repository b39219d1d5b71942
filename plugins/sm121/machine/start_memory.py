"""Forecast whether a vLLM server will fit in memory, from the headers of a checkpoint.

vLLM uses the share ``--gpu-memory-utilization`` of all memory. What the weights and the engine's
overhead leave of it is the KV cache, which must hold one request of ``--max-model-len``. The memory
of activations and CUDA graphs is only known as a range (``fixtures/start-memory.toml``); therefore
the size of the KV cache is a range, too. On a GB10, host and GPU share one memory.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

from sm121.checkpoint import contradictions
from sm121.checkpoint.inspection import Inspection
from sm121.checkpoint.weights import Weight
from sm121.core import printable
from sm121.engines import dead_runs, device_memory
from sm121.engines.preflight import PreflightFinding, finding_of
from sm121.machine import roofline, start_data
from sm121.machine.roofline import Formats
from sm121.machine.start_arguments import StartArguments
from sm121.machine.start_data import Overhead

_GIB = float(1 << 30)
#: The minimum memory of a process that is named in messages.
_LARGE_GIB = 1.0
#: The maximum number of processes that a message names.
_SHOWN = 4
#: The modules of the dense layers that an engine may quantise while loading them.
_DENSE = {
    "qkv": re.compile(r"\.self_attn\.(q|k|v|qkv)_proj$"),
    "o": re.compile(r"\.self_attn\.o_proj$"),
    "lm_head": re.compile(r"^lm_head$"),
}
#: The bits per value of an FP8 KV cache.
_FP8_BITS = 8.0
#: The highest share of the memory that is recommended. Using all memory would freeze the machine.
_MOST_UTILISATION = 0.95
_ANOTHER_CHECKPOINT = "take a checkpoint with fewer bits, or several machines"


def overhead() -> Overhead:
    """Return the range, over published starts, of the memory for all but weights and KV cache."""
    return start_data.read().overhead_gib


@dataclass(frozen=True)
class MachineMemory:
    """The memory of a machine whose GPU shares the host's memory, in GiB."""

    total: float
    #: The memory that is available without swapping, including the page cache.
    available: float
    #: The unused memory, without the page cache.
    free: float
    cached: float
    #: Descriptions of processes that use much memory.
    holders: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> "MachineMemory":
        """Read the memory of this machine."""
        now = psutil.virtual_memory()
        return cls(
            total=now.total / _GIB,
            available=now.available / _GIB,
            free=now.free / _GIB,
            cached=now.cached / _GIB,
            holders=tuple(_holders()),
        )

    @classmethod
    def of_a_gb10(cls) -> "MachineMemory":
        """Return the memory of a GB10 on which nothing runs."""
        total = start_data.read().gb10.total_gib
        return cls(total=total, available=total, free=total, cached=0.0)


def _holders() -> Iterator[str]:
    """Yield the processes that use much memory: orphans, users of the GPU, and large processes."""
    named: set[int] = set()
    for run, processes in dead_runs.of_dead_runs().items():
        for process in processes:
            named.add(process.pid)
            yield f"{_name(process)} (pid {process.pid}), an orphan of run {run or 'unknown'}"
    for pids in (device_memory.read_computing_pids() or {}).values():
        for pid in sorted(pids - named):
            named.add(pid)
            with contextlib.suppress(psutil.Error):
                yield f"{_name(psutil.Process(pid))} (pid {pid}) on the GPU"
    large = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            resident = process.memory_info().rss / _GIB
            if resident >= _LARGE_GIB and process.pid not in named:
                large.append((resident, f"{_name(process)} (pid {process.pid})"))
    for resident, name in sorted(large, reverse=True):
        yield f"{name} with {resident:.1f} GiB"


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "a process"


@dataclass(frozen=True)
class MemoryForecast:
    """The memory of a start, in GiB."""

    start: StartArguments
    memory: MachineMemory
    weights: float
    #: The KV cache for a request of the maximum length; None: the kind of cache is unknown.
    request: float | None
    #: The KV cache for one more token in such a request.
    growth: float = 0.0
    #: The KV cache for the request with an FP8 cache; None: the cache has at most 8 bits already.
    fp8_request: float | None = None

    @property
    def requested(self) -> float:
        """The memory that the start requests."""
        return self.memory.total * self.start.utilisation

    def kv_cache(self, overhead: float) -> float:
        """Return the memory that is left for the KV cache.

        Args:
            overhead: The memory that the engine needs besides weights and KV cache.
        """
        return self.requested - self.weights - overhead

    @property
    def least_kv_cache(self) -> float:
        """The memory that is left for the KV cache with the largest overhead."""
        return self.kv_cache(self._most_overhead)

    @property
    def usual_kv_cache(self) -> float:
        """The memory that is left for the KV cache with the usual overhead."""
        return self.kv_cache(overhead().usual)

    def tokens(self, kv_cache: float) -> int | None:
        """Return the number of tokens that fit in a KV cache, in requests of the maximum length.

        Args:
            kv_cache: The size of the KV cache in GiB.
        """
        if not self.request:
            return None
        return max(0, int(kv_cache / self.request * self.start.length))

    @property
    def text(self) -> str:
        """The forecast on one line."""
        low, high = self.least_kv_cache, self.kv_cache(overhead().least)
        option = f"--gpu-memory-utilization {self.start.utilisation:g}"
        line = (
            f"memory: weights {self.weights:.1f} GiB (file headers); {option} takes "
            f"{self.requested:.1f} of {self.memory.total:.1f} GiB; left for the KV cache: "
            f"{max(0.0, low):.1f} to {max(0.0, high):.1f} GiB"
        )
        tokens = self.tokens(self.usual_kv_cache)
        if not tokens:
            return line
        return f"{line}, about {tokens:,} tokens in requests of {self.start.length:,}"

    @property
    def _most_overhead(self) -> float:
        return overhead().most_with(self.start.parallel)

    def findings(self) -> list[PreflightFinding]:
        """Return the problems of the start, each with the argument to change."""
        own = self.memory
        found = []
        if own.available < self.requested:
            found.append(self._taken())
        elif own.free < self.requested:
            found.append(
                finding_of("page_cache", free=own.free, cached=own.cached, requested=self.requested)
            )
        if self.kv_cache(overhead().least) <= 0:
            found.append(self._too_large())
        elif self.request is not None and self.request > self.least_kv_cache:
            found.append(self._too_long(self.request))
        return found

    def _taken(self) -> PreflightFinding:
        own = self.memory
        holders = ""
        if own.holders:
            holders = f": held by {printable.some_of(own.holders, _SHOWN)}"
        fitting = int(100 * own.available / own.total) / 100
        least = self.weights + overhead().usual + (self.request or 0.0)
        remedy = f"lower --gpu-memory-utilization to {fitting:g}"
        if fitting * own.total < least:
            remedy = f"stop other processes that use memory: this start needs about {least:.1f} GiB"
        return finding_of(
            "utilisation_exceeds_free",
            utilisation=self.start.utilisation,
            requested=self.requested,
            total=own.total,
            available=own.available,
            holders=holders,
            remedy=remedy,
        )

    def _too_large(self) -> PreflightFinding:
        remedy = (
            self._larger_share(self.request or 0.0)
            or self._larger_share_with_fp8()
            or self._larger_share_and_shorter()
            or self._larger_share(0.0)
            or _ANOTHER_CHECKPOINT
        )
        return finding_of(
            "weights_exceed_memory",
            weights=self.weights,
            utilisation=self.start.utilisation,
            requested=self.requested,
            total=self.memory.total,
            overhead=overhead().least,
            remedy=remedy,
        )

    def _too_long(self, request: float) -> PreflightFinding:
        low, high = self.least_kv_cache, self.kv_cache(overhead().least)
        remedies = []
        fitting = self._fitting_length(request, low)
        if fitting:
            remedies.append(f"lower --max-model-len to {fitting}")
        larger = self._larger_share(request)
        if self.fp8_request is not None:
            if self.fp8_request <= high:
                remedies.append("take --kv-cache-dtype fp8")
            elif not larger:
                larger = self._larger_share_with_fp8()
        if larger:
            remedies.append(larger)
        if not remedies:
            remedies.append(self._larger_share_and_shorter() or _ANOTHER_CHECKPOINT)
        remedy = ", or ".join(remedies)
        return finding_of(
            "context_exceeds_cache",
            "error" if request > high else "warning",
            length=self.start.length,
            request=request,
            low=max(0.0, low),
            high=high,
            remedy=remedy,
        )

    def _larger_share(self, request: float) -> str:
        """Return a sufficient ``--gpu-memory-utilization`` as a remedy; else an empty text.

        If the KV cache already fits with the usual overhead, the largest overhead is assumed.

        Args:
            request: The KV cache that is needed, in GiB.
        """
        for besides in (overhead().usual, self._most_overhead):
            share = math.ceil(100 * (self.weights + besides + request) / self.memory.total) / 100
            if self.start.utilisation < share <= _MOST_UTILISATION:
                return f"raise --gpu-memory-utilization to {share:g}"
        return ""

    def _larger_share_with_fp8(self) -> str:
        """Return a remedy: a larger share and an FP8 cache; empty if that does not suffice."""
        share = self._larger_share(self.fp8_request) if self.fp8_request is not None else ""
        return f"{share} and take --kv-cache-dtype fp8" if share else ""

    def _larger_share_and_shorter(self) -> str:
        """Return a remedy: the largest share and a context that fits; empty if none fits."""
        available = math.floor(100 * self.memory.available / self.memory.total) / 100
        share = min(_MOST_UTILISATION, available)
        left = share * self.memory.total - self.weights - self._most_overhead
        length = self._fitting_length(self.request or 0.0, left)
        if not length or share <= self.start.utilisation:
            return ""
        return f"raise --gpu-memory-utilization to {share:g} and lower --max-model-len to {length}"

    def _fitting_length(self, request: float, kv_cache: float) -> int:
        """Return the maximum length of a request that fits in a KV cache; 0 if none fits."""
        fixed = request - self.growth * self.start.length
        if not self.growth or kv_cache <= fixed:
            return 0
        return int((kv_cache - fixed) / self.growth)


def loaded(inspection: Inspection, served: Formats | None, *, drafts: bool) -> float:
    """Return the size of the weights in bytes, after they were loaded.

    Args:
        inspection: The checkpoint.
        served: The formats in which the engine serves: padded experts, requantised dense layers.
            None: the stored formats.
        drafts: Whether the drafter in the checkpoint is loaded.
    """
    padding = _padding(inspection, served)
    total = 0.0
    for weight in inspection.weights:
        if weight.drafts and not drafts:
            continue
        size = float(weight.size)
        if weight.group == "experts":
            size *= padding
        elif served is not None:
            size *= _requantised(weight, served)
        total += size
    return total


def _padding(inspection: Inspection, served: Formats | None) -> float:
    """Return the factor by which padding enlarges the experts."""
    if served is None or served.padded_to == (1, 1):
        return 1.0
    sizes = []
    for keys in (("hidden_size",), ("moe_intermediate_size", "intermediate_size")):
        sizes.append(contradictions.number(inspection.config, keys))
    hidden, intermediate = sizes
    if not hidden or not intermediate:
        return 1.0
    rows = math.ceil(hidden / served.padded_to[0]) * served.padded_to[0]
    columns = math.ceil(intermediate / served.padded_to[1]) * served.padded_to[1]
    return rows * columns / (hidden * intermediate)


def _requantised(weight: Weight, served: Formats) -> float:
    """Return the factor by which requantisation reduces the size of a dense weight."""
    bits = {"qkv": served.qkv, "o": served.o, "lm_head": served.lm_head}
    for layer, pattern in _DENSE.items():
        stored = roofline.bits_of(weight.format or "")
        if pattern.search(weight.module) and stored and bits[layer] < stored:
            return bits[layer] / stored
    return 1.0


def forecast(
    inspection: Inspection,
    start: StartArguments,
    memory: MachineMemory,
    served: Formats | None = None,
) -> MemoryForecast:
    """Forecast the memory of a start.

    Args:
        inspection: The checkpoint.
        start: The arguments of the start.
        memory: The machine's memory.
        served: As in `loaded`.
    """
    weights = loaded(inspection, served, drafts=start.drafts)
    request: float | None = None
    growth = 0.0
    fp8_request: float | None = None
    if inspection.kv is not None and start.length:
        size = inspection.kv.request_size(
            start.length, start.kv_bits, batched=start.batched, block=start.block
        )
        request = size / start.parallel / _GIB
        if start.kv_bits > _FP8_BITS:
            smaller = inspection.kv.request_size(
                start.length, _FP8_BITS, batched=start.batched, block=start.block
            )
            fp8_request = smaller / start.parallel / _GIB
        growth = inspection.kv.growth(start.kv_bits) / start.parallel / _GIB
    return MemoryForecast(
        start=start,
        memory=memory,
        weights=weights / start.parallel / _GIB,
        request=request,
        growth=growth,
        fp8_request=fp8_request,
    )


def lines(found: MemoryForecast) -> Iterable[str]:
    """Yield a line with the forecast, and a line for each problem of the start.

    Args:
        found: The forecast.
    """
    yield found.text
    for item in found.findings():
        yield f"memory: {item.severity}: {item.message}. {item.remedy}"
