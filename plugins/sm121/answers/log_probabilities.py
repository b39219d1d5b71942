"""The server's log-probabilities against the oracle's, where the checkpoint fits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sm121.client.completions import Asker, Position, Request, ids_of, name_of
from sm121.core.profile import LogProbabilityTolerance, Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun, require

if TYPE_CHECKING:
    from sm121.oracles.gpt_oss import Weights

_Bound = TypeVar("_Bound")

#: The oracle holds the dequantised weights in float64; gpt-oss-20b and up do not fit.
_LARGEST_CHECKPOINT_BYTES = 1 << 30
_LIKELY = math.log(0.5)


def _with_window(weights: Weights, shift: int) -> Weights:
    window = weights.config.window + shift
    config = dataclasses.replace(weights.config, window=window)
    return dataclasses.replace(weights, config=config)


def _without_sink(weights: Weights, layer: int, head: int) -> Weights:
    layers = list(weights.layers)
    sinks = layers[layer].sinks.clone()
    sinks[head] = -math.inf
    layers[layer] = dataclasses.replace(layers[layer], sinks=sinks)
    return dataclasses.replace(weights, layers=tuple(layers))


#: Makes the weights of a gpt-oss with a mistake of those of the intact one.
Mistake: TypeAlias = "Callable[[Weights], Weights]"

#: Mistakes too small for the tolerance of a coarse dtype, and the prompt that shows each best.
SMALL_MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a sliding window of 127": (functools.partial(_with_window, shift=-1), "mixture of 300"),
    "a sliding window of 129": (functools.partial(_with_window, shift=1), "mixture of 300"),
    "one head without its sink": (
        functools.partial(_without_sink, layer=1, head=0),
        "languages and code",
    ),
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

    def beyond(self, tolerance: LogProbabilityTolerance, *, means: bool = True) -> list[str]:
        """What is above the tolerance, in words; without the means if they are not to be held."""
        mean, likely_mean = tolerance.mean_abs, tolerance.likely_mean_abs
        pairs = [
            ("largest difference", self.max_abs, tolerance.max_abs),
            ("mean difference", self.mean_abs, mean if means else None),
            ("largest of likely tokens", self.likely_max_abs, tolerance.likely_max_abs),
            ("mean of likely tokens", self.likely_mean_abs, likely_mean if means else None),
        ]
        return [
            f"{what}: required at most {bound:g}, seen {seen:.3g}"
            for what, seen, bound in pairs
            if bound is not None and not seen <= bound
        ]


@dataclass(frozen=True)
class OracleReference:
    """What the oracle computes from, and how exact the engine is meant to be."""

    checkpoint: Path
    dtype: str
    tolerance: LogProbabilityTolerance


def reference_for(server: Server, profile: Profile, intact: Path | None = None) -> OracleReference:
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
    table = profile.correctness.log_probability_tolerance
    tolerance = bound_for(table, server, profile, "log_probability_tolerance")
    return OracleReference(checkpoint, dtype_of(server, profile), tolerance)


def bound_for(table: Mapping[Any, _Bound], server: Server, profile: Profile, name: str) -> _Bound:
    """The entry of a table of the profile, ``correctness.NAME``, for the dtype of the server.

    Raises:
        NotRun: it has none.
    """
    dtype = dtype_of(server, profile)
    found = {str(key): value for key, value in table.items()}.get(dtype)
    if found is None:
        known = ", ".join(table) or "none"
        raise NotRun(
            f"profile {profile.name} has no correctness.{name} for dtype {dtype} (it has: {known})"
        )
    return found


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


def long_prompt() -> tuple[str, list[int]]:
    """A prompt of `LONG_PROMPT_TOKENS`, with a name: the longest of `prompts`, over and over."""
    name, longest = max(prompts(), key=lambda prompt: len(prompt[1]))
    ids = longest * (LONG_PROMPT_TOKENS // len(longest) + 1)
    return f"{name}, over and over", ids[:LONG_PROMPT_TOKENS]


@functools.lru_cache(maxsize=128)
def from_oracle(
    checkpoint: Path, token_ids: tuple[int, ...], mistake: Mistake | None = None
) -> tuple[float, ...]:
    """log p of each token that really follows, by the reference model in float64; of a gpt-oss with
    a mistake where one is given."""
    from sm121.oracles import gpt_oss

    weights = _weights(checkpoint)
    changed = weights if mistake is None else mistake(weights)
    return tuple(gpt_oss.next_token_log_probabilities(changed, token_ids).tolist())


def generation_beyond(
    reference: OracleReference,
    prompt: Sequence[int],
    generated: Sequence[int],
    positions: Sequence[Position],
) -> str | None:
    """What is wrong with greedy tokens and their log-probabilities, None for nothing.

    The chosen token may be less likely than the best by what two log-probabilities may be off.
    """
    from sm121.oracles import gpt_oss

    tolerance = reference.tolerance
    ids = [*prompt, *generated]
    places = range(len(prompt) - 1, len(ids) - 1)
    # log p of every token of the vocabulary at each place: [place][token].
    weights = _weights(reference.checkpoint)
    rows = list(gpt_oss.log_probabilities(weights, ids, positions=places).numpy())
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
    if not seen:
        return "required: log-probabilities, seen: none"
    # The least likely of the told tokens are far down: only the bounds on one value hold for them.
    beyond = compare(seen, expected).beyond(tolerance, means=False)
    return f"{len(seen)} log-probabilities: {'; '.join(beyond)}" if beyond else None


def prompts_agree(asker: Asker, reference: OracleReference) -> None:
    """The server's log-probabilities of all `prompts` are the oracle's, within the tolerance.

    Raises:
        AssertionError: they are not; names the first prompt and token, or what all together miss.
        NotRun: the engine does not tell them.
    """
    seen: list[float] = []
    expected: list[float] = []
    limit = reference.tolerance.max_abs
    for name, ids in prompts():
        values = _of_prompt(asker, ids)
        right = from_oracle(reference.checkpoint, tuple(ids))
        error = compare(values, right)
        require(
            error.max_abs <= limit,
            f"|difference| at most {limit:g}",
            f"{error.max_abs:.2g} (at token {error.worst_position})",
            f"prompt {name} ({len(ids)} tokens, {reference.dtype}): ",
        )
        seen += values
        expected += right
    if beyond := compare(seen, expected).beyond(reference.tolerance):
        raise AssertionError(f"{len(seen)} tokens, {reference.dtype}: {'; '.join(beyond)}")


def mistake_is_absent(asker: Asker, reference: OracleReference, mistake: str) -> None:
    """The server is nearer to gpt-oss than to gpt-oss with one of the `SMALL_MISTAKES`.

    Raises:
        AssertionError: it is not.
        NotRun: the engine does not tell log-probabilities of a prompt.
    """
    wrong_by, name = SMALL_MISTAKES[mistake]
    ids = dict(prompts())[name]
    right = from_oracle(reference.checkpoint, tuple(ids))
    wrong = from_oracle(reference.checkpoint, tuple(ids), wrong_by)
    share = share_of(_of_prompt(asker, ids), right, wrong)
    wanted = "a share below 0.5 (0 is gpt-oss, 1 the mistake)"
    require(abs(share) < 0.5, wanted, f"{share:.2f}", f"{mistake} (prompt {name}): ")


def generations_agree(
    asker: Asker, reference: OracleReference, asked: Sequence[tuple[str, Sequence[int]]]
) -> None:
    """The 12 tokens that the server generates after each of the named prompts, asked together, and
    their log-probabilities, are the oracle's within the tolerance.

    Raises:
        AssertionError: they are not.
        NotRun: the engine does not tell them.
    """
    answers = asker.ask_together([Request(tuple(ids), 12) for _, ids in asked])
    for (name, ids), answer in zip(asked, answers, strict=True):
        wrong = generation_beyond(reference, ids, asker.ids(answer), asker.positions(answer))
        if wrong is not None:
            raise AssertionError(f"prompt {name} ({len(ids)} tokens) and 12 more: {wrong}")


def _of_prompt(asker: Asker, ids: Sequence[int]) -> list[float]:
    answer = asker.ask(Request(tuple(ids), 1, prompt_log_probabilities=True))
    return list(asker.need(answer.prompt_log_probabilities, "prompt_logprobs"))


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


@functools.lru_cache(maxsize=1)
def _weights(checkpoint: Path) -> Any:
    import torch

    from sm121.oracles import gpt_oss

    return gpt_oss.load(checkpoint, torch.float64)
