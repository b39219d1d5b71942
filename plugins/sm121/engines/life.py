"""Whether an engine lives.

Each engine has one `Life`, whether the suite started it or attached to it.

`sm121.run.servers.Servers` reads the state of a `Life` between tests, at the end of a test or of
the run, and after failures.
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
from sm121.evidence import remedies
from sm121.evidence.death import OF_ENGINES
from sm121.evidence.failure import Cause, classify

#: After an engine has ended, its API server ends within this many seconds.
DYING_S = 6.0
#: If one of its processes has ended, a server counts as alive only if it serves a token within this
#: many seconds.
_ANSWERS_WITHIN_S = 30.0
#: Seconds that the other nodes get to report their faults after rank 0 has ended.
_FAULT_SETTLES_S = 3.0


@dataclass(frozen=True)
class Alive:
    """The engine lives, and is the one that the suite started or attached to."""


@dataclass(frozen=True)
class Dead:
    """The engine ended, or another process took its place, and the suite did not cause it."""

    #: What happened, in one sentence without the cause.
    what: str
    cause: Cause
    #: The time of the detection (``time.monotonic``).
    when: float
    #: The engine's log; None if it is unknown.
    evidence: Path | None
    #: The evidence that the engine ended, for example a value before and after; empty if the cause
    #: already contains the evidence.
    detail: str = ""
    #: Whether another process, or another release, answers in place of the engine.
    replaced: bool = False


class ServerDied(ServerError):
    """A managed server ended, or its engine did, after it had been ready."""


class Life(Protocol):
    """The state of one engine."""

    #: Whether the engine's end needs no report, because it was already reported, or because the
    #: suite itself ended the engine.
    accounted: bool

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """Return whether the engine lives.

        Args:
            asked_within_s: No request is sent if the engine answered within this many seconds.
        """

    def answers(self) -> bool:
        """Return whether the engine answers a request now."""

    def account(self) -> None:
        """Record that the engine's end was reported, or that the suite caused it."""


class ManagedLife:
    """The life of a server that the suite has started.

    Args:
        managed: The server, after it has become ready.
    """

    def __init__(self, managed: ManagedServer) -> None:
        self.managed = managed
        self.accounted = False
        self._needed = managed.launch.pids_when_ready
        self._ends_judged: set[int] = set()
        self._healthy_at = time.monotonic()
        self._dead: Dead | None = None
        #: Whether the suite has already waited for the exit status of the dead engine.
        self._settled = False

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """Return whether the engine lives.

        The engine counts as dead if its main process ended, if /health reports an error, or if any
        process ended that it had when it became ready. A crashed process counts even if the server
        has replaced the process.

        Args:
            asked_within_s: /health is not requested if it answered within this many seconds.
        """
        if self._dead is None and not self.accounted:
            self._dead = self._find_death(asked_within_s)
        return self._dead or Alive()

    def account(self) -> None:
        """Record that the engine's end was reported, or that the suite caused it."""
        self.accounted = True

    def _find_death(self, asked_within_s: float) -> Dead | None:
        end = self._end(asked_within_s)
        fault = self.managed.fault(settle_s=0.0 if end is None else _FAULT_SETTLES_S)
        if fault is not None:
            return Dead(fault.what, fault.cause, time.monotonic(), fault.log)
        if end is None:
            return None
        cause = logged_cause(self.managed)
        return Dead(end, cause, time.monotonic(), self.managed.launch.log)

    def after_failure(self) -> Alive | Dead:
        """Return whether the engine lives, after a request has failed.

        If an engine dies, its API server ends some seconds later. This method waits for this end.
        """
        until(lambda: self.managed.launch.exit_status is not None, DYING_S)
        state = self.state()
        self._settled = isinstance(state, Dead)
        return state

    def ended_since(self, began: float, *, wait_s: float = 0.0) -> bool:
        """Return whether the engine ended since a given time, judged only by its processes.

        A server that hangs counts as alive.

        Args:
            began: The time (``time.monotonic``).
            wait_s: How long to wait for the end, in seconds. A client may get a reset connection or
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
        """Return whether the engine answers a request for one token.

        /health is not sufficient, because the web server may answer it although the engine is gone.

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
        """Return how the server ended, or None if it lives."""
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
            return None if served else f"the server generates no token within {within_s:g} s"
        with self.managed.endpoint.http(timeout_s=10.0) as http:
            try:
                answer = f"{http.get('/health').status_code}"
            except httpx.HTTPError as error:
                answer = type(error).__name__
        if answer == "200":
            return None
        # A dying server answers 503 or nothing shortly before it exits. Wait for the exit status,
        # which shows the cause better.
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
                return f"process {name} ({pid}) of the server was ended by {by}"
            if name.startswith(OF_ENGINES):
                return f"process {name} ({pid}) of the engine ended with status {status}"
        ended_pids = {pid for pid in self._needed if pid in ended or not psutil.pid_exists(pid)}
        new = ended_pids - self._ends_judged
        self._ends_judged |= ended_pids
        if new and not self.answers(_ANSWERS_WITHIN_S):
            listed = ", ".join(str(pid) for pid in sorted(new))
            return (
                f"processes {listed} of the server ended, and the server does not answer any more"
            )
        return None


def logged_cause(managed: ManagedServer) -> Cause:
    """Return the cause of a server's end, as its log shows it.

    Args:
        managed: The server.
    """
    logged = classify(managed.launch.log, managed.launch.exit_status)
    return remedies.for_engine(logged, managed.engine.name)


def _was_killed(entry: Mapping[str, Any], began: float) -> bool:
    """Return whether a process was ended by a signal after `began` that the suite did not send.

    SIGTERM does not count, because it is a request to end.
    """
    status = entry.get("status") or 0
    if entry.get("by_us") or status >= 0 or status == -signal.SIGTERM:
        return False
    ended_at: float = entry.get("monotonic_s", began)
    return ended_at >= began
