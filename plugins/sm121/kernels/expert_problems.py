"""Problems for the router, the experts and dense MXFP4 layers."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import block_scales, cases, comparison, expert_layers
from sm121.kernels.comparison import describe
from sm121.kernels.problem import Problem, ToleranceJudge, normal, off_edges, widened
from sm121.kernels.protocol import Declaration
from sm121.oracles import moe, mxfp4, mxfp8, rounding

#: The factor by which outlier channels are enlarged.
_OUTLIER = 30
#: The column of the first outlier channel.
_FIRST_OUTLIER = 7
#: The distance between outlier channels, in columns.
_OUTLIERS_APART = 89
#: The factor by which the first block is enlarged in cases with `cancelling`.
_CANCELLING_EXPERTS = 32.0
_CANCELLING_LINEAR = 128.0


def roundings(declared: Declaration) -> moe.Roundings:
    """Return the oracle's roundings for a provider's experts.

    Args:
        declared: The provider's declaration.

    Raises:
        TypeError: The declaration has unknown activations, or MXFP8 without its scale rule.
    """
    plain = {"bfloat16": moe.EXACT, "e4m3": moe.E4M3}
    if declared.activations in plain:
        return plain[declared.activations]
    if declared.activations != "mxfp8" or declared.mxfp8_scale_rule is None:
        raise TypeError(
            f"provider {declared.name}: expected activations of e4m3, bfloat16, or mxfp8 with an "
            f"mxfp8_scale_rule, got {declared.activations} with {declared.mxfp8_scale_rule}"
        )
    return moe.mxfp8_activations(mxfp8.ScaleRule(declared.mxfp8_scale_rule))


def route(case: cases.RouteCase) -> Problem:
    """Build a problem of choosing the experts of tokens.

    Args:
        case: The case.
    """
    generator = torch.Generator().manual_seed(case.seed)
    logits = normal(generator, case.tokens, case.experts) * 2
    if case.kind == "far":
        logits = logits + 500 * normal(generator, case.tokens, 1)
    elif case.kind == "equal":
        logits = torch.full_like(logits, 1.25)
    elif case.kind == "dominant":
        logits[:, 3] += 200
    logits = logits.bfloat16().float()
    best = logits.double().topk(case.top_k, -1).values

    def judge(output: Any, _declared: Declaration) -> list[Fact]:
        return _judge_routing(case, logits, best, output)

    arguments = (widened(logits, case.strided), case.top_k)
    return Problem("route", arguments, judge, strided=case.strided, reference=best.softmax(-1))


def _judge_routing(case: cases.RouteCase, logits: Tensor, best: Tensor, output: Any) -> list[Fact]:
    """Check routing weights and experts. `best`: each token's k largest logits in float64."""
    if not (isinstance(output, tuple) and len(output) == 2):
        return [Fact("weights and numbers of the experts", describe(output))]
    shares, chosen = output
    shape = (case.tokens, case.top_k)
    if tuple(shares.shape) != shape or tuple(chosen.shape) != shape:
        return [Fact(f"two tensors of shape {shape}", f"{describe(shares)}, {describe(chosen)}")]
    chosen = chosen.cpu().long()
    if not case.tokens:
        return []
    if int(chosen.min()) < 0 or int(chosen.max()) >= case.experts:
        return [Fact(f"experts 0..{case.experts - 1}", "others")]
    if any(len(set(experts)) < case.top_k for experts in chosen.tolist()):
        return [Fact("k different experts per token", "the same one twice")]
    # A provider may choose any of several equal logits, and any logit whose softmax underflows in
    # float32.
    logit = logits.double().gather(-1, chosen)
    differs = logit.sort(-1, descending=True).values != best
    has_share = best.softmax(-1) >= torch.finfo(torch.float32).tiny
    if (differs & has_share).any():
        return [Fact("the k largest logits", "others")]
    limit = comparison.tolerance("route", shares.dtype)
    if limit is None:
        return [Fact("weights of the experts in float32 or bfloat16", describe(shares))]
    return comparison.measure(shares, logit.softmax(-1), limit.floor).beyond(limit)


@dataclass(frozen=True)
class _MoeInputs:
    """The tensors of a `MoeCase`, in the shapes of `sm121.kernels.protocol.FusedMoe`."""

    x: Tensor
    shares: Tensor
    ids: Tensor
    layer: expert_layers.ExpertLayer


