"""Right kernels of builds that round more than the checkpoint pass with a margin, and each provider
calls them as upstream does."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meta_tests.fakes.flashinfer_emulation import (
    EmulatedProvider,
    Emulation,
    Identity,
    IdentityProvider,
)
from meta_tests.faults import fast_build_mutants, kernel_mutants
from sm121.core.verdict import NotRun
from sm121.evidence.kernel_path import KernelPath
from sm121.kernels import cases, checks, comparison, problems, registry, serving
from sm121.kernels.protocol import declaration
from sm121.kernels.torch_provider import TorchProvider
from sm121.oracles import attention

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = ("moe_ranges", "mxfp4_linear", "prefill_fp8", "decode_fp8")
HONEST = {
    "torch": (TorchProvider, NEW),
    "torch, MXFP4 activations": (fast_build_mutants.W4a4, NEW[1:2]),
    "mm_fp4": (EmulatedProvider, NEW[:2]),
    "identity": (lambda: IdentityProvider(Identity()), NEW[:1]),
    "identity by atomics": (lambda: IdentityProvider(Identity()).with_tactic("0,1"), NEW[:1]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("torch", "identity"))) for n in HONEST],
)
def test_a_right_kernel_has_margin(name, monkeypatch):
    """A right kernel uses at most two thirds of each tolerance.

    Attention, which rounds the softmax weights, uses at most five sixths.

    Attention, which rounds the softmax weights, needs five sixths."""
    make, groups = HONEST[name]
    tight = []
    for each in comparison.tolerances():
        share = 1.2 if "attention" in each.operation else 1.5
        update = {measure: getattr(each, measure) / share for measure in comparison.MEASURES}
        tight.append(each.model_copy(update=update))
    monkeypatch.setattr(comparison, "tolerances", lambda: tight)
    chosen = []
    for group in groups:
        chosen += kernel_mutants.small(group)
    for case in chosen:
        if max(getattr(case, "lengths", [getattr(case, "tokens", 0)]), default=0) <= 65:
            assert checks.check(make(), problems.build(case)) == [], case


@pytest.mark.slow("the groups of all experts")
@pytest.mark.parametrize("group", kernel_mutants.MOE)
def test_identity_passes(group):
    provider = IdentityProvider(Identity())
    for case in kernel_mutants.small(group):
        assert checks.check(provider, kernel_mutants.problem(group, case)) == [], case


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("FP8 cache: cut off, not rounded", "a cache of cut values"),
        ("FP8 cache: bfloat16 where FP8 is promised", "a cache of bfloat16 values"),
        ("MXFP4 linear: scales by floor for ceil", "MXFP4 activations by ocp-floor"),
        pytest.param(
            "identity where computed scales are promised",
            "E4M3 activations with scales of one",
            id="identity where computed scales are promised, E4M3",
        ),
        ("computed scales where identity is promised", "MXFP8 activations"),
    ],
)
def test_the_format_that_a_kernel_has_in_truth_is_named(name, fits):
    make, groups = fast_build_mutants.MUTANTS[name]
    case = next(iter(kernel_mutants.small(groups[0])))
    facts = checks.check(make(), kernel_mutants.problem(groups[0], case))
    assert f"those of {fits}" in {fact.observed for fact in facts}


def case_of(group: str, **fields: Any) -> problems.Problem:
    return problems.build(dataclasses.replace(cases.GROUPS[group][-1], full=False, **fields))


# Tiles


class OneTile(Emulation):
    """A provider in which the last column of one tile has the value of its neighbour."""

    def __init__(self, wrong: tuple[int, int]) -> None:
        self.wrong = wrong

    def finalize(self, results, *rest):
        y = super().finalize(results, *rest)
        if self.core.select_tile_mn_for_sm120(len(results)) == self.wrong:
            y[:, self.wrong[1] - 1 :: 128] = y[:, self.wrong[1] - 2 :: 128]
        return y


@pytest.mark.parametrize("tile", [(64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 65])
def test_each_tile_is_judged_for_itself(tile, tokens):
    """Each tile is judged by itself, independent of the tile that the number of tokens would
    choose."""
    problem = case_of("moe_ranges", tokens=tokens)
    for wrong in ((64, 128), (128, 128)):
        provider = EmulatedProvider(OneTile(wrong)).with_tactic(f"{tile[0]}x{tile[1]}")
        assert bool(checks.check(provider, problem)) is (tile == wrong)


# Providers, as vLLM calls the kernels


def as_read(tokens: torch.Tensor) -> torch.Tensor:
    """Return keys or values as vLLM's writers read them, which use only the stride of a token."""
    return tokens.as_strided(tokens.shape, (tokens.stride(0), tokens.shape[2], 1))


