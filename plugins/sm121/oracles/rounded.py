"""A model as a server holds it whose weights are in other formats than the checkpoint's."""

import dataclasses

import torch
from torch import Tensor

from sm121.oracles import rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.gpt_oss import Latest, Layer, Linear, Rows, Weights
from sm121.oracles.rounding import Function


def rounded(weights: Weights, way: Rounding) -> Weights:
    """Return the model as a server with a rounding holds it.

    Args:
        weights: The model with the formats of the checkpoint, or already with those of `way`.
        way: The rounding.

    Raises:
        ValueError: The weights have other formats.
    """
    present = _weight_formats(weights.rounding)
    if present == _weight_formats(way):
        return dataclasses.replace(weights, rounding=way)
    if any(present):
        raise ValueError(f"weights in {weights.rounding.name} cannot become {way.name}")
    return dataclasses.replace(
        weights,
        layers=Latest(len(weights.layers), lambda n: _rounded_layer(weights.layers[n], way)),
        head=_RoundedRows(weights.head, rounding.weight(way, "lm_head"), weights.dtype),
        rounding=way,
    )


def _weight_formats(way: Rounding) -> tuple[str | None, ...]:
    return way.qkv, way.o, way.lm_head


class _RoundedRows:
    """Rows of a vocabulary matrix, rounded when they are read."""

    def __init__(self, rows: Rows, near: Function, dtype: torch.dtype) -> None:
        self._rows = rows
        self._near = near
        self._dtype = dtype

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self._near(self._rows[rows].to(self._dtype))


def _rounded_layer(layer: Layer, way: Rounding) -> Layer:
    round_qkv = rounding.weight(way, "qkv")
    round_o = rounding.weight(way, "o")
    return dataclasses.replace(
        layer,
        q=_rounded_linear(layer.q, round_qkv),
        k=_rounded_linear(layer.k, round_qkv),
        v=_rounded_linear(layer.v, round_qkv),
        o=_rounded_linear(layer.o, round_o),
    )


def _rounded_linear(linear: Linear, near: Function) -> Linear:
    weight, bias = linear
    return near(weight), bias
