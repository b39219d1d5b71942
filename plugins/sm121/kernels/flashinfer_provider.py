"""The provider `flashinfer`: FlashInfer's kernels as vLLM calls them for gpt-oss.

- Prefill attention: the attention-sink wrapper with the backend fa2 (on SM12x, plain wrappers
  ignore `sinks=`).
- Decode attention: XQA. Exception: before FlashInfer 0.6.16, XQA has no sinks on SM12x, so the
  provider uses the same wrapper there, with one query per sequence. The provider `flashinfer-fa2`
  decodes with the wrapper on every release.
- Both kinds of attention with an FP8 cache, which a kernel of vLLM writes.
- The quantisers, from sm100 on. The experts, computed by `cutlass_fused_moe`: W4A16 on sm90, W4A8
  on SM10x and SM12x. Dense MXFP4 layers, computed by `mm_fp4` (W4A4).

If the installed release lacks a function, NotRun names the first release that has it
(`flashinfer_releases`). A kernel that raises an exception is a failure.
"""

import copy
from typing import Any, Self

from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels import parts
from sm121.kernels.flashinfer_attention import FlashInferAttention
from sm121.kernels.flashinfer_experts import FlashInferExperts, IdentityExperts
from sm121.kernels.flashinfer_library import FlashInferLibrary
from sm121.kernels.planning import Call, PlanningProvider
from sm121.kernels.protocol import (
    DecodeAttention,
    FusedMoe,
    Operation,
    Packed,
    PrefillAttention,
)


class FlashInferProvider(PlanningProvider):
    """The operations that the architecture supports; the others raise NotRun with the reason.

    Args:
        library: FlashInfer on this GPU; imported if it is not given.

    Raises:
        NotRun: FlashInfer cannot be imported, or there is no GPU.
        TypeError: A subclass is defined that replaces a method of a part.
    """

    name = "flashinfer"
    mxfp4_scale_rule = "ceil"
    mxfp8_scale_rule = "ceil"
    linear_activations = "mxfp4"
    deterministic = frozenset(
        {
            "mxfp4_quantize",
            "mxfp8_quantize",
            "fused_moe",
            "prefill_attention",
            "decode_attention",
            "prefill_attention_fp8",
            "decode_attention_fp8",
        }
    )
    graphs = frozenset({"fused_moe", "prefill_attention", "decode_attention"})
    #: Whether decode uses XQA if the release has XQA with sinks.
    by_xqa = True
    #: The classes of the parts.
    experts_class: type[FlashInferExperts] = FlashInferExperts
    attention_class: type[FlashInferAttention] = FlashInferAttention

    def __init__(self, library: FlashInferLibrary | None = None) -> None:
        library = library or FlashInferLibrary()
        self.experts = self.experts_class(library)
        self.attention = self.attention_class(library, by_xqa=self.by_xqa)
        self.activations = "bfloat16" if library.capability // 10 == 9 else "mxfp8"

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse a subclass with a method that no operation would call."""
        super().__init_subclass__(**keywords)
        parts.refuse_steps(cls, FlashInferProvider, ("experts_class", "attention_class"))

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            As `FlashInferExperts.mxfp4_quantize`.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        return self.experts.mxfp4_quantize(x)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            As `FlashInferExperts.mxfp8_quantize`.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        return self.experts.mxfp8_quantize(x)

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Return a call that computes a dense layer; see `FlashInferExperts`."""
        return self.experts.plan_linear(x, weight)

    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        """Return a call that computes the experts; see `FlashInferExperts`."""
        return self.experts.plan_experts(inputs)

    def plan_prefill(self, inputs: PrefillAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes prefill attention; see `FlashInferAttention`."""
        return self.attention.plan_prefill(inputs, fp8=fp8)

    def plan_decode(self, inputs: DecodeAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes decode attention; see `FlashInferAttention`."""
        return self.attention.plan_decode(inputs, fp8=fp8)

    def tactics(self, operation: Operation) -> tuple[str, ...]:
        """Return the tactics of an operation that are worth a test of their own.

        Args:
            operation: The operation; only `fused_moe` has tactics.
        """
        if operation != "fused_moe":
            return ()
        return self.experts.tactics(self.device)

    def with_tactic(self, tactic: str) -> Self:
        """Return a copy of the provider that always uses one tactic.

        Args:
            tactic: One of `tactics`.
        """
        fixed = copy.copy(self)
        fixed.experts = self.experts.with_tactic(tactic)
        if self.activations != "bfloat16":
            # With vLLM's arguments, some tactics add with atomics, whose order varies.
            fixed.deterministic = self.deterministic - {"fused_moe"}
        return fixed


class FlashInferFa2Provider(FlashInferProvider):
    """FlashInfer's kernels, decoding with the sink wrapper on fa2, as the MXFP4 build does."""

    name = "flashinfer-fa2"
    by_xqa = False


class FlashInferIdentityProvider(FlashInferProvider):
    """FlashInfer's kernels, for a build whose experts take E4M3 activations with scales of one.

    Args:
        library: FlashInfer on this GPU; imported if it is not given.

    Raises:
        NotRun: The experts have no MXFP8 activations on this GPU.
    """

    name = "flashinfer-identity"
    experts_class = IdentityExperts

    def __init__(self, library: FlashInferLibrary | None = None) -> None:
        super().__init__(library)
        if self.activations != "mxfp8":
            raise NotRun("FlashInfer has experts with MXFP8 activations only for SM10x and SM12x")
        self.activations = "e4m3"
