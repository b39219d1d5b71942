"""Compute the smallest defects of the canary that the check of log-probabilities detects.

A tolerance is only useful if one knows what it detects. Each row injects one defect into the
oracle, and compares the log-probabilities of the actual next tokens with those of the intact model,
over a fixed set of prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from sm121.answers import oracle_making
from sm121.answers.mistake_pattern import Pattern
from sm121.answers.oracle_file import OracleFile
from sm121.answers.oracle_texts import SMALL_MISTAKES
from sm121.answers.oracle_tolerance import computed_tolerance
from sm121.core.level_settings import LogProbabilityTolerance
from sm121.oracles import gpt_oss, moe, mxfp4
from sm121.oracles.gpt_oss import Layer, Weights
from sm121.oracles.scores import Change
from tools import small_oracle

TOLERANCE = 1e-3
"""The suite's float32 tolerance: largest absolute difference of a log-probability, in nats."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A fixed prompt: its name and token ids."""

    name: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One defect, and how it changes the log-probabilities of the actual next tokens over all
    prompts.

    The values are the mean and the largest absolute change, and the prompt with the largest change.
    The same values are given for the tokens to which the intact model gives a probability above one
    half.
    """

    feature: str
    mean: float
    max: float
    prompt: str
    position: int
    likely_mean: float = 0.0
    likely_max: float = 0.0

    def noticed(self, tolerance: LogProbabilityTolerance) -> list[str]:
        """Return the statistics that this defect alone moves beyond a tolerance.

        Args:
            tolerance: The tolerance, in nats. A statistic without a bound detects nothing.

        Returns:
            The names ``max``, ``mean``, ``likely max`` and ``likely mean``, as far as they apply.
        """
        pairs = [
            ("max", self.max, tolerance.max_abs),
            ("mean", self.mean, tolerance.mean_abs),
            ("likely max", self.likely_max, tolerance.likely_max_abs),
            ("likely mean", self.likely_mean, tolerance.likely_mean_abs),
        ]
        return [name for name, seen, bound in pairs if bound is not None and seen > bound]


@dataclasses.dataclass(frozen=True)
class Defect:
    """A defect of the canary. `change` changes its weights; `instead` replaces a function of the
    oracle's `module`. A defect has one of them or both."""

    change: Change = lambda weights: weights
    module: Any = None
    function: str = ""
    instead: Callable[..., Any] | None = None

    def log_probabilities(self, weights: Weights, token_ids: Sequence[int]) -> Tensor:
        """Return log p of each actual next token in the model with the defect, [T - 1].

        Args:
            weights: The intact model.
            token_ids: The T tokens of the prompt.
        """
        with contextlib.ExitStack() as stack:
            if self.instead is not None:
                stack.enter_context(mock.patch.object(self.module, self.function, self.instead))
            return small_oracle.next_token_log_probabilities(self.change(weights), token_ids)


@dataclasses.dataclass(frozen=True)
class BlockFault:
    """A fault in one block of an expert's weights: the E8M0 scale of block `block` of a row (32
    elements along K) is too high by `delta`.
    """

    layer: int
    projection: Literal["gate_up", "down"]
    expert: int
    row: int
    block: int
    delta: int = 1

    def __call__(self, weights: Weights) -> Weights:
        """Return the weights with this fault."""
        layers = list(weights.layers)
        matrices, biases = getattr(layers[self.layer], self.projection)
        span = slice(self.block * mxfp4.BLOCK, (self.block + 1) * mxfp4.BLOCK)
        matrices = matrices.clone()
        matrices[self.expert, self.row, span] *= 2.0**self.delta
        layers[self.layer] = dataclasses.replace(
            layers[self.layer], **{self.projection: (matrices, biases)}
        )
        return dataclasses.replace(weights, layers=tuple(layers))


def _config(**values: Any) -> Defect:
    def change(weights: Weights) -> Weights:
        return dataclasses.replace(weights, config=dataclasses.replace(weights.config, **values))

    return Defect(change)


def _each_layer(change: Callable[[Weights, Layer], dict[str, Any]]) -> Defect:
    def changed(weights: Weights) -> Weights:
        layers = []
        for each in weights.layers:
            layers.append(dataclasses.replace(each, **change(weights, each)))
        return dataclasses.replace(weights, layers=tuple(layers))

    return Defect(changed)


def _without_biases(*names: str) -> Defect:
    def change(_weights: Weights, layer: Layer) -> dict[str, Any]:
        parts = {name: getattr(layer, name) for name in names}
        return {name: (weight, torch.zeros_like(bias)) for name, (weight, bias) in parts.items()}

    return _each_layer(change)


