"""The provider `flashinfer`: FlashInfer's kernels as vLLM calls them for gpt-oss.

- Prefill attention: the attention-sink wrapper on fa2 (plain wrappers ignore `sinks=` on SM12x).
- Decode attention: XQA; on SM12x before FlashInfer 0.6.16, where XQA has no sinks, the same
  wrapper with one query a sequence. `flashinfer-fa2` decodes by the wrapper on every release.
- An FP8 cache, written by vLLM, for both.
- The quantisers, from sm100 on. The experts by `cutlass_fused_moe`: W4A16 on sm90, W4A8 on SM10x
  and SM12x. Dense MXFP4 layers by `mm_fp4` (W4A4).

What the installed release does not have is NotRun, with the release that has it
(``fixtures/kernels/flashinfer.toml``). A kernel that raises is a failure."""

import copy
import functools
import importlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from packaging.version import Version
from pydantic import Field
from torch import Tensor

from sm121.core import data_file
from sm121.core.verdict import NotRun
from sm121.evidence.failure import classify_lines
from sm121.kernels import flashinfer_sinks
from sm121.kernels.planning import Call, Paging, PlanningProvider, in_fp8, padded, side_by_side
from sm121.kernels.protocol import DecodeAttention, FusedMoe, Operation, Packed, PrefillAttention

_PAGE = 32
_ALIGNED = 128
"""cutlass_fused_moe wants both sizes in multiples of this: 2880 becomes 2944."""
_BLOCK = 32
"""Elements that share a scale."""
_E4M3 = torch.float8_e4m3fn
_TILES = {"64x128": (64, 128), "128x128": (128, 128)}
"""Rows and columns of an output's tiles with which the MXFP4 build decodes and prefills."""
_TILE_OF = "select_tile_mn_for_sm120"
_WORKSPACE = 128 << 20


class _Api(data_file.DataTable):
    name: str
    argument: str | None = None
    since: str = Field(pattern=r"^\d+(\.\d+)+$")
    source: str = Field(min_length=3)


class _ApiData(data_file.DataTable):
    #: Whose wheels were read for the rows.
    releases: tuple[str, ...]
    api: tuple[_Api, ...]


def api_data() -> _ApiData:
    return data_file.load("kernels/flashinfer.toml", _ApiData)


@functools.cache
def since() -> dict[tuple[str, str | None], str]:
    """The first release that has a function, or an argument of it."""
    return {(row.name, row.argument): row.since for row in api_data().api}


