"""Compute the smallest defect of each kind that the tolerances of the numerics detect.

A tolerance is only useful if one knows what passes it. Each defect is added to the output of a
correct provider, which has its own rounding errors, and is made smaller until the check no longer
detects it. The correct provider is `torch`; for experts with MXFP8 activations, it is `torch` with
the roundings of that path.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import (
    attention_problems,
    block_scales,
    cases,
    comparison,
    expert_problems,
    problems,
)
from sm121.kernels.cases import Case, DecodeCase, LinearCase, MoeCase, PrefillCase
from sm121.kernels.comparison import MEASURES, Errors, KernelTolerance
from sm121.kernels.problem import Problem
from sm121.kernels.protocol import Declaration, declaration
from sm121.kernels.torch_codecs import TorchCodecs
from sm121.kernels.torch_experts import TorchExperts
from sm121.kernels.torch_provider import TorchProvider
from sm121.oracles import attention, moe

_SAMPLES = 6
"""The number of elements, rows and experts of each output that get a defect. The defect that is
hardest to detect counts."""

_STEPS = 9
"""Steps of the bisection that finds the size of a defect: each halves the range of the logarithm,
which leaves an error of 3 %."""

_ONE_HEAD = 17

_LEAST_DETECTED = {"bfloat16": 1.0, "mxfp8": 0.9999}
"""The share of the wrong block scales that must be detected."""

_LARGEST_OUTPUT = 700_000
"""The largest number of elements of a case. A larger case takes seconds for each size, and is
only in the table of block scales."""


class Mxfp8Experts(TorchExperts):
    """Experts with MXFP8 activations."""

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None, e: int) -> Tensor:
        """Return x W^T rounded to bfloat16, plus the bias, in float32."""
        q, scales = self.codecs.mxfp8_quantize(x)
        values = TorchCodecs().scale_values(scales)
        wide = q.float().unflatten(-1, (scales.shape[1], -1)) * values[..., None]
        y = (wide.flatten(-2) @ matrix.float().T).bfloat16().float()
        if bias is None:
            return y
        return y + bias[e].float()


class Mxfp8Provider(TorchProvider):
    """`torch` with MXFP8 activations, and with bfloat16 where FlashInfer's kernels store it: the
    first product, and the output of each expert. This is the default tactic."""

    activations = "mxfp8"
    experts_class = Mxfp8Experts


class AtomicsProvider(Mxfp8Provider):
    """A provider that adds the output of each expert to a bfloat16 output, one after the other, as
    tactics that fuse the sum into the second product do."""

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return y [T, H] bfloat16; see `FusedMoe`."""
        x, weights, ids, *layer = arguments
        out = torch.zeros(x.shape, dtype=torch.bfloat16)
        for e in ids.unique().tolist():
            share = torch.where(ids == e, weights, 0.0)
            out += super().fused_moe(x, share, ids, *layer, **keywords)
        return out


