"""A checkpoint as its headers and its label describe it: formats by layer, bytes of a token."""

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

#: Weights that are vectors, in the column of formats.
_VECTORS = "vectors"


@dataclass(frozen=True)
class Part:
    """The weights of one part of a model in one format."""

    #: As checkpoint.toml names it; ``draft`` for a drafter.
    name: str
    #: As formats.toml names it; ``vectors`` for norms and biases that stand alone.
    format: str
    #: The numbers of its layers for people; empty: it belongs to none.
    layers: str
    weights: int
    #: Its bytes, with scales and biases.
    stored: int
    #: The bytes of it that a token reads.
    read: float


@dataclass(frozen=True)
class Inspection:
    """What is known of a checkpoint without a weight."""

    stored: StoredTensors
    config: Mapping[str, Any]
    label: Label
    weights: tuple[Weight, ...]
    parts: tuple[Part, ...]
    #: The experts of a layer, and those that a token uses; None: it has none.
    experts: int | None
    used_experts: int | None
    #: None: it is not known, for the reason ``kv_unknown``.
    kv: KvCache | None
    kv_unknown: str
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]

    @property
    def read(self) -> float:
        """The bytes of weights that a token reads."""
        return sum(part.read for part in self.parts)

    @property
    def drafter(self) -> int:
        """The bytes of a drafter, which are loaded only for speculation."""
        return sum(weight.size for weight in self.weights if weight.drafts)


def inspect(model: str, environment: Mapping[str, str] = os.environ) -> Inspection:
    """Read the headers and the label of a checkpoint.

    Args:
        model: A folder, or owner/name of a model in the hub's cache. Nothing is downloaded.
        environment: Has the variables of the hub's cache.

    Raises:
        UsageError: This machine does not have it.
        Sm121Error: It has no safetensors, or a file cannot be read.
    """
    folder = model_folder.folder_of(model, environment)
    if folder is None:
        raise UsageError(
            f"{model}: expected a folder, or a model in the cache of the hub. Download it first: "
            f"hf download {model}"
        )
    return of_folder(folder)


def of_folder(folder: Path) -> Inspection:
    """Read the headers and the label in a folder.

    Args:
        folder: The folder.

    Raises:
        Sm121Error: It has no safetensors, or a file cannot be read.
    """
    stored = safetensors_header.read(folder)
    config = label.read_json(folder / label.CONFIG)
    own = label.of_folder(folder, config)
    layers = contradictions.number(config, ("num_hidden_layers",))
    held = weights_of.of_tensors(stored.tensors, layers, own.group_size)
    experts = weights_of.stored_experts(held)
    used = None
    if experts is not None:
        used = contradictions.number(config, weight_tables.load().keys.used_experts)
    judged = contradictions.judge(own, held, config)
    kv: KvCache | None = None
    kv_unknown = ""
    try:
        kv = kv_cache.of(config)
    except Sm121Error as error:
        kv_unknown = str(error)
    notes = list(judged.notes)
    if experts is not None and used is None:
        notes.append("experts of a token: not known, so a token is counted to read all of them")
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
    )


def _parts(held: Sequence[Weight], experts: int | None, used: int | None) -> Iterable[Part]:
    """Yield the parts, the largest first."""
    has_head = any(weight.group == "lm_head" for weight in held)
    share = used / experts if used is not None and experts else 1.0
    parts: dict[tuple[str, str], Part] = {}
    layers: dict[tuple[str, str], set[int | None]] = {}
    for weight in held:
        key = (weight.group, weight.format or _VECTORS)
        part = parts.get(key, Part(*key, layers="", weights=0, stored=0, read=0.0))
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
    """Return the bytes of a weight that a token reads.

    Args:
        weight: The weight.
        share: The share of the experts that a token uses.
        is_head: Whether the embedding is the head as well.
    """
    if weight.drafts or weight.part.read == "nothing":
        return 0.0
    if weight.part.read == "used":
        return weight.size * share
    if weight.part.read == "row" and not is_head:
        return weight.size / weight.main.shape[0]
    return float(weight.size)