class Vllm:
    """vLLM's functions, with the arguments of the installed version."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.kernels = SimpleNamespace(
            current_platform=SimpleNamespace(is_cuda=lambda: True),
            prepare_fp4_layer_for_marlin=self.prepare,
            apply_fp4_marlin_linear=self.apply,
            triton_reshape_and_cache_flash=self.write,
            reshape_and_cache_flash=self.write,
            unified_attention=self.attend,
            flash_attn_supports_sinks=lambda: True,
            get_flash_attn_version=lambda: 3,
        )

    def prepare(self, layer, input_dtype=None) -> None:
        shape = (layer.output_size_per_partition, layer.input_size_per_partition // 2)
        assert layer.weight.shape == shape
        layer.matrix = TorchProvider().mxfp4_dequantize(layer.weight, layer.weight_scale)
        layer.weight_scale = torch.nn.Parameter(layer.matrix, requires_grad=False)

    def apply(self, input, weight, weight_scale, weight_global_scale, workspace, size_n, size_k):  # noqa: A002
        assert weight_global_scale is None and weight_scale.shape == (size_n, size_k)
        return (input.float() @ weight_scale.T).to(input.dtype)

    def write(
        self, key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    ):
        assert kv_cache_dtype == "fp8" and k_scale.dtype == v_scale.dtype == torch.float32
        for tokens, pages in ((key, key_cache), (value, value_cache)):
            scale = 0.9 if self.fault == "scale" else float(k_scale)
            near = (as_read(tokens).float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            page = slot_mapping // pages.shape[1]
            offset = slot_mapping % pages.shape[1]
            pages.view(torch.float8_e4m3fn)[page, offset] = near

    def attend(self, q, k, v, out, *, sinks, window_size, k_descale, v_descale, **planned):
        assert k.dtype is torch.float8_e4m3fn
        assert k_descale.shape == v_descale.shape == (len(planned["seqused_k"]), k.shape[2])
        sinks = None if self.fault == "sinks" or sinks is None else sinks.double()
        window = None if window_size[0] < 0 else window_size[0] + 1
        starts = planned["cu_seqlens_q"].tolist()
        for n, (table, length) in enumerate(
            zip(planned["block_table"].long(), planned["seqused_k"].tolist(), strict=True)
        ):
            rows = slice(starts[n], starts[n + 1])
            keys, values = (part[table].flatten(0, 1)[:length].double() for part in (k, v))
            at = torch.arange(length)[length - (rows.stop - rows.start) :]
            out[rows] = attention.attend(
                *(q[rows].double(), keys, values, attention.visible_keys(at, length, window)),
                sinks=sinks,
                scale=planned["softmax_scale"],
            )


def vllm_provider(monkeypatch, name: str = "vllm", fault: str = "") -> Any:
    from sm121.kernels import vllm_cuda

    monkeypatch.setattr(vllm_cuda, "_module", lambda _name: Vllm(fault).kernels)
    monkeypatch.setattr(vllm_cuda.VllmProvider, "device", "cpu")
    return registry.load(name)


@pytest.mark.parametrize("fault", ["", "scale", "sinks"])
@pytest.mark.parametrize("group", ["prefill_fp8", "decode_fp8"])
def test_attention_of_an_fp8_cache_is_called_as_vllm_calls_it(monkeypatch, group, fault):
    provider = vllm_provider(monkeypatch, fault=fault)
    problem = case_of(group, lengths=(5, 33), sinks="usual", window=16, power=0)
    assert bool(checks.check(provider, problem)) is bool(fault)


@pytest.mark.parametrize("layout", ["packed", "strided"])
def test_keys_and_values_are_written_as_vllm_passes_them(monkeypatch, layout):
    """Keys and values are written as vLLM passes them. vLLM passes heads without gaps, even if the
    cache has each value after its key."""
    provider = vllm_provider(monkeypatch)
    problem = case_of("prefill_fp8", lengths=(5, 33), sinks="usual", power=0, **{layout: True})
    assert checks.check(provider, problem) == []


def test_a_dense_layer_is_called_as_vllm_calls_it(monkeypatch):
    problem = case_of("mxfp4_linear", tokens=2, outputs=128)
    assert checks.check(vllm_provider(monkeypatch), problem) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow("imports vLLM, whose version is pinned")
def test_the_installed_vllm_takes_these_arguments():
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as written

    for real, emulated in (
        (marlin_utils_fp4.prepare_fp4_layer_for_marlin, Vllm().prepare),
        (marlin_utils_fp4.apply_fp4_marlin_linear, Vllm().apply),
        (_custom_ops.reshape_and_cache_flash, Vllm().write),
        (written.triton_reshape_and_cache_flash, Vllm().write),
    ):
        names = list(inspect.signature(emulated).parameters)
        assert list(inspect.signature(real).parameters)[: len(names)] == names


def test_queries_that_are_quantised_as_well_are_not_run(monkeypatch):
    provider = vllm_provider(monkeypatch, "vllm-flash-attn")
    with pytest.raises(NotRun, match="also quantises the queries"):
        checks.check(provider, case_of("decode_fp8", lengths=(5,)))


@pytest.mark.slow("it imports vLLM: 5 s of CPU")
@pytest.mark.parametrize("group", ["prefill_fp8", "decode_fp8"])
def test_vllm_on_the_cpu_cuts_what_it_caches(group):
    """vLLM's own CPU kernels truncate float32 values for the cache.

    Values that are rounded to nearest fail."""
    provider = registry.load("vllm-cpu-float32")
    for power in (9, 0, -6):
        problem = case_of(group, lengths=(7, 40), power=power)
        try:
            assert checks.check(provider, problem) == []
        except NotRun as error:
            pytest.skip(f"{error}")
        output = getattr(provider, problem.operation)(*problem.arguments, **problem.keywords)
        nearest = dataclasses.replace(declaration(provider), kv_fp8="nearest")
        facts = problem.judge(output, nearest)
        assert "those of a cache of cut values" in {fact.observed for fact in facts}


# The choice of a provider


@pytest.mark.parametrize(
    ("path", "arch", "expected"),
    [
        pytest.param(
            {
                "attention": "FLASHINFER",
                "attention_decode": "flashinfer-native",
                "kv_cache_dtype": "fp8",
                "requantised": ["qkv", "o"],
            },
            "sm121",
            {
                "decode_attention_fp8": "flashinfer-fa2",
                "mxfp4_linear": "vllm",
                "mxfp4_quantize": "flashinfer",
            },
            id="attention FLASHINFER attention_decode flashinfer-native",
        ),
        pytest.param(
            {"attention": "TRITON_ATTN", "kv_cache_dtype": "fp8_e4m3", "requantised": []},
            "sm90",
            {"decode_attention_fp8": "vllm"},
            id="attention TRITON_ATTN kv_cache_dtype fp8_e4m3",
        ),
        pytest.param(
            {"attention": "FLASH_ATTN", "kv_cache_dtype": "bfloat16"},
            "sm90",
            {},
            id="attention FLASH_ATTN kv_cache_dtype bfloat16, sm90",
        ),
        pytest.param(
            {"attention": "CPU_ATTN", "kv_cache_dtype": "fp8", "dtype": "float32"},
            "cpu",
            {"decode_attention_fp8": "vllm-cpu-float32"},
            id="attention CPU_ATTN kv_cache_dtype fp8 dtype float32",
        ),
    ],
)
def test_the_provider_follows_what_is_rounded(path, arch, expected):
    judged = {}
    for operation in ("decode_attention_fp8", "mxfp4_linear", "mxfp4_quantize"):
        (choice,) = serving.choices("vllm", arch, KernelPath(**path), operation)
        if choice.nothing is None and (arch != "cpu" or choice.provider):
            judged[operation] = choice.provider
    assert judged == expected
