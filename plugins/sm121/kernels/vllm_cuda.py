"""The providers `vllm`, `vllm-triton` and `vllm-flash-attn`: vLLM's kernels for gpt-oss on a GPU.

The providers call these kernels as vLLM 0.24 to 0.33 do:

- for the experts, Marlin (`fused_marlin_moe`) or the Triton kernels from OpenAI
  (`triton_kernel_fused_experts`),
- for attention, Triton's unified attention or FlashAttention, both with sinks,
- for MXFP8, `mxfp8_e4m3_quantize`,
- for MXFP4, `downcast_to_mxfp` of the Triton kernels.
"""

import importlib
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels.planning import (
    Call,
    Paging,
    PlanningProvider,
    in_fp8,
    new_like,
    padded,
    with_dense_heads,
)
from sm121.kernels.protocol import DecodeAttention, FusedMoe, Packed, PrefillAttention

#: gpt-oss's SwiGLU constants, which are compiled into the experts' kernels.
_ALPHA = 1.702
_LIMIT = 7.0
#: The page size of the cache that a prefill writes, in tokens.
_PAGE = 32
#: The number of elements that share a scale.
_BLOCK = 32
_E4M3 = torch.float8_e4m3fn
_LAYERS = "vllm.model_executor.layers"
#: The number of segments into which vLLM splits the softmax of a decode step
#: (`NUM_PAR_SOFTMAX_SEGMENTS`).
_SEGMENTS = 16
#: vLLM splits decode if it would launch fewer thread blocks (`MIN_LAUNCH_GRID_SIZE_2D`).
_GRID = 128
#: vLLM pads the intermediate size to a multiple of this.
_INTERMEDIATE_MULTIPLE = 128
#: The experts of a layer: a function of x, weights and ids that returns y.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
#: The arguments that only Triton's attention takes, or that have other names in FlashAttention.
_OF_TRITON = {
    "seq_threshold_3D",
    "num_par_softmax_segments",
    "softmax_segm_output",
    "softmax_segm_max",
    "softmax_segm_expsum",
    "sinks",
}


