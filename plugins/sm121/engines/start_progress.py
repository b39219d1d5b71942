"""What is shown of a server that starts: one line when it starts quickly, more when it does not."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sm121.engines.starting import StartPhase

#: What takes longer is worth a line.
_LONG_S = 15.0


@dataclass
class _Start:
    """A start that has not ended, with times in seconds of the clock."""

    phase: str
    #: When the phase began, a line was last shown, and the start began.
    since: float
    line_at: float
    began: float


class StartProgress:
    """Called with a configuration's name and what its server does, on each change. `show` gets at
    most one line in fifteen seconds, and one at the end; `begins`: also that it begins; `clock`:
    seconds."""

    def __init__(
        self,
        show: Callable[[str, str], None],
        *,
        begins: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self._begins = begins
        self._clock = clock
        self._starts: dict[str, _Start] = {}

    def __call__(self, name: str, progress: StartPhase) -> None:
        line, now = progress.text, self._clock()
        if progress.ready:
            self._starts.pop(name, None)
            self._show(name, line)
            return
        if name not in self._starts:
            self._starts[name] = _Start(line, now, now, now)
            if self._begins:
                self._show(name, line)
            return
        start = self._starts[name]
        if now - start.line_at >= _LONG_S:
            took = now - start.since
            before = f"{start.phase} took {took:.0f} s, now " if took >= _LONG_S else ""
            self._show(name, f"{before}{line}, {now - start.began:.0f} s since the start")
            start.line_at = now
        if line != start.phase:
            start.phase, start.since = line, now
