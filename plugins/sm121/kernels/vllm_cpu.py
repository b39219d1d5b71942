"""The providers `vllm-cpu` and `vllm-cpu-float32`: the compiled kernels that vLLM's CPU platform
serves with, in the precision of ``--dtype``, called as vLLM 0.32 calls them: attention as
`CPUAttentionBackendImpl`, the experts as `CPUUnquantizedExperts` on MXFP4 weights decoded exactly
to bfloat16 or float32, routing as `CPURouter` (it is PyTorch), the head as
`dispatch_cpu_unquantized_gemm`. There are no quantisers."""

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels.planning import Paging
from sm121.kernels.protocol import DecodeAttention, FusedMoe, Operation, Packed, PrefillAttention
from sm121.kernels.torch_provider import TorchProvider

_ALPHA, _LIMIT = 1.702, 7.0
_BLOCK = 32


class VllmCpuProvider:
    """Routing, experts and attention of vLLM on the CPU. Raises NotRun: it cannot be loaded."""

    device = "cpu"
    deterministic = frozenset(
        {"route", "fused_moe", "prefill_attention", "decode_attention", "lm_head"}
    )
    kv_fp8 = "cut"
    block_sizes = (32, 64, 128)
    """The kernels take multiples of 32 (`get_supported_kernel_block_sizes`)."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = "vllm-cpu" if dtype is torch.bfloat16 else "vllm-cpu-float32"
        try:
            # What vLLM's modules warn of is no finding about its kernels, nor pytest's error.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from vllm import _custom_ops
                from vllm.model_executor.layers.fused_moe.router.cpu_router import _softmax_topk
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
                from vllm.platforms import current_platform
                from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        except ImportError as error:
            raise NotRun(
                f"provider {self.name} needs vLLM for the CPU, here: {error}; "
                "pip install 'sm121-conformance[cpu]'"
            ) from error
        if not current_platform.is_cpu():
            raise NotRun(
                f"provider {self.name} needs vLLM built for the CPU, this one is for "
                f"{current_platform.device_name}"
            )
        current_platform.import_kernels()
        self._ops: Any = _custom_ops
        self._decoder = TorchProvider()
        self._softmax_topk: Any = _softmax_topk
        self._dispatch: Any = dispatch_cpu_unquantized_gemm
        self._dtype = dtype
        self._attention_isa: Any = functools.partial(_get_attn_isa, dtype)
        amx = torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16
        self._moe_isa = "amx" if amx else "vec"

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shares, experts = self._softmax_topk(logits, k, renormalize=True)
        return shares, experts

    def prepare(
        self, operation: Operation, *arguments: Any, **keywords: Any
    ) -> Callable[[], Tensor] | None:
        if operation == "fused_moe":
            return self._experts(FusedMoe(*arguments, **keywords))
        if operation == "lm_head":
            return self._head(*arguments)
        return None

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        """y [T, H] of the provider's precision; see `FusedMoe`. Raises NotRun for other constants
        than gpt-oss's, which the kernel has built in."""
        return self._experts(FusedMoe(*arguments, **keywords))()

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, V] of the provider's precision."""
        return self._head(x, weight)()

    def _head(self, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        layer: Any = SimpleNamespace(weight=weight.to(self._dtype), bias=None)
        self._dispatch(layer, remove_weight=False)
        return lambda: layer.cpu_linear(x.to(self._dtype), layer.weight, None)

    def _experts(self, inputs: FusedMoe) -> Callable[[], Tensor]:
        if (inputs.alpha, inputs.limit) != (_ALPHA, _LIMIT):
            raise NotRun(f"provider {self.name} has alpha {_ALPHA} and limit {_LIMIT} built in")
        matrices = (self._prepacked(inputs.w1), self._prepacked(inputs.w2))
        biases = (
            None if b is None else b.to(self._dtype) for b in (inputs.w1_bias, inputs.w2_bias)
        )
        fixed = (*matrices, *biases, inputs.weights, inputs.ids, "swigluoai", self._moe_isa)

        def call() -> Tensor:
            x = inputs.x.to(self._dtype)
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            self._ops.cpu_fused_moe(out, x, *fixed)
            return out

        return call

    def _prepacked(self, weights: Packed) -> Tensor:
        """[E, rows, K] in the kernel's order, decoded expert by expert to bound the memory."""
        packed, scales = weights
        decoded = torch.stack(
            [
                self._decoder.mxfp4_dequantize(p, s).to(self._dtype)
                for p, s in zip(packed, scales, strict=True)
            ]
        )
        return self._ops.cpu_prepack_moe_weight(decoded, self._moe_isa)

    def _prefill(self, kv: str, *arguments: Any, **keywords: Any) -> Tensor:
        """The kernel reads a paged cache, which is written first by the kernel that the engine
        writes it with."""
        inputs = PrefillAttention(*arguments, **keywords)
        paging = Paging(inputs.cu_seqlens.tolist(), _BLOCK)
        slots = paging.slots()
        cache = self._written(inputs.k, inputs.v, slots, (paging.pages, _BLOCK), kv)
        lengths = inputs.cu_seqlens[1:] - inputs.cu_seqlens[:-1]
        return self._attend(inputs, cache, paging.table(), inputs.cu_seqlens, lengths, kv)

    def _decode(self, kv: str, *arguments: Any, **keywords: Any) -> Tensor:
        """The engine's own cache has keys in the kernel's order: the contract's is copied into it,
        with whatever lies after a sequence's last token."""
        inputs = DecodeAttention(*arguments, **keywords)
        blocks, _, heads, block, size = inputs.kv_cache.shape
        keys, values = (
            inputs.kv_cache[:, i].transpose(1, 2).reshape(-1, heads, size) for i in (0, 1)
        )
        slots = torch.arange(blocks * block)
        cache = self._written(keys, values, slots, (blocks, block), kv)
        starts = torch.arange(len(inputs.q) + 1, dtype=torch.int32)
        return self._attend(inputs, cache, inputs.block_table, starts, inputs.seq_lens, kv)

    prefill_attention = functools.partialmethod(_prefill, "auto")
    decode_attention = functools.partialmethod(_decode, "auto")
    prefill_attention_fp8 = functools.partialmethod(_prefill, "fp8")
    decode_attention_fp8 = functools.partialmethod(_decode, "fp8")

    def _written(
        self, k: Tensor, v: Tensor, slots: Tensor, pages: tuple[int, int], kv: str
    ) -> tuple[Tensor, Tensor]:
        """A cache of so many pages of so many tokens, with k and v [T, Hkv, D] in their slots."""
        blocks, block = pages
        dtype = torch.uint8 if kv == "fp8" else self._dtype
        cache = torch.zeros(blocks, k.shape[1], 2 * block, k.shape[2], dtype=dtype).chunk(2, dim=2)
        tokens, isa = (k.to(self._dtype), v.to(self._dtype)), self._isa(cache, kv)
        self._ops.cpu_attn_reshape_and_cache(*tokens, *cache, slots, isa, kv_cache_dtype=kv)
        keys, values = cache
        return keys, values

    def _isa(self, cache: tuple[Tensor, Tensor], kv: str) -> str:
        try:
            return str(self._attention_isa(cache[0].shape[2], cache[0].shape[3], kv))
        except NotImplementedError as error:
            raise NotRun(f"vLLM's CPU attention has no FP8 KV cache here: {error}") from error

    def _attend(
        self,
        inputs: PrefillAttention | DecodeAttention,
        cache: tuple[Tensor, Tensor],
        table: Tensor,
        starts: Tensor,
        lengths: Tensor,
        kv: str,
    ) -> Tensor:
        q = inputs.q.to(self._dtype)
        sliding = -1 if inputs.window is None else inputs.window
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        shared = {"seq_lens": lengths, "query_start_loc": starts, "kv_cache_dtype": kv}
        metadata = self._ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=q.shape[1],
            num_kv_heads=cache[0].shape[1],
            head_dim=q.shape[2],
            dtype=q.dtype,
            causal=True,
            sliding_window_size=sliding,
            isa=self._isa(cache, kv),
            enable_kv_split=True,
            **shared,
        )
        self._ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=cache[0],
            value_cache=cache[1],
            output=out,
            scale=inputs.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=sliding,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=inputs.sinks,
            **shared,
        )
        return out


def float32_provider() -> VllmCpuProvider:
    return VllmCpuProvider(torch.float32)
