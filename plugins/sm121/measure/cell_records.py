"""The files of a cell's raw answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sm121.client.timed_answer import TimedAnswer


def fresh_file(directory: Path, stem: str) -> Path:
    """Return the path of a new file, and make its directory.

    Args:
        directory: The folder of the raw records.
        stem: The name without its suffix.

    Returns:
        ``STEM.jsonl``; if that exists, ``STEM-2.jsonl`` and so on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem}.jsonl"
    number = 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.jsonl"
    return path


def write(path: Path, kinds: Mapping[str, Sequence[TimedAnswer]]) -> None:
    """Write answers as JSON lines, each with its kind.

    Args:
        path: The file. It is replaced.
        kinds: The answers of each kind (``long``, ``short``, ``left_out``).
    """
    with path.open("w", encoding="utf-8") as stream:
        for kind, answers in kinds.items():
            for answer in answers:
                stream.write(json.dumps({"kind": kind, **asdict(answer)}) + "\n")
