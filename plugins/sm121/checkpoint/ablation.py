"""What each feature of gpt-oss is worth on the canary: the smallest defects that a log-probability
check sees.

A tolerance is accountable only when it is known what it catches. Each row breaks one feature in the
oracle and compares the log-probabilities of the tokens that really follow, over a fixed set of
prompts, with the intact model.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from sm121.oracles import gpt_oss
from sm121.oracles.gpt_oss import BlockFault, Variant

TOLERANCE = 1e-3
"""The suite's float32 tolerance: largest absolute difference of a log-probability, in nats."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A fixed prompt: its name and token ids."""

    name: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One defect: mean and largest |change of log p(next token)| over all prompts, and the prompt
    of the largest."""

    feature: str
    mean: float
    max: float
    prompt: str
    position: int


ABLATIONS: dict[str, Variant] = {
    "sinks zeroed": Variant(sinks="zeroed"),
    "sinks dropped": Variant(sinks="dropped"),
    "one head's sink dropped (layer 1, head 0)": Variant(sinkless_head=(1, 0)),
    "sliding window off": Variant(window=False),
    "sliding window 127 for 128": Variant(window_shift=-1),
    "sliding window 129 for 128": Variant(window_shift=1),
    "YaRN off": Variant(yarn=False),
    "YaRN mscale dropped": Variant(mscale=False),
    "KV head mapping interleaved": Variant(kv_interleaved=True),
    "attention biases dropped": Variant(attention_biases=False),
    "router bias dropped": Variant(router_bias=False),
    "top-3 for top-4": Variant(top_k=3),
    "softmax before top-k, not renormalised": Variant(softmax_before_top_k=True),
    "expert biases dropped": Variant(expert_biases=False),
    "SwiGLU alpha 1 for 1.702": Variant(alpha=1.0),
    "SwiGLU limit off": Variant(limit=False),
    "SwiGLU +1 dropped": Variant(plus_one=False),
    "gate and up swapped": Variant(gate_up_swapped=True),
    "one block scale off by one (gate_up: layer 1, expert 0, row 9)": Variant(
        block_fault=BlockFault(1, "gate_up", 0, 9, 0)
    ),
    "one block scale off by one (down: layer 1, expert 0, row 9)": Variant(
        block_fault=BlockFault(1, "down", 0, 9, 0)
    ),
    "nibbles swapped": Variant(nibbles_swapped=True),
    "one layer skipped (layer 2)": Variant(skipped_layer=2),
    "embedding rows shifted by one": Variant(embedding_shift=1),
}


def load_prompts() -> list[Prompt]:
    """The prompts of fixtures/canary/prompts.json."""
    text = (resources.files("sm121.fixtures") / "canary" / "prompts.json").read_text("utf-8")
    return [
        Prompt(entry["name"], tuple(entry["token_ids"])) for entry in json.loads(text)["prompts"]
    ]


def measure(
    checkpoint: Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    ablations: dict[str, Variant] = ABLATIONS,
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """One row per ablation, on a built checkpoint of either twin; about two minutes for all on one
    core.

    Raises ValueError without prompts, and what `gpt_oss.load` raises.
    """
    prompts = load_prompts() if prompts is None else prompts
    if not prompts:
        raise ValueError("an ablation needs at least one prompt")
    weights = gpt_oss.load(checkpoint, dtype)
    intact = [gpt_oss.next_token_log_probabilities(weights, prompt.token_ids) for prompt in prompts]
    rows = []
    for feature, variant in ablations.items():
        changes = [
            (gpt_oss.next_token_log_probabilities(weights, prompt.token_ids, variant) - right).abs()
            for prompt, right in zip(prompts, intact, strict=True)
        ]
        worst = max(range(len(prompts)), key=lambda n: float(changes[n].max()))
        rows.append(
            Row(
                feature=feature,
                mean=float(torch.cat(changes).mean()),
                max=float(changes[worst].max()),
                prompt=prompts[worst].name,
                position=int(changes[worst].argmax()) + 1,
            )
        )
    return rows


def markdown(rows: Sequence[Row], tolerance: float = TOLERANCE) -> str:
    """The rows as a Markdown table, the hardest to see first."""
    lines = [
        "| defect | mean \\|Δ log p\\| | max \\|Δ log p\\| | max / tolerance "
        "| where (prompt, token) |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in sorted(rows, key=lambda row: row.max):
        times = row.max / tolerance
        lines.append(
            f"| {row.feature} | {row.mean:.2g} | {row.max:.3g} | {times:.0f} "
            f"| {row.prompt}, {row.position} |"
        )
    return "\n".join(lines) + "\n"


def random_blocks(checkpoint: Path, count: int = 24, seed: int = 0) -> dict[str, Variant]:
    """Block scales off by one, drawn at random over layers, projections, experts, rows and blocks.

    Two blocks named in advance say nothing of the others: most blocks matter less than a whole
    feature does.
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
        blocks[str(fault)] = Variant(block_fault=fault)
    return blocks


def write_report(checkpoint: Path, out_file: Path, tolerance: float = TOLERANCE) -> list[Row]:
    """Measure all ablations and write them to a Markdown page. Returns the rows."""
    prompts = load_prompts()
    rows = measure(checkpoint, prompts)
    blocks = measure(checkpoint, prompts, ablations=random_blocks(checkpoint))
    changes = sorted(row.max for row in blocks)
    lengths = ", ".join(str(len(prompt.token_ids)) for prompt in prompts)
    out_file.write_text(
        "# What a log-probability check on the canary detects\n\n"
        "Each row is gpt-oss with one thing wrong, computed by the oracle\n"
        "(`sm121.oracles.gpt_oss`, float32) on the canary checkpoint. Δ log p is the change of\n"
        "the log-probability, in nats, of the token that really follows, over the\n"
        f"{len(prompts)} prompts of `fixtures/canary/prompts.json` ({lengths} tokens).\n"
        f"The suite's tolerance for float32 engines is {tolerance:g} (largest absolute\n"
        "difference): a defect is caught when its largest change is above that.\n"
        "Made by `sm121 ablation`.\n\n"
        + markdown(rows, tolerance)
        + "\nThe two blocks in the table were named in advance. Of "
        f"{len(changes)} blocks drawn at random,\none scale off by one moves the "
        f"log-probabilities by {changes[0]:.2g} (smallest), {statistics.median(changes):.2g}\n"
        f"(median) and {changes[-1]:.2g} (largest): "
        f"{sum(change > tolerance for change in changes)} of them are above the tolerance, "
        f"{sum(change >= 10 * tolerance for change in changes)} above ten\ntimes it.\n",
        "utf-8",
    )
    return rows
