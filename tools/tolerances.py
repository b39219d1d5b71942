"""What the tolerances of the numerics detect: the smallest defect of each kind, computed.

A tolerance is accountable only when it is known what it lets through. Each defect is put on the
output of the clean provider `torch`, with its own rounding errors in it, and made smaller until the
check no longer notices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm121.kernels import block_scales, cases, comparison, problems
from sm121.kernels.cases import DecodeCase, MoeCase, PrefillCase
from sm121.kernels.comparison import MEASURES, Errors, KernelTolerance
from sm121.kernels.problems import ALPHA, LIMIT, Problem
from sm121.kernels.torch_provider import TorchProvider
from sm121.oracles import attention, moe, mxfp4

_SAMPLES = 6
"""Elements, rows and experts tried of each output; the hardest counts."""

_STEPS = 9
"""Halvings, on a logarithmic scale, of the range in which a size is looked for: to 3 %."""

_ONE_HEAD = 17

_LARGEST_OUTPUT = 700_000
"""Elements above which a case is left to the table of block scales: seconds for each size tried."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of defect in one case: the smallest size that is detected in either direction.

    `size` is infinite where none is. Kinds that are there or not (window) have the ratio of the
    largest measure to its tolerance in `ratio` instead: above 1 is detected.
    """

    group: str
    case: str
    kind: str
    size: float
    ratio: float = math.nan


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """All block scales of a matrix, each wrong by one exponent in turn: how many there are, how
    many are detected, and the smallest ratio of the error to its tolerance."""

    case: str
    limit: float
    matrix: str
    total: int
    detected: int
    least: float


def findings(group: str) -> Iterator[Finding]:
    """The findings of each case of a group that has a tolerance, at the default sizes."""
    for case in cases.select(group, full=False):
        problem = problems.build(case)
        reference = problem.reference
        if reference is None or not 0 < reference.numel() <= _LARGEST_OUTPUT or problem.strided:
            continue
        if isinstance(case, MoeCase | PrefillCase | DecodeCase):
            yield from _of_case(group, case, problem)


def _of_case(
    group: str, case: MoeCase | PrefillCase | DecodeCase, problem: Problem
) -> Iterator[Finding]:
    assert problem.reference is not None
    reference = problem.reference
    output = getattr(TorchProvider(), problem.operation)(*problem.arguments, **problem.keywords)
    limit = comparison.tolerance(problem.operation, output.dtype)
    assert limit is not None
    actual = output.reshape(reference.shape).double()
    # An output that is as good as zero, as under sinks of +30, has no errors relative to its size.
    relative = float(reference.square().mean().sqrt()) > limit.floor
    for kind, defects in _output_defects(reference, limit.floor).items() if relative else ():
        sizes = [_smallest(actual, reference, limit, defect) for defect in defects]
        yield Finding(group, case.name, kind, max(sizes))
    if isinstance(case, MoeCase):
        parts = [_times(part) for part in _expert_parts(problem)]
        sizes = [_smallest(actual, reference, limit, part) for part in parts]
        yield Finding(group, case.name, "one expert", max(sizes))
    elif relative:
        yield from _attention_findings(group, case, problem, actual, limit)


Defect = Callable[[float], Tensor]
"""From the size of a defect to what it adds to the output."""


def _times(part: Tensor) -> Defect:
    return lambda size: size * part


def _output_defects(reference: Tensor, floor: float) -> dict[str, list[Defect]]:
    generator = torch.Generator().manual_seed(0)
    # Rows that are as good as zero have no errors relative to their size.
    sizeable = (reference.square().mean(-1).sqrt() > floor).nonzero()[:, 0]
    at = torch.randint(len(sizeable), (_SAMPLES,), generator=generator)
    rows = sizeable[at].tolist()
    whole = reference.square().mean().sqrt()

    def one_row(row: int) -> Defect:
        part = torch.zeros_like(reference)
        part[row] = reference[row]
        return _times(part)

    def one_element(row: int) -> Defect:
        # The largest of its row: the tolerance grows with it.
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
    """The least size from which on, in both directions, the check notices; by bisection."""

    def noticed(size: float) -> bool:
        return all(
            _ratio(comparison.measure(actual + defect(signed), reference, limit.floor), limit) > 1
            for signed in (size, -size)
        )

    low, high = 1e-5, 10.0
    if not noticed(high):
        return math.inf
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if noticed(middle) else (middle, high)
    return high


def _ratio(errors: Errors, limit: KernelTolerance) -> float:
    """The largest measure in units of its tolerance: above 1 is detected; infinite for NaN."""
    ratios = [getattr(errors, measure) / getattr(limit, measure) for measure in MEASURES]
    return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def _expert_parts(problem: Problem) -> list[Tensor]:
    """What single experts give to the output, for some that have tokens with a share."""
    x, shares, ids, w1, b1, w2, b2 = problem.arguments
    used = ids[shares > 0].unique().tolist()[:_SAMPLES]
    return [
        moe.fused_moe(
            x, torch.where(ids == e, shares, 0.0), ids, w1, b1, w2, b2, **problem.keywords
        )
        for e in used
    ]


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
        rows: Tensor = oracle(*problem.arguments, **{**problem.keywords, **keywords})
        return rows.reshape(reference.shape) - reference

    if case.sinks == "usual":
        # o = N / (Z + e^s): what is left without the sink tells its share, and with the share what
        # any other sink would do.
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


def found_block_scales(case: MoeCase) -> list[BlockScales]:
    """Every block scale of one matrix wrong by one exponent, up and down, one at a time.

    Of the first matrix where the case reads hidden activations out: computed, the size of the error
    that each defect makes, the smaller of up and down, the largest over the tokens, in units of the
    tolerance of `max`; one entry for each such tolerance. Of the second matrix elsewhere: one too
    low takes half of its block's part away, of which the rounding of the clean provider may hide
    what it has of that part itself; in units of `block_scales.LIMIT`.
    """
    problem = problems.build(case)
    assert problem.reference is not None
    if not case.readout:
        output = TorchProvider().fused_moe(*problem.arguments, **problem.keywords)
        error = output.double() - problem.reference
        own = block_scales.each_share(error, problem.arguments, **problem.keywords)
        left = 0.5 - torch.cat([shares.flatten() for _, shares in own]).abs()
        return [_counted(case, "down", block_scales.LIMIT, left)]
    x, shares, ids, w1, b1, w2, _ = problem.arguments
    ratios = []
    for e in range(case.experts):
        tokens, place = ((ids == e) & (shares > 0)).nonzero(as_tuple=True)
        rows = problem.reference[tokens]
        size = torch.maximum(rows.abs(), rows.square().mean(-1, keepdim=True).sqrt())
        unit = size / shares[tokens, place].double()[:, None]
        inside = x[tokens].double() @ moe.expert_matrix(w1, e).T
        parts = x[tokens].double().unflatten(-1, (-1, mxfp4.BLOCK)).abs().amax(-1)
        down = moe.expert_matrix(w2, e)
        ratios.append(
            _gate_up_ratios(inside + b1[e].double(), inside, parts.argmax(-1), down, unit)
        )
    every = torch.cat(ratios)
    limits = [
        t.of_block_scales().max
        for t in comparison.tolerances()
        if t.operation == "fused_moe" and not t.below_limit
    ]
    return [_counted(case, "gate-up", limit, every) for limit in limits]


def _counted(case: MoeCase, matrix: str, limit: float, sizes: Tensor) -> BlockScales:
    return BlockScales(
        case=case.name,
        limit=limit,
        matrix=matrix,
        total=len(sizes),
        detected=int((sizes > limit).sum()),
        least=float(sizes.min()) / limit,
    )


def _gate_up_ratios(t: Tensor, inside: Tensor, block: Tensor, down: Tensor, unit: Tensor) -> Tensor:
    """t and inside [n, 2I]: hidden values with and without the bias; block [n]: where each token
    lives; down [H, I]; unit [n, H] -> [blocks * 2I]."""
    hidden = _activation(t)
    # Each hidden activation is read out in one output, so a column of `down` has one entry.
    peak = down.amax(0) / unit[:, down.argmax(0)]
    sides = []
    for factor in (-0.5, 1.0):  # the exponent one too low, one too high
        gate, up = t.clone(), t.clone()
        gate[:, 0::2] += factor * inside[:, 0::2]
        up[:, 1::2] += factor * inside[:, 1::2]
        moved = torch.stack((_activation(gate) - hidden, _activation(up) - hidden), -1)
        error = (moved.abs() * peak[..., None]).flatten(1)
        sides.append(torch.stack([error[block == b].amax(0) for b in block.unique()]))
    return torch.minimum(*sides).flatten()


def _activation(t: Tensor) -> Tensor:
    return moe.swiglu(t[:, 0::2], t[:, 1::2], alpha=ALPHA, limit=LIMIT)


def write_report(output: Path, progress: Callable[[str], None]) -> list[str]:
    """Write docs/tolerances.md; returns one line for each promise that the tolerances break.

    The promises: in every case a scale error of 1 % is detected, and in the block-scale cases every
    single wrong block scale.
    """
    found: dict[str, list[Finding]] = {}
    for group in cases.GROUPS:
        found[group] = list(findings(group))
        progress(f"{group}: {len(found[group])} findings")
    scales = []
    for case in cases.select("moe_block_scales", full=False):
        assert isinstance(case, MoeCase)
        scales.extend(found_block_scales(case))
        progress(f"block scales of {case}")
    output.write_text(_report(found, scales), "utf-8")
    return broken_promises([f for each in found.values() for f in each], scales)


def broken_promises(found: list[Finding], scales: list[BlockScales]) -> list[str]:
    """One line for each case in which a scale error of 1 % or a wrong block scale passes."""
    loose = [
        f"{f.group} ({f.case}): required: a scale error of 1 % is detected, seen: from {f.size:.2%}"
        for f in found
        if f.kind == "scale" and not f.size <= 0.01
    ]
    missed = [
        f"{s.case} at {s.limit:g}: required: every block scale of {s.matrix}, "
        f"seen: {s.detected} of {s.total}"
        for s in scales
        if s.detected < s.total
    ]
    return loose + missed


_PREFACE = """# What the tolerances of the numerics detect

