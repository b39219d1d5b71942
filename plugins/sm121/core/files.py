"""Write a file whole, or not at all."""

import os
from pathlib import Path


def write_text(text: str, path: Path) -> None:
    """Write a file atomically: a reader sees the old or the new file, even after a crash.

    Args:
        text: The contents. Lone surrogates are written as escapes.
        path: The file. The text is first written to ``.NAME.draft`` in the same folder; a link of
            that name is not followed.

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
