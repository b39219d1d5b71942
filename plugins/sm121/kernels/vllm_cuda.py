"""The providers `vllm`, `vllm-triton` and `vllm-flash-attn`: the kernels that vLLM serves gpt-oss
with on a GPU. Called as vLLM 0.24 to 0.33 call them: the experts by Marlin (`fused_marlin_moe`) or
by the Triton kernels from OpenAI (`triton_kernel_fused_experts`), attention by Triton's unified
attention or by FlashAttention, both with sinks, MXFP8 by `mxfp8_e4m3_quantize`, MXFP4 by the Triton
kernels' `downcast_to_mxfp`."""

import importlib
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels.planning import Call, Paging, PlanningProvider, in_fp8, new_like, padded
from sm121.kernels.protocol import DecodeAttention, FusedMoe, Packed, PrefillAttention

_ALPHA, _LIMIT = 1.702, 7.0
_PAGE = 32
_E4M3 = torch.float8_e4m3fn
_LAYERS = "vllm.model_executor.layers"
_SEGMENTS = 16
_GRID = 128
"""Below so many thread blocks vLLM splits decode: `MIN_LAUNCH_GRID_SIZE_2D`."""
#: Of experts in their layout: x, weights and ids to y.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
_OF_TRITON = {
    "seq_threshold_3D",
    "num_par_softmax_segments",
    "softmax_segm_output",
    "softmax_segm_max",
    "softmax_segm_expsum",
    "sinks",
}
"""Arguments that Triton's attention alone has, by these names."""


