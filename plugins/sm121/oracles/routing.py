"""Which experts a token goes to, and with which shares.

Source: the gpt-oss reference implementation (openai/gpt-oss, gpt_oss/torch/model.py, MLPBlock).
"""

from __future__ import annotations

from torch import Tensor


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token and the softmax over those k alone.

    logits [T, E] -> shares [T, k] in the dtype of the logits (float64 in the oracle) that sum to
    one, experts [T, k] int64, largest first. Raises RuntimeError for k > E.
    """
    top, experts = logits.topk(k, -1)
    return top.softmax(-1), experts
