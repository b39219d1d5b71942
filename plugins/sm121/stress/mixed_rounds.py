"""The rounds of a soak, and its report."""

import json
import time
from collections.abc import Callable
from typing import Any

from sm121.client.jobs import Job, LoadResult
from sm121.core import files
from sm121.core.level_settings import StressSizes
from sm121.machine.timeline import Timeline
from sm121.run.run import Run
from sm121.stress import shapes, soak
from sm121.stress.checks import Fault, UnderLoad
from sm121.stress.crowd import Crowd
from sm121.stress.player import LoadPlayer

_SOAK_JSON = "soak.json"
#: Minimum interval between two writings of the memory's samples, in seconds.
_KEEP_MEMORY_EVERY_S = 30.0
#: Minimum interval until the next writing, as a multiple of the last one's duration.
_KEEP_MEMORY_COST = 50.0
#: Every round whose number is divisible by this is a crowd.
_CROWD_EVERY = 4


class MixedRounds:
    """Plays the rounds of a soak: loads of all shapes. Every fourth round is a crowd of all kinds.

    Args:
        player: Plays the loads.
        source: Makes the requests.
        crowd: Makes the crowds.
        crowd_size: Returns the number of requests of a crowd.
        sizes: The profile's sizes.
        timeline: Samples the memory during the rounds.

    Attributes:
        failure: The error of the first round with a fault; None if no round had one.
    """

    def __init__(
        self,
        player: LoadPlayer,
        source: shapes.Shapes,
        crowd: Crowd,
        crowd_size: Callable[[], int],
        sizes: StressSizes,
        timeline: Timeline,
    ) -> None:
        self._player = player
        self._sources = (source.short, source.mixed, source.unruly)
        self._crowd = crowd
        self._crowd_size = crowd_size
        self._sizes = sizes
        self._timeline = timeline
        self.failure: UnderLoad | None = None

    def play(self, number: int) -> soak.SoakRound:
        """Play a round.

        Args:
            number: The number of the round, from 1.
        """
        if number % _CROWD_EVERY == 0:
            jobs = self._crowd.jobs(self._crowd_size(), often=True)
            load = self._player.client.run(jobs)
            faults = self._crowd.faults(load) or self._player.kept()
        else:
            jobs = self._jobs(number)
            load = self._run(number, jobs)
            faults = self._player.faults(load, tails=False)
        if faults:
            error = UnderLoad(f"soak, round {number}", faults, len(jobs))
            self.failure = self.failure or error
            faults = error.faults
        return self._describe(number, jobs, load, faults)

    def _jobs(self, number: int) -> list[Job]:
        source = self._sources[number % len(self._sources)]
        return self._player.take(source, int(self._sizes.mixed_requests.value))

    def _run(self, number: int, jobs: list[Job]) -> LoadResult:
        kind = shapes.ARRIVALS[number % len(shapes.ARRIVALS)]
        per_s = self._sizes.arrivals_per_s.value
        arrivals = shapes.moments(kind, len(jobs), per_s, seed=number)
        return self._player.client.run(jobs, concurrency=self._player.streams, arrivals=arrivals)

    def _describe(
        self, number: int, jobs: list[Job], load: LoadResult, faults: list[Fault]
    ) -> soak.SoakRound:
        return soak.SoakRound(
            number=number,
            at_s=round(load.started - self._timeline.began, 1),
            requests=len(jobs),
            tokens=load.tokens,
            seconds=round(load.seconds, 3),
            faults=[str(fault) for fault in faults],
        )


class SoakReport:
    """Writes soak.json, and the samples of the memory beside it.

    Args:
        run: The run, into whose directory they are written.
        keep_memory: Writes the samples. Each call writes all of them, so a long soak calls it
            seldom.
    """

    def __init__(self, run: Run, keep_memory: Callable[[], None]) -> None:
        self._run = run
        self._keep_memory = keep_memory
        self._next_memory = 0.0

    def write(self, record: dict[str, Any]) -> None:
        """Write the report.

        Args:
            record: The state of the soak, for JSON.

        Raises:
            OSError: A file cannot be written.
        """
        began = time.monotonic()
        if record["state"] != soak.GOING_ON or began >= self._next_memory:
            self._keep_memory()
            now = time.monotonic()
            pause_s = max(_KEEP_MEMORY_EVERY_S, _KEEP_MEMORY_COST * (now - began))
            self._next_memory = now + pause_s
        text = json.dumps(record, indent=2) + "\n"
        files.write_text(self._run.record.redact(text), self._run.record.directory / _SOAK_JSON)
