"""List the tensors of a checkpoint by reading only the headers of its safetensors files.

A file begins with 8 bytes, the length of a JSON header (little-endian). The header has the dtype,
the shape and the offsets of each tensor. No weights are read.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm121.core.errors import Sm121Error
from sm121.core.unmet import Fact

#: The file that lists all tensors with their files, if a checkpoint has several files.
INDEX = "model.safetensors.index.json"
#: The ``kind`` of facts on missing or truncated files.
KIND = "checkpoint files"
#: The longest header that the format allows, in bytes.
_LONGEST = 100_000_000
#: The number of bytes before the header.
_PREFIX = 8
#: The number of bits of an element. safetensors/src/tensor.rs
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor, as its header describes it."""

    name: str
    #: The dtype's name in safetensors: BF16, U8, F8_E4M3, ...
    dtype: str
    shape: tuple[int, ...]
    #: The size in the file, in bytes.
    size: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StoredTensors:
    """All tensors of a checkpoint."""

    folder: Path
    #: The names of the files.
    files: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    #: Files that are missing or truncated, and tensors of the index that are missing.
    facts: tuple[Fact, ...]

    @property
    def size(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(tensor.size for tensor in self.tensors)


def read_headers(folder: Path) -> StoredTensors:
    """Read the headers of all safetensors files in a folder.

    Args:
        folder: The folder. If it has an index, only the files in the index are read.

    Raises:
        Sm121Error: The folder has no safetensors, or a header cannot be read.
    """
    files_by_tensor = _files_by_tensor(folder)
    names = {*files_by_tensor.values()} or {path.name for path in folder.glob("*.safetensors")}
    present = [name for name in sorted(names) if (folder / name).is_file()]
    if not present:
        raise Sm121Error(
            f"{folder}: expected *.safetensors, got none. Name a folder with a checkpoint in "
            "safetensors; GGUF and .bin are not read"
        )
    facts = [_missing_file(name) for name in sorted(names - {*present})]
    tensors: dict[str, Tensor] = {}
    for name in present:
        path = folder / name
        own, end = _read_file(path)
        tensors.update({tensor.name: tensor for tensor in own})
        size = path.stat().st_size
        if size < end:
            facts.append(_cut_file(name, size, end))
    missing = {*files_by_tensor} - {*tensors}
    if missing and not facts:
        facts.append(_missing_tensors(missing))
    return StoredTensors(folder, tuple(present), tuple(tensors.values()), tuple(facts))


def _files_by_tensor(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index; empty if the checkpoint has no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text("utf-8"))
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Sm121Error(f"{path}: expected an index with weight_map ({error})") from error
    for file in {*files.values()}:
        if Path(file).name != file:
            raise Sm121Error(f"{path}: expected names of files in this folder, got {file}")
    return files


def _read_file(path: Path) -> tuple[list[Tensor], int]:
    """Return the tensors of a file, and the minimum size of the file in bytes."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX else 0
        text = file.read(length) if 0 < length <= _LONGEST else b""
    if not text or len(text) < length:
        raise Sm121Error(
            f"{path}: expected a header of safetensors, got {len(prefix) + len(text)} bytes of "
            "one. Download the file again"
        )
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        tensors = [_tensor(name, entry) for name, entry in table.items()]
        places = sorted(tuple(map(int, entry["data_offsets"])) for entry in table.values())
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise Sm121Error(f"{path}: expected a header of safetensors ({error!r})") from error
    end = 0
    for begin, own_end in places:
        if begin != end or own_end < begin:
            raise Sm121Error(
                f"{path}: expected tensors one after the other, got one at {begin} to {own_end} "
                f"after {end} bytes. Download the file again"
            )
        end = own_end
    for tensor in tensors:
        bits = _BITS.get(tensor.dtype)
        if bits is not None and tensor.elements * bits != tensor.size * 8:
            raise Sm121Error(
                f"{path}: expected {tensor.elements * bits // 8} bytes for {tensor}, got "
                f"{tensor.size}. Download the file again"
            )
    return tensors, _PREFIX + length + end


def _tensor(name: str, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    return Tensor(name, str(entry["dtype"]), shape, int(end) - int(begin))


def _missing_file(name: str) -> Fact:
    return Fact(
        required=f"all files of {INDEX}",
        observed=f"{name} is missing",
        kind=KIND,
    )


def _cut_file(name: str, size: int, end: int) -> Fact:
    return Fact(
        required="the length in the file's header",
        observed="a truncated file",
        about=name,
        kind=KIND,
        evidence=f"{size} of {end} bytes; download it again",
    )


def _missing_tensors(names: Collection[str]) -> Fact:
    return Fact(
        required=f"the tensors of {INDEX}",
        observed="some are missing",
        kind=KIND,
        evidence=f"{len(names)}, such as {min(names)}",
    )
