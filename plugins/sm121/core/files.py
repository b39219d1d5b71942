"""Write files atomically, and describe why a file cannot be used."""

import errno
import os
import tempfile
from pathlib import Path

from sm121.core.errors import UsageError


def cause_of(error: Exception) -> str:
    """Return the cause of an error, for a message that already contains the name of the file.

    Args:
        error: The error. The number and the paths of an `OSError` are left out.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error)


def refuse_unwritable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before the work for it begins.

    Args:
        option: The option that names the file.
        path: The file.

    Raises:
        UsageError: The path is a folder, or no file can be created in its folder.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {path}: expected a file that can be written, got: {cause_of(error)}. "
            "Name a file in a folder that exists."
        ) from error


def write_text(text: str, path: Path) -> None:
    """Write a file atomically, so that readers see the old or the new file, even after a crash.

    Args:
        text: The contents. Lone surrogates are written as escapes.
        path: The file. The text is first written to ``.NAME.draft`` in the same folder; if that is
            a symbolic link, it is not followed.

    Raises:
        OSError: The file cannot be written. No draft is left.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # a draft that a crash has left
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # after an error, for example a full disk
        raise
    draft.replace(path)
