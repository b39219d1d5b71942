"""The server's log-probabilities against the oracle's, where the checkpoint fits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm121.client.completions import Position, ids_of, name_of
from sm121.core.profile import Profile, Tolerance
from sm121.core.server import Server
from sm121.core.verdict import NotRun

if TYPE_CHECKING:
    from sm121.oracles.gpt_oss import Variant

#: The oracle holds the dequantised weights in float64; gpt-oss-20b and up do not fit.
_LARGEST_CHECKPOINT_BYTES = 1 << 30
_LIKELY = math.log(0.5)

#: Mistakes too small for the tolerance of a coarse dtype, and the prompt that shows each best.
SMALL_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a sliding window of 127": ({"window_shift": -1}, "mixture of 300"),
    "a sliding window of 129": ({"window_shift": 1}, "mixture of 300"),
    "one head without its sink": ({"sinkless_head": (1, 0)}, "languages and code"),
}

#: Beyond YaRN's original 4096 positions, over 32 blocks of 128, in chunks of 2048 tokens.
LONG_PROMPT_TOKENS = 4090


@dataclass(frozen=True)
class Difference:
    """|server - oracle| in nats over the tokens of a prompt; position 0 is the second token."""

    max_abs: float
    mean_abs: float
    worst_position: int
    #: Over the tokens that the oracle holds for more likely than not; 0 without any.
    likely_max_abs: float
    likely_mean_abs: float

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """What is above the tolerance, in words."""
        pairs = [
            ("largest difference", self.max_abs, tolerance.max_abs),
            ("mean difference", self.mean_abs, tolerance.mean_abs),
            ("largest of likely tokens", self.likely_max_abs, tolerance.likely_max_abs),
            ("mean of likely tokens", self.likely_mean_abs, tolerance.likely_mean_abs),
        ]
        return [
            f"{what}: required at most {bound:g}, seen {seen:.3g}"
            for what, seen, bound in pairs
            if bound is not None and not seen <= bound
        ]


@dataclass(frozen=True)
class Reference:
    """What the oracle computes from, and how exact the engine is meant to be."""

    checkpoint: Path
    dtype: str
    tolerance: Tolerance


def reference_for(server: Server, profile: Profile, intact: Path | None = None) -> Reference:
    """The checkpoint for the oracle, the engine's dtype and the profile's tolerance for it.

    Args:
        intact: the checkpoint that the server is meant to serve (``--reference``); without it,
            what a managed server was started with.

    Raises:
        NotRun: the profile has no tolerance for the dtype, or the checkpoint is not known, cannot
            be read here or is too large for the oracle.
    """
    configuration = server.configuration
    if configuration is None and intact is None:
        raise NotRun(
            "the oracle needs the checkpoint of the server, and this one is attached: name it with "
            "--reference PATH (and the dtype with --configuration NAME)"
        )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise NotRun("the oracle needs torch and safetensors in the suite's environment")
    checkpoint = intact or Path(configuration.model if configuration else "")
    if not checkpoint.is_dir():
        raise NotRun(f"the oracle needs the checkpoint as a folder, {checkpoint} is none")
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if size > _LARGEST_CHECKPOINT_BYTES:
        raise NotRun(
            f"the oracle takes checkpoints up to {_LARGEST_CHECKPOINT_BYTES >> 20} MiB, "
            f"this one has {size >> 20} MiB; --golden compares with a trusted run"
        )
    dtype = dtype_of(server, profile)
    tolerances = {str(k): v for k, v in profile.correctness.log_probability_tolerance.items()}
    tolerance = tolerances.get(dtype)
    if tolerance is None:
        known = ", ".join(tolerances) or "none"
        raise NotRun(f"the profile has no tolerance for dtype {dtype} (it has: {known})")
    return Reference(checkpoint, dtype, tolerance)


def dtype_of(server: Server, profile: Profile) -> str:
    """The dtype that the engine was started with; of an attached one, that of the profile's
    configuration under test."""
    if server.configuration is not None:
        return _dtype(server.configuration.arguments)
    own = profile.configurations[profile.under_test]
    return _dtype((*profile.engine.arguments, *own.arguments))


def _dtype(arguments: Sequence[str]) -> str:
    """``--dtype`` in either spelling; the last one counts, as it does for the engine."""
    dtype = "auto"
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == "--dtype":
            dtype = following
        elif argument.startswith("--dtype="):
            dtype = argument.removeprefix("--dtype=")
    return dtype


def prompts() -> list[tuple[str, list[int]]]:
    """Fixed prompts as token ids of the real vocabulary, across the sliding window's edge."""
    text = (files("sm121.fixtures") / "canary" / "prompts.json").read_text("utf-8")
    return [(entry["name"], entry["token_ids"]) for entry in json.loads(text)["prompts"]]


