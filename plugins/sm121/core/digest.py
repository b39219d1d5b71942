"""Digests of contents: the first 16 hexadecimal digits of SHA-256."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

_LENGTH = 16
#: A file of at most this many bytes is read completely.
_WHOLE_BYTES = 1 << 20
#: The number of pieces. The first piece is at the file's start, the last one at its end.
_PIECES = 16
_PIECE_BYTES = 1 << 16


def of_value(value: object) -> str:
    """Return the digest of a value as JSON.

    Args:
        value: The value. The order of the keys in its tables does not matter. Parts that are no
            JSON types are converted with `str`.
    """
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def of_files(root: Path, files: Iterable[Path]) -> str:
    """Return the digest of the names, sizes and contents of files.

    Files above 1 MiB, such as weights, are sampled: only some pieces of them are read.

    Args:
        root: The folder to which the names are relative.
        files: Files below it, in any order.

    Raises:
        OSError: A file cannot be read.
    """
    total = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        total.update(f"{file.relative_to(root)}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                total.update(stream.read())
                continue
            for number in range(_PIECES):
                stream.seek((size - _PIECE_BYTES) * number // (_PIECES - 1))
                total.update(stream.read(_PIECE_BYTES))
    return total.hexdigest()[:_LENGTH]
