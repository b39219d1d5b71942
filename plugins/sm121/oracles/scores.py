"""What the oracle says of texts, of a checkpoint of any size: layer by layer, and to be resumed. A
layer's weights are read once for all texts, an expert's when it computes, and the vocabulary in
chunks. What is in memory does not depend on the size of the checkpoint: about 2 GiB for gpt-oss,
beside a state [H] and, for texts that go on, the keys and values of each token."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sm121.core import digest
from sm121.oracles import gpt_oss, rounding
from sm121.oracles.formats import EXACT, Rounding
from sm121.oracles.gpt_oss import Past, Weights
from sm121.oracles.rounded import rounded

#: Of the vocabulary, at a time.
_CHUNK = 8192
#: Likeliest tokens of each place.
_TOP = 20

#: Makes the weights of another gpt-oss, as one with a mistake, of those of the intact one.
Change: TypeAlias = "Callable[[Weights], Weights]"


@dataclass(frozen=True)
class Text:
    """A text to be scored, and by which model."""

    ids: tuple[int, ...]
    #: The model is the checkpoint's, or this one.
    change: "Change | None" = None
    rounding: Rounding = EXACT
    #: Whether each of its tokens is scored; else only what may follow the last one.
    whole: bool = True
    #: How many tokens the model goes on, each the most likely one.
    more: int = 0
    #: It goes on with the tokens of this one of the texts that are scored together.
    follows: int | None = None


@dataclass(frozen=True)
class Scores:
    """Of a text of T tokens. Log-probabilities are in nats."""

    #: log p of each token that really follows, [T - 1]; empty if only the end was scored.
    following: Tensor
    #: The most likely tokens after each scored token, most likely first, and their log p: [S, K].
    top_ids: Tensor
    top: Tensor
    #: What the model went on with, and the most likely tokens at each of its places: [more, K].
    generated: tuple[int, ...] = ()
    generated_top_ids: Tensor | None = None
    generated_top: Tensor | None = None


def score(
    checkpoint: Path,
    texts: Sequence[Text],
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    cache: Path | None = None,
    say: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Scores]:
    """The scores of each text by a checkpoint in the Hugging Face format, computed in ``dtype`` on
    ``device``. What the folder ``cache`` has of the same checkpoint, texts and dtype is not
    computed again; it is removed at the end. ``say`` is called after each layer, with the layers
    done and in all; each token that texts go on with passes all layers once more. Raises
    ValueError: an empty text, an unknown token, or a tensor that the checkpoint has not;
    FileNotFoundError: the checkpoint has no config.json or no *.safetensors."""
    intact = gpt_oss.stream(checkpoint, dtype, device)
    layers, longest = len(intact.layers), max((text.more for text in texts), default=0)
    models = _models(intact, texts)
    state = _Kept(cache, _digest(checkpoint, texts, dtype, device), device)
    first, states, past = state.resumed(layers)
    if not first:
        states = [gpt_oss.embedded(m, t.ids) for m, t in zip(models, texts, strict=True)]
    for n in range(first, layers):
        states, pasts = gpt_oss.after_layer(models, n, states)
        past.append([pair for pair, text in zip(pasts, texts, strict=True) if text.more])
        state.keep(n + 1, states, past[-1])
        say(n + 1, layers * (1 + longest))
    results = _of_states(
        models,
        [state if text.whole else state[-1:] for state, text in zip(states, texts, strict=True)],
        [text.ids if text.whole else () for text in texts],
    )
    del states
    if going := [i for i, text in enumerate(texts) if text.more]:
        follows = [texts[i].follows for i in going]
        on = _go_on(
            [models[i] for i in going],
            [n if leader is None else going.index(leader) for n, leader in enumerate(follows)],
            [results[i] for i in going],
            past,
            longest,
            say,
        )
        for i, scores in zip(going, on, strict=True):
            results[i] = scores
    state.remove()
    return results


def _models(intact: Weights, texts: Sequence[Text]) -> list[Weights]:
    """The model of each text. Weights in one format are rounded once for all of them."""
    by_formats: dict[tuple[str | None, ...], Weights] = {}
    heads: dict[str | None, gpt_oss.Rows] = {}
    models = []
    for text in texts:
        way = text.rounding
        formats = (way.qkv, way.o, way.lm_head)
        if formats not in by_formats:
            weights = rounded(intact, way)
            head = heads.setdefault(way.lm_head, weights.head)
            by_formats[formats] = dataclasses.replace(weights, head=head)
        model = rounded(by_formats[formats], way)
        models.append(model if text.change is None else text.change(model))
    return models


def _go_on(
    models: Sequence[Weights],
    leaders: Sequence[int],
    starts: Sequence[Scores],
    past: list[list[Past]],
    more: int,
    say: Callable[[int, int], None],
) -> list[Scores]:
    """The scores with `more` tokens after the last one; each token is the most likely one of the
    text's leader."""
    layers = len(past)
    last = [(scores.top_ids[-1:], scores.top[-1:]) for scores in starts]
    steps = [[pair] for pair in last]
    for step in range(1, more):
        states = [
            gpt_oss.embedded(model, [int(last[leader][0][0, 0])])
            for model, leader in zip(models, leaders, strict=True)
        ]
        for n in range(layers):
            states, past[n] = gpt_oss.after_layer(models, n, states, past[n])
            say(layers * (step + 1) - layers + n + 1, layers * (1 + more))
        new = _of_states(models, states, [()] * len(models))
        last = [(scores.top_ids, scores.top) for scores in new]
        for chain, pair in zip(steps, last, strict=True):
            chain.append(pair)
    say(layers * (1 + more), layers * (1 + more))
    return [
        dataclasses.replace(
            scores,
            generated=tuple(int(ids[0, 0]) for ids, _ in steps[leader]),
            generated_top_ids=torch.cat([ids for ids, _ in chain]),
            generated_top=torch.cat([values for _, values in chain]),
        )
        for scores, chain, leader in zip(starts, steps, leaders, strict=True)
    ]


