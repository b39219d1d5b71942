"""gpt-oss with one wrong rounding (``data/rounding-faults.toml``), computed in float32.

A server with this fault is simulated in one of two ways: it loads a checkpoint whose weights were
already rounded (`held`), or the oracle rounds the original weights while it computes."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meta_tests.folders import DATA
from meta_tests.two_steps import in_two_steps
from sm121.answers import oracle_texts
from sm121.oracles import gpt_oss, mxfp4, rounding
from sm121.oracles.formats import Rounding
from tools import small_oracle
from tools.roundings import DENSE, part_of, write_twin

_DATA = tomllib.loads((DATA / "rounding-faults.toml").read_text("utf-8"))
#: A row of the data file. The tables below have the names of rows as keys.
Row = Mapping[str, Any]
HONEST: Mapping[str, Row] = _DATA["honest"]
FAULTS: Mapping[str, Row] = _DATA["fault"]
_RULE = mxfp4.ScaleRule.VLLM_RNE
_LOUD = 64.0


def formats_of(row: Row) -> str:
    """Return the formats that the server claims to use."""
    return DENSE if row["formats"] == "dense" else str(row["formats"])


def quantised(weight: Tensor, rule: mxfp4.ScaleRule = _RULE, roll: int | None = None) -> Tensor:
    """Return the values of a weight [out, in] in MXFP4, made by the codec, with its scales shifted
    along one axis."""
    blocks = weight.double().numpy().reshape(len(weight), -1, mxfp4.BLOCK)
    scales = mxfp4.choose_scale(np.abs(blocks).max(-1), rule)
    codes = mxfp4.encode_elements(blocks / mxfp4.decode_scale(scales)[..., None])
    moved = scales if roll is None else np.roll(scales, 1, roll)
    values = mxfp4.CODE_VALUES[codes] * mxfp4.decode_scale(moved)[..., None]
    return torch.from_numpy(values.reshape(weight.shape)).to(weight.dtype)


@in_two_steps
def _without_the_last(weight: Tensor, columns: int) -> Tensor:
    weight = quantised(weight)
    weight[:, -columns:] = 0
    return weight


_WEIGHTS: Mapping[str, rounding.Function] = {
    "nothing": rounding.same,
    "floor": lambda weight: quantised(weight, mxfp4.ScaleRule.OCP_FLOOR),
    "scales one block off": lambda weight: quantised(weight, roll=1),
    "scales one row off": lambda weight: quantised(weight, roll=0),
    "ceil": lambda weight: quantised(weight, mxfp4.ScaleRule.CEIL),
    "without the last half block": _without_the_last(mxfp4.BLOCK // 2),
    "without the last half tile": _without_the_last(64),
}
_near = rounding.to_e4m3
_CACHED: Mapping[str, rounding.Function] = {
    "nothing": rounding.same,
    "flushed": lambda x: torch.where(x.abs() < 2.0**-6, 0.0, _near(x)),
    "raised": lambda x: torch.where(x.abs() < 2.0**-6, torch.sign(x) * 2.0**-6, _near(x)),
    "cut off": rounding.to_e4m3_cut,
    "NaN beyond 448": lambda x: torch.where(x.abs() > 464, torch.nan, _near(x)),
    "0 beyond 448": lambda x: torch.where(x.abs() > 448, 0.0, _near(x)),
    "256 beyond 448": lambda x: torch.where(x.abs() > 448, torch.sign(x) * 256, _near(x)),
    "scale 0.9 when written": lambda x: _near(x / 0.9),
    "scale 0.9 when read": lambda x: _near(x) * 0.9,
    "scale 0.9": lambda x: _near(x / 0.9) * 0.9,
    "scale 1.1": lambda x: _near(x / 1.1) * 1.1,
    "twice": lambda x: _near(_near(x * 0.75) / 0.75),
    "twice, once cut off": lambda x: _near(rounding.to_e4m3_cut(x * 0.6) / 0.6),
}
_EXPERTS: Mapping[str, rounding.Function] = {
    "nothing": rounding.same,
    "identity": rounding.to_e4m3,
    "computed": rounding.to_mxfp8,
}


def with_loud_keys(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of an equivalent model whose keys are larger than 448, the largest E4M3
    value.

    Keys are multiplied by a factor, and queries divided by it."""
    return tensor * {"q_proj": 1 / _LOUD, "k_proj": _LOUD}.get(name.split(".")[-2], 1.0)


@in_two_steps
def held(name: str, tensor: Tensor, row: Row) -> Tensor:
    """Return a tensor of the checkpoint as a server with this fault stores it."""
    part = part_of(name)
    where = row.get("part", "")
    if row["formats"] != "dense" or part is None or not name.endswith(".weight"):
        return tensor
    is_here = part == where or name.startswith(f"model.{where.replace('layer ', 'layers.')}.")
    return _WEIGHTS[row["does"]](tensor) if is_here else quantised(tensor)


@contextmanager
def _computing_as(row: Row) -> Iterator[None]:
    patches: dict[str, rounding.Function] = {}
    if "cached" in row:
        patches["cached"] = _CACHED[row["cached"]]
    if "experts" in row:
        patches["expert_inputs"] = _EXPERTS[row["experts"]]
    before = {name: getattr(rounding, name) for name in patches}
    attention = gpt_oss.attention

    def attend(weights: gpt_oss.Weights, n: int, *more: Any) -> Any:
        if weights.config.sliding_layers[n] != (row.get("layers", "sliding") == "sliding"):
            plain = dataclasses.replace(weights.rounding, kv=None)
            weights = dataclasses.replace(weights, rounding=plain)
        return attention(weights, n, *more)

    for name, function in patches.items():
        setattr(rounding, name, lambda _way, function=function: function)
    gpt_oss.attention = attend if "layers" in row else attention
    try:
        yield
    finally:
        gpt_oss.attention = attention
        for name, function in before.items():
            setattr(rounding, name, function)


def answers(row: Row, checkpoint: Path, folder: Path, dtype: str) -> dict[str, list[float]]:
    """Return the server's answer to each prompt: the log-probability of each actual next token.

    If the server's weights differ from the original ones, it loads a changed copy of the checkpoint
    from a new folder."""
    if row["formats"] == "dense":
        checkpoint = write_twin(checkpoint, folder, held(row))
    served = Rounding.parse(formats_of(row))
    way = Rounding(dtype, kv=served.kv, experts=served.experts)
    model = dataclasses.replace(small_oracle.load(checkpoint, torch.float32), rounding=way)
    says = small_oracle.next_token_log_probabilities
    with _computing_as(row):
        return {name: says(model, ids).tolist() for name, ids in oracle_texts.prompts()}
