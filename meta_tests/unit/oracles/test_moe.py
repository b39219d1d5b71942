"""The oracles agree with independent definitions of the same operations."""

import itertools
import math

import numpy as np
import pytest
import torch

from sm121.core.errors import UsageError
from sm121.kernels import block_scales, cases, comparison, expert_problems, problems
from sm121.kernels.protocol import Declaration, declaration
from sm121.oracles import attention, moe, mxfp4, mxfp8, rounding
from sm121.oracles.formats import CHOICES, EXACT, ROUND_INPUTS, Rounding
from tools import tolerances

pytestmark = pytest.mark.usefixtures("one_thread")


def test_e4m3_is_as_torch_has_it():
    codes = np.arange(256, dtype=np.uint8)
    decoded = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(mxfp8.E4M3_VALUES, decoded, equal_nan=True)
    values = np.random.default_rng(0).normal(size=20_000) * 100
    values = np.concatenate((values, np.arange(-448.0, 448.5, 0.5), values * 1e-4))
    values = np.clip(values, -448, 448).astype(np.float32)
    rounded = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(mxfp8.encode_elements(values.astype(np.float64)), rounded)


@pytest.mark.parametrize("rule", mxfp8.ScaleRule)
def test_mxfp8_of_what_is_representable_changes_nothing(rule):
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 256, (64, 128), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    scales = generator.integers(100, 150, (64, 4, 1), dtype=np.uint8)
    values = mxfp8.E4M3_VALUES[codes].reshape(64, 4, mxfp4.BLOCK) * mxfp4.decode_scale(scales)
    scale = mxfp4.decode_scale(mxfp8.choose_scale(np.abs(values).max(-1, keepdims=True), rule))
    same = (mxfp8.E4M3_VALUES[mxfp8.encode_elements(values / scale)] * scale == values).all()
    # E4M3 ends at 448, not at 480. With the floor rule, an amax of 240 gets half the scale and
    # saturates.
    assert same == (rule is mxfp8.ScaleRule.CEIL)


def exponent_of(rule: mxfp4.ScaleRule, amax: float) -> int:
    bits = int(np.float32(amax).view(np.uint32))
    if rule is mxfp4.ScaleRule.VLLM_RNE:
        return (((bits + 0x200000) & 0x7F800000) >> 23) - 127 - 2
    if rule is mxfp4.ScaleRule.OCP_FLOOR:
        return (bits >> 23) - 127 - 2
    if rule is mxfp4.ScaleRule.ROUND_LOG2:
        return round(math.log2(amax)) - 2
    return math.ceil(math.log2(amax / 6))


@pytest.mark.parametrize("rule", mxfp4.ScaleRule)
def test_the_four_scale_rules(rule):
    amax = torch.arange(1, 2000).bfloat16().unique().double().numpy()
    amax = np.concatenate((amax, amax * 2.0**-20))
    expected = [exponent_of(rule, value) + 127 for value in amax]
    assert mxfp4.choose_scale(amax, rule).tolist() == expected


def test_the_four_scale_rules_differ():
    amax = np.array([3.0, 5.0, 5.75, 6.5, 7.0])
    chosen = {tuple(mxfp4.choose_scale(amax, rule).tolist()) for rule in mxfp4.ScaleRule}
    assert len(chosen) == len(mxfp4.ScaleRule)


@pytest.mark.parametrize("rule", mxfp8.ScaleRule)
def test_values_that_mxfp8_preserves(rule):
    """Both rules of MXFP8 preserve blocks whose largest value is 448.

    Only the floor rule saturates 449."""
    x = torch.zeros(1, 64, dtype=torch.float64)
    # The last value is half of the smallest element. This is a tie, which becomes zero.
    x[0, :3] = torch.tensor([448.0, 1.0, 2.0**-10])
    x[0, 32:35] = torch.tensor([480.0, 33.0, -1.0])
    ceil = rule is mxfp8.ScaleRule.CEIL
    rounded = rounding.to_mxfp8(x, rule)[0]
    assert rounded[:3].tolist() == [448.0, 1.0, 0.0]
    assert rounded[32:35].tolist() == [480.0 if ceil else 448.0, 32.0, -1.0]
    assert not rounded[35:].any()


