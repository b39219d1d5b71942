"""The checks of a server after its loads: throughput, memory, no leftover requests."""

import time
from collections.abc import Callable, Sequence

import psutil

from sm121.core import architecture
from sm121.core.server import Server
from sm121.core.verdict import Inconclusive, NotRun, Verdict
from sm121.machine.timeline import Timeline
from sm121.measure import counters, growth
from sm121.measure.growth import Growth
from sm121.run import unknown_memory
from sm121.run.run import Run
from sm121.stress import aftermath, memory
from sm121.stress.aftermath import ThroughputReading
from sm121.stress.checks import Fault, UnderLoad

#: Maximum number of repetitions of the load if the memory's samples are inconclusive.
_MEMORY_ROUNDS = 3
_MEMORY_WITHIN_S = 180.0
#: The fraction of the CPU that other processes may use, if the profile has no limit.
_MAX_OTHER_LOAD = 0.25
#: Number of attempts to read /metrics before it counts as gone.
_METRICS_READINGS = 3


class Afterwards:
    """Checks one server after its loads.

    Args:
        run: The run.
        server: The server.
        timeline: Samples the memory during the loads.
        before: The throughput before any load.
        read_throughput: Measures the throughput now.
        repeat_load: Sends the sustained load once more.
    """

    def __init__(
        self,
        run: Run,
        server: Server,
        timeline: Timeline,
        before: ThroughputReading,
        *,
        read_throughput: Callable[[], ThroughputReading],
        repeat_load: Callable[[], object],
    ) -> None:
        self._run = run
        self._server = server
        self._timeline = timeline
        self._before = before
        self._read_throughput = read_throughput
        self._repeat_load = repeat_load
        self._growths: list[Growth] = []
        #: The index of the first sample that is used to judge the memory.
        self._steady_from: int | None = None

    def begin_steady_part(self) -> None:
        """Mark the begin of the load whose samples are used to judge the memory."""
        self._steady_from = len(self._timeline.samples)

    def check_throughput(self) -> None:
        """Check that the server is as fast as before all loads, within the profile's bound.

        Raises:
            UnderLoad: The server is slower.
            Inconclusive: The server is slower, but other processes used the CPU.
            NotRun: The answers are not streamed.
        """
        profile = self._run.profile
        line = aftermath.compare_throughput(
            self._before,
            self._read_throughput,
            allowed=profile.stress.throughput_drop.value,
            on_cpu=self._is_on_cpu(),
            max_other_load=profile.box.max_other_load if profile.box else _MAX_OTHER_LOAD,
        )
        self._say(line)

    def check_idle(self) -> None:
        """Check that the server has no leftover request, KV block or zombie process.

        Raises:
            UnderLoad: There is one, or /metrics has vanished.
        """
        checked = [
            aftermath.not_idle(self._server.endpoint),
            aftermath.zombies(self._run.servers.processes),
        ]
        had_counters = counters.parse_counters(self._timeline.metrics or "").values
        if had_counters and not self._has_counters():
            checked.append(Fault("not_idle", "expected /metrics as before the load, got none"))
        faults = [fault for fault in checked if fault is not None]
        if faults:
            raise UnderLoad("after the load", faults, 0)

    def _has_counters(self) -> bool:
        endpoint = self._server.endpoint
        return any(counters.fetch(endpoint) is not None for _ in range(_METRICS_READINGS))

    def check_memory(self, *, more: bool = True) -> None:
        """Check that memory and handles do not grow with the requests of the steady part.

        Args:
            more: Whether to repeat the load as long as the samples are inconclusive.

        Raises:
            UnderLoad: Memory or handles grow.
            Inconclusive: There is no sample, or the samples are inconclusive.
            NotRun: There was no steady part, or the memory is unknown.
        """
        if self._steady_from is None:
            raise NotRun("the sustained load, whose memory is checked, did not run")
        self._growths = self._judge_memory()
        if more:
            self._repeat_until_decided()
        self.keep_memory()
        for item in self._growths:
            self._say(f"{item.verdict.value}: {item.reason}")
        if self._has_no_sample():
            raise Inconclusive("no sample of the server's memory was taken during the load")
        if not self._growths:
            raise NotRun(unknown_memory.reason(self._run))
        faults: list[Fault] = []
        for item in self._growths:
            if item.verdict is Verdict.FAIL:
                kind = "handle_growth" if item.quantity == memory.HANDLES else "memory_growth"
                faults.append(Fault(kind, item.reason))
        if faults:
            raise UnderLoad("memory", faults, 0)
        undecided = _undecided(self._growths)
        if undecided:
            raise Inconclusive("; ".join(item.reason for item in undecided))

    def _repeat_until_decided(self) -> None:
        began = time.monotonic()
        rounds = 0
        while self._has_no_sample() or _undecided(self._growths):
            # Count only rounds with enough samples, because a fast server ends a load within a few
            # samples.
            if all(item.samples >= growth.LEAST_EVEN_SAMPLES for item in self._growths):
                rounds += 1
            if rounds >= _MEMORY_ROUNDS or time.monotonic() - began > _MEMORY_WITHIN_S:
                return
            self._repeat_load()
            self._growths = self._judge_memory()

    def _judge_memory(self) -> list[Growth]:
        samples = self._timeline.since(self._steady_from or 0)
        if not samples:
            return []
        machine = None if self._is_on_cpu() else psutil.virtual_memory().total
        sizes = self._run.profile.stress
        return memory.judged(samples, sizes, machine_bytes=machine)

    def _has_no_sample(self) -> bool:
        """Return whether the load ended before a sample was taken, or sampling has ended."""
        return len(self._timeline.samples) <= (self._steady_from or 0)

    def has_memory_samples(self) -> bool:
        """Return whether there are enough samples of the steady part to judge the memory."""
        return len(self._timeline.since(self._steady_from or 0)) >= 4 * growth.LEAST_SAMPLES

    def keep_memory(self) -> None:
        """Write the samples of the memory so far, and its growth.

        Raises:
            OSError: The file cannot be written.
        """
        memory.write_memory(self._run.record, self._timeline, self._growths)

    def _is_on_cpu(self) -> bool:
        return self._run.target.arch == architecture.CPU

    def _say(self, line: str) -> None:
        self._run.record.say("stress", line)


def _undecided(growths: Sequence[Growth]) -> list[Growth]:
    return [item for item in growths if item.verdict is Verdict.INCONCLUSIVE]
