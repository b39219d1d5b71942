"""Routing, experts and dense layers in plain PyTorch: a part of the provider `torch`.

Values are rounded to bfloat16 where a real kernel would store them, and summed in float32.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from sm121.kernels.protocol import FusedMoe, Packed


class Codecs(Protocol):
    """The codecs that the experts use: operations of a kernel provider."""

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            The packed elements [M, K/2] u8 and the scales [M, K/32] u8 E8M0.
        """

    def mxfp4_dequantize(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Decode MXFP4.

        Args:
            packed: [..., K/2] u8.
            scales: [..., K/32] u8 E8M0.

        Returns:
            The values [..., K] float32.
        """

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            The elements [M, K] float8_e4m3fn and the scales [M, K/32] u8 E8M0.
        """


class TorchExperts:
    """The router, the mixture of experts and the dense layers, on any device.

    Args:
        codecs: The codecs of the provider. A subclass of the provider may replace them.
    """

    def __init__(self, codecs: Codecs) -> None:
        self.codecs = codecs

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [T, E].
            k: The number of experts per token.

        Returns:
            The shares [T, k] float32, a softmax over the k largest logits, and the experts [T, k].
        """
        top, experts = torch.topk(logits.float(), k, -1)
        shares = (top - top[:, :1]).exp()
        return shares / shares.sum(-1, keepdim=True), experts.int()

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the mixture of experts.

        Args:
            *arguments: The fields of `FusedMoe`, in their order.
            **keywords: The other fields.

        Returns:
            y [T, H], of the dtype of x.
        """
        inputs = FusedMoe(*arguments, **keywords)
        x = inputs.x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(len(inputs.w1[0])):
            share = torch.where(inputs.ids == e, inputs.weights, 0.0).sum(-1)
            tokens = (inputs.ids == e).any(-1).nonzero()[:, 0]
            if not len(tokens):
                continue
            sums = self.linear(x[tokens], self.expert(inputs.w1, e), inputs.w1_bias, e)
            hidden = self.activation(sums, inputs.alpha, inputs.limit).to(x.dtype)
            y = self.linear(hidden, self.expert(inputs.w2, e), inputs.w2_bias, e)
            total[tokens] += y * self.share(share[tokens])[:, None]
        out.copy_(total)
        return out

    def expert(self, weights: Packed, e: int) -> Tensor:
        """Return the matrix [rows, K] bfloat16 of an expert.

        Args:
            weights: The packed matrices of all experts.
            e: The number of the expert.
        """
        packed, scales = weights
        return self.codecs.mxfp4_dequantize(packed[e], scales[e]).to(torch.bfloat16)

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None, e: int) -> Tensor:
        """Multiply x by a matrix of an expert, and add its bias.

        Args:
            x: [n, K].
            matrix: [rows, K].
            bias: The biases of all experts [E, rows], or None.
            e: The number of the expert.

        Returns:
            [n, rows] float32.
        """
        y = x.float() @ matrix.float().T
        if bias is None:
            return y
        return y + bias[e].float()

    def share(self, share: Tensor) -> Tensor:
        """Return the shares by which an expert's outputs are weighted.

        Args:
            share: [n], the shares that the router gave the expert, one for each of its n tokens.
                They are returned unchanged.
        """
        return share

    def activation(self, t: Tensor, alpha: float, limit: float) -> Tensor:
        """Compute the clamped SwiGLU of gpt-oss.

        Args:
            t: [n, 2I], gate and up interleaved.
            alpha: The factor of the gate within the sigmoid.
            limit: The upper bound of the gate, and the bound of the absolute value of up.

        Returns:
            [n, I].
        """
        gate = t[:, 0::2].clamp(max=limit)
        up = t[:, 1::2].clamp(-limit, limit)
        return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of the output head.

        Args:
            x: [T, H].
            weight: [V, H].

        Returns:
            [T, V], of the dtype of x.
        """
        return x @ weight.T

    def mxfp4_linear(self, x: Tensor, weight: Packed) -> Tensor:
        """Compute a dense layer with MXFP4 weights.

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].

        Returns:
            [M, N], of the dtype of x.
        """
        return self.dense(self.linear_input(x), self.codecs.mxfp4_dequantize(*weight)).to(x.dtype)

    def linear_input(self, x: Tensor) -> Tensor:
        """Return the activations that `mxfp4_linear` multiplies.

        Args:
            x: [M, K].

        Returns:
            [M, K] float32.
        """
        return x.float()

    def dense(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply activations by the matrix of a dense layer.

        Args:
            x: [M, K].
            matrix: [N, K], of the dtype of x.

        Returns:
            [M, N].
        """
        return x @ matrix.T
