"""The provider `flashinfer` calls attention as vLLM does.

It has a module for each kind of cache, passes queries without strides to XQA, and uses the
release's decode kernel."""

from unittest import mock

import pytest
import torch

from meta_tests.fakes.attention_emulation import Attention, Module
from meta_tests.fakes.flashinfer_emulation import EmulatedProvider, Emulation, Fa2Provider
from meta_tests.faults import kernel_mutants
from sm121.core.verdict import NotRun
from sm121.kernels import cases, checks, flashinfer_sinks, problems

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def as_often_as_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each operation only twice, because these faults occur each time.

    test_kernel_mutants.py has a decode that is wrong in one of sixteen runs.
    """
    monkeypatch.setattr(checks, "RUNS", {})


GROUPS = ("prefill", "prefill_sinks", "prefill_fp8", "decode", "decode_sinks", "decode_fp8")
DECODE = ("decode", "decode_sinks", "decode_fp8")
WINDOW, FULL = (f"batch_prefill_attention_sink_bf16_swa_{on}_fa2" for on in (True, False))
"""The names that vLLM's own wrappers give their modules before FlashInfer 0.7.4."""


class WholeNames(Attention):
    whole_names = True


def emulation(
    version: str = "0.7.2", capability: tuple[int, int] = (12, 1), attention: type = Attention
) -> Emulation:
    made = Emulation()
    made.version = version
    made.capability = capability
    made.of_attention = attention
    return made


def of_name(group: str, name: str) -> problems.Problem:
    return problems.build(next(case for case in cases.GROUPS[group] if case.name == name))


def wrong_of(provider, group: str, names: str = "") -> dict[str, list]:
    """Return the faults of each case, without cases that the provider does not run.

    The keys are cases."""
    wrong = {}
    for case in kernel_mutants.small(group):
        if names not in case.name:
            continue
        try:
            facts = checks.check(provider, kernel_mutants.problem(group, case))
        except NotRun:
            continue
        if facts:
            wrong[case.name] = facts
    return wrong


@pytest.mark.parametrize(
    ("group", "release"),
    [
        *[
            pytest.param(
                group,
                "0.7.4",
                marks=[pytest.mark.slow("as 0.6.12 computes it")] * (group == "prefill"),
            )
            for group in GROUPS
        ],
        ("prefill", "0.6.12"),
        ("decode_fp8", "0.6.12"),
        *[
            pytest.param(group, "0.6.12", marks=pytest.mark.slow("the same names as of prefill"))
            for group in ("prefill_sinks", "prefill_fp8", "decode", "decode_sinks")
        ],
    ],
)
def test_a_healthy_gb10_passes(group, release):
    """A healthy GB10 passes. One process checks BF16 and FP8 caches, as in a run."""
    attention = WholeNames if release == "0.7.4" else Attention
    provider = EmulatedProvider(emulation(release, attention=attention))
    if "fp8" in group:
        before = of_name("prefill", "window-16")
    else:
        before = of_name("prefill_fp8", "fp8-window-129-130")
    assert checks.check(provider, before) == []
    assert wrong_of(provider, group) == {}


def modules_of(attention: type) -> set[str]:
    made = emulation(attention=attention)
    provider = EmulatedProvider(made)
    for group, name in (("prefill", "window-16"), ("prefill_fp8", "fp8-window-129-130")):
        assert checks.check(provider, of_name(group, name)) == []
    return set(made.attention.loaded)


def test_two_plans_get_two_modules_and_leave_the_engines_alone():
    names = modules_of(Attention)
    assert names == {f"{WINDOW}_kv_bfloat16_64_64", f"{WINDOW}_kv_float8_e4m3fn_64_64"}


def test_a_name_that_tells_caches_apart_is_kept():
    """A module name that already depends on the cache is kept.

    From 0.7.4 on, the engine's own module is tested."""
    assert modules_of(WholeNames) == {
        "batch_prefill_attention_sink_bf16_bf16_64_64_swa_True_fa2",
        "batch_prefill_attention_sink_bf16_e4m3_64_64_swa_True_fa2",
    }


@pytest.mark.parametrize("window", [None, 128])
def test_the_installed_flashinfer_gets_two_names(window):
    """With the class of the installed FlashInfer (0.7.2.post1), the two caches get two names."""
    flashinfer = pytest.importorskip("flashinfer")
    named = []

    def made(_self, *_arguments, jit_args, **_keywords):
        named.append(jit_args[0])

    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper
    sizes = flashinfer_sinks.LayerSizes(64, 8, 64)
    nothing = torch.empty(0, dtype=torch.int32)
    batch = flashinfer_sinks.Batch(nothing, nothing, nothing, nothing, 32)
    parent = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    with mock.patch.object(parent, "__init__", made), mock.patch.object(parent, "plan"):
        for cache in (torch.bfloat16, torch.float8_e4m3fn):
            kernel = flashinfer_sinks.SinkKernel("NHD", torch.bfloat16, cache, window, sizes)
            kernel.planned(wrapper, torch.empty(0, dtype=torch.uint8), batch)
    assert len(set(named)) == 2
    assert not {WINDOW, FULL} & set(named), "the engine's name would be compiled anew"


@pytest.mark.parametrize("name", ["full-attention-strided", "window-strided"])
def test_queries_reach_xqa_contiguous(name):
    made = emulation()
    assert checks.check(EmulatedProvider(made), of_name("decode", name)) == []
    assert made.attention.queries
    for query in made.attention.queries:
        assert query.is_contiguous()


