"""The provider `torch`: plain PyTorch with the roundings of a real kernel.

Values are bfloat16 where a kernel would store them, and sums are in float32. The provider was
written independently of the oracle: each codec has another formula, and the softmax runs over tiles
of keys. Its operations consist of the steps of three parts: `torch_codecs`, `torch_experts` and
`torch_attention`.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels import parts
from sm121.kernels.protocol import Operation, Packed
from sm121.kernels.torch_attention import TorchAttention
from sm121.kernels.torch_codecs import TorchCodecs
from sm121.kernels.torch_experts import TorchExperts


class TorchProvider:
    """All operations, computed with PyTorch on any device, with FlashInfer's scale rules.

    The results on the CPU are deterministic.

    A subclass may override an operation. To change one step of an operation, the subclass assigns
    its own class to the attribute of the part that contains the step. For example, for a step of
    attention it assigns a subclass of `TorchAttention` to `attention_class`.

    Args:
        device: The device of the tensors, as PyTorch names it.

    Raises:
        TypeError: A subclass is defined that replaces a step instead of an operation.
    """

    name = "torch"
    mxfp4_scale_rule = "ceil"
    mxfp8_scale_rule = "ceil"
    activations = "bfloat16"
    block_sizes = (16, 32, 64, 128)
    #: The classes of the parts, whose methods are the steps of the operations.
    codecs_class: type[TorchCodecs] = TorchCodecs
    experts_class: type[TorchExperts] = TorchExperts
    attention_class: type[TorchAttention] = TorchAttention

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.deterministic: frozenset[str] = frozenset(get_args(Operation))
        # The other operations read values back to the host, which a CUDA graph cannot record.
        self.graphs = frozenset({"mxfp4_dequantize", "route", "lm_head"})
        self.codecs = self.codecs_class()
        self.experts = self.experts_class(self)
        self.attention = self.attention_class(self.codecs)

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse a subclass with a method that no operation would call."""
        super().__init_subclass__(**keywords)
        attributes = ("codecs_class", "experts_class", "attention_class")
        parts.refuse_steps(cls, TorchProvider, attributes)

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            As `TorchCodecs.mxfp4_quantize`.
        """
        return self.codecs.mxfp4_quantize(x)

    def mxfp4_dequantize(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Decode MXFP4.

        Args:
            packed: [..., K/2] u8.
            scales: [..., K/32] u8 E8M0.

        Returns:
            The values [..., K] float32.
        """
        return self.codecs.mxfp4_dequantize(packed, scales)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            As `TorchCodecs.mxfp8_quantize`.
        """
        return self.codecs.mxfp8_quantize(x)

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [T, E].
            k: The number of experts per token.

        Returns:
            As `TorchExperts.route`.
        """
        return self.experts.route(logits, k)

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the mixture of experts.

        Args:
            *arguments: The fields of `FusedMoe`, in their order.
            **keywords: The other fields.

        Returns:
            y [T, H], of the dtype of x.
        """
        return self.experts.fused_moe(*arguments, **keywords)

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of the output head.

        Args:
            x: [T, H].
            weight: [V, H].

        Returns:
            [T, V], of the dtype of x.
        """
        return self.experts.lm_head(x, weight)

    def mxfp4_linear(self, x: Tensor, weight: Packed) -> Tensor:
        """Compute a dense layer with MXFP4 weights.

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].

        Returns:
            [M, N], of the dtype of x.
        """
        return self.experts.mxfp4_linear(x, weight)

    def prefill_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute causal attention over whole sequences.

        Args:
            *arguments: The fields of `PrefillAttention`, in their order.
            **keywords: The other fields.

        Returns:
            o [T, Hq, D].
        """
        return self.attention.prefill_attention(*arguments, **keywords)

    def decode_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute attention of one token per sequence over a paged cache.

        Args:
            *arguments: The fields of `DecodeAttention`, in their order.
            **keywords: The other fields.

        Returns:
            o [B, Hq, D].
        """
        return self.attention.decode_attention(*arguments, **keywords)

    def prefill_attention_fp8(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute `prefill_attention` with keys and values from an FP8 cache.

        Args:
            *arguments: As for `prefill_attention`.
            **keywords: As for `prefill_attention`.
        """
        q, k, v, *rest = arguments
        cached = self.attention.cached
        return self.prefill_attention(q, cached(k), cached(v), *rest, **keywords)

    def decode_attention_fp8(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute `decode_attention` over an FP8 cache.

        Args:
            *arguments: As for `decode_attention`.
            **keywords: As for `decode_attention`.
        """
        q, kv_cache, *rest = arguments
        return self.decode_attention(q, self.attention.cached(kv_cache), *rest, **keywords)


def cuda_provider() -> TorchProvider:
    """Return the provider on a GPU: PyTorch's own kernels.

    Raises:
        NotRun: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotRun("provider torch-cuda needs a GPU that PyTorch can use, there is none here")
    return TorchProvider("cuda")
