"""Base of the providers on a GPU: weights are put in order and a step is planned once."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.kernels.protocol import DecodeAttention, FusedMoe, Operation, PrefillAttention, prepared

Call = Callable[[], Tensor]


class PlanningProvider(ABC):
    """Experts and attention as prepared calls; a subclass plans each for given tensors. A plan is
    None where there are no tokens: the engine launches nothing then."""

    device = "cuda"
    block_sizes = (16, 32, 64, 128)

    @abstractmethod
    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        """A call that computes y [T, H]."""

    @abstractmethod
    def plan_prefill(self, inputs: PrefillAttention) -> Call | None:
        """A call that computes o [T, Hq, D]."""

    @abstractmethod
    def plan_decode(self, inputs: DecodeAttention) -> Call | None:
        """A call that computes o [B, Hq, D]."""

    def prepare(self, operation: Operation, *arguments: Any, **keywords: Any) -> Call | None:
        plan: Call | None
        if operation == "fused_moe":
            plan = self.plan_experts(FusedMoe(*arguments, **keywords))
        elif operation == "prefill_attention":
            plan = self.plan_prefill(PrefillAttention(*arguments, **keywords))
        elif operation == "decode_attention":
            plan = self.plan_decode(DecodeAttention(*arguments, **keywords))
        else:
            return None
        return plan or (lambda: new_like(arguments[0]))

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        y: Tensor = prepared(self, "fused_moe", *arguments, **keywords)()
        return y

    def prefill_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        y: Tensor = prepared(self, "prefill_attention", *arguments, **keywords)()
        return y

    def decode_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        y: Tensor = prepared(self, "decode_attention", *arguments, **keywords)()
        return y

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, V] by cuBLAS, as vLLM's unquantised linear layers compute it."""
        return functional.linear(x, weight)


def new_like(activations: Tensor) -> Tensor:
    """Memory for an output of the shape of these activations, without their strides."""
    return torch.empty_like(activations, memory_format=torch.contiguous_format)


def padded(weights: tuple[Tensor, Tensor], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Packed elements and scales [E, rows, K] with so many more rows and columns (elements) of
    zeros."""
    packed, scales = (
        functional.pad(part, (0, columns // per, 0, rows)).contiguous()
        for part, per in zip(weights, (2, 32), strict=True)
    )
    return packed, scales
