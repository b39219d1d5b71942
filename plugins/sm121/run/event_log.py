"""Appends the events of a run to its ``run.jsonl``, and folds them."""

import os
import threading
import time
from pathlib import Path

from sm121.run import events, fold
from sm121.run.events import Event, Stamped
from sm121.run.fold import Fold
from sm121.run.verdict_file import VerdictFile

#: After these the file is on the disk even if the machine fails.
_SYNCED = (events.Decided, events.Died, events.Measured, events.Closed)


class EventLog:
    """The events of a run.

    A line is written at once: the death of this process loses no whole line. The file is made for
    the first event, and opened for each: a report directory that was removed is noticed.

    Args:
        file: The verdict file that the events so far make.
        path: The ``run.jsonl``; None if nothing is written: the run is joined of parts, which have
            their own, or it will be resumed.

    Attributes:
        fold: The verdict file of the events so far.
        path: As given.
    """

    def __init__(self, file: VerdictFile, path: Path | None = None) -> None:
        self.fold = Fold(file)
        self.path = path
        self._began = time.monotonic()
        #: Bytes that could not be written yet.
        self._pending = b""
        # The sampler of the memory makes remarks, too.
        self._lock = threading.RLock()

    @classmethod
    def resume(cls, path: Path, stream: events.Stream) -> "EventLog":
        """Go on with the events of a run that was killed. A torn last line is removed.

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

    @property
    def age_s(self) -> float:
        """The seconds since the run began, without the time between a kill and its resumption."""
        return round(time.monotonic() - self._began, 3)

    def append(self, event: Event) -> None:
        """Fold an event, and append it to the file.

        Args:
            event: The event. The fold gets it as a reader of the file does, and shares nothing with
                it.

        Raises:
            OSError: The file cannot be written. The line is written before the next one.
        """
        with self._lock:
            line = events.to_line(Stamped(self.age_s, event))
            self.fold.apply(events.from_line(line).event)
            if self.path is None:
                return
            self._pending += line.encode("ascii")
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
