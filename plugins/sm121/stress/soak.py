"""Long loads: rounds of mixed load with the same checks, and a report after each round."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sm121.core.errors import UsageError

#: The state of the report of a soak that has not ended.
GOING_ON = "going on"
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
#: Number of last rounds that the report contains.
_ROUNDS_KEPT = 500
_SAY_EVERY_S = 60.0
_LONGEST_S = 30 * 86400.0


def parse_duration(text: str, option: str = "--soak") -> float:
    """Return the seconds of a duration.

    Args:
        text: The duration, such as 30s, 10m or 2h.
        option: The option that contains it, for the error.

    Raises:
        UsageError: The text is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(
            f"{option} {text[:40]}: expected a duration of at most 30d, as in {option} 30s, 10m or "
            "2h"
        )
    return seconds


@dataclass
class SoakRound:
    """One round of a soak."""

    number: int
    #: When the round began, in seconds since the sampling of the server began.
    at_s: float
    requests: int
    tokens: int
    seconds: float
    faults: list[str]


def run(
    duration_s: float,
    play: Callable[[int], SoakRound],
    write: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = lambda _line: None,
) -> None:
    """Play rounds until the time is over or a round has a fault.

    Args:
        duration_s: The duration of the soak, in seconds.
        play: Plays the round with the given number, counted from 1.
        write: Writes the report (JSON data), after each round and at the end, also after Ctrl-C.
        say: Shows the progress, once a minute.
    """
    rounds: list[SoakRound] = []
    requests = 0
    faults: list[str] = []

    def report(state: str) -> None:
        counts = {"duration_s": duration_s, "requests": requests, "rounds": len(rounds)}
        last = [asdict(played) for played in rounds[-_ROUNDS_KEPT:]]
        write({"state": state, **counts, "faults": faults, "last_rounds": last})

    started = time.monotonic()
    last_said_s = -_SAY_EVERY_S
    ended_by = "a fault"
    try:
        while (elapsed := time.monotonic() - started) < duration_s and not faults:
            played = play(len(rounds) + 1)
            rounds.append(played)
            requests += played.requests
            faults += played.faults
            if elapsed - last_said_s >= _SAY_EVERY_S:
                last_said_s = elapsed
                say(
                    f"{elapsed:.0f} of {duration_s:.0f} s, {requests} requests, "
                    f"{played.tokens / max(played.seconds, 1e-9):.1f} tok/s, {len(faults)} faults"
                )
            report(GOING_ON)
        if not faults:
            ended_by = "the end of its time"
    except KeyboardInterrupt:
        ended_by = "an interrupt"
        raise
    finally:
        report(ended_by)
