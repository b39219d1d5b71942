"""Score texts with the oracle, layer by layer, for a checkpoint of any size.

A computation that was stopped can be resumed. The weights of a layer are read once for all texts.
The weights of an expert are read only when the expert is computed, and the vocabulary matrices in
chunks. Memory use does not depend on the size of the checkpoint: about 2 GiB for gpt-oss, plus a
state [H] for each token and, for texts with a continuation, the token's keys and values.
"""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sm121.core import digest
from sm121.oracles import gpt_oss, rounding, stored_weights
from sm121.oracles.formats import EXACT, Rounding
from sm121.oracles.gpt_oss import Past, Weights
from sm121.oracles.rounded import rounded

#: The number of rows of the vocabulary that are in memory at a time.
_CHUNK = 8192
#: The number of likeliest tokens that are returned for each position.
_TOP = 20

#: A function that changes the model, for example by a deliberate mistake.
Change: TypeAlias = "Callable[[Weights], Weights]"
#: A function that is called with the number of completed layers and the number of all layers.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Text:
    """A text to be scored, and the model that scores it."""

    ids: tuple[int, ...]
    #: A change of the checkpoint's model for this text; None for no change.
    change: "Change | None" = None
    rounding: Rounding = EXACT
    #: Whether to score every token of the text. If false, only the candidates after the last token
    #: are scored.
    whole: bool = True
    #: The number of tokens by which the model continues the text greedily.
    more: int = 0
    #: The index of another text in the same computation whose continuation is used for this text,
    #: too.
    follows: int | None = None


@dataclass(frozen=True)
class Scores:
    """The scores of a text of T tokens. Log-probabilities are in nats."""

    #: The log-probability of each token of the text except the first, [T - 1]; empty if only the
    #: end was scored.
    following: Tensor
    #: The likeliest tokens after each scored token, in descending order, [S, K].
    top_ids: Tensor
    #: The log-probabilities of `top_ids`, [S, K].
    top: Tensor
    #: The tokens of the continuation.
    generated: tuple[int, ...] = ()
    #: The likeliest tokens at each position of the continuation, in descending order, [N, K] for
    #: N generated tokens.
    generated_top_ids: Tensor | None = None
    #: The log-probabilities of `generated_top_ids`, [N, K].
    generated_top: Tensor | None = None


def score(
    checkpoint: Path,
    texts: Sequence[Text],
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    cache: Path | None = None,
    say: Progress = lambda _done, _all: None,
) -> list[Scores]:
    """Score texts with a checkpoint in the Hugging Face format.

    Args:
        checkpoint: The folder of the checkpoint.
        texts: The texts.
        dtype: The dtype of the computation.
        device: A device of PyTorch.
        cache: A folder for the state of the computation, which is removed at the end. If the folder
            has the state of a stopped computation with the same checkpoint, texts and dtype, that
            computation is resumed.
        say: Called after each layer. For each token of a continuation, all layers are computed
            again.

    Returns:
        The scores of each text.

    Raises:
        ValueError: A text is empty or has an unknown token, or the checkpoint lacks a tensor.
        FileNotFoundError: The checkpoint has no config.json or no *.safetensors.
    """
    intact = stored_weights.stream(checkpoint, dtype, device)
    layers = len(intact.layers)
    longest = max((text.more for text in texts), default=0)
    models = _models(intact, texts)
    kept = _Kept(cache, _digest(checkpoint, texts, dtype, device), device)
    resumed = kept.resumed(layers)
    states = resumed.states
    past = resumed.past
    if not resumed.layers:
        states = [gpt_oss.embedded(m, t.ids) for m, t in zip(models, texts, strict=True)]
    for n in range(resumed.layers, layers):
        states, pasts = gpt_oss.after_layer(models, n, states)
        past.append([pair for pair, text in zip(pasts, texts, strict=True) if text.more])
        kept.keep(n + 1, states, past[-1])
        say(n + 1, layers * (1 + longest))
    results = _scores_of_texts(models, states, texts)
    del states
    if longest:
        _add_continuations(models, texts, results, past, say)
    kept.remove()
    return results


