"""Measure kernel times, and check that each timed call computed its result.

A time is valid only under two conditions. First, the output is correct: some rows are compared with
the oracle, the whole output was written, and each call had new input values. Second, the call is
not faster than memory: it used at most the measured bandwidth.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sm121.core.unmet import Fact, facts_text
from sm121.core.verdict import Invalid, NotRun
from sm121.kernels import codec_problems, comparison, expert_layers, expert_problems
from sm121.kernels.cases import BenchmarkCase
from sm121.kernels.protocol import Declaration, declaration, prepared
from sm121.machine import stream_bandwidth
from sm121.machine.stream_bandwidth import Bandwidth
from sm121.oracles import attention, moe, mxfp4

#: A call may use at most this multiple of the measured bandwidth. It is above 1 because the
#: measured bandwidth and times of a few microseconds both scatter.
_MARGIN = 1.1

#: The size of the buffer for measuring the bandwidth on a GPU, in bytes.
_BUFFER_ON_GPU = 4 << 30
#: The size of that buffer on a CPU, as a multiple of the last-level cache.
_BUFFER_IN_CACHES = 8
#: The minimum size of that buffer on a CPU, in bytes.
_SMALLEST_BUFFER = 64 << 20
#: The maximum size of buffers on a CPU, in bytes. Servers have caches of 480 MiB: a virtual machine
#: took 20 s to touch a buffer of three times that size for the first time.
_LARGEST_BUFFER = 256 << 20

#: The number of rows of an output that are compared with the oracle.
_ROWS = 4
#: The number of columns of the logits that are compared with the oracle.
_COLUMNS = 1024
#: An output counts as unwritten if this many neighbouring columns of a row are all zero. NaN and
#: infinite values are not accepted anywhere.
_ZERO_COLUMNS = 16
#: The bounds of the random exponents (E8M0) of the experts' scales; the upper bound is exclusive.
_FIRST_SCALES = (119, 121)
_SECOND_SCALES = (117, 119)
#: Makes the GPU wait for about a millisecond before a call, so that host time is not measured.
_HOLD_CYCLES = 2_000_000


@dataclass(frozen=True)
class Timed:
    """A call, and the judge of its output.

    Attributes:
        call: The call.
        bytes_moved: The number of bytes that the call must at least read and write.
        judge: Returns one fact for each fault of an output.
        activation: The input whose values change between calls.
    """

    call: Callable[[], Any]
    bytes_moved: int
    judge: Callable[[Any], list[Fact]]
    activation: Tensor

    def renew(self) -> None:
        """Change the values of the activation, so that the output of an earlier call is wrong."""
        self.activation.copy_(self.activation.roll(1, -1))


def build(provider: Any, case: BenchmarkCase) -> Timed:
    """Build the call of a case, with weights in the provider's own layout.

    Args:
        provider: The kernel provider.
        case: The operation and its sizes.

    Raises:
        NotRun: The provider lacks the operation.
    """
    declared = declaration(provider)
    if getattr(provider, case.operation, None) is None:
        raise NotRun(
            f"provider {declared.name} has no {case.operation}; another one may (--kernel-provider)"
        )
    generator = torch.Generator(declared.device).manual_seed(1)
    return _BUILDERS[case.operation](provider, declared, case, generator)


def check_output(case: BenchmarkCase, timed: Timed, output: Any) -> None:
    """Check the output of the last call.

    Args:
        case: The case.
        timed: Its call.
        output: The output.

    Raises:
        Invalid: The output is wrong.
    """
    wrong = timed.judge(output)
    if wrong:
        raise Invalid(
            f"{case.name}: the timed call does not compute {case.operation}: {facts_text(wrong)}"
        )


def check(case: BenchmarkCase, seconds: float, timed: Timed, output: Any, peak: Bandwidth) -> float:
    """Check the output of the last call and its time.

    Args:
        case: The case.
        seconds: The time of a call.
        timed: The call.
        output: The output.
        peak: The bandwidth of the memory.

    Returns:
        The share of the bandwidth.

    Raises:
        Invalid: The output is wrong, or the call is faster than the memory.
    """
    check_output(case, timed, output)
    share = timed.bytes_moved / seconds / 1e9 / peak.best_gb_s
    if not 0 < share <= _MARGIN:
        raise Invalid(
            Fact(
                "a share of the measured bandwidth of at most",
                "of the bandwidth: the kernel did not do all its work, or its data came from a "
                "cache",
                case.name,
                value=share,
                limit=_MARGIN,
                evidence=f"{timed.bytes_moved} bytes in {seconds:.3g} s, "
                f"{peak.best_gb_s:.4g} GB/s by {peak.method}",
            )
        )
    return share


@functools.cache
def bandwidth(device: str) -> Bandwidth:
    """Measure the bandwidth of a device's memory, once.

    Args:
        device: The device, as PyTorch names it.
    """
    if device != "cpu":
        return stream_bandwidth.read_bandwidth(_BUFFER_ON_GPU, device=device)
    size = _BUFFER_IN_CACHES * stream_bandwidth.last_level_cache_bytes()
    size = min(max(size, _SMALLEST_BUFFER), _LARGEST_BUFFER)
    return stream_bandwidth.read_bandwidth(size, device="cpu")


def _byte_count(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).bfloat16()


def _bytes(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(
        low, high, shape, generator=generator, device=generator.device, dtype=torch.uint8
    )


def _judge_rows(
    operation: Any,
    expected: Callable[[], Tensor],
    rows: Callable[[Tensor], Tensor],
    declared: Declaration,
) -> Callable[[Any], list[Fact]]:
    """Return a judge that compares some rows of an output with the oracle's."""

    def judge(output: Any) -> list[Fact]:
        limit = None
        if isinstance(output, Tensor):
            limit = comparison.tolerance(operation, output.dtype, declared)
        if limit is None:
            return [Fact("a bfloat16 or float32 tensor", "another")]
        reference = expected()
        observed = rows(output).reshape(reference.shape).cpu()
        errors = comparison.measure(observed, reference, limit.floor)
        return errors.beyond(limit) + _find_unwritten(output)

    return judge


