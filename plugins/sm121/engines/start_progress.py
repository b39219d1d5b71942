"""What is shown of a server that starts: one line when it starts quickly, more when it does not."""

import time
from collections.abc import Callable

from sm121.engines.starting import StartPhase

#: What takes longer is worth a line.
_LONG_S = 15.0


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
        #: Of the start that has not ended: its server, what it does, and when (by the clock) that
        #: began, a line was last shown, and the start began.
        self._name, self._phase = "", ""
        self._since = self._line_at = self._began = 0.0

    def __call__(self, name: str, progress: StartPhase) -> None:
        line, now = progress.text, self._clock()
        if progress.ready:
            self._name = ""
            self._show(name, line)
        elif name != self._name:
            self._name, self._phase = name, line
            self._since = self._line_at = self._began = now
            if self._begins:
                self._show(name, line)
        else:
            if now - self._line_at >= _LONG_S:
                took = now - self._since
                before = f"{self._phase} took {took:.0f} s, now " if took >= _LONG_S else ""
                self._show(name, f"{before}{line}, {now - self._began:.0f} s since the start")
                self._line_at = now
            if line != self._phase:
                self._phase, self._since = line, now