def _of_states(
    models: Sequence[Weights], states: Sequence[Tensor], texts: Sequence[Sequence[int]]
) -> list[Scores]:
    """Scores by the states [S, H] after the last layer; of a text's own tokens where it is given.
    Of each output matrix a part is read once for all models that have it."""
    parts = [
        _Part(
            gpt_oss.last_norm(model, state),
            torch.tensor(list(text)[1:], dtype=torch.int64, device=state.device),
        )
        for model, state, text in zip(models, states, texts, strict=True)
    ]
    heads, vocabulary = {id(m.head): m.head for m in models}, models[0].config.vocabulary
    for start in range(0, vocabulary, _CHUNK):
        numbers = slice(start, min(start + _CHUNK, vocabulary))
        read = {n: head[numbers].to(parts[0].states.dtype) for n, head in heads.items()}
        for model, part in zip(models, parts, strict=True):
            rows = read[id(model.head)]
            part.add(start, rounding.activations(model.rounding)(part.states @ rows.T))
    return [part.scores() for part in parts]


class _Part:
    def __init__(self, states: Tensor, targets: Tensor) -> None:
        self.states, self._targets = states, targets
        self._total = states.new_full((len(states),), -math.inf, dtype=torch.float64)
        self._following = states.new_zeros(len(targets))
        self._best = states.new_empty(len(states), 0)
        self._ids = targets.new_empty(len(states), 0)

    def add(self, start: int, logits: Tensor) -> None:
        """The logits [S, n] of n tokens from `start` on."""
        self._total = torch.logaddexp(self._total, logits.double().logsumexp(-1))
        count, targets = logits.shape[1], self._targets
        rows = ((targets >= start) & (targets < start + count)).nonzero()[:, 0]
        self._following[rows] = logits[rows, targets[rows] - start]
        most = logits.topk(min(_TOP, count), -1)
        candidates = torch.cat((self._best, most.values), -1)
        order = candidates.topk(min(_TOP, candidates.shape[1]), -1)
        self._ids = torch.cat((self._ids, most.indices + start), -1).gather(1, order.indices)
        self._best = order.values

    def scores(self) -> Scores:
        total = self._total.to(self._best.dtype)
        return Scores(
            (self._following - total[: len(self._targets)]).cpu(),
            self._ids.cpu(),
            (self._best - total[:, None]).cpu(),
        )


def _digest(checkpoint: Path, texts: Sequence[Text], dtype: torch.dtype, device: str) -> str:
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(checkpoint.glob("*.safetensors"))
    ]
    config = (checkpoint / "config.json").read_text("utf-8")
    described = [(t.ids, str(t.change), t.rounding.name, t.whole, t.more, t.follows) for t in texts]
    return digest.of([config, files, described, str(dtype), device])


class _Kept:
    """The states after the last layer that was computed, and the keys and values of each layer."""

    def __init__(self, folder: Path | None, made_of: str, device: str) -> None:
        self._folder, self._made_of, self._device = folder, made_of, device
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, layers: int, states: Sequence[Tensor], past: Sequence[Past]) -> None:
        self._write(f"layer-{layers}", past)
        self._write("states", (layers, states))

    def resumed(self, layers: int) -> tuple[int, list[Tensor], list[list[Past]]]:
        done, states = self._read("states") or (0, [])
        past = [self._read(f"layer-{n}") for n in range(1, min(done, layers) + 1)]
        return (0, [], []) if None in past else (done, states, past)

    def remove(self) -> None:
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
        try:
            file = self._folder / name
            made_of, content = torch.load(file, map_location=self._device, weights_only=True)
        except (RuntimeError, OSError, EOFError, UnpicklingError):
            return None  # cut short by a machine that went down
        return content if made_of == self._made_of else None
