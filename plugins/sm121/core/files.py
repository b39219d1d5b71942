"""Write a file whole, or not at all."""

import os
from pathlib import Path


def write_text(text: str, path: Path) -> None:
    """Write a file atomically: a reader, or a crash, finds the old file or the new one.

    Args:
        text: The contents. Half surrogates are written as escapes.
        path: The file. Its draft is ``.NAME.draft`` beside it, which is never followed as a link.

    Raises:
        OSError: The file cannot be written. No draft is left.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # left by a crash
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # the disk may be full
        raise
    draft.replace(path)
