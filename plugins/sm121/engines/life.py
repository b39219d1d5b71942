"""Whether an engine lives: one object knows it of each engine, the suite's own or an attached one.

`sm121.run.servers.Servers` asks: between tests, at the end of a test or of the run, after failures.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from sm121.core.waiting import until
from sm121.engines.endings import FATAL
from sm121.engines.managed import ManagedServer
from sm121.engines.nodes import bounds
from sm121.engines.server_errors import ServerError
from sm121.engines.starting import ask_for_a_token
from sm121.evidence.death import OF_ENGINES
from sm121.evidence.failure import Cause, classify

#: Seconds within which an API server ends after its engine did.
DYING_S = 6.0
#: Seconds within which a server serves a token after one of its processes has ended.
_ANSWERS_WITHIN_S = 30.0
#: When rank 0 has ended, other nodes get this time to report their faults.
_FAULT_SETTLES_S = 3.0


@dataclass(frozen=True)
class Alive:
    """It is the engine that was started, or attached to, and it answers."""


@dataclass(frozen=True)
class Dead:
    """It ended, or another process took its place, though nobody asked for that."""

    #: The event, in one sentence without the cause.
    what: str
    cause: Cause
    #: When it was noticed (``time.monotonic``).
    when: float
    #: Its log; None if that is not known.
    evidence: Path | None
    #: The proof, with the values before and after; empty if the cause says it.
    detail: str = ""
    #: Another process, or another release, answers in its place.
    replaced: bool = False


class ServerDied(ServerError):
    """A managed server ended, or its engine did, after it had been ready."""


class Life(Protocol):
    """Knows whether one engine lives."""

    #: The report has the reason of its end, or the suite itself ended it: it is not reported again.
    accounted: bool

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """Return whether it lives.

        Args:
            asked_within_s: The engine is not asked again if it answered so many seconds ago.
        """

    def answers(self) -> bool:
        """Return whether it answers now, however long it has lived."""


class ManagedLife:
    """The life of a server that the suite has started.

    Args:
        managed: The server, ready, with all processes that it needs.
    """

    def __init__(self, managed: ManagedServer) -> None:
        self.managed = managed
        self.accounted = False
        self._needed = managed.launch.pids_when_ready
        self._ends_judged: set[int] = set()
        self._healthy_at = time.monotonic()
        self._dead: Dead | None = None
        #: The exit status of the dead one was waited for.
        self._settled = False

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """Return whether it lives.

        It is dead if its main process ended, /health says so, or a process ended that it had when
        it was ready; a crashed one counts also if another has taken its place.

        Args:
            asked_within_s: /health is not asked again if it answered so many seconds ago.
        """
        if self._dead is None and not self.accounted:
            self._dead = self._find_death(asked_within_s)
        return self._dead or Alive()

    def _find_death(self, asked_within_s: float) -> Dead | None:
        end = self._end(asked_within_s)
        fault = self.managed.fault(settle_s=0.0 if end is None else _FAULT_SETTLES_S)
        if fault is not None:
            return Dead(fault.what, fault.cause, time.monotonic(), fault.log)
        if end is None:
            return None
        log = self.managed.launch.log
        return Dead(end, classify(log, self.managed.launch.exit_status), time.monotonic(), log)

    def after_failure(self) -> Alive | Dead:
        """Return whether it lives, after a request has failed.

        An engine ends first, and the server that answers for it some seconds later. This waits for
        that.
        """
        until(lambda: self.managed.launch.exit_status is not None, DYING_S)
        state = self.state()
        self._settled = isinstance(state, Dead)
        return state

    def ended_since(self, began: float, *, wait_s: float = 0.0) -> bool:
        """Return whether it ended since a moment, by its processes alone.

        A server that hangs has not ended.

        Args:
            began: The moment (``time.monotonic``).
            wait_s: How long to wait for its end, in seconds. Clients may get a reset connection or
                a status 500 some seconds before the process ends.
        """
        if self.managed.launch.was_stopped:
            return False
        until(lambda: self.managed.launch.exit_status is not None, 0.0 if self._settled else wait_s)
        if self.managed.launch.exit_status is not None:
            return True
        killed = any(_was_killed(entry, began) for entry in self.managed.launch.exits())
        return killed and not self.answers()

    def answers(self, within_s: float = 5.0) -> bool:
        """Return whether it serves a token.

        /health may be answered by a web server without an engine.

        Args:
            within_s: The timeout of the request, in seconds.
        """
        endpoint = self.managed.endpoint
        if endpoint is None:
            return False
        with endpoint.http() as http:
            try:
                return ask_for_a_token(http, endpoint.served_name, within_s=within_s) == 200
            except httpx.HTTPError:
                return False

    def _end(self, asked_within_s: float) -> str | None:
        """Return how it ended, or None if it lives."""
        status = self.managed.launch.exit_status
        if status is not None:
            return f"the server ended with status {status} while serving"
        if time.monotonic() - self._healthy_at >= asked_within_s:
            problem = self._unhealthy()
            if problem is not None:
                return problem
            self._healthy_at = time.monotonic()
        return self._lost_process()

    def _unhealthy(self) -> str | None:
        if self.managed.endpoint is None:
            return "the server is not running"
        if self.managed.configuration.span is not None:
            within_s = bounds().token_within_s.value
            served = self.answers(within_s)
            return None if served else f"the server serves no token within {within_s:g} s"
        with self.managed.endpoint.http(timeout_s=10.0) as http:
            try:
                answer = f"{http.get('/health').status_code}"
            except httpx.HTTPError as error:
                answer = type(error).__name__
        if answer == "200":
            return None
        # A dying server answers 503 or nothing shortly before it exits: its status says more.
        until(lambda: self.managed.launch.exit_status is not None, 1.0)
        exit_status = self.managed.launch.exit_status
        ended = (
            "" if exit_status is None else (f" and its process has ended with status {exit_status}")
        )
        return f"the server answers /health with {answer}{ended}"

    def _lost_process(self) -> str | None:
        ended = {entry["pid"]: entry for entry in self.managed.launch.exits()}
        for pid in self._needed & ended.keys():
            status = ended[pid]["status"]
            name = str(ended[pid]["name"])
            if status in FATAL:
                by = signal.Signals(-status).name
                return f"process {name} ({pid}) of the server ended by {by}"
            if name.startswith(OF_ENGINES):
                return f"process {name} ({pid}) of the engine ended with status {status}"
        ended_pids = {pid for pid in self._needed if pid in ended or not psutil.pid_exists(pid)}
        new = ended_pids - self._ends_judged
        self._ends_judged |= ended_pids
        if new and not self.answers(_ANSWERS_WITHIN_S):
            listed = ", ".join(str(pid) for pid in sorted(new))
            return (
                f"of the server's processes {listed} ended, and the server does not answer any more"
            )
        return None


def _was_killed(entry: Mapping[str, Any], began: float) -> bool:
    """Return whether a process was ended by a signal since a moment, and not by the suite.

    SIGTERM is a request to end, and no crash.
    """
    status = entry.get("status") or 0
    if entry.get("by_us") or status >= 0 or status == -signal.SIGTERM:
        return False
    ended_at: float = entry.get("monotonic_s", began)
    return ended_at >= began
