"""gpt-oss served with one rounding wrong: an emulation that computes in float32, as an engine does,
and answers log-probabilities. The oracle has nothing of it: its weights are those of a checkpoint
that holds the rounded values, where a format is of weights."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sm121.oracles import gpt_oss, mxfp4, rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.gpt_oss import Weights

_PROJECTIONS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"}
DENSE = "qkv=mxfp4-even,o=mxfp4-even,lm_head=mxfp4-even"
_LOUD = 64.0
#: What becomes of a tensor [out, in] of the checkpoint, by its name.
Change = Callable[[str, Tensor], Tensor]


def part_of(name: str) -> str | None:
    """``qkv``, ``o`` or ``lm_head``: of which part a tensor of the checkpoint is the weight."""
    if name == "lm_head.weight":
        return "lm_head"
    module = name.removesuffix(".weight").rpartition(".")[2]
    return _PROJECTIONS.get(module) if name.endswith(".weight") else None


def quantised(
    weight: Tensor,
    rule: mxfp4.ScaleRule = mxfp4.ScaleRule.VLLM_RNE,
    scales: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] = lambda scales: scales,
) -> Tensor:
    """The values of a weight [out, in] in MXFP4, by the codec; ``scales`` is done to its scales."""
    blocks = weight.double().numpy().reshape(len(weight), -1, mxfp4.BLOCK)
    chosen = mxfp4.choose_scale(np.abs(blocks).max(-1), rule)
    codes = mxfp4.encode_elements(blocks / mxfp4.decode_scale(chosen)[..., None])
    values = mxfp4.CODE_VALUES[codes] * mxfp4.decode_scale(scales(chosen))[..., None]
    return torch.from_numpy(values.reshape(weight.shape)).to(weight.dtype)


def dense(name: str, weight: Tensor) -> Tensor:
    """As a server holds it that quantises its dense layers as it should."""
    return weight if part_of(name) is None else quantised(weight)


def loud(name: str, tensor: Tensor) -> Tensor:
    """The same model with keys beyond 448: what they are multiplied by, queries are divided by."""
    factor = {"q_proj": 1 / _LOUD, "k_proj": _LOUD}.get(name.split(".")[-2], 1.0)
    return tensor * factor


def write_twin(checkpoint: Path, folder: Path, change: Change = dense) -> Path:
    """A checkpoint like another one, its tensors changed; what is not a weight is the same file."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: change(name, t) for name, t in load_file(file).items()}
            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file.name)
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder


def in_memory(checkpoint: Path, change: Change) -> Weights:
    """The same as a model."""

    def weight(name: str, tensor: Tensor) -> Tensor:
        return change(name, tensor.bfloat16()).to(tensor.dtype)

    weights = gpt_oss.load(checkpoint, torch.float32)
    layers = []
    for n, layer in enumerate(weights.layers):
        parts = {
            part: (weight(f"model.layers.{n}.self_attn.{part}_proj.weight", pair[0]), pair[1])
            for part, pair in (("q", layer.q), ("k", layer.k), ("v", layer.v), ("o", layer.o))
        }
        layers.append(dataclasses.replace(layer, **parts))
    head = change("lm_head.weight", weights.head)
    return dataclasses.replace(weights, layers=tuple(layers), head=head)


@dataclass(frozen=True)
class Fault:
    """Formats that a server says it has, and what it does instead."""

    formats: str
    weights: Change = lambda _name, tensor: tensor
    #: What a table of `rounding` has instead, by the table's name and the format's.
    patches: Mapping[tuple[str, str], rounding.Function] = dataclasses.field(default_factory=dict)
    #: Layers that cache as the server says; the others cache as computed.
    caching: Callable[[gpt_oss.GptOssConfig, int], bool] = lambda _config, _layer: True
    #: Whether the checkpoint is the one with loud keys.
    is_loud: bool = False


