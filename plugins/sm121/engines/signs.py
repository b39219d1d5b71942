"""`Signs`: values by which the suite detects that another process has replaced a server."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

#: The maximum difference between two readings of the same start time, in seconds. It allows for
#: adjustments of the clock.
CLOCK_SLACK_S = 2.0
_LONGEST_VALUE = 80


@dataclass(frozen=True)
class Word:
    """The name of a value that does not change as long as a server lives."""

    name: str
    #: The path whose answer contains the value; None if the value is in the answers of the model.
    page: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.page})" if self.page else f"{self.name} of its answers"


#: The field ``created`` of an answer. If it is the same in all answers, it is the time at which the
#: server started.
CREATED_OF_ANSWERS = Word("created", None)


@dataclass(frozen=True)
class ClockOffset:
    """Bounds for how far a server's clock is ahead of this machine's clock, in seconds."""

    least: float
    most: float


@dataclass(frozen=True)
class Signs:
    """The values that identify a server's process, read at one time.

    Unknown values are None or empty.
    """

    #: Pid and start time (ticks since boot) of each process that listens or holds the server's
    #: memory.
    processes: frozenset[tuple[int, int]] = frozenset()
    #: When the process started according to its own metrics, in seconds since 1970.
    started: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    #: The values that do not change as long as the server lives.
    words: dict[Word, str] = field(default_factory=dict)
    #: The offset of the server's clock, computed from the dates in its answers.
    clock: ClockOffset | None = None
    #: Paths that the server does not offer.
    withheld: frozenset[str] = frozenset()

    def is_same_process(self, other: "Signs") -> bool | None:
        """Return whether both readings are of the same process; None if that is unknown.

        Args:
            other: The signs of a server, read at the same time.
        """
        if self.started is not None and other.started is not None:
            return self.started == other.started
        if self.processes and other.processes:
            return bool(self.processes & other.processes)
        return None

    def after(self, earlier: "Signs") -> "Signs":
        """Return an earlier reading, updated with the processes, start and counters of this one.

        Args:
            earlier: The earlier reading. All of its `words` are kept.
        """
        return replace(
            earlier,
            processes=self.processes,
            started=earlier.started if self.started is None else self.started,
            counters={**earlier.counters, **self.counters},
        )

    def steady(self, later: "Signs") -> "Signs":
        """Return the signs of a later reading, but only those `words` that both readings have.

        Args:
            later: The later reading.
        """
        words = dict(self.words.items() & later.words.items())
        clock = None if CREATED_OF_ANSWERS in words else later.clock
        return replace(later, words=words, clock=clock)

    def changes(self, now: "Signs") -> Iterator[str]:
        """Yield each proof that another process, or another release, now answers.

        Args:
            now: A later reading of the signs.

        Yields:
            One sentence for each proof, with the values before and after.
        """
        if (self.started or self.counters) and "/metrics" in now.withheld - self.withheld:
            yield "/metrics was available before, and is missing now"
        yield from self._change_of_start(now)
        yield from self._change_of_processes(now)
        yield from self._changes_of_words(now)
        for name, count in self.counters.items():
            current = now.counters.get(name)
            if current is not None and current < count:
                kind = "counter " if ":" in name else ""
                yield f"its {kind}{name} fell from {count:g} to {current:g}"
        yield from self._change_of_clock(now)

    def _change_of_start(self, now: "Signs") -> Iterator[str]:
        if self.started is None or now.started is None:
            return
        if abs(now.started - self.started) > CLOCK_SLACK_S:
            before = time.strftime("%F %TZ", time.gmtime(self.started))
            after = time.strftime("%F %TZ", time.gmtime(now.started))
            yield f"its process started at {after}, but the earlier one at {before}"

    def _change_of_processes(self, now: "Signs") -> Iterator[str]:
        if self.processes and self.processes != now.processes:
            ended = _list_pids(self.processes - now.processes)
            came = _list_pids(now.processes - self.processes)
            yield (f"processes that listen or hold its memory: {ended} have ended, {came} are new")

    def _changes_of_words(self, now: "Signs") -> Iterator[str]:
        newly_withheld = now.withheld - self.withheld
        for word, value in self.words.items():
            before = value[:_LONGEST_VALUE]
            if word in now.words:
                if now.words[word] != value:
                    after = now.words[word][:_LONGEST_VALUE]
                    yield f"its {word} is {after}, and was {before} before"
            elif word.page in newly_withheld:
                yield f"its {word} was {before} before, and is missing now"

    def _change_of_clock(self, now: "Signs") -> Iterator[str]:
        if self.clock is None or now.clock is None:
            return
        latest = max(self.clock.least, now.clock.least)
        earliest = min(self.clock.most, now.clock.most)
        if latest - earliest > CLOCK_SLACK_S:
            yield (
                f"the times in its answers are {now.clock.least:.0f} s ahead of this machine's "
                f"clock, and were {self.clock.least:.0f} s ahead before"
            )


def _list_pids(processes: frozenset[tuple[int, int]]) -> str:
    return ", ".join(str(pid) for pid, _start in sorted(processes)) or "none"
