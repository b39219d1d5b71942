"""Writing a file whole, or not at all."""

import os
from pathlib import Path


def write_text(text: str, path: Path) -> None:
    """Write a file atomically: a reader, or a crash, sees the old file or the new one. Raises
    OSError: it cannot be written; nothing half written is left."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # of a crash; never written through a link put there since
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # the disk is full: what is half written helps nobody
        raise
    draft.replace(path)
