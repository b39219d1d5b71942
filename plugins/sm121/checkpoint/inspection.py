"""Inspect a checkpoint without reading its weights.

The results are the formats in each layer, and the number of bytes that are read for a token.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm121.checkpoint import contradictions, kv_cache, label, safetensors_header, weight_tables
from sm121.checkpoint import weights as weights_of
from sm121.checkpoint.kv_cache import KvCache
from sm121.checkpoint.label import Label
from sm121.checkpoint.safetensors_header import StoredTensors
from sm121.checkpoint.weights import Weight
from sm121.core import model_folder
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.unmet import Fact

#: The name of the "format" of weights that are vectors.
_VECTORS = "vectors"


@dataclass(frozen=True)
class WeightPart:
    """The weights of one part of a model in one format."""

    #: The name in checkpoint.toml; ``draft`` for a drafter.
    name: str
    #: The name in formats.toml; ``vectors`` for separate norms and biases.
    format: str
    #: The numbers of the part's layers, as text; empty if the part belongs to no layer.
    layers: str
    #: The number of weights in the part.
    weights: int
    #: The size of the part in bytes, with scales and biases.
    stored: int
    #: How many bytes of the part are read for a token.
    read: float


@dataclass(frozen=True)
class Inspection:
    """The properties of a checkpoint that are known without reading weights."""

    stored: StoredTensors
    config: Mapping[str, Any]
    label: Label
    weights: tuple[Weight, ...]
    parts: tuple[WeightPart, ...]
    #: The number of experts in a layer; None if the model has no experts.
    experts: int | None
    #: The number of experts that a token uses; None if the model has no experts, or if it is
    #: unknown.
    used_experts: int | None
    #: The KV cache; None if it is unknown (``kv_unknown`` is the reason).
    kv: KvCache | None
    #: Why the KV cache is unknown; empty if ``kv`` is known.
    kv_unknown: str
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    #: A line for each thing that could not be judged; empty: everything was judged.
    unjudged: tuple[str, ...]

    @property
    def read(self) -> float:
        """The number of bytes of weights that are read for a token."""
        return sum(part.read for part in self.parts)

    @property
    def drafter(self) -> int:
        """The size of the drafter in bytes, which is loaded only for speculative decoding."""
        return sum(weight.size for weight in self.weights if weight.drafts)


def inspect(
    model: str, environment: Mapping[str, str] = os.environ, revision: str | None = None
) -> Inspection:
    """Read the headers and the declared quantisation (the label) of a checkpoint.

    Args:
        model: A folder, or owner/name of a model in the hub's cache. Nothing is downloaded.
        environment: Has the variables of the hub's cache.
        revision: A branch, a tag or a commit on the hub; None: the branch ``main``, else the only
            snapshot in the cache.

    Raises:
        UsageError: The model is not on this machine.
        Sm121Error: The checkpoint has no safetensors, or a file cannot be read.
    """
    folder = model_folder.folder_of(model, environment, revision)
    if folder is None and revision is None:
        folder = model_folder.served_folder(model, None, environment)
    if folder is None:
        raise UsageError(
            f"{model}: expected a folder, or a model in the cache of the hub. Download it first: "
            f"hf download {model}"
        )
    return of_folder(folder)


def of_folder(folder: Path) -> Inspection:
    """Read the headers and the declared quantisation (the label) in a folder.

    Args:
        folder: The folder.

    Raises:
        Sm121Error: The folder has no safetensors, or a file cannot be read.
    """
    stored = safetensors_header.read_headers(folder)
    config = label.read_json(folder / label.CONFIG)
    own = label.of_folder(folder, config)
    layers = contradictions.number(config, ("num_hidden_layers",))
    held = weights_of.of_tensors(stored.tensors, layers, own.group_size)
    experts = weights_of.stored_experts(held)
    used = None
    if experts is not None:
        used = contradictions.number(config, weight_tables.load().keys.used_experts)
    judged = contradictions.compare_label(own, held, config)
    kv: KvCache | None = None
    kv_unknown = ""
    try:
        kv = kv_cache.kv_cache_of(config)
    except Sm121Error as error:
        kv_unknown = str(error)
    notes = list(judged.notes)
    if experts is not None and used is None:
        notes.append("number of experts per token: unknown, so all experts count as read")
    return Inspection(
        stored=stored,
        config=config,
        label=own,
        weights=tuple(held),
        parts=tuple(_parts(held, experts, used)),
        experts=experts,
        used_experts=used,
        kv=kv,
        kv_unknown=kv_unknown,
        facts=(*stored.facts, *judged.facts),
        notes=tuple(notes),
        unjudged=judged.unjudged,
    )


def _parts(held: Sequence[Weight], experts: int | None, used: int | None) -> Iterable[WeightPart]:
    """Yield the parts, in descending order of their sizes."""
    has_head = any(weight.group == "lm_head" for weight in held)
    share = used / experts if used is not None and experts else 1.0
    parts: dict[tuple[str, str], WeightPart] = {}
    layers: dict[tuple[str, str], set[int | None]] = {}
    for weight in held:
        key = (weight.group, weight.format or _VECTORS)
        part = parts.get(key, WeightPart(*key, layers="", weights=0, stored=0, read=0.0))
        parts[key] = replace(
            part,
            weights=part.weights + 1,
            stored=part.stored + weight.size,
            read=part.read + _read(weight, share, is_head=not has_head),
        )
        layers.setdefault(key, set()).add(weight.layer)
    for key, part in sorted(parts.items(), key=lambda item: -item[1].stored):
        yield replace(part, layers=weights_of.layers_text(layers[key]))


def _read(weight: Weight, share: float, *, is_head: bool) -> float:
    """Return the number of a weight's bytes that are read for a token.

    Args:
        weight: The weight.
        share: The share of the experts that a token uses.
        is_head: Whether the embedding is also the output matrix.
    """
    if weight.drafts or weight.part.read == "nothing":
        return 0.0
    if weight.part.read == "used":
        return weight.size * share
    if weight.part.read == "row" and not is_head:
        rows = weight.main.shape[0] if weight.main.shape else 0
        return weight.size / max(1, rows)
    return float(weight.size)