Generated by `sm121 tolerances`. Each defect is put on the output of the clean provider `torch`,
with its own rounding errors in it, and made smaller until the check no longer notices. A test is
named by its group of cases (`sm121.kernels.cases`). The first number is that of the case that sees
the most, the second that of the case that sees the least; a defect in every call is caught by the
first. Not in it: cases of full size, outputs of millions, and outputs and rows that are as good as
zero by design (sinks of +30 and +90). The measures are those of `sm121.kernels.comparison`, the
tolerances those of `fixtures/kernels/tolerances.toml`:

| operation | output | max | rms | slope | bias | why |
|---|---|---:|---:|---:|---:|---|
"""

_KINDS = """
What the kinds mean: *scale*: the whole output times 1 + s; *bias*: s times the output's RMS added
everywhere; *one row*: a row (a token, for attention a token's head) times 1 + s; *one element*: s
times its row's RMS added to the largest element of a row; *one expert*: what one expert gives times
1 + s; *sink shift*: s added to the sinks, in natural-log units; *window*: one more or one less, as
a multiple of what is detected (above 1 is detected).

The codecs have no tolerance: decoding is exact; a scale byte off by one, a wrong element or a lost
NaN is detected anywhere. Routing is held to the k largest logits exactly.
"""

_BLOCKS = """
## One wrong block scale

Each block scale of a layer off by one exponent, up and down, one at a time, in units of what is
detected: above 1 is. Of `down`, whose blocks add up in an output, how much of a block's part is in
the error, by projection over the tokens of the expert (`sm121.kernels.block_scales`): at most 0.25,
where a wrong scale shows 0.5 or 1, less what the rounding of the clean provider has of it. Of
`gate-up`, read out in single outputs, the largest error against `block_scale_max` (the larger one
is that of providers that declare `rounds_each_expert`), without the kernel's own rounding.

| case of moe_block_scales | matrix | limit | block scales | detected | least |
|---|---|---:|---:|---:|---:|"""


def _report(found: dict[str, list[Finding]], scales: list[BlockScales]) -> str:
    limits = [
        f"| {t.operation} | {t.dtype} | {t.max:g} | {t.rms:g} | {t.slope:g} | {t.bias:g} "
        f"| {t.source} |"
        for t in comparison.tolerances()
    ]
    rows = []
    for group, each in found.items():
        for kind in dict.fromkeys(f.kind for f in each):
            own = [f for f in each if f.kind == kind]
            if kind.startswith("window"):
                own.sort(key=lambda f: -f.ratio)
                sizes = [f"{f.ratio:.1f} x ({f.case})" for f in (own[0], own[-1])]
            else:
                own.sort(key=lambda f: f.size)
                ends = (own[0], own[-1])
                if "nat" in kind:
                    sizes = [f"{f.size:.2g} ({f.case})" for f in ends]
                else:
                    sizes = [f"{f.size * 100:.2g} % ({f.case})" for f in ends]
            rows.append(f"| {group} | {kind} | {sizes[0]} | {sizes[1]} |")
    blocks = [
        f"| {s.case} | {s.matrix} | {s.limit:g} | {s.total} | {s.detected} | {s.least:.2f} |"
        for s in scales
    ]
    return "\n".join(
        [
            _PREFACE.rstrip("\n"),
            *limits,
            _KINDS,
            "| test | defect | smallest detected, best case | smallest detected, worst case |",
            "|---|---|---|---|",
            *rows,
            _BLOCKS,
            *blocks,
            "",
        ]
    )