@pytest.mark.parametrize("rule", mxfp8.ScaleRule)
def test_mxfp8_by_the_codec_and_by_torch(rule):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((20, 64)) * np.ldexp(1.0, generator.integers(-20, 20, (20, 1)))
    blocks = x.reshape(20, 2, 32)
    powers = mxfp4.decode_scale(mxfp8.choose_scale(np.abs(blocks).max(-1), rule))[..., None]
    expected = mxfp8.E4M3_VALUES[mxfp8.encode_elements(blocks / powers)] * powers
    rounded = rounding.to_mxfp8(torch.from_numpy(x), rule)
    assert np.array_equal(rounded.numpy(), expected.reshape(x.shape))


@pytest.mark.parametrize("rule", list(mxfp4.ScaleRule)[:3])
def test_mxfp4_by_the_codec_and_by_torch(rule):
    """The MXFP4 codec and torch agree on blocks whose largest element is next to a boundary of the
    rules."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((60, 64)) * np.ldexp(1.0, generator.integers(-20, 20, (60, 1)))
    x[:5, 0] = [6.0, 6.000001, 7.0, 6.999999, 0.0]
    x[4, :32] = 0
    blocks = x.reshape(60, 2, 32)
    powers = mxfp4.decode_scale(mxfp4.choose_scale(np.abs(blocks).max(-1), rule))[..., None]
    expected = mxfp4.CODE_VALUES[mxfp4.encode_elements(blocks / powers)] * powers
    rounded = rounding.to_mxfp4(torch.from_numpy(x), rule)
    assert np.array_equal(rounded.numpy(), expected.reshape(x.shape))


def test_e4m3_by_the_codec_and_by_torch():
    """The E4M3 codec and torch agree for every BF16 value: on the nearest value, saturated, and on
    the next value towards zero."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    every = every[every.isfinite()]
    near = mxfp8.E4M3_VALUES[mxfp8.encode_elements(every.numpy())]
    assert np.array_equal(rounding.to_e4m3(every).numpy(), near)
    cut = rounding.to_e4m3_cut(every)
    table = torch.from_numpy(mxfp8.E4M3_VALUES[:127])
    below = table[torch.searchsorted(table, every.abs(), side="right") - 1]
    assert torch.equal(cut.abs(), below) and torch.equal(cut.signbit(), every.signbit())


def test_fp8_by_row():
    """With one FP8 scale per row, the largest element of a row is 448 times the row's scale."""
    x = torch.tensor([[448.0, 1.0, 17.0], [0.875, 0.875 / 7, -0.1], [0.0, 0.0, 0.0]]).double()
    rows = rounding.to_fp8_rows(x)
    assert rows[0].tolist() == [448.0, 1.0, 16.0] and not rows[2].any()
    assert rows[1].tolist() == pytest.approx([0.875, 0.125, -0.1015625], abs=1e-7)


def test_the_name_of_a_rounding():
    text = "qkv=mxfp4-ceil,o=mxfp4-ceil,lm_head=mxfp4-even,kv=fp8,experts=mxfp8-identity"
    parsed = Rounding.parse(text)
    assert parsed.formats == text and parsed.computed_in("bf16").name == f"bf16: {text}"
    assert Rounding.parse("kv=fp8, o=fp8-channel").formats == "o=fp8-channel,kv=fp8"
    tables = [rounding.WEIGHTS] * 3 + [rounding.CACHES, rounding.EXPERTS]
    assert [*CHOICES.values()] == [tuple(table) for table in tables]
    assert tuple(rounding.INPUTS) == ROUND_INPUTS
    assert Rounding.parse("checkpoint") == EXACT and EXACT.formats == "checkpoint"
    for wrong in ("", "kv", "kv=fp4", "router=mxfp4-ceil", "kv=fp8,kv=fp8", "qkv=fp8"):
        with pytest.raises(UsageError, match="expected 'checkpoint' or a list of qkv=mxfp4-ceil"):
            Rounding.parse(wrong)