@pytest.mark.parametrize("provider", [EmulatedProvider, Fa2Provider])
@pytest.mark.parametrize("group", ["prefill", "prefill_fp8", "decode", "decode_fp8"])
def test_packed_keys_and_values_reach_the_kernel_as_two_views(group, provider):
    """Packed keys and values reach the kernel as two views, with strides of 2 D, as in vLLM
    0.32."""
    made = emulation()
    (case,) = (case for case in cases.GROUPS[group] if case.packed)
    assert checks.check(provider(made), problems.build(case)) == []
    assert made.attention.caches
    for given in made.attention.caches:
        keys, values = given
        assert keys.stride(-2) == values.stride(-2) == 2 * case.head_dim
        assert values.storage_offset() == case.head_dim


def test_the_cache_is_one_tensor_where_it_is_not_packed():
    made = emulation()
    assert checks.check(EmulatedProvider(made), of_name("prefill", "window-16")) == []
    for given in made.attention.caches:
        assert isinstance(given, torch.Tensor)


class OneViewReadAsDense(Module):
    """A provider that reads the keys of a packed cache as if they were not packed."""

    def read(self, part):
        if part.stride(-2) == part.shape[-1]:
            return super().read(part)
        dense = torch.empty(part.shape, device="meta").stride()
        return torch.as_strided(part, part.shape, dense, part.storage_offset()).float()


@pytest.mark.parametrize("group", GROUPS[:1] + GROUPS[2:4] + GROUPS[5:])
def test_a_kernel_that_ignores_the_strides_of_a_cache_is_red(group):
    class Broken(Attention):
        module = OneViewReadAsDense

    wrong = wrong_of(EmulatedProvider(emulation(attention=Broken)), group)
    assert [name for name in wrong if "packed" in name] == list(wrong) != []


# The decode kernel


def decoded_by(provider, made: Emulation) -> str:
    assert checks.check(provider, of_name("decode", "window-page-32")) == []
    return "xqa" if made.attention.queries else "fa2"


@pytest.mark.parametrize(
    ("release", "capability", "kernel"),
    [
        pytest.param("0.6.3", (12, 1), "fa2", id="the-52-tok/s-build"),
        pytest.param("0.6.15.post1", (12, 1), "fa2", id="the-last-without-xqa-sinks"),
        pytest.param("0.6.16", (12, 1), "xqa", id="the-first-with-xqa-sinks"),
        pytest.param("0.7.4", (12, 1), "xqa", id="newest"),
        pytest.param("0.6.12", (9, 0), "xqa", id="hopper-had-them"),
    ],
)
def test_the_decode_kernel_is_the_releases(release, capability, kernel):
    made = emulation(release, capability)
    assert decoded_by(EmulatedProvider(made), made) == kernel


def test_fa2_decodes_where_it_is_asked_for():
    made = emulation("0.7.4", attention=WholeNames)
    assert decoded_by(Fa2Provider(made), made) == "fa2"


@pytest.mark.parametrize("group", DECODE)
def test_decode_by_fa2_passes(group):
    assert wrong_of(EmulatedProvider(emulation("0.6.3")), group) == {}


class WrongScale(Module):
    def scaled(self, scale):
        return scale * 1.01


class NoSink(Module):
    def sinks(self, sinks):
        return None


class WindowOffByOne(Module):
    def left(self, window_left):
        return window_left + 1


@pytest.mark.parametrize(
    "group", ["decode", pytest.param("decode_fp8", marks=pytest.mark.slow("the same kernel"))]
)
@pytest.mark.parametrize("fault", [WrongScale, NoSink, WindowOffByOne])
def test_a_wrong_decode_by_fa2_is_red(group, fault):
    class Broken(Attention):
        module = fault

    assert wrong_of(EmulatedProvider(emulation("0.6.3", attention=Broken)), group)


def test_without_sinks_the_wrapper_is_not_run():
    provider = EmulatedProvider(emulation("0.6.3"))
    with pytest.raises(NotRun, match="another kernel without them"):
        checks.check(provider, of_name("decode_sinks", "sinks-none"))


# Hopper


def test_xqa_of_an_fp8_cache_is_not_run_on_hopper():
    """XQA with an FP8 cache is NOT_RUN on Hopper, because its kernel rounds queries and softmax
    weights there, which the oracle does not."""
    provider = EmulatedProvider(emulation("0.7.4", (9, 0), WholeNames))
    with pytest.raises(NotRun, match=r"mha_sm90\.cu rounds queries and attention weights to E4M3"):
        checks.check(provider, of_name("decode_fp8", "fp8-full-attention-321"))
    assert checks.check(provider, of_name("decode", "window-page-32")) == []


def test_fa2_decodes_an_fp8_cache_on_hopper():
    provider = Fa2Provider(emulation("0.7.4", (9, 0), WholeNames))
    assert checks.check(provider, of_name("decode_fp8", "fp8-full-attention-321")) == []


def test_the_batch_invariant_mode_of_flashinfer_has_no_sm12x():
    """FlashInfer's batch-invariant mode does not support SM12x.

    From the release that supports it, it must be tested with a row alone and in a batch."""
    api = pytest.importorskip("flashinfer.gemm.batch_invariant.api")
    classes = {name: archs for name, archs in vars(api).items() if name.endswith("_ARCHS")}
    assert len(classes) >= 4
    for name, archs in classes.items():
        assert all(major != 12 for major, _ in archs), name
