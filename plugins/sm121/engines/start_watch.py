"""Wait until a launched server is ready, within the time limits of a start."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sm121.core.server import Endpoint
from sm121.engines.launch import Launch
from sm121.engines.server_errors import (
    PortTaken,
    ServerError,
    ServerExited,
    ServerStalled,
    ServerTimedOut,
    StartError,
)
from sm121.engines.starting import Activity, ReadinessProbe, StartHooks, StartLimits, StartPhase
from sm121.evidence import failure, remedies, stacks
from sm121.evidence.signatures import startup_progress

_POLL_S = 0.1
#: Seconds between two readings of the files that are being compiled.
_CACHES_EVERY_S = 2.0
#: Seconds that the other nodes get to report their faults after rank 0 has ended.
_FAULT_SETTLES_S = 3.0
#: With at least this many running processes per processor, the load of the machine may have delayed
#: the start.
_BUSY = 3


@dataclass
class StartWatch:
    """Watches one launch while it starts."""

    launch: Launch
    #: The engine's name.
    engine: str
    limits: StartLimits
    hooks: StartHooks
    #: Returns the fault of another node of the server (`ManagedServer.fault`).
    fault: Callable[..., ServerError | None]
    _progress: str = field(init=False, default="not started")

    def wait_until_ready(self, endpoint: Endpoint, started: float) -> None:
        """Wait until the server has served a token.

        Args:
            endpoint: The address of the server.
            started: When the start began (``time.monotonic``).

        Raises:
            StartError: The server, or another node of it, has ended, or it takes too long.
        """
        deadline = started + self.limits.ready_s
        caches_at = started
        activity = Activity(self.launch.log, self.launch.engine_processes)
        probe = ReadinessProbe(endpoint)
        probe.start()
        try:
            while True:
                self._check()
                for line in activity.new_lines():
                    self._note(startup_progress(line, self.engine))
                self._note(probe.progress)
                if time.monotonic() >= caches_at:
                    caches_at = time.monotonic() + _CACHES_EVERY_S
                    building = self.launch.compilation.building()
                    if building is not None:
                        self._note(f"building kernels (JIT): {building}")
                if probe.ready and self.launch.listens():
                    return
                if time.monotonic() >= deadline:
                    deadline = self._later_deadline(started, deadline)
                idle_s = activity.idle_s()
                if idle_s >= self.limits.stalled_s:
                    message = f"the server wrote no log and used no CPU for {idle_s:.0f} s"
                    raise self._failed(ServerStalled, message)
                time.sleep(_POLL_S)
        finally:
            probe.cancelled.set()

    def _check(self) -> None:
        """Raise a StartError if the server, or another node of it, has ended."""
        exit_status = self.launch.exit_status
        fault = self.fault(settle_s=0.0 if exit_status is None else _FAULT_SETTLES_S)
        if fault is not None:
            raise fault
        if exit_status is None:
            return
        log = self.launch.log
        cause = remedies.for_engine(failure.classify(log, exit_status), self.engine)
        kind = PortTaken if cause.kind == "port" else ServerExited
        raise kind(
            f"the server ended with status {exit_status} during start-up "
            f"(last progress: {self._progress})",
            cause,
            log,
        )

    def _later_deadline(self, started: float, deadline: float) -> float:
        """Return the extended deadline of a start that has exceeded its time limit.

        The start gets the time limit of a warm start again, counted from the last compiled file, or
        from now while a compiler runs. In total, it gets at most the time limit of a cold start.

        Raises:
            ServerTimedOut: The server did not compile recently, or the time limit of a cold start
                is over.
        """
        latest = self.launch.compilation.latest()
        if latest is not None:
            since = time.monotonic() - (time.time() - latest)
            later = min(since + self.limits.ready_s, started + self.limits.cold_s)
            if later > time.monotonic():
                self.hooks.on_cold(later - deadline)
                return later
        message = f"the server was not ready within {time.monotonic() - started:.0f} s"
        if latest is not None:
            message += f", {time.time() - latest:.0f} s after the last file that it compiled"
        raise self._failed(ServerTimedOut, message + _other_load())

    def _failed(self, kind: type[StartError], what: str) -> StartError:
        """Read the stack traces of a start that hangs, and return its error."""
        tree = self.launch.look_at_tree()
        self.launch.stacks = stacks.take_or_why(tree, self.launch.supervision.stacks_folder)
        log = self.launch.log
        cause = remedies.for_engine(failure.classify(log), self.engine)
        return kind(f"{what}; last progress: {self._progress}", cause, log)

    def _note(self, progress: str | None) -> None:
        if progress is not None and progress != self._progress:
            self._progress = progress
            self.hooks.notify(StartPhase(progress))


def _other_load() -> str:
    """Return a remark if this machine was busy during the start, else an empty text."""
    waiting = os.getloadavg()[1]  # the load of the last five minutes
    processors = len(os.sched_getaffinity(0))
    if waiting < _BUSY * processors:
        return ""
    return (
        f" (this machine was busy: on average {waiting:.0f} processes for its {processors} "
        "processors in the last five minutes; stop other work, and start again)"
    )