def test_one_expert_with_mxfp8_activations_by_hand():
    """One expert with MXFP8 activations is computed by hand: x of 33 becomes 32, and the hidden
    activation keeps three bits."""
    up = np.zeros((1, 64, 16), np.uint8)
    up[0, 0, 0], up[0, 1, 0] = 2, 5  # E2M1 of 1 and of 3
    down = np.zeros((1, 32, 16), np.uint8)
    down[0, 0, 0] = 2
    scales = torch.full((1, 64, 1), 127, dtype=torch.uint8)
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0] = 33.0
    arguments = (
        x, torch.tensor([[1.0]]), torch.tensor([[0]]), (torch.from_numpy(up), scales), None,
        (torch.from_numpy(down), scales[:, :32]), None,
    )  # fmt: skip
    path = moe.mxfp8_activations(mxfp8.ScaleRule.CEIL)
    h = moe.hidden(x, *arguments[3:5], 0, alpha=1.702, limit=1e9, roundings=path)
    # 32 * sigmoid(54) * (96 + 1) = 3104: bfloat16 has 3104, E4M3 has 3072 and 3328.
    assert h[0, 0] == 3072.0
    y = moe.fused_moe(*arguments, alpha=1.702, limit=1e9, roundings=path)
    assert y[0].tolist() == [3072.0] + [0.0] * 31
    assert moe.fused_moe(*arguments, alpha=1.702, limit=1e9)[0, 0] == 33 * 100.0


def test_activations_that_there_are_not_are_refused():
    for declared in (Declaration(activations="int8"), Declaration(activations="mxfp8")):
        with pytest.raises(TypeError, match="bfloat16, or mxfp8 with an"):
            expert_problems.roundings(declared)


def test_routing_of_four_logits_by_hand():
    shares, experts = moe.route(torch.tensor([[0.0, math.log(3), -5.0, 0.0]]).double(), 2)
    assert experts[0, 0] == 1
    assert shares[0].tolist() == pytest.approx([0.75, 0.25])


def test_one_expert_by_hand():
    """One expert is computed by hand.

    The gate value 8 is clamped to 7, and the up value -9 to -7. The down-projection has the weight
    0.5 and the bias 1. The router's weight of the expert is 0.25."""
    up = np.zeros((1, 64, 16), np.uint8)
    up[0, :2, 0] = 4  # E2M1 of 2
    down = np.zeros((1, 32, 16), np.uint8)
    down[0, 0, 0] = 1  # E2M1 of 0.5
    ones = torch.full((1, 64, 1), 127, dtype=torch.uint8)
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0] = 1
    bias = torch.tensor([[6.0, -11.0] + [0.0, -1.0] * 31])
    y = moe.fused_moe(
        x, torch.tensor([[0.25]]), torch.tensor([[0]]), (torch.from_numpy(up), ones), bias,
        (torch.from_numpy(down), ones[:, :32]), torch.ones(1, 32), alpha=1.702, limit=7.0,
    )  # fmt: skip
    act = 7 / (1 + math.exp(-1.702 * 7)) * (-7 + 1)
    assert y[0].tolist() == pytest.approx([0.25 * (0.5 * act + 1)] + [0.25] * 31)


