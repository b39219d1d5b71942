"""Kernel times. A number counts only when the output of a timed call is right (some rows of it
against the oracle, all of it written, from values that no call before it had) and when it is not
faster than memory: its share of the measured bandwidth is at most one."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sm121.core.unmet import Fact, text
from sm121.core.verdict import Invalid, NotRun
from sm121.kernels import comparison, expert_layers, problems
from sm121.kernels.cases import BenchmarkCase
from sm121.kernels.protocol import Declaration, declaration, prepared
from sm121.measure import stream_bandwidth
from sm121.measure.stream_bandwidth import Bandwidth
from sm121.oracles import attention, moe

_MARGIN = 1.1
"""A share up to this counts as one: the measured bandwidth and a few microseconds both scatter."""

_ON_GPU = 4 << 30
_TIMES_CACHE = 8
"""The buffer that the bandwidth is measured on."""

_ROWS = 4
_COLUMNS = 1024
_EVERYWHERE = 16
"""In blocks of so many columns no row may be zero all over, nor anything be NaN or infinite."""


@dataclass(frozen=True)
class Timed:
    """What is called, and how to judge what it returns."""

    call: Callable[[], Any]
    bytes_moved: int
    """What must be read and written at the least, each byte once."""
    judge: Callable[[Any], list[Fact]]
    activation: Tensor
    """What a call reads anew."""

    def renew(self) -> None:
        self.activation.copy_(self.activation.roll(1, -1))


def build(provider: Any, case: BenchmarkCase) -> Timed:
    """A case's call with its inputs on the provider's device, weights already in its own layout.
    Raises NotRun when the provider lacks the operation."""
    declared = declaration(provider)
    if getattr(provider, case.operation, None) is None:
        raise NotRun(
            f"provider {declared.name} has no {case.operation}; another one may (--kernel-provider)"
        )
    generator = torch.Generator(declared.device).manual_seed(1)
    return _BUILDERS[case.operation](provider, declared, case, generator)


def check_output(case: BenchmarkCase, timed: Timed, output: Any) -> None:
    """Raises Invalid when the output of the last call is wrong."""
    wrong = timed.judge(output)
    if wrong:
        raise Invalid(
            f"{case.name}: what was timed does not compute {case.operation}: {text(wrong)}"
        )


def check(case: BenchmarkCase, seconds: float, timed: Timed, output: Any, peak: Bandwidth) -> float:
    """The share of the roofline. Raises Invalid: a wrong output, or too fast for the memory."""
    check_output(case, timed, output)
    share = timed.bytes_moved / seconds / 1e9 / peak.best_gb_s
    if not 0 < share <= _MARGIN:
        raise Invalid(
            Fact(
                "of the measured bandwidth at most",
                "of it: the kernel did not do its work, or its data came from a cache",
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
    """The roofline of a device, measured once."""
    if device != "cpu":
        return stream_bandwidth.read_bandwidth(_ON_GPU, device=device)
    size = max(_TIMES_CACHE * stream_bandwidth.last_level_cache_bytes(), 64 << 20)
    return stream_bandwidth.read_bandwidth(min(size, 1 << 30), device="cpu")


def _size(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).bfloat16()


def _bytes(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(
        low, high, shape, generator=generator, device=generator.device, dtype=torch.uint8
    )


def _by_rows(
    operation: Any,
    expected: Callable[[], Tensor],
    rows: Callable[[Tensor], Tensor],
    declared: Declaration,
) -> Callable[[Any], list[Fact]]:
    def judge(output: Any) -> list[Fact]:
        if not isinstance(output, Tensor) or not (
            limit := comparison.tolerance(operation, output.dtype, declared)
        ):
            return [Fact("a bfloat16 or float32 tensor", "another")]
        reference = expected()
        observed = rows(output).reshape(reference.shape).cpu()
        errors = comparison.measure(observed, reference, limit.floor)
        return errors.beyond(limit) + _unwritten(output)

    return judge


def _unwritten(output: Tensor) -> list[Fact]:
    if not bool(output.isfinite().all()):
        return [Fact("finite values throughout", "others")]
    whole = output.shape[-1] // _EVERYWHERE * _EVERYWHERE
    blocks = output[..., :whole].unflatten(-1, (-1, _EVERYWHERE))
    zero = int((blocks == 0).all(-1).sum())
    if zero:
        return [Fact(f"{_EVERYWHERE} neighbours are not all zero", f"{zero} times")]
    return []


def _some(generator: torch.Generator, size: int, count: int) -> Tensor:
    permutation = torch.randperm(size, generator=generator, device=generator.device)
    ends = torch.tensor([0, size - 1], device=generator.device)
    return torch.cat([ends, permutation])[: min(count, size)].unique()


def _experts(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    e, h, i = case.experts, case.hidden, case.intermediate
    w1 = _bytes(generator, 0, 256, e, 2 * i, h // 2), _bytes(generator, 119, 121, e, 2 * i, h // 32)
    w2 = _bytes(generator, 0, 256, e, h, i // 2), _bytes(generator, 117, 119, e, h, i // 32)
    b1, b2 = _normal(generator, e, 2 * i), _normal(generator, e, h)
    x = _normal(generator, case.tokens, h)
    shares = _normal(generator, case.tokens, case.top_k).float().softmax(-1)
    order = torch.rand(case.tokens, e, generator=generator, device=generator.device).argsort(-1)
    ids = order[:, : case.top_k].int().contiguous()
    constants: dict[str, Any] = {"alpha": expert_layers.ALPHA, "limit": expert_layers.LIMIT}
    call = prepared(provider, "fused_moe", x, shares, ids, w1, b1, w2, b2, **constants)
    at = _some(generator, case.tokens, _ROWS)

    def expected() -> Tensor:
        chosen = ids[at].unique().long()
        of = {int(old): new for new, old in enumerate(chosen)}
        local = torch.tensor([[of[int(old)] for old in row] for row in ids[at]], dtype=torch.int32)
        first, second = ((w[0][chosen].cpu(), w[1][chosen].cpu()) for w in (w1, w2))
        biases = b1[chosen].cpu(), b2[chosen].cpu()
        return moe.fused_moe(
            x[at].cpu(), shares[at].cpu(), local, first, biases[0], second, biases[1], **constants,
            roundings=problems.roundings(declared),
        )  # fmt: skip

    touched = len(ids.unique())
    weights = _size(*w1, *w2, b1, b2) // e * touched
    moved = weights + _size(x, shares, ids) + _size(x)
    judge = _by_rows("fused_moe", expected, lambda y: y[at], declared)
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
    keywords: dict[str, Any] = {
        "sinks": _normal(generator, case.query_heads).float(),
        "window": case.window,
        "scale": case.head_dim**-0.5,
    }
    call = prepared(provider, "decode_attention", q, cache, table, lengths, **keywords)

    def expected() -> Tensor:
        arguments = [t.cpu() for t in (q, cache, table, lengths)]
        on_cpu = keywords | {"sinks": keywords["sinks"].cpu()}
        return attention.decode(*arguments, **on_cpu).flatten(0, 1)

    visible = length if case.window is None else min(length, case.window)
    moved = visible * 2 * case.kv_heads * case.head_dim * 2 + 2 * _size(q)
    judge = _by_rows("decode_attention", expected, lambda o: o.flatten(0, 1), declared)
    return Timed(call, moved, judge, q)


def _quantise(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    x = _normal(generator, case.tokens, case.hidden)
    call = prepared(provider, case.operation, x)
    form = case.operation.removesuffix("_quantize")
    elements = x.numel() // 2 if form == "mxfp4" else x.numel()
    moved = _size(x) + elements + x.numel() // 32

    def judge(output: Any) -> list[Fact]:
        return problems.quantisation(x.cpu(), form).judge(output, declared)

    return Timed(call, moved, judge, x)


def _lm_head(
    provider: Any, declared: Declaration, case: BenchmarkCase, generator: torch.Generator
) -> Timed:
    x = _normal(generator, case.tokens, case.hidden)
    weight = _normal(generator, case.vocabulary, case.hidden)
    call = prepared(provider, "lm_head", x, weight)
    at = _some(generator, case.vocabulary, _COLUMNS)

    def expected() -> Tensor:
        return x.cpu().double() @ weight[at].cpu().double().T

    moved = _size(x, weight) + 2 * case.tokens * case.vocabulary
    return Timed(call, moved, _by_rows("lm_head", expected, lambda y: y[:, at], declared), x)


_BUILDERS: dict[str, Callable[..., Timed]] = {
    "fused_moe": _experts,
    "decode_attention": _decode,
    "mxfp4_quantize": _quantise,
    "mxfp8_quantize": _quantise,
    "lm_head": _lm_head,
}


_HOLD_CYCLES = 2_000_000
"""About a millisecond in which the GPU waits, so that the host's slowness is not timed."""


class HostClock:
    """perf_counter, and a read of several times the last-level cache before each round."""

    how = "perf_counter, cold last-level cache"
    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._other = np.ones(3 * stream_bandwidth.last_level_cache_bytes() // 8, dtype=np.int64)

    def before(self) -> None:
        np.bitwise_or.reduce(self._other)


class _Moment:
    """An event on the GPU's time line; a difference of two waits for the later one."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "_Moment") -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class EventClock:
    """CUDA events around the enqueued work, with the L2 cache overwritten before each round."""

    how = "CUDA events, cold L2 cache"

    def __init__(self, device: str) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(max(4 * cache, 64 << 20), dtype=torch.uint8, device=device)

    def now(self) -> Any:
        return _Moment()

    def before(self) -> None:
        torch.cuda.synchronize()
        self._other.zero_()
        torch.cuda._sleep(_HOLD_CYCLES)


@functools.cache
def clock_of(device: str) -> HostClock | EventClock:
    """The clock for a provider's device: one for all tests, for pytest-benchmark keeps the timer of
    each of them to the end of the session, and a timer holds gigabytes where caches are large."""
    return HostClock() if device == "cpu" else EventClock(device)