def long_prompt() -> list[int]:
    """A prompt of `LONG_PROMPT_TOKENS`: the longest of `prompts`, over and over."""
    longest = max((ids for _, ids in prompts()), key=len)
    return (longest * (LONG_PROMPT_TOKENS // len(longest) + 1))[:LONG_PROMPT_TOKENS]


def from_oracle(
    checkpoint: Path, token_ids: Sequence[int], mistake: dict[str, Any] | None = None
) -> list[float]:
    """log p of each token that really follows, by the reference model in float64; of a gpt-oss with
    a mistake (fields of `Variant`) where one is given."""
    names = tuple(sorted((mistake or {}).items()))
    return list(_oracle(checkpoint, tuple(token_ids), names))


def generated_by_oracle(
    checkpoint: Path, prompt: Sequence[int], generated: Sequence[int]
) -> list[Any]:
    """log p of every token of the vocabulary at each place of a generation, [place][token]."""
    from sm121.oracles import gpt_oss

    ids = [*prompt, *generated]
    places = range(len(prompt) - 1, len(ids) - 1)
    rows = gpt_oss.log_probabilities(_weights(checkpoint), ids, positions=places)
    return list(rows.numpy())


def generation_beyond(
    reference: Reference,
    prompt: Sequence[int],
    generated: Sequence[int],
    positions: Sequence[Position],
) -> str | None:
    """What is wrong with greedy tokens and their log-probabilities, None for nothing.

    The chosen token may be less likely than the best by what two log-probabilities may be off.
    """
    tolerance = reference.tolerance
    rows = generated_by_oracle(reference.checkpoint, prompt, generated)
    seen: list[float] = []
    expected: list[float] = []
    for place, (token, position, row) in enumerate(zip(generated, positions, rows, strict=True)):
        behind = float(row.max() - row[token])
        if behind > 2 * (tolerance.likely_max_abs or tolerance.max_abs):
            return (
                f"token {place}: required the most likely token {int(row.argmax())}, seen {token}, "
                f"which is {behind:.3g} nats less likely"
            )
        told = {**position.top, name_of(token): position.log_probability}
        for name, value in told.items():
            other = ids_of([dataclasses.replace(position, token=name)])
            if other is None:
                continue
            seen.append(value)
            expected.append(float(row[other[0]]))
    beyond = compare(seen, expected).beyond(tolerance) if seen else ["no log-probabilities"]
    # The least likely of the told tokens are far down: only the bound on one value holds for them.
    beyond = [line for line in beyond if line.startswith(("largest", "no"))]
    return f"{len(seen)} log-probabilities: {'; '.join(beyond)}" if beyond else None


def compare(seen: Sequence[float], expected: Sequence[float]) -> Difference:
    """The difference over tokens; a NaN or infinity anywhere is an infinite difference."""
    errors = [abs(a - b) for a, b in zip(seen, expected, strict=True)]
    errors = [error if math.isfinite(error) else math.inf for error in errors]
    likely = [e for e, value in zip(errors, expected, strict=True) if value > _LIKELY] or [0.0]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Difference(
        max_abs=errors[worst],
        mean_abs=math.fsum(errors) / len(errors),
        worst_position=worst + 1,
        likely_max_abs=max(likely),
        likely_mean_abs=math.fsum(likely) / len(likely),
    )


def share_of(seen: Sequence[float], expected: Sequence[float], mistaken: Sequence[float]) -> float:
    """How much of a known mistake is in what was seen: 0 for the intact model, 1 for the mistake.

    The least-squares share of (mistaken - expected) in (seen - expected). Rounding has little in
    common with any one mistake, so that this tells mistakes that are smaller than the rounding.
    """
    mistake = [b - a for a, b in zip(expected, mistaken, strict=True)]
    errors = [b - a for a, b in zip(expected, seen, strict=True)]
    size = math.fsum(m * m for m in mistake)
    if not size > 0.0:
        raise ValueError("this mistake changes nothing on this prompt")
    return math.fsum(m * e for m, e in zip(mistake, errors, strict=True)) / size


@functools.lru_cache(maxsize=128)
def _oracle(
    checkpoint: Path, token_ids: tuple[int, ...], mistake: tuple[tuple[str, Any], ...]
) -> tuple[float, ...]:
    from sm121.oracles import gpt_oss

    variant: Variant = gpt_oss.Variant(**dict(mistake))
    found = gpt_oss.next_token_log_probabilities(_weights(checkpoint), token_ids, variant)
    return tuple(found.tolist())


@functools.lru_cache(maxsize=1)
def _weights(checkpoint: Path) -> Any:
    import torch

    from sm121.oracles import gpt_oss

    return gpt_oss.load(checkpoint, torch.float64)
