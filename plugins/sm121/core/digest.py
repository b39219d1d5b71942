"""Digests: short names of what something is made of."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

_LENGTH = 16
#: Of a file that is larger, pieces are read: its two ends, and some between them.
_WHOLE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def of(value: object) -> str:
    """The digest of anything that JSON can say; what it cannot is taken by its text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def of_files(root: Path, files: Iterable[Path]) -> str:
    """The digest of files: their names below ``root``, their sizes, and what is in them. Of files
    above 1 MiB, as those of weights, only pieces are read. Raises OSError: one cannot be read."""
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
