"""The numerics of the kernel level detect every wrong kernel, and pass every right one."""

import dataclasses
import itertools

import pytest
import torch

from meta_tests.faults import kernel_mutants
from meta_tests.folders import ROOT
from sm121.core import errors, verdict
from sm121.kernels import cases, checks, comparison, problems, registry
from sm121.kernels.torch_provider import TorchProvider
from sm121.oracles import moe

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = 50
SAMPLE = 1
TABLE = ROOT / "docs" / "tables" / "kernel-mutants.md"


EVERY = kernel_mutants.EVERY
MOE = [m for m in kernel_mutants.MUTANTS if set(m.groups) & set(kernel_mutants.MOE)]


#: Mutants that take some seconds each, because only a large batch or all groups detect them. `make
#: test` leaves them out, and runs similar ones.
LARGE = (
    "320: scales of neighbouring blocks",
    "320: 2 % too large",
    "scales of the tile before",
    "tiles of scales in the other order",
    "not at a tile",
    "activations saturate at 20",
    "fused_moe: scale x 1.01",
    "expert 126 for 127",
    "fused_moe: wrong only for M >= 320",
    "window + 1",
    "fused_moe: wrong only for M = 96",
    "decode_attention: wrong only for B > 16",
    "fused_moe: wrong only above row 32",
)


#: `make test` leaves these out, and runs every fifth of the W4A8 mutants.
W4A8 = {m.name for n, m in enumerate(kernel_mutants.W4A8) if n % 5}
#: `make test` leaves these out, and runs one in eight mutants.
FAST_BUILD = {m.name for n, m in enumerate(kernel_mutants.FAST_BUILD) if n % 8}
#: Faults that are possible in any operation. `make test` runs all of them for the first operation,
#: and every third for the other operations, so it leaves these out.
ANYWHERE = set()
for operation in ("prefill_attention: ", "decode_attention: "):
    of_operation = [mutant.name for mutant in EVERY if mutant.name.startswith(operation)]
    ANYWHERE |= {*of_operation} - {*of_operation[::3]}


def _seldom(mutant) -> bool:
    return mutant.name.endswith(LARGE) or mutant.name in ANYWHERE | W4A8 | FAST_BUILD


@pytest.mark.parametrize(
    "broken", [pytest.param(m, marks=[pytest.mark.slow] * _seldom(m), id=m.name) for m in EVERY]
)
def test_a_wrong_kernel_is_noticed(broken):
    assert kernel_mutants.kill(broken), "expected a check that notices it, got none"


@pytest.mark.parametrize(
    "broken",
    [pytest.param(m, marks=[pytest.mark.slow] * (n % 8 > 0), id=m.name) for n, m in enumerate(MOE)],
)
def test_a_wrong_kernel_that_rounds_each_expert_is_noticed(broken):
    """The wider tolerance for kernels that round each expert must not hide a fault."""
    provider = broken.make()
    provider.rounds_each_expert = True
    kills = (kernel_mutants.first_kill(provider, group) for group in broken.groups)
    assert any(kills), "expected a check that notices it, got none"


def test_the_largest_of_many_errors_is_held_against_rounding(monkeypatch):
    """The tolerance of the largest error grows with the number of tokens.

    A correct Marlin kernel had an error of 0.0328 at 2,048 tokens; the limit for a hundred tokens
    is 0.032."""
    problem = problems.build(next(c for c in cases.GROUPS["moe_token_counts"] if c.tokens == 129))
    honest = moe.fused_moe(*problem.arguments, **problem.keywords, roundings=moe.EACH_EXPERT)
    largest = comparison.measure(honest.bfloat16(), problem.reference, 1e-3).max
    tight = [t.model_copy(update={"max": largest / 1.1}) for t in comparison.tolerances()]
    monkeypatch.setattr(comparison, "tolerances", lambda: tight)

    def wrong(rounds: bool, factor: float) -> list:
        class Marlin(TorchProvider):
            rounds_each_expert = rounds

            def fused_moe(self, *arguments, **keywords):
                return kernel_mutants.where(honest, slice(0, 1), factor).bfloat16()

        return checks.check(Marlin(), problem)

    assert not wrong(True, 1.0) and wrong(True, 1.05) and wrong(False, 1.0)


@pytest.mark.parametrize("case", ["down", "gate-up"])
def test_a_wrong_block_scale_is_noticed_of_one_that_rounds_each_expert(case):
    chosen = next(c for c in cases.GROUPS["moe_block_scales"] if c.name == case)

    class Wrong(TorchProvider):
        rounds_each_expert = True

        def fused_moe(self, x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords):
            which = (w1, w2)[case == "down"]
            scales = which[1].clone()
            scales[1, 7, 2] += 1
            w1, w2 = (w1, (w2[0], scales)) if case == "down" else ((w1[0], scales), w2)
            return super().fused_moe(x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords)

    assert checks.check(Wrong(), problems.build(chosen)), "expected a fact for the wrong scale"


def test_the_published_table_is_of_these_mutants():
    published = TABLE.read_text("utf-8")
    missing = [m.name for m in EVERY if f"| {m.name} |" not in published]
    assert not missing, "run python -m meta_tests.faults.kernel_mutants"
    assert "**survives**" not in published


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > SAMPLE)) for n in range(1, SEEDS + 1)]
)
def test_a_right_kernel_passes(seed):
    """Each group of cases passes with a right kernel.

    Each round uses other values and other weights."""
    for group in cases.GROUPS:
        chosen = list(kernel_mutants.small(group))
        case = chosen[seed % len(chosen)]
        case = dataclasses.replace(case, seed=case.seed + 1000 * seed)
        assert checks.check(TorchProvider(), problems.build(case)) == [], f"{group}: {case}"


