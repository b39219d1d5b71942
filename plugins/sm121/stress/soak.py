"""Load for hours: rounds of mixed load with the same checks, and a report that rolls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sm121.core.errors import UsageError

#: State of a soak that has not ended.
GOING_ON = "going on"
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")


def parse_duration(text: str) -> float:
    """Seconds of ``30s``, ``10m``, ``2h``.

    Raises:
        UsageError: it is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--soak {text}: expected a duration, as in --soak 30s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2]]


@dataclass
class Round:
    """One round of a soak."""

    number: int
    at_s: float
    requests: int
    tokens: int
    seconds: float
    faults: list[str]


@dataclass
class Soak:
    """A soak and its report.

    Args:
        duration_s: no round begins after it.
        play: one round; gives what it was.
        write: keeps the report, after each round.
    """

    duration_s: float
    play: Callable[[int], Round]
    write: Callable[[dict[str, Any]], None]
    show: Callable[[str], None] = lambda _line: None
    rounds: list[Round] = field(default_factory=list)
    requests: int = 0
    faults: list[str] = field(default_factory=list)
    ended_by: str = "not ended"
    _keep: int = 500

    def run(self) -> None:
        """Play rounds until the time is over or something is wrong; what ends it is written, also
        when that is Ctrl-C."""
        started = time.monotonic()
        shown = -60.0
        self.ended_by = "a fault"
        try:
            while (elapsed := time.monotonic() - started) < self.duration_s and not self.faults:
                played = self.play(len(self.rounds) + 1)
                self.requests += played.requests
                self.faults += played.faults
                self.rounds.append(played)
                if elapsed - shown >= 60.0:
                    shown = elapsed
                    self.show(
                        f"{elapsed:.0f} of {self.duration_s:.0f} s, {self.requests} requests, "
                        f"{played.tokens / max(played.seconds, 1e-9):.1f} tok/s, "
                        f"{len(self.faults)} faults"
                    )
                self.write(self.record(GOING_ON))
            self.ended_by = "a fault" if self.faults else "the end of its time"
        except KeyboardInterrupt:
            self.ended_by = "an interrupt"
            raise
        finally:
            self.write(self.record(self.ended_by))

    def record(self, state: str) -> dict[str, Any]:
        """For JSON; of very long soaks the last rounds, the one that failed among them."""
        return {
            "state": state,
            "duration_s": self.duration_s,
            "requests": self.requests,
            "rounds": len(self.rounds),
            "faults": self.faults,
            "last_rounds": [vars(played) for played in self.rounds[-self._keep :]],
        }
