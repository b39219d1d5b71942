"""Copy an attached server's log, so that rotation, truncation or removal loses no line."""

import os
from pathlib import Path

from sm121.core.redaction import redact_file

#: The maximum size of a log that is copied, in bytes. A longer log is read in place.
_COPIED_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20


class KeptLog:
    """Follows a log that its owner may rename, truncate or remove during the run.

    Args:
        log: The log.
        kept: The path of the copy.

    Raises:
        OSError: The log cannot be read, or the copy cannot be written.
    """

    def __init__(self, log: Path, kept: Path) -> None:
        self.log = log
        self._read = log.open("rb")
        is_short = os.fstat(self._read.fileno()).st_size <= _COPIED_BYTES
        #: The file from which other modules read the log: the copy, or a long log itself.
        self.path = kept if is_short else log
        #: A description of the lost part of the log; None if nothing was lost.
        self.lost: str | None = None
        if self.path == kept:
            kept.unlink(missing_ok=True)
            self.follow()

    def follow(self) -> None:
        """Copy the lines that were written since the last call.

        Raises:
            OSError: The log cannot be read, or the copy cannot be written.
        """
        if self.path == self.log or self._read.closed:
            return
        if os.fstat(self._read.fileno()).st_size < self._read.tell():
            self.lost = f"{self.log} was truncated during the run: lines may be lost"
            self._read.seek(0)
        self._copy()
        try:
            now = self.log.stat()
        except FileNotFoundError:
            return  # the log was renamed or removed; further lines are read through the open file
        if not os.path.samestat(now, os.fstat(self._read.fileno())):
            self._read.close()
            self._read = self.log.open("rb")
            self._copy()

    def _copy(self) -> None:
        with self.path.open("ab") as copy:
            while block := self._read.read(_BLOCK_BYTES):
                copy.write(block)

    def close(self, secrets: set[str]) -> None:
        """Copy the last new lines, and remove secrets from the copy.

        Args:
            secrets: The texts to remove.

        Raises:
            OSError: The log cannot be read, or the copy cannot be written.
        """
        self.follow()
        self._read.close()
        if self.path != self.log:
            redact_file(self.path, secrets)