class FastExponentialExperts(Mxfp8Experts):
    """Experts with an exponential by ex2.approx: its argument, up to 7 alpha = 12, is rounded to
    float32, with an error up to 2^-20."""

    def activation(self, t: Tensor, alpha: float, limit: float) -> Tensor:
        """Return the clamped SwiGLU, t [n, 2I] interleaved -> [n, I]."""
        h = super().activation(t, alpha, limit)
        noise = torch.rand(h.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return h * (1 + noise * 2.0**-20)


class FastExponentialProvider(AtomicsProvider):
    """A provider that sums the experts' outputs with atomics, and computes exponentials by
    ex2.approx.
    """

    experts_class = FastExponentialExperts


CLEAN = (TorchProvider, Mxfp8Provider)

MXFP8 = declaration(Mxfp8Provider())
_PATH = expert_problems.roundings(MXFP8)
DEFINITIONS = {
    "nothing: the exact mathematics": moe.EXACT,
    "x": moe.Roundings(x=_PATH.x),
    "x and the hidden activations": moe.Roundings(x=_PATH.x, hidden=_PATH.x),
    "these, and bfloat16 where the kernel stores it": _PATH,
}
"""The roundings that an oracle for MXFP8 activations may make by definition."""


@dataclasses.dataclass(frozen=True)
class Honest:
    """The largest errors of a correct kernel with MXFP8 activations, over cases."""

    kernel: str
    definition: str
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of defect in one case: the smallest size that is detected in both directions.

    `size` is infinite if no size is detected. For a kind without a size (window), `ratio` is the
    largest error measure divided by its tolerance. Above 1, the defect is detected.
    """

    group: str
    case: str
    kind: str
    size: float
    ratio: float = math.nan


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """The result of making each block scale of a matrix wrong by one exponent, one at a time.

    It has the number of scales, the number of detected ones, and the smallest share of a block in
    the error, in units of the limit.
    """

    case: str
    activations: str
    matrix: str
    total: int
    detected: int
    least: float


def findings(group: str, clean: TorchProvider) -> Iterator[Finding]:
    """Yield the findings of each case of a group with a tolerance, at the default sizes.

    Args:
        group: The name of the group.
        clean: The correct provider. With MXFP8 activations, only cases of experts count.
    """
    for case in cases.select(group, full=False):
        if clean.activations != "bfloat16" and not isinstance(case, MoeCase):
            continue
        problem = problems.build(case)
        if problem.strided or not _sizeable(problem.reference):
            continue
        if isinstance(case, MoeCase | PrefillCase | DecodeCase | LinearCase):
            yield from _of_case(group, case, problem, clean)


def _sizeable(reference: Tensor | None) -> bool:
    return reference is not None and 0 < reference.numel() <= _LARGEST_OUTPUT


HONEST_GROUPS = ("moe_token_counts", "moe_routing", "moe_activation")


def honest(chosen: Iterable[Case]) -> Iterator[Honest]:
    """Yield the errors of correct kernels with MXFP8 activations.

    The default kernel is compared with the oracle of each definition, the others with the last one.

    Args:
        chosen: The cases.
    """
    names = {
        "the default tactic": Mxfp8Provider,
        "added by atomics": AtomicsProvider,
        "atomics and fast exponentials": FastExponentialProvider,
    }
    worst: dict[tuple[str, str], dict[str, float]] = {}
    limit = comparison.tolerance("fused_moe", torch.bfloat16, MXFP8)
    assert limit is not None
    for case in chosen:
        problem = problems.build(case)
        if not _sizeable(problem.reference) or problem.strided:
            continue
        arguments = problem.arguments
        keywords = problem.keywords
        references = {
            name: moe.fused_moe(*arguments, **keywords, roundings=each)
            for name, each in DEFINITIONS.items()
        }
        for kernel, provider in names.items():
            output = provider().fused_moe(*arguments, **keywords)
            for name, reference in references.items():
                if kernel != "the default tactic" and name != list(references)[-1]:
                    continue
                errors = comparison.measure(output, reference, limit.floor)
                own = worst.setdefault((kernel, name), dict.fromkeys(MEASURES, 0.0))
                own.update({m: max(own[m], getattr(errors, m)) for m in MEASURES})
    for (kernel, name), errors_of in worst.items():
        yield Honest(kernel, name, errors_of)


def _expected(problem: Problem, declared: Declaration) -> Tensor:
    """Return the rows with which a provider of this kind is compared."""
    assert problem.reference is not None
    if problem.operation != "fused_moe":
        return problem.reference
    path = expert_problems.roundings(declared)
    return moe.fused_moe(*problem.arguments, **problem.keywords, roundings=path)


def _of_case(
    group: str,
    case: MoeCase | PrefillCase | DecodeCase | LinearCase,
    problem: Problem,
    clean: TorchProvider,
) -> Iterator[Finding]:
    reference = _expected(problem, declaration(clean))
    output = getattr(clean, problem.operation)(*problem.arguments, **problem.keywords)
    limit = comparison.tolerance(
        problem.operation,
        output.dtype,
        declaration(clean),
        readout=isinstance(case, MoeCase) and case.readout,
    )
    assert limit is not None
    actual = output.reshape(reference.shape).double()
    # An output near zero, for example with sinks of +30, has no errors relative to its size.
    relative = float(reference.square().mean().sqrt()) > limit.floor
    for kind, defects in _output_defects(reference, limit.floor).items() if relative else ():
        sizes = []
        for defect in defects:
            sizes.append(_smallest(actual, reference, limit, defect))
        yield Finding(group, case.name, kind, max(sizes))
    if isinstance(case, MoeCase):
        parts = [_times(part) for part in _expert_parts(problem)]
        sizes = []
        for part in parts:
            sizes.append(_smallest(actual, reference, limit, part))
        yield Finding(group, case.name, "one expert", max(sizes))
    elif relative and not isinstance(case, LinearCase):
        yield from _attention_findings(group, case, problem, actual, limit)


Defect = Callable[[float], Tensor]
"""A function that returns what a defect of the given size adds to the output."""


def _times(part: Tensor) -> Defect:
    return lambda size: size * part


def _output_defects(reference: Tensor, floor: float) -> dict[str, list[Defect]]:
    generator = torch.Generator().manual_seed(0)
    # Rows near zero have no errors relative to their size.
    sizeable = (reference.square().mean(-1).sqrt() > floor).nonzero()[:, 0]
    at = torch.randint(len(sizeable), (_SAMPLES,), generator=generator)
    rows = sizeable[at].tolist()
    whole = reference.square().mean().sqrt()

    def one_row(row: int) -> Defect:
        part = torch.zeros_like(reference)
        part[row] = reference[row]
        return _times(part)

    def one_element(row: int) -> Defect:
        # The largest value of its row: the tolerance grows with it.
        part = torch.zeros_like(reference)
        column = int(reference[row].abs().argmax())
        part[row, column] = reference[row].square().mean().sqrt()
        return _times(part)

    return {
        "scale": [_times(reference)],
        "bias": [_times(whole.expand_as(reference))],
        "one row": [one_row(row) for row in rows],
        "one element": [one_element(row) for row in rows],
    }


def _smallest(actual: Tensor, reference: Tensor, limit: KernelTolerance, defect: Defect) -> float:
    """Find the smallest size at which the check detects the defect and its negative."""

    def noticed(size: float) -> bool:
        return all(
            _ratio(comparison.measure(actual + defect(signed), reference, limit.floor), limit) > 1
            for signed in (size, -size)
        )

    low = 1e-5
    high = 10.0
    if not noticed(high):
        return math.inf
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if noticed(middle) else (middle, high)
    return high


def _ratio(errors: Errors, limit: KernelTolerance) -> float:
    """Return the largest measure in units of its tolerance: above 1 is detected; infinite for
    NaN."""
    ratios = []
    for measure in MEASURES:
        ratios.append(getattr(errors, measure) / getattr(limit, measure))
    return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def _expert_parts(problem: Problem) -> list[Tensor]:
    """Return the contributions of single experts to the output, for some experts with tokens."""
    x, shares, ids, w1, b1, w2, b2 = problem.arguments
    used = ids[shares > 0].unique().tolist()[:_SAMPLES]
    parts = []
    for expert in used:
        own = torch.where(ids == expert, shares, 0.0)
        parts.append(moe.fused_moe(x, own, ids, w1, b1, w2, b2, **problem.keywords))
    return parts


def _attention_findings(
    group: str,
    case: PrefillCase | DecodeCase,
    problem: Problem,
    actual: Tensor,
    limit: KernelTolerance,
) -> Iterator[Finding]:
    oracle: Any = attention.prefill if isinstance(case, PrefillCase) else attention.decode
    assert problem.reference is not None
    reference = problem.reference

    def changed(**keywords: Any) -> Tensor:
        inputs = attention_problems.as_cached(case, problem.arguments)
        return oracle(*inputs, **problem.keywords | keywords).reshape(reference.shape) - reference

    if case.sinks == "usual":
        # o = N / (Z + e^s): the output without the sink gives the sink's share, and the share gives
        # the output with any other sink.
        without = reference + changed(sinks=None)
        kept = (reference * without).sum(-1, keepdim=True) / without.square().sum(-1, keepdim=True)

        def shifted(by: float) -> Tensor:
            return reference / (kept + (1 - kept) * math.exp(by)) - reference

        every = _smallest(actual, reference, limit, shifted)
        yield Finding(group, case.name, "sink shift, all heads (nat)", every)
        one = (torch.arange(len(reference)) % case.query_heads == _ONE_HEAD)[:, None]
        single = _smallest(actual, reference, limit, lambda by: shifted(by) * one)
        yield Finding(group, case.name, "sink shift, one head (nat)", single)
    if case.window is not None and max(case.lengths) > case.window:
        for by in (-1, 1):
            errors = comparison.measure(
                actual + changed(window=case.window + by), reference, limit.floor
            )
            yield Finding(group, case.name, f"window {by:+}", math.nan, _ratio(errors, limit))


def found_block_scales(case: MoeCase, clean: TorchProvider) -> BlockScales:
    """Find which wrong block scales of one matrix are detected.

    Each block scale is set wrong by one exponent, up and down, one at a time; the smaller share of
    its block in the error counts, in units of `block_scales.LIMIT`. If the case reads hidden
    activations, this is done for the first matrix, and the error is the effect of the wrong scale
    on what the path keeps of the activations. Otherwise it is done for the second matrix: a scale
    that is one too low removes half of its block's contribution, and the rounding of the correct
    provider may hide its own part of it.

    Args:
        case: The case.
        clean: The correct provider.
    """
    problem = problems.build(case)
    declared = declaration(clean)
    arguments = problem.arguments
    keywords = problem.keywords
    keywords = keywords | {"roundings": expert_problems.roundings(declared)}
    if not case.readout:
        output = clean.fused_moe(*arguments, **problem.keywords)
        error = output.double() - _expected(problem, declared)
        own = block_scales.of_second_matrix(error, arguments, **keywords)
        shares = 0.5 - torch.cat([each.flatten() for _, each in own]).abs()
    else:
        shares = torch.cat(list(_read_out(case, arguments, keywords)))
    return BlockScales(
        case=case.name,
        activations=declared.activations,
        matrix="gate-up" if case.readout else "down",
        total=len(shares),
        detected=int((shares > block_scales.LIMIT).sum()),
        least=float(shares.min()) / block_scales.LIMIT,
    )


def _read_out(
    case: MoeCase, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield, for each expert, the share of each wrong scale of its first matrix, [rows *
    blocks]."""
    _, weights, ids, *_ = arguments
    keep = keywords["roundings"].hidden
    for e in range(case.experts):
        tokens = ((ids == e) & (weights > 0)).any(-1).nonzero()[:, 0]
        moved = block_scales.Moved.of(arguments, e, tokens, **keywords)
        for part in (0, 1):
            yield torch.minimum(
                *(
                    moved.share(keep(moved.hidden(factor, part)) - keep(moved.right), factor, part)
                    for factor in block_scales.WRONG
                )
            ).flatten()


def broken_promises(found: list[Finding], scales: list[BlockScales]) -> list[str]:
    """Return one line for each case in which a scale error of 1 % or a wrong block scale passes.

    Args:
        found: The findings of the groups.
        scales: The findings of the block scales.
    """
    loose = []
    for f in found:
        if f.kind == "scale" and not f.size <= 0.01:
            loose.append(
                Fact(
                    "a scale error of 1 % is detected",
                    f"from {f.size:.2%}",
                    f"{f.group} ({f.case})",
                )
            )
    missed = []
    for s in scales:
        if s.detected < s.total * _LEAST_DETECTED[s.activations]:
            missed.append(
                Fact(
                    f"every block scale of {s.matrix}",
                    f"{s.detected} of {s.total}",
                    f"{s.case}, activations of {s.activations}",
                )
            )
    return [str(fact) for fact in loose + missed]
