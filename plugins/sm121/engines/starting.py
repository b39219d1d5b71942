"""Parts of starting a server: its activity, the readiness probe and the progress lines."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from sm121.core.server import Endpoint

_HEALTH_EVERY_S = 0.5
_ACTIVITY_EVERY_S = 2.0
#: A server that uses more than this share of a core counts as working. The share is not 0, because
#: even an idle Python process wakes up now and then.
_WORKING_SHARE = 0.01
#: If a phase takes longer than this many seconds, a progress line is printed.
_LONG_S = 15.0


@dataclass(frozen=True)
class StartPhase:
    """One phase of the start of a server."""

    text: str
    #: Whether this is the last phase of a start, in which the server serves.
    ready: bool = False


@dataclass(frozen=True)
class StartLimits:
    """The time limits of a server's start, in seconds."""

    ready_s: float
    stalled_s: float
    stop_s: float
    #: The time limit of a start that compiles; at least `ready_s`.
    cold_s: float = 0.0


@dataclass(frozen=True)
class StartHooks:
    """The callbacks of a server's start."""

    #: Called with each new phase, and with each problem.
    notify: Callable[[StartPhase], None] = lambda _progress: None
    #: Returns secrets to remove from the server's log, in addition to its API key.
    other_secrets: Callable[[], Collection[str]] = tuple
    #: Called if the start gets more time because it compiles, with the additional seconds.
    on_cold: Callable[[float], None] = lambda _seconds: None


def ask_for_a_token(http: httpx.Client, served_name: str, *, within_s: float) -> int:
    """Request a token, and return the status of the answer.

    Args:
        http: A client of the server.
        served_name: The name of the model.
        within_s: The timeout of the request, in seconds.

    Raises:
        httpx.HTTPError: No answer came in time.
    """
    request = {"model": served_name, "prompt": "Hello", "max_tokens": 1}
    return http.post("/v1/completions", json=request, timeout=within_s).status_code


class Activity:
    """Reads a server's new log lines, and how long it has neither logged nor used the processor.

    Args:
        log: The log of the server.
        processes: Returns the processes of the server.
    """

    def __init__(self, log: Path, processes: Callable[[], list[psutil.Process]]) -> None:
        self._log = log
        self._processes = processes
        self._position = log.stat().st_size if log.exists() else 0
        self._rest = b""
        self._last = time.monotonic()
        self._cpu_s = 0.0
        self._next_look = 0.0

    def new_lines(self) -> list[str]:
        """Return the complete lines that were logged since the last call."""
        with self._log.open("rb") as stream:
            stream.seek(self._position)
            fresh = stream.read(1 << 20)
        if fresh:
            self._last = time.monotonic()
            self._position += len(fresh)
        # Progress bars end their lines with a carriage return instead of a line feed.
        *lines, self._rest = (self._rest + fresh).replace(b"\r", b"\n").split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def idle_s(self) -> float:
        """Return the seconds since the server last logged a line or used the processor."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _ACTIVITY_EVERY_S
            cpu_s = 0.0
            for process in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    cpu_s += times.user + times.system
            if cpu_s - self._cpu_s > _WORKING_SHARE * _ACTIVITY_EVERY_S:
                self._last = now
            self._cpu_s = cpu_s
        return now - self._last


class ReadinessProbe(threading.Thread):
    """A thread that requests /health and then a token. Either request may hang for a long time.

    /health shows that the web server runs; a token shows that the engine runs.

    Args:
        endpoint: The server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(name="sm121-readiness", daemon=True)
        self._http = endpoint.http(timeout_s=2.0)
        self._served_name = endpoint.served_name
        #: Set to end the thread. A request that is in progress ends with the server or the process.
        self.cancelled = threading.Event()
        self.progress: str | None = None
        self.ready = False

    def run(self) -> None:
        """Repeat the requests until a token was received, or `cancelled` is set."""
        with self._http as http:
            while not self.ready and not self.cancelled.wait(_HEALTH_EVERY_S):
                try:
                    if http.get("/health").status_code != 200:
                        continue
                    self.progress = "first token"
                    status = ask_for_a_token(http, self._served_name, within_s=3600.0)
                except httpx.HTTPError:  # the server does not listen yet, or was stopped meanwhile
                    continue
                self.ready = status == 200
                if not self.ready:
                    self.progress = f"first token refused with status {status}"


@dataclass
class StartProgress:
    """Prints the progress of a start: at most one line in 15 seconds, and one at the end.

    Call the object with a configuration's name and the phase of its server, on each change.
    """

    #: Prints a line; called with the configuration's name and the phase.
    show: Callable[[str, StartPhase], None]
    #: Whether to print a line at the beginning of a start, too.
    begins: bool = False
    #: Returns the current time in seconds.
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        #: The name of the server that is being started.
        self._name = ""
        #: The current phase of the start.
        self._phase = ""
        #: The time at which this phase began.
        self._since = 0.0
        #: The time at which the last line was printed.
        self._line_at = 0.0
        #: The time at which the start began.
        self._began = 0.0

    def __call__(self, name: str, progress: StartPhase) -> None:
        """Store the phase of a server, and print it if a line is due.

        Args:
            name: The name of the configuration.
            progress: The phase of its server.
        """
        now = self.clock()
        if progress.ready:
            self._name = ""
            self.show(name, progress)
        elif name != self._name:
            self._name = name
            self._phase = progress.text
            self._since = self._line_at = self._began = now
            if self.begins:
                self.show(name, progress)
        else:
            self._note_phase(progress.text, now)

    def _note_phase(self, phase: str, now: float) -> None:
        if now - self._line_at >= _LONG_S:
            took = now - self._since
            before = f"{self._phase} took {took:.0f} s, now " if took >= _LONG_S else ""
            text = f"{before}{phase}, {now - self._began:.0f} s since the start"
            self.show(self._name, StartPhase(text))
            self._line_at = now
        if phase != self._phase:
            self._phase = phase
            self._since = now
