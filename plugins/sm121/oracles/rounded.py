"""A model as a server holds it that has weights in other formats than the checkpoint."""

import dataclasses

import torch
from torch import Tensor

from sm121.oracles import rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.gpt_oss import Latest, Layer, Rows, Weights
from sm121.oracles.rounding import Function


def rounded(weights: Weights, way: Rounding) -> Weights:
    """The same model as a server that rounds in that way holds it. `weights`: with the formats of
    the checkpoint, or already with those of `way`. Raises ValueError: with others."""
    formats = [(w.qkv, w.o, w.lm_head) for w in (weights.rounding, way)]
    if formats[0] == formats[1]:
        return dataclasses.replace(weights, rounding=way)
    if any(formats[0]):
        raise ValueError(f"weights in {weights.rounding.name} cannot become {way.name}")
    return dataclasses.replace(
        weights,
        layers=Latest(len(weights.layers), lambda n: _layer(weights.layers[n], way)),
        head=_RoundedRows(weights.head, rounding.weight(way, "lm_head"), weights.dtype),
        rounding=way,
    )


class _RoundedRows:
    def __init__(self, rows: Rows, near: Function, dtype: torch.dtype) -> None:
        self._rows, self._near, self._dtype = rows, near, dtype

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self._near(self._rows[rows].to(self._dtype))


def _layer(layer: Layer, way: Rounding) -> Layer:
    weights = {}
    for name, part in {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o"}.items():
        weight, bias = getattr(layer, name)
        weights[name] = rounding.weight(way, part)(weight), bias
    return dataclasses.replace(layer, **weights)
