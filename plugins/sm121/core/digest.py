"""Digests: short names of contents, 16 hexadecimal digits of SHA-256."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

_LENGTH = 16
#: A larger file is read in pieces: its two ends, and some between them.
_WHOLE_BYTES = 1 << 20
#: The number of pieces, evenly spread.
_PIECES = 16
_PIECE_BYTES = 1 << 16


def of(value: object) -> str:
    """Return the digest of a value's JSON; a part without JSON counts by its text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def of_files(root: Path, files: Iterable[Path]) -> str:
    """Return the digest of files: of their names, sizes and contents.

    Only pieces of files above 1 MiB are read, such as those of weights.

    Args:
        root: The folder from which the names are taken.
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
