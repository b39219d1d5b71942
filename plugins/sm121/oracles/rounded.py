"""A model as a server holds it that has weights in other formats than the checkpoint."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sm121.oracles import rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.gpt_oss import Layer, Rows, Weights
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
        layers=_RoundedLayers(weights.layers, way),
        head=_RoundedRows(weights.head, rounding.weight(way, "lm_head"), weights.dtype),
        rounding=way,
    )


class _RoundedRows:
    def __init__(self, rows: Rows, near: Function, dtype: torch.dtype) -> None:
        self._rows, self._near, self._dtype = rows, near, dtype

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self._near(self._rows[rows].to(self._dtype))


class _RoundedLayers(Sequence[Layer]):
    """The layer that was asked for last is kept."""

    def __init__(self, layers: Sequence[Layer], way: Rounding) -> None:
        self._layers, self._way = layers, way
        self._last: tuple[int, Layer] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, n: Any) -> Any:
        if self._last is None or self._last[0] != n:
            self._last = None  # before the next one is read
            layer, weights = self._layers[n], {}
            for name, part in {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o"}.items():
                weight, bias = getattr(layer, name)
                weights[name] = rounding.weight(self._way, part)(weight), bias
            self._last = n, dataclasses.replace(layer, **weights)
        return self._last[1]
