"""From a case to tensors, and to what must be said of the output. Random values are of the case's
seed. The oracle is asked once, when the problem is built."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import block_scales, cases, comparison, expert_layers, quantised
from sm121.kernels.comparison import describe
from sm121.kernels.protocol import Declaration, Operation
from sm121.oracles import attention, moe, mxfp4, mxfp8, rounding

Judge = Callable[[Any, Declaration], list[Fact]]


@dataclass(frozen=True)
class Problem:
    """Arguments for an operation, and the judgement of what it returns."""

    operation: Operation
    arguments: tuple[Any, ...]
    """Tensors on the CPU, some in tuples."""
    judge: Judge
    """One line for each thing that is wrong with an output."""
    keywords: dict[str, Any] = field(default_factory=dict)
    strided: bool = False
    block: int | None = None
    reference: Tensor | None = None
    """The oracle's rows [rows, n] float64, where judged by tolerance; activations in bfloat16."""


@functools.singledispatch
def build(case: cases.Case) -> Problem:
    """The problem of a case. Raises TypeError for a case of an unknown kind."""
    raise TypeError(f"expected one of the cases of sm121.kernels.cases, not {type(case).__name__}")


def _by_tolerance(
    operation: Operation,
    shape: tuple[int, ...],
    reference: Tensor | Callable[[Declaration], Tensor],
    *,
    more: Callable[[Tensor, Declaration], list[Fact]] = lambda _error, _declared: [],
    rounded: Callable[[], Tensor] | None = None,
    case: cases.MoeCase = cases.MoeCase("usual"),  # noqa: B008 - frozen
    definitions: Mapping[str, Callable[[], Tensor]],
) -> Judge:
    """`more`: what else is wrong with an error [rows, n] float64. `rounded`: what rounding makes of
    the reference for `rounds_each_expert`. `definitions`: of formats that it may have in truth."""

    def judge(output: Any, declared: Declaration) -> list[Fact]:
        if not isinstance(output, Tensor) or tuple(output.shape) != shape:
            return [Fact(f"a tensor of shape {shape}", describe(output))]
        limit = comparison.tolerance(
            operation, output.dtype, declared, below_limit=case.below_limit, readout=case.readout
        )
        if limit is None:
            return [Fact("bfloat16 or float32", describe(output))]
        expected = reference(declared) if callable(reference) else reference
        rows = output.reshape(expected.shape)
        errors = comparison.measure(rows, expected, limit.floor)
        if rounded is not None and declared.rounds_each_expert and errors.max > limit.max:
            limit = comparison.widened(limit, rounded().bfloat16(), expected)
        beyond = errors.beyond(limit)
        fits = (
            Fact("the roundings that are declared", f"those of {name}")
            for name, of_format in (definitions.items() if beyond else ())
            if not comparison.measure(rows, of_format(), limit.floor).beyond(limit)
        )
        return [*beyond, *fits, *more(rows.double().cpu() - expected, declared)]

    return judge


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _widened(tensor: Tensor, strided: bool) -> Tensor:
    """The same values as every other column group of a wider tensor, as a slice of a fused one."""
    if not strided:
        return tensor
    return torch.cat((tensor, torch.full_like(tensor, 77.0)), -1)[..., : tensor.shape[-1]]


@build.register
def _dequantise(case: cases.DequantiseCase) -> Problem:
    generator = np.random.default_rng(case.seed)
    shape = (case.rows, case.blocks * mxfp4.BLOCK // 2)
    if case.kind == "all":
        packed = np.broadcast_to(np.arange(256, dtype=np.uint8), shape).copy()
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], case.blocks, 1)
    else:
        packed = generator.integers(0, 256, shape, dtype=np.uint8)
        scales = generator.integers(100, 150, (case.rows, case.blocks), dtype=np.uint8)
        if case.kind == "nan":
            scales[:, ::7] = mxfp4.E8M0_NAN
    return mxfp4_dequantisation(packed, scales)