def _only(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """One part is quantised in another way than the rest."""
    return lambda name, tensor: change(tensor) if part_of(name) == part else dense(name, tensor)


def _one_layer(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.startswith("model.layers.1.") else dense(name, tensor)


def _without_last(columns: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = quantised(tensor)
        tensor[:, -columns:] = 0
        return tensor

    return change


def _floor(tensor: Tensor) -> Tensor:
    return quantised(tensor, mxfp4.ScaleRule.OCP_FLOOR)


def _flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 2.0**-6, 0.0, rounding.to_e4m3(x)).to(x.dtype)


def _not_a_number(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 464, torch.nan, rounding.to_e4m3(x)).to(x.dtype)


def _wrapped(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 448, torch.sign(x) * 256, rounding.to_e4m3(x)).to(x.dtype)


def _scaled(x: Tensor) -> Tensor:
    return rounding.to_e4m3(x / 0.9)


def _rescaled(x: Tensor) -> Tensor:
    return rounding.to_e4m3(x / 0.9) * 0.9


def _twice(x: Tensor) -> Tensor:
    return rounding.to_e4m3(rounding.to_e4m3(x * 0.75) / 0.75)


def _cached(change: rounding.Function, **more: Any) -> Fault:
    return Fault("kv=fp8", patches={("CACHES", "fp8"): change}, **more)


def _experts(served: str, computed: rounding.Function) -> Fault:
    return Fault(f"experts={served}", patches={("EXPERTS", served): computed})


FAULTS: Mapping[str, Fault] = {
    "scales of lm_head one block off": Fault(
        DENSE, _only("lm_head", lambda t: quantised(t, scales=lambda s: np.roll(s, 1, 1)))
    ),
    "scales of o one row off": Fault(
        DENSE, _only("o", lambda t: quantised(t, scales=lambda s: np.roll(s, 1, 0)))
    ),
    "lm_head left in BF16": Fault(DENSE, _only("lm_head", lambda t: t)),
    "one layer left in BF16": Fault(DENSE, _one_layer),
    "the floor rule for qkv": Fault(DENSE, _only("qkv", _floor)),
    "the floor rule for o": Fault(DENSE, _only("o", _floor)),
    "the floor rule for lm_head": Fault(DENSE, _only("lm_head", _floor)),
    "the last half block of qkv dropped": Fault(DENSE, _only("qkv", _without_last(16))),
    "the last half block of lm_head dropped": Fault(DENSE, _only("lm_head", _without_last(16))),
    "E4M3 flushed below its normals": _cached(_flushed),
    "E4M3 cut off": _cached(rounding.to_e4m3_cut),
    "keys beyond 448 become NaN": _cached(_not_a_number, is_loud=True),
    "keys beyond 448 become 256": _cached(_wrapped, is_loud=True),
    "written with a scale of 0.9, read without": _cached(_scaled),
    "written and read with a scale of 0.9": _cached(_rescaled),
    "rounded twice": _cached(_twice),
    "window layers alone in FP8": _cached(
        rounding.to_e4m3, caching=lambda config, n: config.sliding_layers[n]
    ),
    "full layers alone in FP8": _cached(
        rounding.to_e4m3, caching=lambda config, n: not config.sliding_layers[n]
    ),
    "no FP8 cache at all": _cached(rounding.same),
    "identity scales where computed ones are promised": _experts("mxfp8", rounding.to_e4m3),
    "computed scales where identity is promised": _experts("mxfp8-identity", rounding.to_mxfp8),
    "experts' inputs not rounded": _experts("mxfp8", rounding.same),
}
HONEST: Mapping[str, Fault] = {
    "dense layers": Fault(DENSE, dense),
    "KV cache": Fault("kv=fp8"),
    "KV cache, loud keys": Fault("kv=fp8", is_loud=True),
    "experts": Fault("experts=mxfp8"),
    "experts, identity": Fault("experts=mxfp8-identity"),
}


@contextmanager
def _in_force(fault: Fault) -> Iterator[None]:
    """Its tables, and its layers that do not cache as they should."""
    before = {place: getattr(rounding, place[0])[place[1]] for place in fault.patches}
    attention = gpt_oss.attention

    def attend(weights: Weights, n: int, *more: Any) -> Any:
        if not fault.caching(weights.config, n):
            way = dataclasses.replace(weights.rounding, kv=None)
            weights = dataclasses.replace(weights, rounding=way)
        return attention(weights, n, *more)

    for (table, name), function in fault.patches.items():
        getattr(rounding, table)[name] = function
    gpt_oss.attention = attend
    try:
        yield
    finally:
        gpt_oss.attention = attention
        for (table, name), function in before.items():
            getattr(rounding, table)[name] = function


def answers(
    fault: Fault, checkpoint: Path, dtype: str, prompts: Sequence[tuple[str, Sequence[int]]]
) -> dict[str, list[float]]:
    """What such a server says of each prompt: log p of each token that really follows."""
    weights = in_memory(checkpoint, fault.weights)
    way = Rounding.parse(fault.formats)
    way = Rounding(dtype, kv=way.kv, experts=way.experts)
    with _in_force(fault):
        model = dataclasses.replace(weights, rounding=way)
        return {
            name: gpt_oss.next_token_log_probabilities(model, ids).tolist() for name, ids in prompts
        }
