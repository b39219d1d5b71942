"""Appends the events of a run to ``run.jsonl``, and applies them to the verdict file."""

import os
import threading
import time
from pathlib import Path

from sm121.core import files
from sm121.run import events, fold
from sm121.run.events import Event, Stamped
from sm121.run.fold import Fold
from sm121.run.verdict_file import VerdictFile

#: After each of these events the file is synced to the disk, so that a machine failure loses none.
_SYNCED = (events.Decided, events.Died, events.Measured, events.Closed)


class EventLog:
    """The events of a run.

    Each event is written at once, so that no complete line is lost if this process is killed. The
    file is created with the first event and opened again for each event. This way the suite
    notices that somebody has removed the report directory.

    Args:
        file: The verdict file after the events so far.
        path: The ``run.jsonl``. None: write nothing, because the run is merged from parts that
            have their own file, or because it will be resumed.

    Attributes:
        fold: Applies each event to the verdict file.
        path: The ``run.jsonl``, or None.
    """

    def __init__(self, file: VerdictFile, path: Path | None = None) -> None:
        self.fold = Fold(file)
        self.path = path
        self._began = time.monotonic()
        #: The lines that are not written to the file yet. Without a path, all lines are kept here.
        self._pending = b""
        # A lock is needed, because the thread that samples the memory also records remarks.
        self._lock = threading.RLock()

    @classmethod
    def resume(cls, path: Path, stream: events.EventStream) -> "EventLog":
        """Continue the events of a run that was killed, after removing an incomplete last line.

        Args:
            path: The ``run.jsonl``.
            stream: Its events.

        Raises:
            OSError: The file cannot be written.
        """
        replayed = fold.replay(stream.events)
        os.truncate(path, stream.size)
        log = cls(replayed.file, path)
        log.fold = replayed
        log._began -= stream.events[-1].at_s
        return log

    def begin(self, path: Path) -> None:
        """Create ``run.jsonl``, write the events so far to it, and append all later events to it.

        Args:
            path: The ``run.jsonl``. An earlier file is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            files.write_text(self._pending.decode("ascii"), path)
            self._pending = b""
            self.path = path

    @property
    def age_s(self) -> float:
        """The seconds since the run began, without the time between a kill and ``--resume``."""
        return round(time.monotonic() - self._began, 3)

    def append(self, event: Event) -> None:
        """Apply an event to the verdict file, and append it to ``run.jsonl``.

        Args:
            event: The event. It is serialized and parsed before it is applied, so that later
                changes of the object have no effect.

        Raises:
            OSError: The file cannot be written. The next call writes this line first.
        """
        with self._lock:
            line = events.to_line(Stamped(self.age_s, event))
            self.fold.apply(events.from_line(line).event)
            self._pending += line.encode("ascii")
            if self.path is None:
                return
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            if isinstance(event, events.Opened):
                flags |= os.O_CREAT
            descriptor = os.open(self.path, flags, 0o644)
            try:
                while self._pending:
                    written = os.write(descriptor, self._pending)
                    self._pending = self._pending[written:]
                if isinstance(event, _SYNCED):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