def _add_continuations(
    models: Sequence[Weights],
    texts: Sequence[Text],
    results: list[Scores],
    past: list[list[Past]],
    say: Progress,
) -> None:
    """Compute the continuations, and replace the scores of the continued texts in `results`."""
    continued = [index for index, text in enumerate(texts) if text.more]
    leaders = []
    for place, index in enumerate(continued):
        leader = texts[index].follows
        leaders.append(place if leader is None else continued.index(leader))
    scores = _continue(
        [models[index] for index in continued],
        leaders,
        [results[index] for index in continued],
        past,
        max(texts[index].more for index in continued),
        say,
    )
    for index, with_more in zip(continued, scores, strict=True):
        results[index] = with_more


def _models(intact: Weights, texts: Sequence[Text]) -> list[Weights]:
    """Return the model of each text. Texts with the same weight formats share rounded weights."""
    by_formats: dict[tuple[str | None, ...], Weights] = {}
    heads: dict[str | None, gpt_oss.Rows] = {}
    models = []
    for text in texts:
        served = text.rounding
        formats = (served.qkv, served.o, served.lm_head)
        if formats not in by_formats:
            weights = rounded(intact, served)
            head = heads.setdefault(served.lm_head, weights.head)
            by_formats[formats] = dataclasses.replace(weights, head=head)
        model = rounded(by_formats[formats], served)
        if text.change is not None:
            model = text.change(model)
        models.append(model)
    return models


class _Likeliest(NamedTuple):
    """The likeliest tokens at one position, [1, K]."""

    ids: Tensor
    values: Tensor


def _continue(
    models: Sequence[Weights],
    leaders: Sequence[int],
    starts: Sequence[Scores],
    past: list[list[Past]],
    more: int,
    say: Progress,
) -> list[Scores]:
    """Return the scores with a continuation of `more` tokens.

    Each next token is the likeliest one of the text's leader: the text itself, or the text that it
    follows. `past` has, for each layer, the keys and values of each text.
    """
    layers = len(past)
    last = [_Likeliest(scores.top_ids[-1:], scores.top[-1:]) for scores in starts]
    chains = [[place] for place in last]
    for step in range(1, more):
        states = []
        for model, leader in zip(models, leaders, strict=True):
            token = int(last[leader].ids[0, 0])
            states.append(gpt_oss.embedded(model, [token]))
        for n in range(layers):
            states, past[n] = gpt_oss.after_layer(models, n, states, past[n])
            say(layers * (step + 1) - layers + n + 1, layers * (1 + more))
        new = _scores_of_states(models, states, [()] * len(models))
        last = [_Likeliest(scores.top_ids, scores.top) for scores in new]
        for chain, place in zip(chains, last, strict=True):
            chain.append(place)
    say(layers * (1 + more), layers * (1 + more))
    results = []
    for scores, chain, leader in zip(starts, chains, leaders, strict=True):
        with_more = dataclasses.replace(
            scores,
            generated=tuple(int(place.ids[0, 0]) for place in chains[leader]),
            generated_top_ids=torch.cat([place.ids for place in chain]),
            generated_top=torch.cat([place.values for place in chain]),
        )
        results.append(with_more)
    return results


def _scores_of_texts(
    models: Sequence[Weights], states: Sequence[Tensor], texts: Sequence[Text]
) -> list[Scores]:
    """Compute the scores of texts from their states after the last layer."""
    scored_states = []
    scored_ids: list[Sequence[int]] = []
    for state, text in zip(states, texts, strict=True):
        scored_states.append(state if text.whole else state[-1:])
        scored_ids.append(text.ids if text.whole else ())
    return _scores_of_states(models, scored_states, scored_ids)


def _scores_of_states(
    models: Sequence[Weights], states: Sequence[Tensor], texts: Sequence[Sequence[int]]
) -> list[Scores]:
    """Compute scores from the states [S, H] after the last layer, and from the texts' ids, if any.

    Each chunk of an output matrix is read once for all models that share the matrix.
    """
    parts = []
    for model, state, text in zip(models, states, texts, strict=True):
        targets = torch.tensor(list(text)[1:], dtype=torch.int64, device=state.device)
        parts.append(_Part(gpt_oss.last_norm(model, state), targets))
    heads = {id(model.head): model.head for model in models}
    vocabulary = models[0].config.vocabulary
    for start in range(0, vocabulary, _CHUNK):
        numbers = slice(start, min(start + _CHUNK, vocabulary))
        rows = {key: head[numbers].to(parts[0].states.dtype) for key, head in heads.items()}
        for model, part in zip(models, parts, strict=True):
            near = rounding.activations(model.rounding)
            part.add(start, near(part.states @ rows[id(model.head)].T))
    return [part.scores() for part in parts]