def qkv(length: int, heads: int = 4, kv_heads: int = 2, size: int = 16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, n, size, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_a_softmax_with_one_more_column(window):
    q, k, v = qkv(12)
    sinks = torch.tensor([0.5, -2.0, 3.0, 40.0]).double()
    edges = torch.tensor([0, 12])
    computed = attention.prefill(q, k, v, edges, sinks=sinks, window=window, scale=0.25)
    for head, t in itertools.product(range(4), range(12)):
        first = 0 if window is None else max(0, t - window + 1)
        scores = [float(q[t, head] @ k[s, head // 2]) * 0.25 for s in range(first, t + 1)]
        shares = torch.tensor([*scores, float(sinks[head])], dtype=torch.float64).softmax(-1)
        expected = shares[:-1] @ v[first : t + 1, head // 2]
        assert torch.allclose(computed[t, head], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_decode_is_the_last_row_of_prefill(length):
    q, k, v = qkv(length)
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0]).double()
    pages = torch.tensor([[4, 1, 3]])
    cache = torch.full((6, 2, 16, 2, 16), math.nan, dtype=torch.float64)
    for s in range(length):
        cache[pages[0, s // 16], 0, s % 16] = k[s]
        cache[pages[0, s // 16], 1, s % 16] = v[s]
    cache = cache.transpose(2, 3)
    keywords = {"sinks": sinks, "window": 9, "scale": 0.25}
    whole = attention.prefill(q, k, v, torch.tensor([0, length]), **keywords)
    last = attention.decode(q[-1:], cache, pages, torch.tensor([length]), **keywords)
    assert torch.allclose(last[0], whole[-1], rtol=1e-12)


def test_a_scale_error_of_one_percent_and_a_wrong_block_scale_are_seen():
    findings = []
    scales = []
    selected = cases.select("moe_block_scales", full=False)
    of_experts = [case for case in selected if isinstance(case, cases.MoeCase)]
    of_experts = [case for case in of_experts if not case.name.startswith("real-")]
    for clean in tolerances.CLEAN:
        findings += tolerances.findings("moe_activation", clean())
        findings += tolerances.findings("decode_sinks", clean())
        scales += [tolerances.found_block_scales(case, clean()) for case in of_experts]
    assert tolerances.broken_promises(findings, scales) == []
    # The limit exceeds the tolerance by more than the correct provider's error, which could hide a
    # wrong scale.
    for scale in scales:
        assert scale.least > 1.5


@pytest.mark.slow("every kernel")
def test_the_tolerance_of_mxfp8_has_room_for_every_right_kernel():
    """The tolerance of MXFP8 is 1.5 times the effect of its roundings, so every right kernel has
    room.

    If the oracle did not round, there would be no room."""
    limit = comparison.tolerance("fused_moe", torch.bfloat16, Declaration(activations="mxfp8"))
    names = {"tokens-1", "tokens-33", "tokens-321", "one-expert-129", "near-zero"}
    groups = ("moe_token_counts", "moe_routing", "moe_activation")
    chosen = []
    for group in groups:
        for case in cases.GROUPS[group]:
            if case.name in names:
                chosen.append(case)
    for right in tolerances.honest(chosen):
        beyond = [m for m, error in right.errors.items() if error * 1.5 > getattr(limit, m)]
        if right.definition == list(tolerances.DEFINITIONS)[-1]:
            assert beyond == [], right
        else:
            assert {"max", "rms"} <= set(beyond), right


@pytest.mark.parametrize("clean", tolerances.CLEAN)
def test_wrong_block_scales_of_the_first_matrix_are_named(clean):
    """Each wrong block scale of the first matrix is found and named.

    Some scales are really changed."""
    problem = problems.build(block_scale_case("gate-up"))
    keywords = {**problem.keywords, "roundings": expert_problems.roundings(declaration(clean()))}
    x, shares, ids, (packed, scales), *rest = problem.arguments
    right = moe.fused_moe(*problem.arguments, **keywords)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        at = tuple(int(torch.randint(n, (1,), generator=generator)) for n in scales.shape)
        for by in (-1, 1):
            wrong = scales.clone()
            wrong[at] = int(wrong[at]) + by
            error = moe.fused_moe(x, shares, ids, (packed, wrong), *rest, **keywords) - right
            blocks = block_scales.of_first_matrix(error, problem.arguments, **keywords)
            worst = block_scales.worst("w1", blocks)
            # The row of the gate and the row of `up` change the same activation, so either may be
            # found.
            assert (worst.expert, worst.row // 2, worst.block) == (at[0], at[1] // 2, at[2])
            assert worst.beyond()


def block_scale_case(name: str) -> cases.MoeCase:
    return next(case for case in cases.GROUPS["moe_block_scales"] if case.name == name)


def test_a_wrong_block_scale_of_the_second_matrix_shows_its_share():
    """A wrong block scale of the second matrix is recognised by its share.

    A scale that is one too high adds a block's contribution again, and one that is too low removes
    half of it."""
    problem = problems.build(block_scale_case("down"))
    *before, (packed, scales), bias = problem.arguments

    def second(error):
        shares = block_scales.of_second_matrix(error, problem.arguments, **problem.keywords)
        return block_scales.worst("w2", shares)

    for by, share in ((1, 1.0), (-1, -0.5)):
        wrong = scales.clone()
        wrong[3, 100, 5] += by
        rows = moe.fused_moe(*before, (packed, wrong), bias, **problem.keywords)
        worst = second(rows - problem.reference)
        assert (worst.expert, worst.row, worst.block) == (3, 100, 5) and worst.beyond()
        assert worst.share == pytest.approx(share, abs=1e-6)
    # Random errors of several times bfloat16's rounding must not look like a wrong block.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(problem.reference.shape, generator=generator, dtype=torch.float64)
    noise *= problem.reference * 2.0**-7
    assert not second(noise).beyond()
    assert second(torch.full_like(noise, torch.nan)).beyond(), "expected a finding for NaN"


def test_every_tolerance_file_entry_is_read():
    experts_and_more = {"fused_moe", "route", "lm_head", "mxfp4_linear"}
    operations = experts_and_more | {"prefill_attention", "decode_attention"}
    assert {tolerance.operation for tolerance in comparison.tolerances()} == operations