def _sinks(value: float) -> Defect:
    return _each_layer(lambda _weights, layer: {"sinks": torch.full_like(layer.sinks, value)})


def _without_mscale(weights: Weights, layer: Layer) -> dict[str, Any]:
    # Rotated queries and rotated keys are both larger by this factor.
    mscale = 0.1 * math.log(weights.config.rope_factor) + 1
    return {
        "q": tuple(part / mscale for part in layer.q),
        "k": tuple(part / mscale for part in layer.k),
    }


def _interleaved(weights: Weights, layer: Layer) -> dict[str, Any]:
    # Query head h reads KV head h mod Hkv, so another query head takes its place.
    config = weights.config
    heads = torch.arange(config.query_heads).view(-1, config.kv_heads).T.flatten()
    rows = torch.arange(config.query_heads * config.head_dim).view(config.query_heads, -1)
    rows = rows[heads].flatten()
    return {
        "q": (layer.q[0][rows], layer.q[1][rows]),
        "sinks": layer.sinks[heads],
        "o": (layer.o[0][:, rows], layer.o[1]),
    }


def _gate_as_up(_weights: Weights, layer: Layer) -> dict[str, Any]:
    swapped = (part.unflatten(1, (-1, 2)).flip(2).flatten(1, 2) for part in layer.gate_up)
    return {"gate_up": tuple(swapped)}


