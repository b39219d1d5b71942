"""What each feature of gpt-oss is worth on the canary: the smallest defects that a log-probability
check sees.

A tolerance is accountable only when it is known what it catches. Each row breaks one feature in the
oracle and compares the log-probabilities of the tokens that really follow, over a fixed set of
prompts, with the intact model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from sm121.answers.log_probabilities import SMALL_MISTAKES, from_oracle, share_of
from sm121.core.profile import LogProbabilityTolerance
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
    of the largest; the same over tokens that the intact model holds for more likely than not."""

    feature: str
    mean: float
    max: float
    prompt: str
    position: int
    likely_mean: float = 0.0
    likely_max: float = 0.0

    def noticed(self, tolerance: LogProbabilityTolerance) -> list[str]:
        """The statistics that this defect alone moves above the tolerance."""
        pairs = [
            ("max", self.max, tolerance.max_abs),
            ("mean", self.mean, tolerance.mean_abs),
            ("likely max", self.likely_max, tolerance.likely_max_abs),
            ("likely mean", self.likely_mean, tolerance.likely_mean_abs),
        ]
        return [name for name, seen, bound in pairs if bound is not None and seen > bound]


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
    likely = torch.cat(intact) > math.log(0.5)
    rows = []
    for feature, variant in ablations.items():
        changes = [
            (gpt_oss.next_token_log_probabilities(weights, prompt.token_ids, variant) - right).abs()
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
    """The rows as a Markdown table, the hardest to see first."""
    names = list(tolerances)
    lines = [
        "| defect | mean \\|Δ log p\\| | max \\|Δ log p\\| | mean, likely | max, likely "
        "| where (prompt, token) | " + " | ".join(f"caught in {name} by" for name in names) + " |",
        "| --- | ---: | ---: | ---: | ---: | --- |" + " --- |" * len(names),
    ]
    small = {Variant(**fields): f"share of {name}" for name, (fields, _) in SMALL_MISTAKES.items()}
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


def random_blocks(checkpoint: Path, count: int = 12, seed: int = 0) -> dict[str, Variant]:
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


def small_mistakes(checkpoint: Path) -> str:
    """What `share_of` says of each small mistake when it is there, as lines of Markdown."""
    prompts = {prompt.name: prompt.token_ids for prompt in load_prompts()}
    lines = []
    for name, (fields, prompt) in SMALL_MISTAKES.items():
        right = from_oracle(checkpoint, prompts[prompt])
        wrong = from_oracle(checkpoint, prompts[prompt], fields)
        size = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(right, wrong, strict=True)))
        share = share_of(wrong, right, wrong)
        lines.append(f"- {name} ({prompt}): {size:.2g} nats over all tokens, share {share:.2f}")
    return "\n".join(lines) + "\n"


def write_report(
    checkpoint: Path, out_file: Path, tolerances: dict[str, LogProbabilityTolerance]
) -> tuple[list[Row], dict[str, list[str]]]:
    """Measure all ablations and write them to a Markdown page.

    Returns the rows, and by dtype the features whose defect nothing catches.
    """
    prompts = load_prompts()
    rows = measure(checkpoint, prompts)
    blocks = measure(checkpoint, prompts, ablations=random_blocks(checkpoint))
    changes = sorted(row.max for row in blocks)
    lengths = ", ".join(str(len(prompt.token_ids)) for prompt in prompts)
    exact = tolerances["float32"].max_abs
    bounds = "".join(
        f"| {name} | {t.max_abs:g} | {t.mean_abs:g} | {t.likely_max_abs or '-'} "
        f"| {t.likely_mean_abs or '-'} | {t.source} |\n"
        for name, t in tolerances.items()
    )
    caught = {
        name: sum(bool(row.noticed(tolerance)) for row in blocks)
        for name, tolerance in tolerances.items()
    }
    small = {Variant(**fields) for fields, _ in SMALL_MISTAKES.values()}
    missed = {
        name: [r.feature for r in rows if not r.noticed(t) and ABLATIONS[r.feature] not in small]
        for name, t in tolerances.items()
    }
    out_file.write_text(
        "# What a log-probability check on the canary detects\n\n"
        "Each row is gpt-oss with one thing wrong, computed by the oracle\n"
        "(`sm121.oracles.gpt_oss`, float32) on the canary checkpoint. Δ log p is the change of\n"
        "the log-probability, in nats, of the token that really follows, over the\n"
        f"{len(prompts)} prompts of `fixtures/canary/prompts.json` ({lengths} tokens);\n"
        "likely tokens are those that the intact model gives more than 1/2. Made by\n"
        "`sm121 ablation`.\n\n"
        "The tolerances, in nats (a defect is caught by the statistics that it alone moves above\n"
        "them; rounding comes on top):\n\n"
        "| dtype | max | mean | max, likely | mean, likely | source |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
        + bounds
        + "\n"
        + markdown(rows, tolerances)
        + "\nSome mistakes are smaller than what BF16 rounds. The level asks of each on the\n"
        "prompt that shows it best how much of the mistake's own pattern is in the difference\n"
        "from the oracle (least squares: 0 for gpt-oss, 1 for the mistake; below 0.5 passes):\n\n"
        + small_mistakes(checkpoint)
        + "\nThe two blocks in the table were named in advance. Of "
        f"{len(changes)} blocks drawn at random,\none scale off by one moves the "
        f"log-probabilities by {changes[0]:.2g} (smallest), {statistics.median(changes):.2g}\n"
        f"(median) and {changes[-1]:.2g} (largest): "
        f"{sum(change > exact for change in changes)} of them are above the tolerance of float32, "
        f"{sum(change >= 10 * exact for change in changes)} above ten\ntimes it. "
        + "; ".join(f"{count} are caught in {name}" for name, count in caught.items())
        + ".\n",
        "utf-8",
    )
    return rows, missed