def test_experts_without_a_share_may_be_any():
    """If the router gives two experts a weight of zero, either choice is right.

    vLLM's fused_topk takes the softmax before the top-k."""

    class SoftmaxFirst(TorchProvider):
        apart = 0

        def route(self, logits, k):
            shares, ids = logits.softmax(-1).topk(k + self.apart, -1)
            shares, ids = (torch.cat((v[:, :1], v[:, 1 + self.apart :]), -1) for v in (shares, ids))
            return shares / shares.sum(-1, keepdim=True), ids.int()

    def wrong() -> set[str]:
        routing = cases.GROUPS["routing"]
        return {c.kind for c in routing if checks.check(SoftmaxFirst(), problems.build(c))}

    assert not wrong()
    SoftmaxFirst.apart = 1
    assert wrong() == {"normal", "far"}


@pytest.mark.parametrize("change", [("flip", 0), ("reshape", -1), ("view", torch.int32)], ids=str)
def test_a_fault_in_the_second_run_only_is_noticed(change):
    """A fault that appears only in the second run of a kernel is detected.

    The second run has other values, and the poisoned memory has the same bytes in another shape or
    dtype."""

    class Second(TorchProvider):
        calls = itertools.count()

        def route(self, logits, k):
            shares, ids = super().route(logits, k)
            return (getattr(shares, change[0])(change[1]) if next(self.calls) else shares), ids

    case = next(case for case in cases.GROUPS["routing"] if case.tokens > 1)
    assert checks.check(Second(), problems.build(case)), "expected a fact, got none"


class Seldom(TorchProvider):
    """A decode kernel that is wrong in a fifth of the elements in one run, as XQA was in flashinfer
    issue 3658."""

    def __init__(self, wrong_run: int | None, factor: float = 1.5) -> None:
        super().__init__()
        self.run = 0
        self.wrong_run = wrong_run
        self.factor = factor

    def decode_attention(self, *arguments, **keywords):
        output = super().decode_attention(*arguments, **keywords)
        self.run += 1
        if self.run == self.wrong_run:
            output.view(-1)[::5] *= self.factor
        return output


DECODE = next(case for case in cases.GROUPS["decode"] if "127-128" in str(case))


@pytest.mark.parametrize("declared", [True, False], ids=["deterministic", "nothing declared"])
@pytest.mark.parametrize("wrong_run", [3, 7, 16])
def test_decode_that_is_wrong_in_one_run_of_sixteen_is_noticed(wrong_run, declared):
    provider = Seldom(wrong_run)
    if not declared:
        provider.deterministic = frozenset()
    found = checks.check(provider, problems.build(DECODE))
    about = f"run {wrong_run} of 16 with the same inputs"
    assert any(about in str(fact) for fact in found), found
    equal = [
        fact
        for fact in found
        if "equal bits in 16 runs, because it is declared deterministic" in str(fact)
    ]
    assert len(equal) == declared, found


def test_other_bits_within_tolerance_fail_only_if_declared_deterministic():
    provider = Seldom(5, factor=1.0078125)
    (fact,) = checks.check(provider, problems.build(DECODE))
    assert "1 with other bits (the first is run 5)" in str(fact)
    provider = Seldom(5, factor=1.0078125)
    provider.deterministic = frozenset()
    assert checks.check(provider, problems.build(DECODE)) == []


def test_decode_that_is_right_is_asked_sixteen_times():
    provider = Seldom(None)
    assert checks.check(provider, problems.build(DECODE)) == []
    assert provider.run == checks.RUNS["decode_attention"] == 16


def test_an_operation_that_a_provider_lacks_is_not_run():
    class Bare:
        name = "bare"

    with pytest.raises(verdict.NotRun, match="bare has no route"):
        checks.check(Bare(), problems.build(cases.GROUPS["routing"][1]))


def test_strides_refused_aloud_are_not_run_and_other_refusals_are_errors():
    class Refuses(TorchProvider):
        words = "expected contiguous logits"

        def route(self, logits, k):
            raise RuntimeError(self.words)

    strided = next(case for case in cases.GROUPS["routing"] if case.strided)
    with pytest.raises(verdict.NotRun, match="refuses strided inputs: expected contiguous"):
        checks.check(Refuses(), problems.build(strided))
    with pytest.raises(RuntimeError, match="expected contiguous"):
        checks.check(Refuses(), problems.build(cases.GROUPS["routing"][1]))
    # A RuntimeError must fail, too. If a crash were NOT_RUN, the run would be green.
    Refuses.words = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        checks.check(Refuses(), problems.build(strided))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param(
            "cuda",
            "expected one of torch, torch-cuda, vllm-cpu, vllm",
            id="cuda, expected one of torch, torch-cuda, vllm-cpu, vllm",
        ),
        ("no.such.module:thing", "no.such.module"),
        ("json:nothing", "expected nothing in json"),
    ],
)
def test_a_wrong_provider_name_is_one_line(name, reason):
    with pytest.raises(errors.UsageError) as error:
        registry.load(name)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_provider_of_ones_own():
    assert registry.load("sm121.kernels.torch_provider:TorchProvider") is TorchProvider