def _nibbles_swapped(_weights: Weights, layer: Layer) -> dict[str, Any]:
    def swapped(experts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return experts[0].unflatten(-1, (-1, 2)).flip(-1).flatten(-2), experts[1]

    return {"gate_up": swapped(layer.gate_up), "down": swapped(layer.down)}


def _without_layer(number: int, weights: Weights) -> Weights:
    sliding = list(weights.config.sliding_layers)
    layers = list(weights.layers)
    del sliding[number], layers[number]
    config = dataclasses.replace(weights.config, sliding_layers=tuple(sliding))
    return dataclasses.replace(weights, config=config, layers=tuple(layers))


def _next_embedding(weights: Weights) -> Weights:
    return dataclasses.replace(weights, embedding=weights.embedding.roll(-1, 0))


def _full_attention(weights: Weights) -> Weights:
    config = dataclasses.replace(weights.config, sliding_layers=(False,) * weights.config.layers)
    return dataclasses.replace(weights, config=config)


def _swiglu_without_one(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * up


def _route_softmax_first(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Route in the wrong order: take the softmax over all E experts, and then the k largest without
    normalising them.

    The shapes are as in `moe.route`.
    """
    experts = logits.topk(k, -1).indices
    return logits.softmax(-1).gather(-1, experts), experts


def _small(name: str) -> Defect:
    return Defect(SMALL_MISTAKES[name][0])


ABLATIONS: dict[str, Defect] = {
    "sinks zeroed": _sinks(0.0),
    "sinks dropped": _sinks(-math.inf),
    "one head's sink dropped (layer 1, head 0)": _small("one head without its sink"),
    "sliding window off": Defect(_full_attention),
    "sliding window 127 for 128": _small("a sliding window of 127"),
    "sliding window 129 for 128": _small("a sliding window of 129"),
    "YaRN off": _config(rope_factor=1.0),
    "YaRN mscale dropped": _each_layer(_without_mscale),
    "KV head mapping interleaved": _each_layer(_interleaved),
    "attention biases dropped": _without_biases("q", "k", "v", "o"),
    "router bias dropped": _without_biases("router"),
    "top-3 for top-4": _config(top_k=3),
    "softmax before top-k, not renormalised": Defect(
        module=moe, function="route", instead=_route_softmax_first
    ),
    "expert biases dropped": _without_biases("gate_up", "down"),
    "SwiGLU alpha 1 for 1.702": _config(alpha=1.0),
    "SwiGLU limit off": _config(limit=math.inf),
    "SwiGLU +1 dropped": Defect(module=moe, function="swiglu", instead=_swiglu_without_one),
    "gate and up swapped": _each_layer(_gate_as_up),
    "one block scale off by one (gate_up: layer 1, expert 0, row 9)": Defect(
        BlockFault(1, "gate_up", 0, 9, 0)
    ),
    "one block scale off by one (down: layer 1, expert 0, row 9)": Defect(
        BlockFault(1, "down", 0, 9, 0)
    ),
    "nibbles swapped": _each_layer(_nibbles_swapped),
    "one layer skipped (layer 2)": Defect(functools.partial(_without_layer, 2)),
    "embedding rows shifted by one": Defect(_next_embedding),
}


def load_prompts() -> list[Prompt]:
    """Return the prompts of fixtures/canary/prompts.json."""
    text = (resources.files("sm121.fixtures") / "canary" / "prompts.json").read_text("utf-8")
    prompts = []
    for entry in json.loads(text)["prompts"]:
        prompts.append(Prompt(entry["name"], tuple(entry["token_ids"])))
    return prompts


def measure(
    checkpoint: Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    ablations: dict[str, Defect] = ABLATIONS,
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """Measure each defect on the BF16 or the MXFP4 canary.

    This takes about two minutes on one core.

    Args:
        checkpoint: The folder of the checkpoint.
        prompts: The prompts; None for those of fixtures/canary/prompts.json.
        ablations: The defects, by their names.
        dtype: The dtype of the oracle.

    Raises:
        ValueError: There are no prompts, or a tensor of the checkpoint is missing.
        FileNotFoundError: The folder contains no checkpoint.
    """
    prompts = load_prompts() if prompts is None else prompts
    if not prompts:
        raise ValueError("an ablation needs at least one prompt")
    weights = small_oracle.load(checkpoint, dtype)
    intact = []
    for prompt in prompts:
        intact.append(small_oracle.next_token_log_probabilities(weights, prompt.token_ids))
    likely = torch.cat(intact) > math.log(0.5)
    rows = []
    for feature, defect in ablations.items():
        changes = [
            (defect.log_probabilities(weights, prompt.token_ids) - right).abs()
            for prompt, right in zip(prompts, intact, strict=True)
        ]
        worst = max(range(len(prompts)), key=lambda n: float(changes[n].max()))
        of_likely = torch.cat(changes)[likely]
        rows.append(
            Row(
                feature=feature,
                mean=float(torch.cat(changes).mean()),
                max=float(changes[worst].max()),
                prompt=prompts[worst].name,
                position=int(changes[worst].argmax()) + 1,
                likely_mean=float(of_likely.mean()) if len(of_likely) else 0.0,
                likely_max=float(of_likely.max()) if len(of_likely) else 0.0,
            )
        )
    return rows


def markdown(rows: Sequence[Row], tolerances: dict[str, LogProbabilityTolerance]) -> str:
    """Return the rows as a Markdown table, the smallest change first.

    Args:
        rows: The measured defects.
        tolerances: The tolerance of each dtype. Each has a column with the statistics that detect
            the defect.
    """
    names = list(tolerances)
    lines = [
        "| defect | mean \\|Δ log p\\| | max \\|Δ log p\\| | mean, likely | max, likely "
        "| where (prompt, token) | " + " | ".join(f"caught in {name} by" for name in names) + " |",
        "| --- | ---: | ---: | ---: | ---: | --- |" + " --- |" * len(names),
    ]
    small = {Defect(mistake): f"share of {name}" for name, (mistake, _) in SMALL_MISTAKES.items()}
    for row in sorted(rows, key=lambda row: row.max):
        known = ABLATIONS.get(row.feature)
        cells = []
        for name in names:
            by = row.noticed(tolerances[name])
            by += [small[known]] if known in small else []
            cells.append(", ".join(by) or "**nothing**")
        lines.append(
            f"| {row.feature} | {row.mean:.2g} | {row.max:.3g} | {row.likely_mean:.2g} "
            f"| {row.likely_max:.2g} | {row.prompt}, {row.position} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def random_blocks(checkpoint: Path, count: int = 12, seed: int = 0) -> dict[str, Defect]:
    """Return defects of single block scales, drawn at random.

    The draw is over layers, projections, experts, rows and blocks. Two fixed blocks would not
    represent the others: most blocks change the output less than a whole feature does.

    Args:
        checkpoint: The folder of the checkpoint. Only its config.json is read.
        count: The number of draws.
        seed: The seed of the draws.
    """
    config = gpt_oss.GptOssConfig.from_json(json.loads((checkpoint / "config.json").read_text()))
    draw = random.Random(seed)
    blocks = {}
    for _ in range(count):
        projection: Literal["gate_up", "down"] = draw.choice(("gate_up", "down"))
        rows = 2 * config.intermediate if projection == "gate_up" else config.hidden
        columns = config.hidden if projection == "gate_up" else config.intermediate
        fault = BlockFault(
            layer=draw.randrange(config.layers),
            projection=projection,
            expert=draw.randrange(config.experts),
            row=draw.randrange(rows),
            block=draw.randrange(columns // 32),
        )
        blocks[str(fault)] = Defect(fault)
    return blocks


def small_mistakes(file: OracleFile) -> str:
    """Return, as lines of Markdown, the size of each small mistake and of rounding alone.

    Args:
        file: The oracle's file.
    """
    lines = []
    for name, (_, prompts) in SMALL_MISTAKES.items():
        size = math.sqrt(math.fsum(m * m for m in Pattern.of(file, name, None).mistake))
        noise = ", ".join(
            f"{Pattern.of(file, name, path).noise():.2g} by {path}" for path in file.rounded
        )
        lines.append(
            f"- {name} ({', '.join(prompts)}): {size:.2g} nats over all tokens; rounding alone "
            f"gives a share with a standard deviation of {noise}"
        )
    return "\n".join(lines) + "\n"


def _tolerance_rows(tolerances: Mapping[str, LogProbabilityTolerance]) -> str:
    rows = ""
    for name, t in tolerances.items():
        rows += (
            f"| {name} | {t.max_abs:.3g} | {t.mean_abs:.2g} | {_bound(t.likely_max_abs)} "
            f"| {_bound(t.likely_mean_abs)} | {t.source} |\n"
        )
    return rows


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _missed(rows: Sequence[Row], tolerance: LogProbabilityTolerance) -> list[str]:
    """Return the features whose defect a tolerance does not detect.

    The small mistakes are left out.
    """
    small = {Defect(mistake) for mistake, _ in SMALL_MISTAKES.values()}
    missed = []
    for row in rows:
        if not row.noticed(tolerance) and ABLATIONS[row.feature] not in small:
            missed.append(row.feature)
    return missed


def write_report(
    checkpoint: Path, out_file: Path, of_float32: LogProbabilityTolerance
) -> tuple[list[Row], dict[str, list[str]]]:
    """Measure all defects and write them to a Markdown page.

    Args:
        checkpoint: The folder of the checkpoint.
        out_file: The page.
        of_float32: The tolerance for float32. Those of the other dtypes are computed.

    Returns:
        The rows, and by dtype the features whose defect no tolerance detects.
    """
    prompts = load_prompts()
    file = oracle_making.make(checkpoint)
    tolerances = {"float32": of_float32}
    tolerances |= {path: computed_tolerance(file, path) for path in file.rounded}
    rows = measure(checkpoint, prompts)
    blocks = measure(checkpoint, prompts, ablations=random_blocks(checkpoint))
    changes = sorted(row.max for row in blocks)
    lengths = ", ".join(str(len(prompt.token_ids)) for prompt in prompts)
    exact = tolerances["float32"].max_abs
    caught = {}
    for name, tolerance in tolerances.items():
        caught[name] = sum(bool(row.noticed(tolerance)) for row in blocks)
    missed = {name: _missed(rows, tolerance) for name, tolerance in tolerances.items()}
    out_file.write_text(
        "# What a log-probability check on the canary detects\n\n"
        "Each row is gpt-oss with one injected defect, computed by the oracle\n"
        "(`sm121.oracles.gpt_oss`, float32) on the canary checkpoint. Δ log p is the change of\n"
        "the log-probability, in nats, of the actual next token, over the\n"
        f"{len(prompts)} prompts of `fixtures/canary/prompts.json` ({lengths} tokens);\n"
        "likely tokens have a probability above 1/2 in the intact model. Made by\n"
        "`sm121 ablation`.\n\n"
        "The tolerances, in nats (a defect is detected by statistics that it alone moves above\n"
        "them; rounding adds to it):\n\n"
        "| dtype | max | mean | max, likely | mean, likely | source |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
        + _tolerance_rows(tolerances)
        + "\n"
        + markdown(rows, tolerances)
        + "\nSome mistakes are smaller than the rounding of BF16. For each, the level\n"
        "computes, on the prompt that shows it best, the share of the mistake's own pattern in\n"
        "the difference from the oracle (least squares: 0 for gpt-oss, 1 for the mistake;\n"
        "below 0.5 passes):\n\n"
        + small_mistakes(file)
        + "\nThe two blocks in the table were chosen in advance. Of "
        f"{len(changes)} blocks drawn at random,\none scale off by one moves the "
        f"log-probabilities by {changes[0]:.2g} (smallest), {statistics.median(changes):.2g}\n"
        f"(median) and {changes[-1]:.2g} (largest): "
        f"{sum(change > exact for change in changes)} of them are above the tolerance of float32, "
        f"{sum(change >= 10 * exact for change in changes)} above ten\ntimes it. "
        + "; ".join(f"{count} are detected in {name}" for name, count in caught.items())
        + ".\n",
        "utf-8",
    )
    return rows, missed
