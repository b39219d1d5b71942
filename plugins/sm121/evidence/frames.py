"""Find the lines of a log that belong to a Python stack trace.

A stack trace quotes source code, which may contain any message, so its lines must not be searched
for messages. An indented line outside a stack trace is the continuation of a message, for example
of a compiler's log.
"""

from enum import Enum, auto

from sm121.evidence import log_message
from sm121.evidence.log_message import LoggingWorker, LogLine

#: The maximum number of processes whose stack traces are followed.
_MOST_PROCESSES = 256

#: A process, identified by its container, its name and its worker, if any.
_Process = tuple[str, str, LoggingWorker | None]


class Place(Enum):
    """The place of a line in the log of its process."""

    TEXT = auto()
    """A line outside a stack trace."""
    STACK = auto()
    """The first line of a stack trace, or one of its frames."""
    UNKNOWN = auto()
    """An indented line before any other line of the process: the log may begin within a stack
    trace."""


class Frames:
    """Follows the stack traces that processes print, line by line."""

    def __init__(self) -> None:
        self._places: dict[_Process, Place] = {}

    def place_of(self, line: LogLine) -> Place:
        """Return the place of the next line of a log.

        Args:
            line: The line.
        """
        process = (line.container, line.process, line.worker)
        place = self._places.get(process, Place.UNKNOWN)
        if log_message.is_traceback_opening(line) or line.text.lstrip().startswith('File "'):
            place = Place.STACK
        elif not line.is_frame:
            place = Place.TEXT
        if process in self._places or len(self._places) < _MOST_PROCESSES:
            self._places[process] = place
        return place