def mxfp4_dequantisation(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Problem:
    """Decoding is exact: the one value of each code. Left open: below 2^-126 float32 may be flushed
    to zero; from 2^128 on it may be infinite or the largest number; the sign of zero."""
    expected = mxfp4.dequantise(packed, scales)

    def judge(output: Any, _declared: Declaration) -> list[Fact]:
        if not isinstance(output, Tensor) or tuple(output.shape) != expected.shape:
            return [Fact(f"a tensor of shape {expected.shape}", describe(output))]
        if output.dtype is not torch.float32:
            return [Fact("float32", describe(output))]
        observed = output.cpu().double().numpy()
        largest = float(np.finfo(np.float32).max)
        same = (observed == expected) | (np.isnan(observed) & np.isnan(expected))
        flushed = (np.abs(expected) < 2.0**-126) & (observed == 0)
        overflow = (np.abs(expected) > largest) & (np.abs(observed) >= largest)
        beyond = overflow & (np.signbit(observed) == np.signbit(expected))
        wrong = ~(same | flushed | beyond)
        if not wrong.any():
            return []
        row, column = (int(axis[0]) for axis in np.nonzero(wrong))
        return [
            Fact(
                "every value exact",
                f"{int(wrong.sum())} of {wrong.size} wrong",
                evidence=f"first at row {row}, column {column}: {observed[row, column]} for "
                f"{expected[row, column]}, scale byte {scales[row, column // mxfp4.BLOCK]}",
            )
        ]

    return Problem(
        "mxfp4_dequantize",
        (torch.from_numpy(packed.copy()), torch.from_numpy(scales.copy())),
        judge,
    )


@build.register
def _quantise(case: cases.QuantiseCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.rows, case.blocks * mxfp4.BLOCK)
    x = _normal(generator, *shape)
    if case.kind == "zeros":
        x = x * (torch.rand(case.rows, 1, generator=generator) < 0.5)
        x[:, : mxfp4.BLOCK] = 0
    elif case.kind == "magnitudes":
        x = torch.ldexp(x, torch.randint(-124, 120, (case.rows, 1), generator=generator))
    elif case.kind == "midpoints":
        x = torch.from_numpy(quantised.midpoints(case)).float()
    return quantisation(x.bfloat16(), case.format, strided=case.strided)


@build.register
def _bytes(case: cases.BytesCase) -> Problem:
    data = np.frombuffer(case.data, dtype=np.uint8)
    if case.codec == "mxfp4-decode":
        edge = case.rows * case.blocks * 16
        packed, scales = data[:edge], data[edge:]
        return mxfp4_dequantisation(
            packed.reshape(case.rows, -1 if case.rows else 16 * case.blocks),
            scales.reshape(case.rows, case.blocks),
        )
    bits = data.view(np.uint16)
    # As float32 bits: bfloat16 is their upper half.
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    x = torch.from_numpy(values.reshape(case.rows, case.blocks * mxfp4.BLOCK)).bfloat16()
    return quantisation(x, case.codec)


def quantisation(x: Tensor, form: str, *, strided: bool = False) -> Problem:
    """Encoding of x [M, K] bfloat16: the scale of the provider's rule, elements the nearest. Bytes
    are not compared across rules: the scale has to be the one of the declared rule, or of one rule
    throughout. Left open: which neighbour a tie goes to, blocks whose scale is at the ends of E8M0,
    the sign of zero."""
    values = x.double().numpy()
    rules = mxfp4.ScaleRule if form == "mxfp4" else mxfp8.ScaleRule
    operation: Operation = "mxfp4_quantize" if form == "mxfp4" else "mxfp8_quantize"

    def judge(output: Any, declared: Declaration) -> list[Fact]:
        wrong = quantised.wrong_shapes(output, x.shape, form)
        if wrong:
            return wrong
        codes = output[0].cpu().contiguous().view(torch.uint8).numpy()
        scales = output[1].cpu().numpy()
        codes = mxfp4.unpack(codes) if form == "mxfp4" else codes
        name = declared.mxfp4_scale_rule if form == "mxfp4" else declared.mxfp8_scale_rule
        candidates = [rule for rule in rules if name in (None, rule.value)]
        return quantised.judge_blocks(values, codes, scales, candidates, form)

    return Problem(operation, (_widened(x, strided),), judge, strided=strided)


def roundings(declared: Declaration) -> moe.Roundings:
    """What the definition of a provider's experts rounds. Raises TypeError where it declares
    activations that there are not, or MXFP8 without its scale rule."""
    plain = {"bfloat16": moe.EXACT, "e4m3": moe.E4M3}
    if declared.activations in plain:
        return plain[declared.activations]
    if declared.activations != "mxfp8" or declared.mxfp8_scale_rule is None:
        raise TypeError(
            f"provider {declared.name}: expected activations of e4m3, bfloat16, or mxfp8 with an "
            f"mxfp8_scale_rule, not {declared.activations} with {declared.mxfp8_scale_rule}"
        )
    return moe.mxfp8_activations(mxfp8.ScaleRule(declared.mxfp8_scale_rule))


@build.register
def _route(case: cases.RouteCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    logits = _normal(generator, case.tokens, case.experts) * 2
    if case.kind == "far":
        logits = logits + 500 * _normal(generator, case.tokens, 1)
    elif case.kind == "equal":
        logits = torch.full_like(logits, 1.25)
    elif case.kind == "dominant":
        logits[:, 3] += 200
    logits = logits.bfloat16().float()
    best = logits.double().topk(case.top_k, -1).values

    def judge(output: Any, _declared: Declaration) -> list[Fact]:
        if not (isinstance(output, tuple) and len(output) == 2):
            return [Fact("shares and experts", describe(output))]
        shares, chosen = output
        shape = (case.tokens, case.top_k)
        if tuple(shares.shape) != shape or tuple(chosen.shape) != shape:
            return [
                Fact(
                    f"{shape} twice",
                    f"{describe(shares)}, {describe(chosen)}",
                )
            ]
        chosen = chosen.cpu().long()
        if not case.tokens:
            return []
        if int(chosen.min()) < 0 or int(chosen.max()) >= case.experts:
            return [Fact(f"experts 0..{case.experts - 1}", "others")]
        if any(len({*experts}) < case.top_k for experts in chosen.tolist()):
            return [Fact("k different experts a token", "one twice")]
        # Of equal logits any may be chosen, and of those without a share in float32.
        logit = logits.double().gather(-1, chosen)
        differs = logit.sort(-1, descending=True).values != best
        if (differs & (best.softmax(-1) >= torch.finfo(torch.float32).tiny)).any():
            return [Fact("the k largest logits", "others")]
        limit = comparison.tolerance("route", shares.dtype)
        if limit is None:
            return [Fact("float32 or bfloat16 shares", describe(shares))]
        return comparison.measure(shares, logit.softmax(-1), limit.floor).beyond(limit)

    arguments = (_widened(logits, case.strided), case.top_k)
    return Problem("route", arguments, judge, strided=case.strided, reference=best.softmax(-1))


@build.register
def _moe(case: cases.MoeCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    layer = expert_layers.layer_of(case.hidden, case.intermediate, case.experts, case.seed // 1000)
    x = _normal(generator, case.tokens, case.hidden) * case.gain
    x[:, 7 : 7 + 89 * case.outliers : 89] *= 30
    shares = _normal(generator, case.tokens, case.top_k).softmax(-1)
    ids = expert_layers.routing_of(case, generator)
    if case.routing == "blocks":
        block = torch.arange(case.tokens) % (case.hidden // mxfp4.BLOCK)
        inside = torch.arange(case.hidden)[None, :] // mxfp4.BLOCK == block[:, None]
        x = x * inside * math.sqrt(case.hidden / mxfp4.BLOCK)
        shares = torch.zeros_like(shares)
        shares[:, 0] = 1
    if case.nan_experts:
        idle = set(range(case.experts)) - set(ids.flatten().tolist())
        layer = expert_layers.with_nan(layer, torch.tensor(sorted(idle)))
    if case.readout:
        layer = expert_layers.reading_out(layer)
    gates = expert_layers.BELOW_LIMIT if case.below_limit else case.gates
    if gates is not None:
        layer = expert_layers.with_gates(layer, gates)
    if case.power:
        layer, x = expert_layers.ranged(layer, x, case.power)
    if case.cancelling:
        w1 = expert_layers.cancelling(layer.w1, x, 32.0)
        layer = dataclasses.replace(layer, w1=w1)
    x = x.bfloat16()
    biases = (layer.w1_bias, layer.w2_bias) if case.biases else (None, None)
    keywords: dict[str, Any] = {"alpha": expert_layers.ALPHA, "limit": expert_layers.LIMIT}
    arguments = (x, shares, ids, layer.w1, biases[0], layer.w2, biases[1])

    @functools.cache
    def rows(path: moe.Roundings) -> Tensor:
        return moe.fused_moe(*arguments, **keywords, roundings=path)

    def blocks(error: Tensor, declared: Declaration) -> list[Fact]:
        if case.routing != "blocks":
            return []
        path = roundings(declared)
        matrix = block_scales.of_first_matrix if case.readout else block_scales.of_second_matrix
        shares = matrix(error, arguments, **keywords, roundings=path)
        return block_scales.worst("w1" if case.readout else "w2", shares).beyond()

    judge = _by_tolerance(
        "fused_moe",
        tuple(x.shape),
        lambda declared: rows(roundings(declared)),
        more=blocks,
        rounded=lambda: rows(moe.EACH_EXPERT),
        case=case,
        definitions={
            "bfloat16 activations": lambda: rows(moe.EXACT),
            "MXFP8 activations": lambda: rows(moe.mxfp8_activations(mxfp8.ScaleRule.CEIL)),
            "E4M3 activations with scales of one": lambda: rows(moe.E4M3),
        },
    )
    passed = (_widened(x, case.strided), *arguments[1:])
    reference = None if case.below_limit else rows(moe.EXACT)  # it is judged by its size alone
    return Problem("fused_moe", passed, judge, keywords, case.strided, reference=reference)


@build.register
def _linear(case: cases.LinearCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    weight = expert_layers.dense(case.outputs, case.inputs)
    x = _normal(generator, case.tokens, case.inputs)
    if case.cancelling:
        weight = expert_layers.cancelling(weight, x, 128.0)
    x = _off_edges(x.bfloat16())

    @functools.cache
    def rows(rule: str | None) -> Tensor:
        if rule is None:
            return moe.mxfp4_linear(x, weight)
        to_mxfp4 = functools.partial(rounding.to_mxfp4, rule=mxfp4.ScaleRule(rule))
        return moe.mxfp4_linear(x, weight, to_mxfp4)

    def expected(declared: Declaration) -> Tensor:
        quantised = declared.linear_activations == "mxfp4"
        return rows(declared.mxfp4_scale_rule if quantised else None)

    shape = (case.tokens, case.outputs)
    definitions = {"bfloat16 activations": lambda: rows(None)}
    for each in mxfp4.ScaleRule:
        definitions[f"MXFP4 activations by {each.value}"] = functools.partial(rows, each.value)
    judge = _by_tolerance("mxfp4_linear", shape, expected, definitions=definitions)
    return Problem("mxfp4_linear", (x, weight), judge, reference=rows(None))


def _off_edges(values: Tensor) -> Tensor:
    """bfloat16 with the last bit set: no value lies between two of E4M3 or E2M1."""
    return (values.view(torch.int16) | 1).view(torch.bfloat16)


def _keywords(
    case: cases.PrefillCase | cases.DecodeCase, generator: torch.Generator
) -> dict[str, Any]:
    return {
        "sinks": _sinks(case.sinks, case.query_heads, generator),
        "window": case.window,
        "scale": case.head_dim**-0.5,
    }


def _sinks(kind: cases.Sinks, heads: int, generator: torch.Generator) -> Tensor | None:
    # Around the logarithm of the sum over some tens of keys: a sink then has a share worth seeing.
    values = (_normal(generator, heads) * 1.5 + 3).bfloat16().float()
    if kind == "none":
        return None
    if kind == "usual":
        return values
    if kind == "mixed":
        extremes = torch.tensor([30.0, -30.0, 0.0, 90.0])
        return torch.where(torch.arange(heads) % 2 == 0, extremes.repeat(heads)[:heads], values)
    return torch.full((heads,), 30.0 if kind == "high" else -30.0)


def _qkv(
    case: cases.PrefillCase | cases.DecodeCase, tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D]: slices of one tensor when strided."""
    heads = case.query_heads + 2 * case.kv_heads
    fused = (_normal(generator, tokens, heads, case.head_dim) * 1.25).bfloat16()
    if case.kv == "fp8":
        fused = _off_edges(fused)
    fused[:, : case.query_heads] *= 2.0**-case.power
    fused[:, case.query_heads :] *= 2.0**case.power
    parts = fused.split((case.query_heads, case.kv_heads, case.kv_heads), 1)
    q, k, v = parts if case.strided else (part.contiguous() for part in parts)
    if case.packed:
        k, v = torch.cat((k, v), -1).split(case.head_dim, -1)
    return q, k, v


_CACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": rounding.to_e4m3,
    "cut": rounding.to_e4m3_cut,
    "bfloat16": rounding.same,
}


def as_cached(
    case: cases.PrefillCase | cases.DecodeCase, arguments: tuple[Any, ...], written: str = ""
) -> list[Any]:
    """The arguments with keys and values as a cache gives them back, or as most do."""
    inputs = list(arguments)
    written = written or ("nearest" if case.kv == "fp8" else "bfloat16")
    cached = slice(1, 3) if isinstance(case, cases.PrefillCase) else slice(1, 2)
    inputs[cached] = map(_CACHED[written], inputs[cached])
    return inputs


def _of_attention(
    case: cases.PrefillCase | cases.DecodeCase,
    oracle: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    **keywords: Any,
) -> tuple[Judge, Tensor]:
    is_fp8 = case.kv == "fp8"

    @functools.cache
    def rows(written: str = "") -> Tensor:
        return oracle(*as_cached(case, arguments, written), **keywords).flatten(0, 1)

    judge = _by_tolerance(
        case.operation,
        tuple(arguments[0].shape),
        lambda declared: rows(declared.kv_fp8 if is_fp8 else ""),
        definitions={
            f"a cache of {name} values": functools.partial(rows, name)
            for name in (_CACHED if is_fp8 else ())
        },
    )
    return judge, rows()


@build.register
def _prefill(case: cases.PrefillCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    q, k, v = _qkv(case, sum(case.lengths), generator)
    edges = torch.tensor([0, *case.lengths]).cumsum(0).int()
    keywords = _keywords(case, generator)
    arguments = (q, k, v, edges)
    judge, reference = _of_attention(case, attention.prefill, arguments, **keywords)
    strided = case.strided or case.packed
    return Problem(case.operation, arguments, judge, keywords, strided, reference=reference)


@build.register
def _decode(case: cases.DecodeCase) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    batch = len(case.lengths)
    q, _, _ = _qkv(case, batch, generator)
    pages = [-(-length // case.block) for length in case.lengths]
    # Two pages that no sequence has, and room after each last token, hold what must not be read.
    total = sum(pages) + 2
    cache = _normal(generator, total, 2, case.kv_heads, case.block, case.head_dim) * 1.25
    cache = cache * 2.0**case.power
    order = torch.randperm(total, generator=generator)
    width = max(pages, default=1)
    table = order[-1].expand(batch, 2 * width if case.strided else width).clone().int()
    start = 0
    unread = torch.ones(total, case.block, dtype=torch.bool)
    for b, (count, length) in enumerate(zip(pages, case.lengths, strict=True)):
        in_use = order[start : start + count]
        table[b, :count] = in_use.int()
        unread[in_use] = (torch.arange(count * case.block) >= length).view(count, case.block)
        start += count
    cache = torch.where(unread[:, None, None, :, None], cache * 100, cache).bfloat16()
    if case.kv == "fp8":
        cache = _off_edges(cache)
    if case.packed:
        cache = torch.stack(cache.unbind(1), -2).movedim(-2, 1)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    keywords = _keywords(case, generator)
    arguments = (q, cache, table[:, :width], lengths)
    judge, reference = _of_attention(case, attention.decode, arguments, **keywords)
    strided = case.strided or case.packed
    return Problem(case.operation, arguments, judge, keywords, strided, case.block, reference)