class FlashInferProvider(PlanningProvider):
    """Each operation where it exists on the architecture; NotRun with the reason elsewhere."""

    name = "flashinfer"
    mxfp4_scale_rule = "ceil"
    mxfp8_scale_rule = "ceil"
    linear_activations = "mxfp4"
    deterministic = frozenset(
        {"mxfp4_quantize", "mxfp8_quantize", "fused_moe", "prefill_attention", "decode_attention"}
    )
    graphs = frozenset({"fused_moe", "prefill_attention", "decode_attention"})
    by_xqa = True
    """Whether decode is XQA's, where the release has it with sinks."""

    def __init__(self) -> None:
        try:
            self._flashinfer: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise NotRun(
                f"provider flashinfer needs FlashInfer, here: {error}; "
                "pip install flashinfer-python"
            ) from error
        except Exception as error:  # FlashInfer checks versions when it is imported
            words = f"{type(error).__name__}: {error}"
            remedy = classify_lines([words]).remedy or "repair the environment of FlashInfer"
            raise NotRun(
                f"provider flashinfer: expected that FlashInfer can be imported, got {words}. "
                f"What to do: {remedy}"
            ) from error
        if not torch.cuda.is_available():
            raise NotRun("provider flashinfer needs a GPU that PyTorch can use, there is none here")
        major, minor = torch.cuda.get_device_capability()
        self._capability = 10 * major + minor
        self.activations = "bfloat16" if major == 9 else "mxfp8"
        self._spaces: dict[str, Tensor] = {}
        self._tactic: list[int] | None = None
        self._tile: tuple[int, int] | None = None

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._needs_sm100("mxfp4_quantize")
        quantize = self._api("flashinfer", "mxfp4_quantize", "sfLayout")
        packed, scales = quantize(x, sfLayout=self._flashinfer.SfLayout.layout_linear)
        return packed, scales.view(torch.uint8).reshape(len(x), x.shape[1] // 32)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._needs_sm100("mxfp8_quantize")
        q, scales = self._mxfp8_quantizer()(x, is_sf_swizzled_layout=False)
        return q, scales.view(torch.uint8).reshape(len(x), x.shape[1] // _BLOCK)

    def _mxfp8_quantizer(self) -> Any:
        quantize = self._api("flashinfer", "mxfp8_quantize", "is_sf_swizzled_layout", "backend")
        return functools.partial(quantize, alignment=_BLOCK, backend="cute-dsl")

    def _api(self, module: str, name: str, *arguments: str) -> Any:
        """What takes these arguments by name. Raises NotRun: this release does not have it."""
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # FlashInfer has it, and what it imports is missing
            function = None
        if function is None:
            raise self._too_old(name, None, f"no {module}.{name}")
        parameters = inspect.signature(function).parameters
        if any(parameters[name].kind is inspect.Parameter.VAR_KEYWORD for name in parameters):
            return function
        for argument in arguments:
            if argument not in parameters:
                raise self._too_old(name, argument, f"no {argument}= of {name}")
        return function

    def _has_xqa_with_sinks(self) -> bool:
        if self._capability // 10 != 12 or not self._version:
            return True
        first = since()["attention sinks in XQA on SM12x", None]
        return Version(self._version).release >= Version(first).release

    def _too_old(self, name: str, argument: str | None, lacks: str) -> NotRun:
        first = since().get((name, argument))
        needed = f"{first} or newer has it" if first else "another release may have it"
        requirement = f"'flashinfer-python>={first}'" if first else "another flashinfer-python"
        return NotRun(
            f"FlashInfer {self._version or '(version not known)'} has {lacks}: {needed}; "
            f"pip install {requirement}, of which vLLM must be a release that takes it"
        )

    @property
    def _version(self) -> str | None:
        text = str(getattr(self._flashinfer, "__version__", ""))
        return None if not text or text.startswith("0.0.0") else text

    def _needs_sm100(self, operation: str) -> None:
        if self._capability < 100:
            raise NotRun(
                f"FlashInfer's {operation} has no code before sm100: on this sm{self._capability} "
                "it launches an empty kernel and returns what was in memory, without an error"
            )

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """As vLLM's `FlashInferMxFp4LinearKernel`, whose backend has NVFP4 alone on SM12x: there
        `auto` takes what there is."""
        self._needs_sm100("mm_fp4")
        quantize = self._api("flashinfer", "mxfp4_quantize", "backend")
        multiply = self._api("flashinfer", "mm_fp4", "block_size", "use_nvfp4", "backend")
        tiles = self._api("flashinfer", "block_scale_interleave")(weight[1])
        tiles = tiles.reshape(-(-len(weight[0]) // _ALIGNED) * _ALIGNED, -1).t()
        backend = "auto" if self._capability // 10 == 12 else "cute-dsl"
        constants = {"block_size": _BLOCK, "use_nvfp4": False, "backend": backend}

        def call() -> Tensor:
            codes, scales = quantize(x.contiguous(), backend="cute-dsl")
            scales = scales.view(torch.uint8).reshape(-1, len(tiles))
            return multiply(codes, weight[0].t(), scales, tiles, **constants)

        return call

    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        if self._capability != 90 and self._capability // 10 not in (10, 12):
            raise NotRun(
                "cutlass_fused_moe has MXFP4 weights with bfloat16 activations on sm90 and with "
                f"MXFP8 activations on SM10x and SM12x, this is sm{self._capability}; vLLM's "
                "Marlin has bfloat16 activations here (--kernel-provider vllm)"
            )
        if not len(inputs.x):
            return None
        layer = _Layer.of(inputs)
        plan = self._w4a16 if self._capability == 90 else self._w4a8
        fused_moe, weights, scales, activations = plan(layer)
        fixed = (inputs.ids, inputs.weights, *weights, torch.bfloat16, scales)
        options = {**layer.biases, **layer.constants}

        def call() -> Tensor:
            wide = functional.pad(inputs.x, (0, layer.to_hidden)).contiguous()
            x, its_scales = activations(wide)
            out = torch.empty_like(wide)
            fused_moe(x, *fixed, **its_scales, output=out, **options)
            return out[:, : layer.hidden].contiguous() if layer.to_hidden else out

        return call

    def _w4a16(self, layer: "_Layer") -> tuple[Any, list[Tensor], list[Tensor], Any]:
        interleave_weights, interleave_scales = (
            self._api("flashinfer.fused_moe", f"interleave_moe_{part}_for_sm90_mixed_gemm")
            for part in ("weights", "scales")
        )
        # The fused finalisation adds by atomics, in another order each time.
        settings = {"use_w4_group_scaling": True, "use_fused_finalize": False}
        fused_moe = functools.partial(self._fused_moe("use_fused_finalize"), **settings)
        weights = [interleave_weights(codes, "fp4") for codes, _ in (layer.w1, layer.w2)]
        scales = [interleave_scales(scale, _BLOCK) for _, scale in (layer.w1, layer.w2)]
        return fused_moe, weights, scales, lambda wide: (wide, {})

    def _w4a8(self, layer: "_Layer") -> tuple[Any, list[Tensor], list[Tensor], Any]:
        """MXFP8 activations, as vLLM's `FLASHINFER_CUTLASS_MXFP4_MXFP8`: the scales in tiles of 128
        rows by 4 blocks, weights and scales seen as wider integers."""
        interleave = self._api("flashinfer", "block_scale_interleave")
        quantize = self._mxfp8_quantizer()
        fused_moe = self._fused_moe("use_mxfp8_act_scaling", "input_sf")
        weights = [codes.view(torch.long) for codes, _ in (layer.w1, layer.w2)]
        blocks = [
            interleave(scale).reshape(scale.shape).view(torch.int32)
            for _, scale in (layer.w1, layer.w2)
        ]
        ones = torch.ones(len(weights[0]), dtype=torch.float32, device=weights[0].device)

        def activations(wide: Tensor) -> tuple[Tensor, dict[str, Any]]:
            q, scales = quantize(wide, is_sf_swizzled_layout=True)
            q, scales = self.quantised(q, scales, wide)
            return q, {"input_sf": scales, "use_mxfp8_act_scaling": True}

        return fused_moe, weights, [blocks[0], ones, blocks[1], ones], activations

    def quantised(self, q: Tensor, scales: Tensor, _x: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts get of x [T, H]: E4M3, and scales in tiles."""
        return q, scales

    def _fused_moe(self, *arguments: str) -> Any:
        if self._tile is not None:  # for good: each tactic has a process of its own
            setattr(self._core(), _TILE_OF, lambda *_arguments, **_keywords: self._tile)
        fixed = {} if self._tactic is None else {"profile_ids": self._tactic}
        function = self._api("flashinfer.fused_moe", "cutlass_fused_moe", *arguments, *fixed)
        return functools.partial(function, **fixed)

    def tactics(self, operation: Operation) -> tuple[str, ...]:
        """The tiles that a build chooses by the number of tokens, and the pairs of autotune tactics
        worth a test of their own: each of a product with the default of the other."""
        if operation != "fused_moe":
            return ()
        tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
        valid: dict[int, list[int]] = {}
        choose = tuner.choose_one

        def listing(*arguments: Any, gemm_idx: int) -> tuple[Any, int]:
            _tuner, _name, (runner, *_), _config, inputs = arguments
            valid[gemm_idx] = sorted(runner.get_valid_tactics(inputs, None))
            return runner, -1

        # A small layer, which is all that listing tactics needs.
        hidden, intermediate, experts = 2944, 2944, 4
        codes = [
            torch.zeros(experts, rows, columns // 2, dtype=torch.uint8, device=self.device)
            for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate))
        ]
        w1, w2 = ((c, c.new_zeros(*c.shape[:2], c.shape[2] // 16)) for c in codes)
        x = torch.zeros(16, hidden, dtype=torch.bfloat16, device=self.device)
        ids = torch.arange(4, dtype=torch.int32, device=self.device).repeat(16, 1)
        shares = torch.full((16, 4), 1 / math.sqrt(16), device=self.device)
        tuner.choose_one = listing
        try:
            self.fused_moe(x, shares, ids, w1, None, w2, None, alpha=1.702, limit=7.0)
        finally:
            tuner.choose_one = choose
        first, second = valid[1], valid[2]
        return (
            *(_TILES if hasattr(self._core(), _TILE_OF) else ()),
            *(f"{one},{second[0]}" for one in first),
            *(f"{first[0]},{two}" for two in second[1:]),
        )

    def _core(self) -> Any:
        return importlib.import_module("flashinfer.fused_moe.core")

    def with_tactic(self, tactic: str) -> "FlashInferProvider":
        """The provider with that tactic and no other."""
        fixed = copy.copy(self)
        if tactic in _TILES:
            fixed._tile = _TILES[tactic]
        else:
            fixed._tactic = [int(part) for part in tactic.split(",")]
        if self.activations != "bfloat16":
            # Called as vLLM does; some tactics then add by atomics, in another order each time.
            fixed.deterministic = self.deterministic - {"fused_moe"}
        return fixed

    def plan_prefill(self, inputs: PrefillAttention, *, fp8: bool = False) -> Call | None:
        q, k, v, cu_seqlens, sinks, window, scale = inputs
        _needs_a_sink(sinks)
        if not len(q):
            return None
        paging = Paging(cu_seqlens.tolist(), _PAGE)
        cached = _E4M3 if fp8 else k.dtype
        counts = torch.tensor([0, *paging.counts], dtype=torch.int32).cumsum(0).int()
        batch = flashinfer_sinks.Batch(
            q_edges=cu_seqlens,
            page_edges=counts.to(q.device),
            pages=torch.arange(paging.pages, dtype=torch.int32, device=q.device),
            last=torch.tensor(paging.last, dtype=torch.int32, device=q.device),
            page=_PAGE,
        )
        sizes = flashinfer_sinks.Sizes(q.shape[1], k.shape[1], q.shape[2])
        kernel = flashinfer_sinks.Kernel("NHD", q.dtype, cached, window, sizes)
        wrapper = kernel.planned(self._sink_wrapper(), self._workspace("prefill"), batch)
        shape = (paging.pages, _PAGE, k.shape[1])
        if side_by_side(k, v):
            packed = torch.zeros(*shape, 2 * k.shape[2], dtype=cached, device=q.device)
            cache = keys, values = packed.split(k.shape[2], -1)
        else:
            whole = torch.zeros(shape[0], 2, *shape[1:], k.shape[2], dtype=cached, device=q.device)
            cache, (keys, values) = whole, whole.unbind(1)
        slots = paging.slots().to(q.device)
        page, offset = slots // _PAGE, slots % _PAGE

        def call() -> Tensor:
            if fp8:
                self.write_fp8(k, v, keys, values, slots)
            else:
                keys[page, offset] = k
                values[page, offset] = v
            output: Tensor = wrapper.run(q, cache, sinks, scale)
            return output

        return call

    def plan_decode(self, inputs: DecodeAttention, *, fp8: bool = False) -> Call | None:
        if not len(inputs.q):
            return None
        if self.by_xqa and self._has_xqa_with_sinks():
            return self._by_xqa(inputs, fp8)
        return self._by_fa2(inputs, fp8)

    def _by_xqa(self, inputs: DecodeAttention, fp8: bool) -> Call:
        if fp8:
            self._needs_mha_cu()
        decode = self._api("flashinfer.decode", "xqa_batch_decode_with_kv_cache", "sinks")
        cache = in_fp8(inputs.kv_cache, self.write_fp8) if fp8 else inputs.kv_cache
        table = inputs.block_table.contiguous()
        longest = table.shape[1] * inputs.kv_cache.shape[3]
        window_left = -1 if inputs.window is None else inputs.window - 1
        tensors = (_as_given(cache), self._workspace("decode"), table, inputs.seq_lens)
        constants = {"bmm1_scale": inputs.scale, "bmm2_scale": 1.0, "kv_layout": "HND"}
        kinds = {"window_left": window_left, "sinks": inputs.sinks, **constants}
        # XQA takes the address of the queries and no stride; vLLM makes them contiguous as well.
        return lambda: decode(inputs.q.contiguous(), *tensors, longest, **kinds)

    def _needs_mha_cu(self) -> None:
        if self._capability == 90:
            raise NotRun(
                "FlashInfer's XQA with an FP8 cache is another kernel on sm90: mha_sm90.cu rounds "
                "queries and shares to E4M3, mha.cu of SM12x rounds neither. Judge it on SM12x, or "
                "judge FA2's decode here (--kernel-provider flashinfer-fa2)"
            )

    def _by_fa2(self, inputs: DecodeAttention, fp8: bool) -> Call:
        """As a prefill of one query a sequence."""
        q, kv_cache, table, seq_lens, sinks, window, scale = inputs
        _needs_a_sink(sinks)
        cache = in_fp8(kv_cache, self.write_fp8) if fp8 else kv_cache
        page = kv_cache.shape[3]
        counts = (seq_lens.cpu() + page - 1) // page
        rows = zip(table, counts.tolist(), strict=True)
        batch = flashinfer_sinks.Batch(
            q_edges=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            page_edges=functional.pad(counts.cumsum(0), (1, 0)).int().to(q.device),
            pages=torch.cat([row[:count] for row, count in rows]).int(),
            last=(seq_lens.cpu() - (counts - 1) * page).int().to(q.device),
            page=page,
        )
        sizes = flashinfer_sinks.Sizes(q.shape[1], kv_cache.shape[2], q.shape[2])
        kernel = flashinfer_sinks.Kernel("HND", q.dtype, cache.dtype, window, sizes)
        wrapper = kernel.planned(self._sink_wrapper(), self._workspace("decode-fa2"), batch)
        given = _as_given(cache)
        return lambda: wrapper.run(q, given, sinks, scale)

    def _sink_wrapper(self) -> Any:
        return self._api("flashinfer", "BatchAttentionWithAttentionSinkWrapper", "head_dim_qk")

    def _workspace(self, of: str) -> Tensor:
        # Zeros, because XQA counts its finished blocks there: another kernel's rests are garbage.
        if of not in self._spaces:
            self._spaces[of] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.device)
        return self._spaces[of]

    def write_fp8(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens to the pages of an FP8 cache, as of `in_fp8`, with scales of one. Raises
        NotRun without vLLM."""
        try:
            write = importlib.import_module("vllm._custom_ops").reshape_and_cache_flash
        except ImportError as error:
            raise NotRun(
                f"vLLM writes the FP8 cache that FlashInfer reads, here: {error}"
            ) from error
        one = torch.ones((), dtype=torch.float32, device=k.device)
        write(k, v, keys.view(torch.uint8), values.view(torch.uint8), slots, "fp8", one, one)


def _needs_a_sink(sinks: Tensor | None) -> None:
    if sinks is None:
        raise NotRun("FlashInfer's sink wrapper has sinks; without them it is another kernel")


def _as_given(cache: Tensor) -> Tensor | tuple[Tensor, ...]:
    """The cache [pages, 2, Hkv, page, D] as vLLM gives it: two views where it is packed."""
    views = cache.unbind(1)
    return views if side_by_side(*views) else cache


class FlashInferFa2Provider(FlashInferProvider):
    """Decodes by the sink wrapper on fa2 on every release, as the MXFP4 build does."""

    name = "flashinfer-fa2"
    by_xqa = False


class FlashInferIdentityProvider(FlashInferProvider):
    """Where a build's experts take E4M3 under scales of one: x is rounded here, hidden by them."""

    name = "flashinfer-identity"

    def __init__(self) -> None:
        super().__init__()
        if self.activations != "mxfp8":
            raise NotRun("experts with MXFP8 activations are on SM10x and SM12x alone")
        self.activations = "e4m3"

    def quantised(self, _q: Tensor, scales: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().clamp(-448.0, 448.0).to(_E4M3), torch.full_like(scales, 0x7F)


@dataclass(frozen=True)
class _Layer:
    """As both forms of `cutlass_fused_moe` take it: up rows before gate rows, sizes padded."""

    w1: Packed
    w2: Packed
    biases: dict[str, Tensor]
    constants: dict[str, Tensor]
    hidden: int
    to_hidden: int
    """Columns that are added to it."""

    @classmethod
    def of(cls, inputs: FusedMoe) -> "_Layer":
        """From what a checkpoint has, where gate and up rows take turns."""
        experts, hidden = len(inputs.w1[0]), inputs.x.shape[1]
        to_hidden = -hidden % _ALIGNED
        to_intermediate = -(inputs.w2[0].shape[2] * 2) % _ALIGNED

        def up_then_gate(part: Tensor, columns: int) -> Tensor:
            gate, up = (
                functional.pad(part[:, i::2], (0, columns, 0, to_intermediate)) for i in (0, 1)
            )
            return torch.cat((up, gate), 1).contiguous()

        biases = {}
        if inputs.w1_bias is not None and inputs.w2_bias is not None:
            biases = {
                "fc1_expert_biases": up_then_gate(inputs.w1_bias[..., None], 0)[..., 0],
                "fc2_expert_biases": functional.pad(inputs.w2_bias, (0, to_hidden)),
            }
        constants = {"alpha": inputs.alpha, "beta": 1.0, "limit": inputs.limit}
        return cls(
            w1=(
                up_then_gate(inputs.w1[0], to_hidden // 2),
                up_then_gate(inputs.w1[1], to_hidden // _BLOCK),
            ),
            w2=padded(inputs.w2, to_hidden, to_intermediate),
            biases=biases,
            constants={
                f"swiglu_{name}": torch.full(
                    (experts,), value, dtype=torch.float32, device=inputs.x.device
                )
                for name, value in constants.items()
            },
            hidden=hidden,
            to_hidden=to_hidden,
        )