def _find_unwritten(output: Tensor) -> list[Fact]:
    if not bool(output.isfinite().all()):
        return [Fact("finite values", "infinity or NaN")]
    whole = output.shape[-1] // _ZERO_COLUMNS * _ZERO_COLUMNS
    blocks = output[..., :whole].unflatten(-1, (-1, _ZERO_COLUMNS))
    zero = int((blocks == 0).all(-1).sum())
    if zero:
        return [
            Fact(f"no {_ZERO_COLUMNS} adjacent elements that are all zero", f"{zero} such groups")
        ]
    return []


def _choose(generator: torch.Generator, size: int, count: int) -> Tensor:
    """Return sorted indices below `size`: the first, the last, and random ones."""
    permutation = torch.randperm(size, generator=generator, device=generator.device)
    ends = torch.tensor([0, size - 1], device=generator.device)
    return torch.cat([ends, permutation])[: min(count, size)].unique()


def _experts(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    e = case.experts
    h = case.hidden
    i = case.intermediate
    w1 = (
        _bytes(generator, 0, 256, e, 2 * i, h // 2),
        _bytes(generator, *_FIRST_SCALES, e, 2 * i, h // mxfp4.BLOCK),
    )
    w2 = (
        _bytes(generator, 0, 256, e, h, i // 2),
        _bytes(generator, *_SECOND_SCALES, e, h, i // mxfp4.BLOCK),
    )
    b1 = _normal(generator, e, 2 * i)
    b2 = _normal(generator, e, h)
    x = _normal(generator, case.tokens, h)
    shares = _normal(generator, case.tokens, case.top_k).float().softmax(-1)
    order = torch.rand(case.tokens, e, generator=generator, device=generator.device).argsort(-1)
    ids = order[:, : case.top_k].int().contiguous()
    swiglu: dict[str, Any] = {"alpha": expert_layers.ALPHA, "limit": expert_layers.LIMIT}
    call = prepared(provider, "fused_moe", x, shares, ids, w1, b1, w2, b2, **swiglu)
    at = _choose(generator, case.tokens, _ROWS)

    def expected() -> Tensor:
        # The oracle gets only the experts of these rows, renumbered in sorted order.
        chosen = ids[at].unique().long()
        local = torch.searchsorted(chosen, ids[at].long()).int().cpu()
        return moe.fused_moe(
            x[at].cpu(),
            shares[at].cpu(),
            local,
            (w1[0][chosen].cpu(), w1[1][chosen].cpu()),
            b1[chosen].cpu(),
            (w2[0][chosen].cpu(), w2[1][chosen].cpu()),
            b2[chosen].cpu(),
            **swiglu,
            roundings=expert_problems.roundings(declared),
        )

    experts_read = len(ids.unique())
    weights = _byte_count(*w1, *w2, b1, b2) // e * experts_read
    moved = weights + _byte_count(x, shares, ids) + _byte_count(x)
    judge = _judge_rows("fused_moe", expected, lambda y: y[at], declared)
    return Timed(call, moved, judge, x)


def _decode(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    page = case.page if case.page in declared.block_sizes else declared.block_sizes[0]
    length = case.depth + 1
    pages = -(-length // page)
    q = _normal(generator, 1, case.query_heads, case.head_dim)
    cache = _normal(generator, pages, 2, case.kv_heads, page, case.head_dim)
    order = torch.randperm(pages, generator=generator, device=generator.device)
    table = order.int()[None].contiguous()
    lengths = torch.tensor([length], dtype=torch.int32, device=generator.device)
    sinks = _normal(generator, case.query_heads).float()
    keywords: dict[str, Any] = {"window": case.window, "scale": case.head_dim**-0.5}
    call = prepared(provider, "decode_attention", q, cache, table, lengths, sinks=sinks, **keywords)

    def expected() -> Tensor:
        output = attention.decode(
            q.cpu(), cache.cpu(), table.cpu(), lengths.cpu(), sinks=sinks.cpu(), **keywords
        )
        return output.flatten(0, 1)

    visible = length if case.window is None else min(length, case.window)
    key_and_value_bytes = 2 * case.kv_heads * case.head_dim * cache.element_size()
    moved = visible * key_and_value_bytes + 2 * _byte_count(q)
    judge = _judge_rows("decode_attention", expected, lambda o: o.flatten(0, 1), declared)
    return Timed(call, moved, judge, q)


def _quantise(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    x = _normal(generator, case.tokens, case.hidden)
    call = prepared(provider, case.operation, x)
    form = "mxfp4" if case.operation == "mxfp4_quantize" else "mxfp8"
    elements = x.numel() // 2 if form == "mxfp4" else x.numel()
    moved = _byte_count(x) + elements + x.numel() // mxfp4.BLOCK

    def judge(output: Any) -> list[Fact]:
        return codec_problems.quantisation(x.cpu(), form).judge(output, declared)

    return Timed(call, moved, judge, x)


def _lm_head(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    x = _normal(generator, case.tokens, case.hidden)
    weight = _normal(generator, case.vocabulary, case.hidden)
    call = prepared(provider, "lm_head", x, weight)
    at = _choose(generator, case.vocabulary, _COLUMNS)

    def expected() -> Tensor:
        return x.cpu().double() @ weight[at].cpu().double().T

    output_bytes = x.element_size() * case.tokens * case.vocabulary
    moved = _byte_count(x, weight) + output_bytes
    judge = _judge_rows("lm_head", expected, lambda y: y[:, at], declared)
    return Timed(call, moved, judge, x)


_BUILDERS: dict[str, Callable[..., Timed]] = {
    "fused_moe": _experts,
    "decode_attention": _decode,
    "mxfp4_quantize": _quantise,
    "mxfp8_quantize": _quantise,
    "lm_head": _lm_head,
}


class HostClock:
    """A timer that uses `perf_counter`, and empties the caches before each round.

    Before a round, it reads other memory of three times the size of the last-level cache, but at
    most 256 MiB. A larger cache may keep some of the kernel's data; `how` then states both sizes.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        cache = stream_bandwidth.last_level_cache_bytes()
        size = min(3 * cache, _LARGEST_BUFFER)
        self.how = "perf_counter, cold last-level cache"
        if size < 3 * cache:
            self.how = f"perf_counter, {size >> 20} MiB read, cache of {cache >> 20} MiB"
        self._other = np.ones(size // 8, dtype=np.int64)

    def before(self) -> None:
        """Replace the content of the caches."""
        np.bitwise_or.reduce(self._other)


class _Moment:
    """A point in time on the GPU: a CUDA event.

    The difference of two points waits for the later one, and is in seconds.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "_Moment") -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class EventClock:
    """A timer that uses CUDA events, and overwrites the L2 cache before each round.

    Args:
        device: The device, as PyTorch names it.
    """

    how = "CUDA events, cold L2 cache"

    def __init__(self, device: str) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(max(4 * cache, 64 << 20), dtype=torch.uint8, device=device)

    def now(self) -> Any:
        """Record a point in time. The difference of two points is in seconds."""
        return _Moment()

    def before(self) -> None:
        """Replace the content of the L2 cache, and let the GPU wait for the host."""
        torch.cuda.synchronize()
        self._other.zero_()
        torch.cuda._sleep(_HOLD_CYCLES)


@functools.cache
def clock_of(device: str) -> HostClock | EventClock:
    """Return the timer for a device.

    All tests share one timer object, because pytest-benchmark keeps each test's timer until the end
    of the session, and with large caches a timer holds gigabytes.

    Args:
        device: The device, as PyTorch names it.
    """
    if device == "cpu":
        return HostClock()
    return EventClock(device)