class _Part:
    """Accumulates the scores of one text while the vocabulary is read in chunks."""

    def __init__(self, states: Tensor, targets: Tensor) -> None:
        #: The inputs of the output matrix, [S, H].
        self.states = states
        self._targets = targets
        #: The logarithm of the sum of all probabilities so far.
        self._total = states.new_full((len(states),), -math.inf, dtype=torch.float64)
        #: The logits of the targets.
        self._following = states.new_zeros(len(targets))
        #: The highest logits so far, and their ids.
        self._best = states.new_empty(len(states), 0)
        self._ids = targets.new_empty(len(states), 0)

    def add(self, start: int, logits: Tensor) -> None:
        """Add the logits [S, n] of n tokens from `start` on."""
        self._total = torch.logaddexp(self._total, logits.double().logsumexp(-1))
        count = logits.shape[1]
        targets = self._targets
        rows = ((targets >= start) & (targets < start + count)).nonzero()[:, 0]
        self._following[rows] = logits[rows, targets[rows] - start]
        most = logits.topk(min(_TOP, count), -1)
        candidates = torch.cat((self._best, most.values), -1)
        order = candidates.topk(min(_TOP, candidates.shape[1]), -1)
        self._ids = torch.cat((self._ids, most.indices + start), -1).gather(1, order.indices)
        self._best = order.values

    def scores(self) -> Scores:
        """Return the scores, after the whole vocabulary was added."""
        total = self._total.to(self._best.dtype)
        return Scores(
            following=(self._following - total[: len(self._targets)]).cpu(),
            top_ids=self._ids.cpu(),
            top=(self._best - total[:, None]).cpu(),
        )


def _describe(change: "Change | None") -> str:
    """Return a text that identifies a change of the weights, and is the same in each process.

    The default text of a lambda or a local function is its address, which is valid only in one
    process.
    """
    if isinstance(change, functools.partial):
        return f"{_describe(change.func)} {change.args} {sorted(change.keywords.items())}"
    name = getattr(change, "__qualname__", "<unnamed>")
    if change is None or "<" in name:
        return str(change)
    return f"{change.__module__}.{name}"


def _digest(checkpoint: Path, texts: Sequence[Text], dtype: torch.dtype, device: str) -> str:
    """Return a digest of everything that affects the scores."""
    weights = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        stat = file.stat()
        weights.append((file.name, stat.st_size, stat.st_mtime_ns))
    config = (checkpoint / "config.json").read_text("utf-8")
    described = []
    for text in texts:
        change = _describe(text.change)
        described.append(
            (text.ids, change, text.rounding.name, text.whole, text.more, text.follows)
        )
    return digest.of_value([config, weights, described, str(dtype), device])


class _Resumed(NamedTuple):
    """The state of a computation that was stopped."""

    #: The number of completed layers.
    layers: int
    states: list[Tensor]
    #: The keys and values of each layer.
    past: list[list[Past]]


class _Kept:
    """A folder with the states after the last finished layer, and each layer's keys and values.

    `made_of` is a digest of everything on which the computation depends. Files with another digest
    are ignored.
    """

    def __init__(self, folder: Path | None, made_of: str, device: str) -> None:
        self._folder = folder
        self._made_of = made_of
        self._device = device
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, layers: int, states: Sequence[Tensor], past: Sequence[Past]) -> None:
        """Write the state after this number of layers."""
        self._write(f"layer-{layers}", past)
        self._write("states", (layers, states))

    def resumed(self, layers: int) -> _Resumed:
        """Return the stored state, or an empty one.

        `layers` is the number of the model's layers.
        """
        done, states = self._read("states") or (0, [])
        past = [self._read(f"layer-{n}") for n in range(1, min(done, layers) + 1)]
        if None in past:
            return _Resumed(0, [], [])
        return _Resumed(done, states, past)

    def remove(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _write(self, name: str, content: Any) -> None:
        if self._folder is not None:
            new = self._folder / f"{name}.new"
            torch.save((self._made_of, content), new)
            new.replace(self._folder / name)

    def _read(self, name: str) -> Any:
        if self._folder is None or not (self._folder / name).is_file():
            return None
        file = self._folder / name
        try:
            made_of, content = torch.load(file, map_location=self._device, weights_only=True)
        except (RuntimeError, OSError, EOFError, UnpicklingError):
            return None  # the file is incomplete, for example because the machine crashed
        if made_of != self._made_of:
            return None
        return content
