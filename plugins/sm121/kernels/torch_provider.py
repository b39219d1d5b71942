"""The provider `torch`: plain PyTorch with the roundings of a real kernel.

Values are bfloat16 where a kernel would store them, and sums are in float32. The provider was
written independently of the oracle: each codec has another formula, and the softmax runs over tiles
of keys. Its parts are in `torch_codecs`, `torch_experts` and `torch_attention`.
"""

from typing import get_args

import torch

from sm121.core.verdict import NotRun
from sm121.kernels.protocol import Operation
from sm121.kernels.torch_attention import TorchAttention
from sm121.kernels.torch_experts import TorchExperts


class TorchProvider(TorchExperts, TorchAttention):
    """All operations on any device, with FlashInfer's scale rules; deterministic on the CPU.

    Args:
        device: The device of the tensors, as PyTorch names it.
    """

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.deterministic: frozenset[str] = frozenset(get_args(Operation))
        # The other operations read values back to the host, which a CUDA graph cannot record.
        self.graphs = frozenset({"mxfp4_dequantize", "route", "lm_head"})


def cuda_provider() -> TorchProvider:
    """Return the provider on a GPU: PyTorch's own kernels.

    Raises:
        NotRun: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotRun("provider torch-cuda needs a GPU that PyTorch can use, there is none here")
    return TorchProvider("cuda")
