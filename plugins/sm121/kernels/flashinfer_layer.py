"""Convert the weights of a layer's experts to the layout of FlashInfer's `cutlass_fused_moe`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.kernels.planning import padded
from sm121.kernels.protocol import FusedMoe, Packed

#: `cutlass_fused_moe` needs hidden and intermediate sizes that are multiples of this: 2880 is
#: padded to 2944.
ALIGNED = 128
#: The number of elements that share a scale.
BLOCK = 32


@dataclass(frozen=True)
class FlashInferLayer:
    """A layer in the layout of both variants of `cutlass_fused_moe`: up rows before gate rows.

    Attributes:
        w1: The first matrices, padded.
        w2: The second matrices, padded.
        biases: The biases by the names of `cutlass_fused_moe`; empty if there are none.
        constants: The constants of SwiGLU by the names of `cutlass_fused_moe`.
        hidden: The hidden size.
        to_hidden: The number of padding columns in the hidden dimension.
    """

    w1: Packed
    w2: Packed
    biases: dict[str, Tensor]
    constants: dict[str, Tensor]
    hidden: int
    to_hidden: int

    @classmethod
    def of(cls, inputs: FusedMoe) -> "FlashInferLayer":
        """Make the layer from a checkpoint's tensors, in which gate and up rows alternate.

        Args:
            inputs: The operation's arguments.
        """
        experts = len(inputs.w1[0])
        hidden = inputs.x.shape[1]
        intermediate = inputs.w2[0].shape[2] * 2
        to_hidden = -hidden % ALIGNED
        to_intermediate = -intermediate % ALIGNED
        codes, scales = inputs.w1
        biases = {}
        if inputs.w1_bias is not None and inputs.w2_bias is not None:
            first = _up_then_gate(inputs.w1_bias[..., None], to_intermediate, 0)
            biases["fc1_expert_biases"] = first[..., 0]
            biases["fc2_expert_biases"] = functional.pad(inputs.w2_bias, (0, to_hidden))
        constants = {}
        for name, value in (("alpha", inputs.alpha), ("beta", 1.0), ("limit", inputs.limit)):
            constants[f"swiglu_{name}"] = torch.full(
                (experts,), value, dtype=torch.float32, device=inputs.x.device
            )
        return cls(
            w1=(
                _up_then_gate(codes, to_intermediate, to_hidden // 2),
                _up_then_gate(scales, to_intermediate, to_hidden // BLOCK),
            ),
            w2=padded(inputs.w2, to_hidden, to_intermediate),
            biases=biases,
            constants=constants,
            hidden=hidden,
            to_hidden=to_hidden,
        )


def _up_then_gate(part: Tensor, rows: int, columns: int) -> Tensor:
    """Return the up rows, then the gate rows, each padded with rows and columns of zeros."""
    gate = functional.pad(part[:, 0::2], (0, columns, 0, rows))
    up = functional.pad(part[:, 1::2], (0, columns, 0, rows))
    return torch.cat((up, gate), 1).contiguous()
