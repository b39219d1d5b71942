"""Round the weights of a model to the formats in which a server stores them."""

import dataclasses

import torch
from torch import Tensor

from sm121.oracles import rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.gpt_oss import Latest, Layer, Linear, Rows, Weights
from sm121.oracles.rounding import Function


def rounded(weights: Weights, served: Rounding) -> Weights:
    """Return the model with its weights rounded as by a server.

    Args:
        weights: The model, with weights in the checkpoint's formats or already in those of
            `served`.
        served: The rounding of the server.

    Raises:
        ValueError: The weights are in other formats.
    """
    present = _weight_formats(weights.rounding)
    if present == _weight_formats(served):
        return dataclasses.replace(weights, rounding=served)
    if any(present):
        raise ValueError(f"weights in {weights.rounding.name} cannot become {served.name}")
    return dataclasses.replace(
        weights,
        layers=Latest(len(weights.layers), lambda n: _rounded_layer(weights.layers[n], served)),
        head=_RoundedRows(weights.head, rounding.weight(served, "lm_head"), weights.dtype),
        rounding=served,
    )


def _weight_formats(served: Rounding) -> tuple[str | None, ...]:
    return served.qkv, served.o, served.lm_head


class _RoundedRows:
    """Rows of a vocabulary matrix, rounded when they are read."""

    def __init__(self, rows: Rows, near: Function, dtype: torch.dtype) -> None:
        self._rows = rows
        self._near = near
        self._dtype = dtype

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self._near(self._rows[rows].to(self._dtype))


def _rounded_layer(layer: Layer, served: Rounding) -> Layer:
    round_qkv = rounding.weight(served, "qkv")
    round_o = rounding.weight(served, "o")
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
