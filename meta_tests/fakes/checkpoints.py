"""Public checkpoints without their weights. The files have the real headers and are sparse."""

import json
import math
import os
import re
import struct
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sm121.fixtures

_FILE = Path(__file__).parents[1] / "data" / "checkpoints.toml"
_MODELS = Path(sm121.fixtures.__file__).parent / "models"
_BYTES = {
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
}
#: A tensor of a header: its dtype and shape.
Entry = tuple[str, list[int]]


@dataclass(frozen=True)
class PublicCheckpoint:
    """A checkpoint: its tensors, its configuration, and its published sizes."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Entry] = field(repr=False)
    #: The published number of tensors, and the number of their bytes.
    published_tensors: int = 0
    published_bytes: int = 0
    #: The number of parameters of each dtype on the hub; empty if it is not published.
    published_values: dict[str, int] = field(default_factory=dict)

    def with_tensors(self, change: Callable[[str, Entry], dict[str, Entry]]) -> "PublicCheckpoint":
        """Return a copy with changed tensors.

        Args:
            change: Gets the name and the entry of a tensor, and returns its replacements.
        """
        tensors: dict[str, Entry] = {}
        for name, entry in self.tensors.items():
            tensors.update(change(name, entry))
        return replace(self, tensors=tensors)

    def with_experts(self, experts: int) -> "PublicCheckpoint":
        """Return a copy with only the first experts of each layer.

        Args:
            experts: The number of experts.
        """

        def change(name: str, entry: Entry) -> dict[str, Entry]:
            number = re.search(r"\.experts\.(\d+)\.", name)
            is_kept = number is None or int(number[1]) < experts
            return {name: entry} if is_kept else {}

        return self.with_tensors(change)

    def with_layers(self, layers: int) -> "PublicCheckpoint":
        """Return a copy with only the first layers of the model and of its drafter.

        Args:
            layers: The number of layers.
        """
        behind = self.config["num_hidden_layers"]

        def change(name: str, entry: Entry) -> dict[str, Entry]:
            number = re.search(r"\.layers\.(\d+)\.", name)
            is_kept = number is None or int(number[1]) < layers or int(number[1]) >= behind
            return {name: entry} if is_kept else {}

        return self.with_tensors(change)

    def write(self, folder: Path, files: int = 2) -> Path:
        """Write the checkpoint without its weights.

        Args:
            folder: The folder, which is created.
            files: The number of files; several have an index.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), "utf-8")
        names = [*self.tensors]
        size = -(-len(names) // files)
        files_by_tensor: dict[str, str] = {}
        for number in range(files):
            file = f"model-{number + 1:05}-of-{files:05}.safetensors"
            own = names[number * size : (number + 1) * size]
            write_header(folder / file, {name: self.tensors[name] for name in own})
            files_by_tensor.update(dict.fromkeys(own, file))
        if files > 1:
            index = {"metadata": {}, "weight_map": files_by_tensor}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
        return folder


def load(name: str) -> PublicCheckpoint:
    """Return a checkpoint of the data file.

    Args:
        name: Its name in the file.
    """
    table = next(entry for entry in _tables() if entry["name"] == name)
    config = table["config"]
    if isinstance(config, str):
        config = json.loads((_MODELS / f"{config}.json").read_text("utf-8"))
    return PublicCheckpoint(
        name=name,
        config=config,
        tensors=dict(_tensors(table)),
        published_tensors=table["tensors"],
        published_bytes=table["published_bytes"],
        published_values=table["published_values"],
    )


def names() -> list[str]:
    """Return the names in the data file."""
    return [entry["name"] for entry in _tables()]


def _tables() -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads(_FILE.read_text("utf-8"))["checkpoint"]
    return tables


def _tensors(table: dict[str, Any]) -> Iterator[tuple[str, Entry]]:
    for row in table["rows"]:
        first, last = row.get("layers", [0, 0])
        for layer in range(first, last + 1):
            for expert in range(row.get("experts", 1)):
                name = row["name"].format(layer=layer, expert=expert)
                yield name, (row["dtype"], row["shape"])


def size_of(entry: Entry) -> int:
    """Return the size of a tensor in bytes."""
    dtype, shape = entry
    return math.prod(shape) * _BYTES[dtype]


def write_header(path: Path, tensors: dict[str, Entry]) -> None:
    """Write a safetensors file in which a hole of the right length replaces the weights.

    Args:
        path: The file.
        tensors: Its tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors.items():
        begin = end
        end += size_of(entry)
        header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