def experts(case: cases.MoeCase) -> Problem:
    """Build a problem of computing a layer's experts.

    Args:
        case: The case.
    """
    inputs = _moe_inputs(case)
    layer = inputs.layer
    w1_bias = layer.w1_bias if case.biases else None
    w2_bias = layer.w2_bias if case.biases else None
    weights = (layer.w1, w1_bias, layer.w2, w2_bias)
    arguments = (inputs.x, inputs.shares, inputs.ids, *weights)
    swiglu: dict[str, Any] = {"alpha": expert_layers.ALPHA, "limit": expert_layers.LIMIT}

    @functools.cache
    def rows(path: moe.Roundings) -> Tensor:
        return moe.fused_moe(*arguments, **swiglu, roundings=path)

    def find_wrong_scales(error: Tensor, declared: Declaration) -> list[Fact]:
        path = roundings(declared)
        if case.readout:
            shares = block_scales.of_first_matrix(error, arguments, roundings=path, **swiglu)
            return block_scales.worst("w1", shares).beyond()
        shares = block_scales.of_second_matrix(error, arguments, roundings=path, **swiglu)
        return block_scales.worst("w2", shares).beyond()

    judge = ToleranceJudge(
        operation="fused_moe",
        shape=tuple(inputs.x.shape),
        reference=lambda declared: rows(roundings(declared)),
        definitions={
            "bfloat16 activations": lambda: rows(moe.EXACT),
            "MXFP8 activations": lambda: rows(moe.mxfp8_activations(mxfp8.ScaleRule.CEIL)),
            "E4M3 activations with scales of one": lambda: rows(moe.E4M3),
        },
        find_more=find_wrong_scales if case.routing == "blocks" else None,
        rounded=lambda: rows(moe.EACH_EXPERT),
        below_limit=case.below_limit,
        readout=case.readout,
    )
    return Problem(
        operation="fused_moe",
        arguments=(widened(inputs.x, case.strided), inputs.shares, inputs.ids, *weights),
        judge=judge,
        keywords=swiglu,
        strided=case.strided,
        # For cases with `below_limit`, only the size of the output is judged.
        reference=None if case.below_limit else rows(moe.EXACT),
    )


def _moe_inputs(case: cases.MoeCase) -> _MoeInputs:
    generator = torch.Generator().manual_seed(case.seed)
    layer = expert_layers.layer_of(case.hidden, case.intermediate, case.experts, case.seed // 1000)
    x = normal(generator, case.tokens, case.hidden) * case.gain
    end = _FIRST_OUTLIER + _OUTLIERS_APART * case.outliers
    x[:, _FIRST_OUTLIER:end:_OUTLIERS_APART] *= _OUTLIER
    shares = normal(generator, case.tokens, case.top_k).softmax(-1)
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
    if case.below_limit:
        layer = expert_layers.with_gates(layer, expert_layers.BELOW_LIMIT)
    elif case.gates is not None:
        layer = expert_layers.with_gates(layer, case.gates)
    if case.power:
        layer, x = expert_layers.ranged(layer, x, case.power)
    if case.cancelling:
        w1 = expert_layers.cancelling(layer.w1, x, _CANCELLING_EXPERTS)
        layer = dataclasses.replace(layer, w1=w1)
    return _MoeInputs(x.bfloat16(), shares, ids, layer)


def linear(case: cases.LinearCase) -> Problem:
    """Build a problem of a dense layer with MXFP4 weights.

    Args:
        case: The case.
    """
    generator = torch.Generator().manual_seed(case.seed)
    weight = expert_layers.dense(case.outputs, case.inputs)
    x = normal(generator, case.tokens, case.inputs)
    if case.cancelling:
        weight = expert_layers.cancelling(weight, x, _CANCELLING_LINEAR)
    x = off_edges(x.bfloat16())

    @functools.cache
    def rows(rule: str | None) -> Tensor:
        if rule is None:
            return moe.mxfp4_linear(x, weight)
        to_mxfp4 = functools.partial(rounding.to_mxfp4, rule=mxfp4.ScaleRule(rule))
        return moe.mxfp4_linear(x, weight, to_mxfp4)

    def expected(declared: Declaration) -> Tensor:
        if declared.linear_activations == "mxfp4":
            return rows(declared.mxfp4_scale_rule)
        return rows(None)

    definitions = {"bfloat16 activations": lambda: rows(None)}
    for rule in mxfp4.ScaleRule:
        definitions[f"MXFP4 activations by {rule.value}"] = functools.partial(rows, rule.value)
    judge = ToleranceJudge(
        operation="mxfp4_linear",
        shape=(case.tokens, case.outputs),
        reference=expected,
        definitions=definitions,
    )
    return Problem("mxfp4_linear", (x, weight), judge, reference=rows(None))