class VllmProvider(PlanningProvider):
    """vLLM's experts by Marlin, attention and quantisers. Raises NotRun: no vLLM for CUDA."""

    name = "vllm"
    deterministic = frozenset({"prefill_attention", "decode_attention"})
    graphs = frozenset({"fused_moe", "decode_attention", "decode_attention_fp8", "mxfp4_linear"})
    rounds_each_expert = True
    _widths = 256  # hidden is in multiples of so many, as vLLM pads it
    absent: ClassVar[dict[str, str]] = {
        "mxfp4_dequantize": "vLLM decodes MXFP4 inside its experts' kernels; the tests of the "
        "experts judge each scale"
    }

    def __init__(self) -> None:
        try:
            platform = _module("vllm.platforms").current_platform
        except ImportError as error:
            raise NotRun(
                f"provider {self.name} needs vLLM for CUDA, here: {error}; pip install vllm"
            ) from error
        if not platform.is_cuda():
            raise NotRun(
                f"provider {self.name} needs vLLM built for CUDA and a GPU, this one is for "
                f"{platform.device_name or 'no device'}"
            )

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _triton_kernels()
        try:
            details = _module("triton_kernels.numerics_details.mxfp")
        except ImportError as error:
            raise NotRun(f"vLLM's Triton kernels cannot be imported: {error}") from error
        packed, scales = details.downcast_to_mxfp(x, torch.uint8, axis=-1)
        return packed, scales

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantise = _module(f"{_LAYERS}.quantization.utils.mxfp8_utils").mxfp8_e4m3_quantize
        if not len(x):
            empty = x.new_empty(0, x.shape[1] // 32, dtype=torch.uint8)
            return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), empty
        q, scales = quantise(x, is_sf_swizzled_layout=False)
        return q, scales.view(torch.uint8).reshape(len(x), x.shape[1] // 32)

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> shares [T, k] float32, experts [T, k] int32; see the contract. Raises
        ValueError for strided logits, which its kernel would misread."""
        if not logits.is_contiguous():
            raise ValueError("vLLM routes the gate's own output alone, which has no strides")
        if not len(logits):  # the engine launches nothing for no tokens
            return logits.new_empty(0, k), logits.new_empty(0, k, dtype=torch.int32)
        fused = _module(f"{_LAYERS}.fused_moe.router.fused_topk_router").fused_topk
        routed = fused(logits, logits, k, renormalize=True)
        return routed[0], routed[1]

    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        """NotRun for other constants than gpt-oss's, which the kernels have built in."""
        if (inputs.alpha, inputs.limit) != (_ALPHA, _LIMIT):
            raise NotRun(f"provider {self.name} has alpha {_ALPHA} and limit {_LIMIT} built in")
        if not len(inputs.x):
            return None
        hidden = inputs.x.shape[1]
        to_hidden, to_intermediate = -hidden % self._widths, -(inputs.w2[0].shape[2] * 2) % 128
        first = padded(inputs.w1, 2 * to_intermediate, to_hidden)
        second = padded(inputs.w2, to_hidden, to_intermediate)
        biases = [
            None if bias is None else functional.pad(bias, (0, rows))
            for bias, rows in ((inputs.w1_bias, 2 * to_intermediate), (inputs.w2_bias, to_hidden))
        ]
        experts = self._in_layout(first, second, biases)

        def call() -> Tensor:
            wide = functional.pad(inputs.x, (0, to_hidden)).contiguous()
            return experts(wide, inputs.weights, inputs.ids)[:, :hidden].contiguous()

        return call

    def _in_layout(self, first: Packed, second: Packed, biases: list[Tensor | None]) -> Experts:
        marlin = _module(f"{_LAYERS}.quantization.utils.marlin_utils_fp4")
        try:
            fused = _module(f"{_LAYERS}.fused_moe.experts.marlin_moe").fused_marlin_moe
        except ImportError:
            fused = _module(f"{_LAYERS}.fused_moe.fused_marlin_moe").fused_marlin_moe
        activation = _module(f"{_LAYERS}.fused_moe.activation").MoEActivation.SWIGLUOAI
        number = _module("vllm.scalar_type").scalar_types.float4_e2m1f.id
        layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
        p1, p2, s1, s2, b1, b2 = marlin.prepare_moe_mxfp4_layer_for_marlin(
            layer, first[0], second[0], first[1], second[1], *biases
        )
        layers = (p1, p2, b1, b2, s1, s2)
        kinds = {"quant_type_id": number, "activation": activation, "global_num_experts": len(p1)}
        return lambda x, weights, ids: fused(x, *layers, weights, ids, **kinds)

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Marlin, as `MarlinMxFp4LinearKernel` calls it, and the MXFP4 build for the layers
        that it quantises at load (christopherowen/vllm, mxfp4.py)."""
        marlin = _module(f"{_LAYERS}.quantization.utils.marlin_utils_fp4")
        rows, columns = len(weight[0]), x.shape[1]
        layer: Any = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = rows, columns
        layer.params_dtype = x.dtype
        parameters = (torch.nn.Parameter(part, requires_grad=False) for part in weight)
        layer.weight, layer.weight_scale = parameters
        marlin.prepare_fp4_layer_for_marlin(layer)
        # By position: a release calls the fourth, a second scale, by another name.
        tensors = (layer.weight, layer.weight_scale, None, getattr(layer, "workspace", None))

        def call() -> Tensor:
            return marlin.apply_fp4_marlin_linear(x, *tensors, rows, columns)

        return call

    def plan_prefill(self, inputs: PrefillAttention, *, fp8: bool = False) -> Call | None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if not len(q):
            return None
        paging = Paging(inputs.cu_seqlens.tolist(), _PAGE)
        shape = (2, paging.pages, _PAGE, *k.shape[1:])
        cache = torch.zeros(shape, dtype=_E4M3 if fp8 else k.dtype, device=q.device)
        slots = paging.slots().to(q.device)
        table = paging.table().to(q.device)
        lengths = torch.tensor(paging.lengths, dtype=torch.int32, device=q.device)
        longest, sinks = max(paging.lengths), _sinks(inputs)

        def call() -> Tensor:
            if fp8:
                self.write_fp8(k, v, cache[0], cache[1], slots)
            else:
                cache[0].view(-1, *k.shape[1:])[slots] = k
                cache[1].view(-1, *v.shape[1:])[slots] = v
            return self._attend(
                inputs,
                cache[0],
                cache[1],
                sinks=sinks,
                cu_seqlens_q=inputs.cu_seqlens,
                max_seqlen_q=longest,
                seqused_k=lengths,
                max_seqlen_k=longest,
                block_table=table,
            )

        return call

    def plan_decode(self, inputs: DecodeAttention, *, fp8: bool = False) -> Call | None:
        q, kv_cache = inputs.q, inputs.kv_cache
        if not len(q):
            return None
        cache = in_fp8(kv_cache, self.write_fp8) if fp8 else kv_cache
        keys, values = (cache[:, i].transpose(1, 2) for i in (0, 1))
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        longest, sinks = int(inputs.seq_lens.max()), _sinks(inputs)
        size = 1 << (q.shape[2] - 1).bit_length()
        shape = (_GRID // kv_cache.shape[2], q.shape[1], _SEGMENTS)
        output, most, total = (
            torch.empty(*shape, *tail, dtype=torch.float32, device=q.device)
            for tail in ((size,), (), ())
        )

        def call() -> Tensor:
            return self._attend(
                inputs,
                keys,
                values,
                sinks=sinks,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=inputs.seq_lens,
                max_seqlen_k=longest,
                block_table=inputs.block_table,
                seq_threshold_3D=len(output),
                num_par_softmax_segments=_SEGMENTS,
                softmax_segm_output=output,
                softmax_segm_max=most,
                softmax_segm_expsum=total,
            )

        return call

    def write_fp8(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens [T, Hkv, D] to the pages of an FP8 cache, with scales of one."""
        write = _module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
        one = torch.ones((), dtype=torch.float32, device=k.device)
        write.triton_reshape_and_cache_flash(k, v, keys, values, slots, "fp8", one, one)

    def _attend(
        self,
        inputs: PrefillAttention | DecodeAttention,
        keys: Tensor,
        values: Tensor,
        **planned: Any,
    ) -> Tensor:
        """o [n, Hq, D] over keys and values [pages, page, Hkv, D]."""
        out = new_like(inputs.q)
        self.attention(
            q=inputs.q,
            k=keys,
            v=values,
            out=out,
            softmax_scale=inputs.scale,
            causal=True,
            window_size=(-1, -1) if inputs.window is None else (inputs.window - 1, 0),
            softcap=0.0,
            **planned,
        )
        return out

    def attention(self, **arguments: Any) -> None:
        module = _module("vllm.v1.attention.ops.triton_unified_attention")
        scales = None
        if arguments["k"].dtype is _E4M3:
            shape = len(arguments["seqused_k"]), arguments["k"].shape[2]
            scales = torch.ones((), device=arguments["k"].device).expand(shape)
        module.unified_attention(q_descale=None, k_descale=scales, v_descale=scales, **arguments)


class VllmFlashAttentionProvider(VllmProvider):
    """The same with attention by FlashAttention, which vLLM takes on sm90. Raises NotRun where
    vLLM's FlashAttention has no sinks on this GPU."""

    name = "vllm-flash-attn"

    def __init__(self) -> None:
        super().__init__()
        utils = _module("vllm.v1.attention.backends.fa_utils")
        self._version = utils.get_flash_attn_version()
        if not utils.flash_attn_supports_sinks():
            raise NotRun(f"vLLM's FlashAttention {self._version} has no sinks here")

    def write_fp8(self, *_arguments: Any) -> None:
        raise NotRun(
            "vLLM's FlashAttention quantises the queries as well where the KV cache is FP8: no "
            "provider calls it so; --attention-backend TRITON_ATTN or FLASHINFER on SM12x is judged"
        )

    def attention(self, **arguments: Any) -> None:
        shared = {name: arguments[name] for name in {*arguments} - _OF_TRITON}
        call = _module("vllm.vllm_flash_attn").flash_attn_varlen_func
        call(fa_version=self._version, s_aux=arguments["sinks"], **shared)


class VllmTritonProvider(VllmProvider):
    """The same with the experts by OpenAI's Triton kernels, which vLLM takes on sm90."""

    name = "vllm-triton"

    _widths = 128  # the Hopper layout is silently wrong for others

    def _in_layout(self, first: Packed, second: Packed, biases: list[Tensor | None]) -> Experts:
        _triton_kernels()
        experts = _module(f"{_LAYERS}.fused_moe.experts.gpt_oss_triton_kernels_moe")
        swizzle = _module(f"{_LAYERS}.quantization.utils.mxfp4_utils")._swizzle_mxfp4
        config = _module(f"{_LAYERS}.fused_moe.config").mxfp4_w4a16_moe_quant_config
        ogs = _module("triton_kernels.matmul_ogs")
        layers, precisions = [], []
        for packed, scales in (first, second):
            values, flex, in_order = swizzle(packed, scales)
            context = ogs.FlexCtx(rhs_data=flex)
            layers.append(values)
            precisions.append(ogs.PrecisionConfig(weight_scale=in_order, flex_ctx=context))
        in_float32 = (None if bias is None else bias.float() for bias in biases)
        quantised, count = config(*precisions, *in_float32), len(first[0])

        def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            routing = experts.make_routing_data(ids, weights, count)
            kinds = {"topk": ids.shape[1], "quant_config": quantised}
            out = torch.empty_like(x)
            return experts.triton_kernel_fused_experts(out, x, *layers, *routing, **kinds)

        return call


def _sinks(inputs: PrefillAttention | DecodeAttention) -> Tensor | None:
    return None if inputs.sinks is None else inputs.sinks.bfloat16()


def _module(name: str) -> Any:
    # What vLLM's modules warn of when imported is no finding about its kernels.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _triton_kernels() -> None:
    if not _module("vllm.utils.import_utils").has_triton_kernels():
        raise NotRun("vLLM finds no Triton kernels from OpenAI (triton_kernels) here")
