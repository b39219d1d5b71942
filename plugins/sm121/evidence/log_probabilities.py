"""The server's prompt log-probabilities against the oracle's, where the checkpoint fits."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.engines.server import Server
from sm121.profile import Profile, Tolerance
from sm121.verdict import NotRun

#: The oracle holds the dequantised weights in float64; gpt-oss-20b and up do not fit.
_LARGEST_CHECKPOINT_BYTES = 1 << 30


@dataclass(frozen=True)
class Difference:
    """|server - oracle| in nats over the tokens of a prompt; position 0 is the second token."""

    max_abs: float
    mean_abs: float
    worst_position: int


def tolerance_for(server: Server, profile: Profile) -> tuple[str, Tolerance]:
    """The engine's dtype and the profile's tolerance for it.

    Raises:
        NotRun: the dtype is not known, the profile has no tolerance for it, or the checkpoint
            cannot be read here or is too large for the oracle.
    """
    configuration = server.configuration
    if configuration is None:
        raise NotRun(
            "the oracle needs the checkpoint and dtype of the server; this one is attached"
        )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise NotRun("the oracle needs torch and safetensors in the suite's environment")
    checkpoint = Path(configuration.model)
    if not checkpoint.is_dir():
        raise NotRun(f"the oracle needs the checkpoint as a folder, {configuration.model} is none")
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if size > _LARGEST_CHECKPOINT_BYTES:
        raise NotRun(
            f"the oracle takes checkpoints up to {_LARGEST_CHECKPOINT_BYTES >> 20} MiB, "
            f"this one has {size >> 20} MiB"
        )
    dtype = _dtype(configuration.arguments)
    tolerances = {str(k): v for k, v in profile.correctness.log_probability_tolerance.items()}
    tolerance = tolerances.get(dtype)
    if tolerance is None:
        known = ", ".join(tolerances) or "none"
        raise NotRun(f"the profile has no tolerance for dtype {dtype} (it has: {known})")
    return dtype, tolerance


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


def of_prompt(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens from the second on, as vLLM's ``prompt_logprobs``.

    Raises:
        AssertionError: the answer does not have one for each of them.
    """
    found = answer.choices[0].prompt_logprobs
    assert found is not None and len(found) == len(token_ids), (
        f"required: prompt_logprobs of {len(token_ids)} tokens, "
        f"seen: {None if found is None else len(found)}"
    )
    values = []
    for position, (token, entry) in enumerate(zip(token_ids[1:], found[1:], strict=True), start=1):
        own = entry.get(str(token)) if entry else None
        assert own is not None, (
            f"required: the log-probability of prompt token {token} at {position}, seen: {entry}"
        )
        values.append(float(own["logprob"]))
    return values


def from_oracle(server: Server, token_ids: Sequence[int]) -> list[float]:
    """The same, by the reference model in float64 on the server's own checkpoint."""
    assert server.configuration is not None
    return list(_oracle(Path(server.configuration.model), tuple(token_ids)))


def compare(seen: Sequence[float], expected: Sequence[float]) -> Difference:
    """The difference over a prompt; a NaN or infinity anywhere is an infinite difference."""
    errors = [abs(a - b) for a, b in zip(seen, expected, strict=True)]
    errors = [error if math.isfinite(error) else math.inf for error in errors]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Difference(errors[worst], math.fsum(errors) / len(errors), worst + 1)


@functools.lru_cache(maxsize=64)
def _oracle(checkpoint: Path, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    from sm121.oracles import gpt_oss

    found = gpt_oss.next_token_log_probabilities(_weights(checkpoint), token_ids)
    return tuple(found.tolist())


@functools.lru_cache(maxsize=1)
def _weights(checkpoint: Path) -> Any:
    import torch

    from sm121.oracles import gpt_oss

    return gpt_oss.load(checkpoint, torch.float64)
