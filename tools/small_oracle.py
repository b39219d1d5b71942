"""The oracle with a whole small checkpoint in memory, for tables of the documentation and for
tests.

The levels use `sm121.oracles.scores`.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sm121.oracles import rounding
from sm121.oracles.gpt_oss import Weights, after_layer, embedded, last_norm
from sm121.oracles.stored_weights import Stored, experts, layer

_VOCABULARY_CHUNK = 16_384


def load(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """Load the weights of a checkpoint in the Hugging Face format, with experts in MXFP4 or BF16.

    Args:
        checkpoint: The folder.
        dtype: The dtype of the computation.

    Raises:
        FileNotFoundError: config.json or *.safetensors is missing.
        ValueError: A tensor is missing.
    """
    stored = Stored(checkpoint)

    def matrices(name: str) -> Tensor:
        return torch.stack([*experts(stored, name, dtype)])

    layers = tuple(layer(stored, n, dtype, matrices) for n in range(stored.config.layers))
    return Weights(
        config=stored.config,
        embedding=stored.tensor("model.embed_tokens.weight"),
        layers=layers,
        norm=stored.tensor("model.norm.weight").to(dtype),
        head=stored.tensor("lm_head.weight"),
    )


def hidden_states(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """Return the normalised last hidden state of each token, [T, H].

    Args:
        weights: The model.
        token_ids: The T tokens.

    Raises:
        ValueError: There is no token, or an unknown one.
    """
    x = [embedded(weights, token_ids)]
    for n in range(len(weights.layers)):
        x, _ = after_layer([weights], n, x)
    return last_norm(weights, x[0])


def _logit_chunks(weights: Weights, states: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weights.config.vocabulary, _VOCABULARY_CHUNK):
        rows = weights.head[start : start + _VOCABULARY_CHUNK].to(states.dtype)
        yield start, rounding.activations(weights.rounding)(states @ rows.T)


def log_probabilities(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """Return log p(token | all tokens up to each position), [T, V]: 1.6 MB per row in float64.

    Args:
        weights: The model.
        token_ids: The T tokens.

    Raises:
        ValueError: There is no token, or an unknown one.
    """
    states = hidden_states(weights, token_ids)
    logits = torch.cat([chunk for _, chunk in _logit_chunks(weights, states)], -1)
    most = logits.max(-1, keepdim=True).values
    # In float32, the sum over so many tokens loses up to 1e-4, depending on the CPU's vector unit.
    shares = (logits - most).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    return logits - (most.double() + shares.log()).to(logits.dtype)


def next_token_log_probabilities(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """Return log p of each actual next token, [T - 1]: an engine's prompt log-probabilities.

    Args:
        weights: The model.
        token_ids: The T tokens.

    Raises:
        ValueError: There is no token, or an unknown one.
    """
    return of_next_tokens(weights, hidden_states(weights, token_ids), token_ids)


def of_next_tokens(weights: Weights, states: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return log p of each actual next token, [T - 1], from hidden states.

    The result [T, V] is never in memory as a whole, because the vocabulary is processed in chunks.
    Logits that are only summed are float32, and their sum is float64: this costs at most 2e-5 and
    saves half of the time.

    Args:
        weights: The model.
        states: The states of `hidden_states`, [T, H].
        token_ids: The T tokens.
    """
    states = states[:-1]
    targets = weights.head[torch.tensor(list(token_ids)[1:], dtype=torch.int64)].to(states.dtype)
    coarse = states.float()
    total = torch.full((len(states),), -math.inf, dtype=torch.float64)
    for _, logits in _logit_chunks(weights, coarse):
        most = logits.max(-1, keepdim=True).values
        shares = (logits - most).exp_().sum(-1, dtype=torch.float64)
        total = torch.logaddexp(total, most[:, 0].double() + shares.log())
    following = rounding.activations(weights.rounding)((states * targets).sum(-1))
    return following - total.to(states.dtype)
