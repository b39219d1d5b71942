"""One attempt to start a server: its port, its log, its supervisor and its processes."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sm121.compilation.caches import COMPILERS, CompileCaches
from sm121.core.waiting import until
from sm121.engines import listeners, ports, process_tree
from sm121.engines.supervision import Supervision
from sm121.evidence import process_snapshot

_PORT_FREE_WITHIN_S = 5.0
#: Seconds that the parent of a Ray worker gets to reap the worker. The suite did not start this
#: parent.
_REAPED_WITHIN_S = 5.0


class StartCompilation:
    """The files that a server compiles while it starts.

    Args:
        caches: The caches into which the server compiles. Other servers may use the same caches.
        since: The start time of the server, in seconds since 1970.
        tree: Returns the processes of the server's tree.
    """

    def __init__(
        self, caches: CompileCaches, since: float, tree: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._caches = caches
        self._since = since
        self._tree = tree

    @property
    def _runs(self) -> bool:
        return any(process["name"] in COMPILERS for process in self._tree())

    def building(self) -> str | None:
        """Return a description of the running compilation; None if no compiler runs."""
        building = self._caches.building(self._since)
        if building is not None and self._runs:
            return building
        return None

    def latest(self) -> float | None:
        """Return when the last file was compiled.

        Returns:
            The time in seconds since 1970. While a compiler runs, this is the current time. None:
            nothing was compiled.
        """
        if self._runs:
            return time.time()
        return self._caches.latest(self._since)

    def compiled(self) -> tuple[str, ...]:
        """Return one line for each cache with new kernels; empty if the caches were warm."""
        return tuple(self._caches.compiled(self._since))


class Launch:
    """The processes of one attempt to start a server, and their log and exit statuses.

    Each attempt has its own log, so that the cause of a failure is read from one attempt alone.

    Args:
        log: The file of the output, which does not exist yet.
        mark: The value of `process_tree.SERVER_ID` in the environment of each process.
        port: The port on which the server will listen; 0 if it serves no requests.
    """

    def __init__(self, log: Path, mark: str, port: int = 0) -> None:
        self.log = log
        self.port = port
        self.supervision = Supervision(log)
        #: When the process was started (``time.monotonic``); 0 before that.
        self.at = 0.0
        #: The process tree at its last reading.
        self.last_tree: list[dict[str, Any]] = []
        #: If the start hung, the stack traces of the processes, or the reason why there are none;
        #: otherwise empty.
        self.stacks = ""
        #: The processes of the tree when the server was ready.
        self.pids_when_ready: frozenset[int] = frozenset()
        self._mark = mark
        #: The files that the server compiles while it starts; set by `start`.
        self.compilation: StartCompilation
        #: Every process that was ever found in the tree.
        self._by_pid: dict[int, psutil.Process] = {}
        #: Whether a process of the launched tree has listened on the port. If not, another process
        #: may have taken the port.
        self._has_listened = False
        #: When `kill` was called (``time.monotonic``); None before.
        self._killed_at: float | None = None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float
    ) -> None:
        """Start the supervisor, which starts the server.

        Args:
            command: The command of the server.
            environment: Environment variables to add to those of this process.
            grace_s: Seconds that the server gets between SIGTERM and SIGKILL.
        """
        self.at = time.monotonic()
        caches = CompileCaches.of(environment)
        self.compilation = StartCompilation(caches, time.time(), self.look_at_tree)
        marked = {**environment, process_tree.SERVER_ID: self._mark}
        self.supervision.launch(command, marked, grace_s=grace_s)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the engine's main process (negative: a signal); None while it runs."""
        return self.supervision.exit_status

    @property
    def was_stopped(self) -> bool:
        """Whether a stop of the server was requested by the suite, or because the suite ended."""
        return self.supervision.was_stopped

    def exits(self) -> list[dict[str, Any]]:
        """Return how processes of the tree ended so far.

        Returns:
            One entry for each process that ended, with these fields. ``pid``; ``name``; ``status``:
            the exit status (negative: a signal; None if only the process's parent knows it);
            ``monotonic_s``: when the end was noticed; ``by_us``: whether the suite's own stop ended
            the process.
        """
        entries = self.supervision.exits()
        for entry in entries:
            if self._killed_at is not None and entry["monotonic_s"] >= self._killed_at:
                entry["by_us"] = True
        return entries

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the server's tree in the order of their pids.

        The supervisor is the first one.
        """
        members = process_tree.tree(
            process_tree.SERVER_ID,
            self._mark,
            root=self.supervision.pid,
            session=self.supervision.session,
        )
        return sorted(members, key=lambda process: process.pid)

    def engine_processes(self) -> list[psutil.Process]:
        """Return the processes of the tree without the supervisor.

        The supervisor uses about 1 % of a slow core, which must not count as activity of the
        server.
        """
        supervisor = self.supervision.pid
        return [process for process in self.processes() if process.pid != supervisor]

    def look_at_tree(self) -> list[dict[str, Any]]:
        """Return the current tree, or the last known one if no process of it lives."""
        now = process_snapshot.snapshot(self.processes())
        if now:
            self.last_tree = now
        return self.last_tree

    def remember_tree(self) -> None:
        """Add the current processes to the known ones."""
        for process in self.processes():
            self._by_pid[process.pid] = process

    def note_ready(self) -> None:
        """Store the current processes as those that the ready server consists of."""
        self.remember_tree()
        self.pids_when_ready = frozenset(self._by_pid)

    @property
    def known(self) -> list[psutil.Process]:
        """Every process that `remember_tree` has found."""
        return list(self._by_pid.values())

    @property
    def known_pids(self) -> set[int]:
        """The pids of every process that was ever found in the tree."""
        pids = {*self._by_pid}
        for entry in (*self.last_tree, *self.exits()):
            pids.add(entry["pid"])
        return pids

    def listens(self) -> bool:
        """Return whether a process of the tree listens on the port."""
        listening = {*listeners.listeners(ports.LOOPBACK, self.port)}
        if not listening.isdisjoint(self.processes()):
            self._has_listened = True
            return True
        return False

    def kill(self) -> None:
        """Send SIGKILL to the engine's processes. The supervisor is not killed, and cleans up."""
        self._killed_at = time.monotonic()
        process_tree.send(self.engine_processes(), signal.SIGKILL)

    def end_what_is_left(self, session: int | None) -> list[process_tree.Survivor]:
        """End processes that outlived the supervisor, and return those that still live.

        Args:
            session: The session id of the server, read before the supervisor ended.
        """

        def remaining() -> list[psutil.Process]:
            return process_tree.tree(process_tree.SERVER_ID, self._mark, session=session)

        def unreaped() -> list[psutil.Process]:
            return [process for process in self._by_pid.values() if process.is_running()]

        process_tree.end(remaining, polite_s=1.0)
        self.supervision.remove_scratch()
        # If the supervisor was killed, its orphans have become children of this process.
        process_tree.reap(self._by_pid)
        # The environment of a zombie cannot be read, so a zombie shows no marker.
        until(lambda: not unreaped(), _REAPED_WITHIN_S)
        return process_tree.describe([*remaining(), *unreaped()])

    def port_is_free(self) -> bool:
        """Return whether the port becomes free within some seconds."""
        if not self._has_listened:
            return True
        return until(lambda: ports.is_free(self.port), _PORT_FREE_WITHIN_S)