class VllmProvider(PlanningProvider):
    """vLLM's Marlin kernel for the experts, its Triton kernel for attention, and its quantisers.

    Raises:
        NotRun: vLLM cannot be imported, or is not built for CUDA.
    """

    name = "vllm"
    deterministic = frozenset(
        {
            "prefill_attention",
            "decode_attention",
            "prefill_attention_fp8",
            "decode_attention_fp8",
        }
    )
    graphs = frozenset({"fused_moe", "decode_attention", "decode_attention_fp8", "mxfp4_linear"})
    rounds_each_expert = True
    #: vLLM pads the hidden size to a multiple of this.
    _hidden_multiple = 256
    absent: ClassVar[dict[str, str]] = {
        "mxfp4_dequantize": "vLLM decodes MXFP4 inside its experts' kernels; the tests of the "
        "experts judge each scale"
    }

    def __init__(self) -> None:
        try:
            platform = _module("vllm.platforms").current_platform
        except ImportError as error:
            raise NotRun(
                f"provider {self.name} needs vLLM for CUDA, which cannot be imported here "
                f"({error}); pip install vllm"
            ) from error
        if not platform.is_cuda():
            raise NotRun(
                f"provider {self.name} needs vLLM built for CUDA and a GPU, this one is for "
                f"{platform.device_name or 'no device'}"
            )

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            The packed elements [M, K/2] u8 and the scales [M, K/32] u8 E8M0.

        Raises:
            NotRun: vLLM finds no Triton kernels here.
        """
        _require_triton_kernels()
        try:
            details = _module("triton_kernels.numerics_details.mxfp")
        except ImportError as error:
            raise NotRun(f"vLLM's Triton kernels cannot be imported: {error}") from error
        packed, scales = details.downcast_to_mxfp(x, torch.uint8, axis=-1)
        return packed, scales

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            The elements [M, K] float8_e4m3fn and the scales [M, K/32] u8 E8M0.
        """
        quantise = _module(f"{_LAYERS}.quantization.utils.mxfp8_utils").mxfp8_e4m3_quantize
        rows, columns = x.shape
        if not rows:
            no_scales = x.new_empty(0, columns // _BLOCK, dtype=torch.uint8)
            return x.new_empty(x.shape, dtype=_E4M3), no_scales
        q, scales = quantise(x, is_sf_swizzled_layout=False)
        return q, scales.view(torch.uint8).reshape(rows, columns // _BLOCK)

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [T, E].
            k: The number of experts per token.

        Returns:
            The shares [T, k] float32 and the experts [T, k] int32.

        Raises:
            ValueError: The logits are not contiguous. The kernel would misread them.
        """
        if not logits.is_contiguous():
            raise ValueError(
                "vLLM's router accepts only the contiguous output of the gate, not a strided tensor"
            )
        if not len(logits):  # without tokens, the engine launches nothing
            return logits.new_empty(0, k), logits.new_empty(0, k, dtype=torch.int32)
        fused = _module(f"{_LAYERS}.fused_moe.router.fused_topk_router").fused_topk
        routed = fused(logits, logits, k, renormalize=True)
        return routed[0], routed[1]

    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        """Return a call that computes y [T, H].

        Args:
            inputs: The operation's arguments.

        Raises:
            NotRun: The constants differ from gpt-oss's, which are compiled into the kernels.
        """
        if (inputs.alpha, inputs.limit) != (_ALPHA, _LIMIT):
            raise NotRun(f"provider {self.name} supports only alpha {_ALPHA} and limit {_LIMIT}")
        if not len(inputs.x):
            return None
        hidden = inputs.x.shape[1]
        intermediate = inputs.w2[0].shape[2] * 2
        to_hidden = -hidden % self._hidden_multiple
        to_intermediate = -intermediate % _INTERMEDIATE_MULTIPLE
        first = padded(inputs.w1, 2 * to_intermediate, to_hidden)
        second = padded(inputs.w2, to_hidden, to_intermediate)
        biases = [
            _padded_bias(inputs.w1_bias, 2 * to_intermediate),
            _padded_bias(inputs.w2_bias, to_hidden),
        ]
        experts = self._in_layout(first, second, biases)

        def call() -> Tensor:
            wide = functional.pad(inputs.x, (0, to_hidden)).contiguous()
            return experts(wide, inputs.weights, inputs.ids)[:, :hidden].contiguous()

        return call

    def _in_layout(self, first: Packed, second: Packed, biases: list[Tensor | None]) -> Experts:
        """Convert the weights to the kernel's layout, and return the experts."""
        marlin = _module(f"{_LAYERS}.quantization.utils.marlin_utils_fp4")
        try:
            fused = _module(f"{_LAYERS}.fused_moe.experts.marlin_moe").fused_marlin_moe
        except ImportError:
            fused = _module(f"{_LAYERS}.fused_moe.fused_marlin_moe").fused_marlin_moe
        activation = _module(f"{_LAYERS}.fused_moe.activation").MoEActivation.SWIGLUOAI
        e2m1 = _module("vllm.scalar_type").scalar_types.float4_e2m1f.id
        layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
        w1, w2, w1_scales, w2_scales, b1, b2 = marlin.prepare_moe_mxfp4_layer_for_marlin(
            layer, first[0], second[0], first[1], second[1], *biases
        )

        def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            output: Tensor = fused(
                x,
                w1,
                w2,
                b1,
                b2,
                w1_scales,
                w2_scales,
                weights,
                ids,
                quant_type_id=e2m1,
                activation=activation,
                global_num_experts=len(w1),
            )
            return output

        return experts

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Return a call of Marlin that computes y [M, N].

        `MarlinMxFp4LinearKernel` calls it in this way. So does the MXFP4 build, for the layers that
        it quantises when it loads the weights (christopherowen/vllm, mxfp4.py).

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].
        """
        marlin = _module(f"{_LAYERS}.quantization.utils.marlin_utils_fp4")
        packed, scales = weight
        rows = len(packed)
        columns = x.shape[1]
        layer: Any = torch.nn.Module()
        layer.output_size_per_partition = rows
        layer.input_size_per_partition = columns
        layer.params_dtype = x.dtype
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        marlin.prepare_fp4_layer_for_marlin(layer)
        # Pass the tensors by position, because the name of the fourth parameter (a second scale)
        # depends on the release.
        tensors = (layer.weight, layer.weight_scale, None, getattr(layer, "workspace", None))

        def call() -> Tensor:
            return marlin.apply_fp4_marlin_linear(x, *tensors, rows, columns)

        return call

    def plan_prefill(self, inputs: PrefillAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that writes a paged cache and computes o [T, Hq, D].

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.
        """
        q = inputs.q
        k = inputs.k
        v = inputs.v
        if not len(q):
            return None
        paging = Paging(inputs.cu_seqlens.tolist(), _PAGE)
        shape = (paging.pages, _PAGE, *k.shape[1:])
        cache_type = _E4M3 if fp8 else k.dtype
        keys, values = torch.zeros(2, *shape, dtype=cache_type, device=q.device)
        slots = paging.slots().to(q.device)
        table = paging.table().to(q.device)
        lengths = torch.tensor(paging.lengths, dtype=torch.int32, device=q.device)
        longest = max(paging.lengths)
        sinks = _sinks(inputs)

        def call() -> Tensor:
            if fp8:
                self.write_fp8(with_dense_heads(k), with_dense_heads(v), keys, values, slots)
            else:
                keys.view(-1, *k.shape[1:])[slots] = k
                values.view(-1, *v.shape[1:])[slots] = v
            return self._attend(
                inputs,
                keys,
                values,
                sinks=sinks,
                cu_seqlens_q=inputs.cu_seqlens,
                max_seqlen_q=longest,
                seqused_k=lengths,
                max_seqlen_k=longest,
                block_table=table,
            )

        return call

    def plan_decode(self, inputs: DecodeAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes o [B, Hq, D].

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.
        """
        q = inputs.q
        kv_cache = inputs.kv_cache
        if not len(q):
            return None
        cache = in_fp8(kv_cache, self.write_fp8) if fp8 else kv_cache
        keys = cache[:, 0].transpose(1, 2)
        values = cache[:, 1].transpose(1, 2)
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        longest = int(inputs.seq_lens.max())
        sinks = _sinks(inputs)
        # Buffers for the segments' intermediate results, as in vLLM's TritonAttentionMetadata.
        head_size = 1 << (q.shape[2] - 1).bit_length()
        shape = (_GRID // kv_cache.shape[2], q.shape[1], _SEGMENTS)
        output = torch.empty(*shape, head_size, dtype=torch.float32, device=q.device)
        highest = torch.empty(shape, dtype=torch.float32, device=q.device)
        total = torch.empty(shape, dtype=torch.float32, device=q.device)

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
                softmax_segm_max=highest,
                softmax_segm_expsum=total,
            )

        return call

    def write_fp8(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens to the pages of an FP8 cache, with scales of one.

        Args:
            k: Keys [T, Hkv, D].
            v: Values [T, Hkv, D].
            keys: Pages of keys [pages, page, Hkv, D].
            values: Pages of values, as `keys`.
            slots: [T], the slot of each token, counted over all pages.
        """
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
        """Return o [n, Hq, D] over keys and values [pages, page, Hkv, D]."""
        out = new_like(inputs.q)
        window = (-1, -1) if inputs.window is None else (inputs.window - 1, 0)
        self.attention(
            q=inputs.q,
            k=keys,
            v=values,
            out=out,
            softmax_scale=inputs.scale,
            causal=True,
            window_size=window,
            softcap=0.0,
            **planned,
        )
        return out

    def attention(self, **arguments: Any) -> None:
        """Compute attention with Triton.

        Args:
            **arguments: The arguments of vLLM's `unified_attention` without the scales.
        """
        module = _module("vllm.v1.attention.ops.triton_unified_attention")
        keys = arguments["k"]
        scales = None
        if keys.dtype is _E4M3:
            shape = (len(arguments["seqused_k"]), keys.shape[2])
            scales = torch.ones((), device=keys.device).expand(shape)
        module.unified_attention(q_descale=None, k_descale=scales, v_descale=scales, **arguments)


class VllmFlashAttentionProvider(VllmProvider):
    """vLLM's kernels, with FlashAttention for attention, which vLLM uses on sm90.

    Raises:
        NotRun: vLLM's FlashAttention has no sinks on this GPU.
    """

    name = "vllm-flash-attn"

    def __init__(self) -> None:
        super().__init__()
        utils = _module("vllm.v1.attention.backends.fa_utils")
        self._version = utils.get_flash_attn_version()
        if not utils.flash_attn_supports_sinks():
            raise NotRun(f"vLLM's FlashAttention {self._version} has no sinks here")

    def write_fp8(self, *_arguments: Any) -> None:
        """Refuse an FP8 cache.

        Raises:
            NotRun: Always.
        """
        raise NotRun(
            "with an FP8 KV cache, vLLM's FlashAttention also quantises the queries, which no "
            "provider tests; the kernels of --attention-backend TRITON_ATTN, and of FLASHINFER "
            "on SM12x, are tested"
        )

    def attention(self, **arguments: Any) -> None:
        """Compute attention with FlashAttention.

        Args:
            **arguments: As for `VllmProvider.attention`.
        """
        shared = {name: arguments[name] for name in {*arguments} - _OF_TRITON}
        call = _module("vllm.vllm_flash_attn").flash_attn_varlen_func
        call(fa_version=self._version, s_aux=arguments["sinks"], **shared)


class VllmTritonProvider(VllmProvider):
    """vLLM's kernels, with OpenAI's Triton kernels for the experts, which vLLM uses on sm90."""

    name = "vllm-triton"

    #: The Hopper layout gives wrong results, without an error, for other multiples.
    _hidden_multiple = 128

    def _in_layout(self, first: Packed, second: Packed, biases: list[Tensor | None]) -> Experts:
        _require_triton_kernels()
        experts = _module(f"{_LAYERS}.fused_moe.experts.gpt_oss_triton_kernels_moe")
        swizzle = _module(f"{_LAYERS}.quantization.utils.mxfp4_utils")._swizzle_mxfp4
        config = _module(f"{_LAYERS}.fused_moe.config").mxfp4_w4a16_moe_quant_config
        ogs = _module("triton_kernels.matmul_ogs")
        layers = []
        precisions = []
        for packed, scales in (first, second):
            values, flex, in_order = swizzle(packed, scales)
            context = ogs.FlexCtx(rhs_data=flex)
            layers.append(values)
            precisions.append(ogs.PrecisionConfig(weight_scale=in_order, flex_ctx=context))
        in_float32 = [None if bias is None else bias.float() for bias in biases]
        quantised = config(*precisions, *in_float32)
        count = len(first[0])

        def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            routing = experts.make_routing_data(ids, weights, count)
            out = torch.empty_like(x)
            return experts.triton_kernel_fused_experts(
                out, x, *layers, *routing, topk=ids.shape[1], quant_config=quantised
            )

        return call


def _padded_bias(bias: Tensor | None, columns: int) -> Tensor | None:
    if bias is None:
        return None
    return functional.pad(bias, (0, columns))


def _sinks(inputs: PrefillAttention | DecodeAttention) -> Tensor | None:
    """Return the sinks in bfloat16, as vLLM keeps them."""
    if inputs.sinks is None:
        return None
    return inputs.sinks.bfloat16()


def _module(name: str) -> Any:
    # Import warnings of vLLM's modules do not concern its kernels.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _require_triton_kernels() -> None:
    if not _module("vllm.utils.import_utils").has_triton_kernels():
        raise NotRun("vLLM finds no Triton kernels from OpenAI (triton_kernels) here")
