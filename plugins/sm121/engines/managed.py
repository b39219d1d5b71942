"""A server that the suite starts, watches and stops, of which nothing is left afterwards."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from sm121.compilation.caches import COMPILERS, CompileCaches
from sm121.core import errors, redaction
from sm121.core.configuration import Rank, ServerConfiguration
from sm121.core.server import Endpoint, Server
from sm121.core.waiting import until
from sm121.engines import api_key, process_tree, protocol
from sm121.engines.memory import Memory, Returned
from sm121.engines.starting import Activity, ReadinessProbe, StartPhase
from sm121.evidence import failure, process_snapshot
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.signatures import startup_progress

_POLL_S = 0.1
#: How often it is looked what is being compiled.
_CACHES_EVERY_S = 2.0
_PORT_ATTEMPTS, _PORT_FREE_WITHIN_S, _REAPED_WITHIN_S = 3, 5.0, 5.0
#: 107 bytes of a socket's path, less "/sm121-xxxxxxxx/" and the UUID that vLLM appends.
_LONGEST_SCRATCH_BASE = 107 - 16 - 36
_FATAL_SIGNALS = ("SEGV", "ABRT", "BUS", "ILL", "FPE", "KILL", "SYS", "TRAP")
#: Exit status of a process that one of these ended: it did not end in order.
FATAL = frozenset(-signal.Signals[f"SIG{name}"] for name in _FATAL_SIGNALS)
#: How engines call their own processes: none of them ends while the server lives.
OF_ENGINES = ("VLLM::", "sglang::")


@dataclass(frozen=True)
class StartLimits:
    """How long a server may take, in seconds."""

    ready_s: float
    stalled_s: float
    stop_s: float
    #: For a start that is seen to compile. Less than `ready_s`: no more than that.
    cold_s: float = 0.0


@dataclass(frozen=True)
class StopReport:
    """What stopping a server left behind; everything empty or true when it was clean."""

    exit_status: int | None
    survivors: tuple[process_tree.Survivor, ...]
    port_free: bool
    memory: Returned
    seconds: float
    #: The log of that start, by name.
    log: str = ""
    #: The signal that it died of when it was asked to end; None where it ended in order.
    crash: str | None = None
    #: What the kernel of each other node has said since the start there, by the node's name.
    kernels: Mapping[str, KernelMessages] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """It ended in order, and no process, port or memory is left."""
        remains = self.survivors or self.memory.missing_bytes or not self.port_free
        return not remains and self.crash is None


class ServerError(errors.Sm121Error):
    """A managed server failed: `what` happened, without the cause; the `cause` by its log; the
    `log`."""

    def __init__(self, what: str, cause: failure.Cause, log: Path) -> None:
        self.what = what
        self.cause = cause
        self.log = log
        lines = "".join(f"\n    {line}" for line in cause.lines[-8:])
        remedy = f" Remedy: {cause.remedy}." if cause.remedy else ""
        super().__init__(
            f"{what}. Cause: {cause.kind}: {cause.summary} (ask: {cause.owner}).{remedy} "
            f"Log: {log}{lines}"
        )


class StartError(ServerError):
    """The server did not become ready."""


class ServerExited(StartError):
    """It ended during start-up, with whatever exit status (0 included)."""


class ServerTimedOut(StartError):
    """It was alive but not ready in time."""


class ServerStalled(StartError):
    """It neither logged nor used the processor for too long."""


class PortTaken(StartError):
    """Somebody else took the port before the server could bind it."""


@dataclass
class ManagedServer:
    """One server process tree. `configuration`: what to start; `engine`: how; `limits`: of its
    phases' times; `directory`: of its log and status; `run_id`: in the environment of each process;
    `notify`: called on each change of progress, and when something is amiss; `other_secrets`: what
    its log must not show, beside its key; `on_cold`: called with the seconds that a start which
    compiles gets beyond the limit; `added`: to its environment."""

    configuration: ServerConfiguration
    engine: protocol.Engine
    limits: StartLimits
    directory: Path
    run_id: str
    notify: Callable[[StartPhase], None] = lambda _progress: None
    other_secrets: Callable[[], Collection[str]] = tuple
    on_cold: Callable[[float], None] = lambda _seconds: None
    added: Mapping[str, str] = field(default_factory=dict)
    #: Its part of a server that spans machines; None: it is the whole.
    rank: Rank | None = None

    progress: str = field(init=False, default="not started")
    #: When its process was started (``time.monotonic``), and its tree as it was before the stop.
    launched: float = field(init=False, default=0.0)
    _launched_at: float = field(init=False, default=0.0)
    _caches: CompileCaches = field(init=False)
    last_tree: list[dict[str, Any]] = field(init=False, default_factory=list)
    log: Path = field(init=False)
    _api_key: str = field(init=False, repr=False)
    _server_id: str = field(init=False)
    _supervisor: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _output: IO[str] | None = field(init=False, default=None)
    #: While it runs and has been ready.
    endpoint: Endpoint | None = field(init=False, default=None)
    _port: int = field(init=False, default=0)
    _scratch: Path | None = field(init=False, default=None)
    _by_pid: dict[int, psutil.Process] = field(init=False, default_factory=dict)
    #: Whether our own tree was seen to listen. If not, another process may have the port.
    _has_listened: bool = field(init=False, default=False)
    #: What was left of a start that failed.
    stopped: StopReport | None = field(init=False, default=None)
    _memory_before: Memory | None = field(init=False, default=None)
    #: When `kill` was called (``time.monotonic``); None before.
    _killed_at: float | None = field(init=False, default=None)
    #: Of the processes of its tree when it was ready.
    pids_when_ready: frozenset[int] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        self._api_key = secrets.token_urlsafe(24)
        if self.engine.name == "vllm":
            environment = self.engine.environment(self.configuration, api_key="")
            self._api_key = api_key.kept(CompileCaches.of(environment).vllm)
        self._server_id = f"{self.run_id}/{uuid.uuid4().hex[:8]}"
        self.log = self.directory / f"server-{self.configuration.name}.log"
        self._number_log()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not appear in any report."""
        return (self._api_key,)

    def start(self) -> Server:
        """Start, and return when a token was served. Raises StartError: one of its subclasses;
        nothing is left running then."""
        self._prepare()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                return self._start_once()
            except PortTaken:
                port = self._port
                self.stopped = self.stop()
                if attempt == _PORT_ATTEMPTS:
                    raise
                self.notify(StartPhase(f"port {port} was taken by somebody else; trying another"))
            except BaseException:  # Ctrl-C too: nothing may be left behind
                self.stopped = self.stop()
                raise
        raise AssertionError("unreachable")

    def start_rank(self) -> None:
        """Start a part that serves nobody itself, and do not wait for it."""
        self._prepare()
        self._launch()

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """What has befallen another node of it. `settle_s`: how long to wait for what they tell."""
        del settle_s  # it has no other node
        return None

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Of each other node of it, by a name for files: its log, and what it told last."""
        return {}

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        process_tree.become_subreaper()
        self._memory_before = Memory.now()

    @property
    def running(self) -> bool:
        """Whether its main process lives."""
        return self.endpoint is not None and self.exit_status is None

    def kill(self) -> None:
        """SIGKILL to the engine's processes at once: for a machine that is about to wedge. The
        supervisor stays, and cleans up; `stop` is still to be called."""
        self._killed_at = time.monotonic()
        processes = self.processes()
        process_tree.send(
            (each for each in processes if each.pid != self._supervisor_pid), signal.SIGKILL
        )

    def stop(self) -> StopReport:
        """Stop politely, then firmly; safe to call at any time and again."""
        started = time.monotonic()
        self._remember_tree()
        self.look_at_tree()
        exit_status = already = self.exit_status
        at_work = Memory.now() if already is None and self._memory_before is not None else None
        session = self._session()
        if self._supervisor is not None:
            ended = _ended(self._supervisor, within_s=self.limits.stop_s + 20.0)
            if exit_status is None and ended not in (0, -signal.SIGTERM):
                exit_status = ended
            self._supervisor = None
        if self._output is not None:
            self._output.close()
            self._output = None
        self.endpoint = None

        def remaining() -> list[psutil.Process]:
            return process_tree.tree(process_tree.SERVER_ID, self._server_id, session=session)

        process_tree.end(remaining, polite_s=1.0)
        if self._scratch is not None:  # the supervisor has removed it, unless it was killed
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._redact(self.log)
        # Orphans of a supervisor that was killed have become our children.
        process_tree.reap(self._by_pid)
        # Zombies show no marker. The parent of a worker of Ray is not ours, and may be slow.
        until(lambda: not any(p.is_running() for p in self._by_pid.values()), _REAPED_WITHIN_S)
        survivors = process_tree.describe(
            [*remaining(), *(p for p in self._by_pid.values() if p.is_running())]
        )
        returned = self._memory_returned(at_work)
        self.progress = "stopped"
        # It is killed when it does not end in time, and by our own end.
        last = self.exit_status if already is None else None
        crashed = last in FATAL - {-signal.SIGKILL}
        return StopReport(
            exit_status=exit_status,
            survivors=tuple(survivors),
            port_free=not self._has_listened
            or until(lambda: process_tree.is_free(self._port), _PORT_FREE_WITHIN_S),
            memory=returned,
            seconds=time.monotonic() - started,
            log=self.log.name,
            crash=signal.Signals(-last).name if crashed and last is not None else None,
        )

    def _redact(self, log: Path | None) -> None:
        """Nobody writes to it any more; it is part of the report."""
        if log is None or not log.is_file():
            return
        environment = dict(self.configuration.environment)
        hidden = {self._api_key, *self.other_secrets(), *redaction.secrets_of(environment)}
        try:
            redaction.redact_file(log, hidden)
        except OSError as error:
            self.notify(StartPhase(f"{log.name} may show secrets: {error.strerror or error}"))

    def look_at_tree(self) -> list[dict[str, Any]]:
        """The tree as it is now. When no process of it lives, the tree as it was last seen."""
        if now := process_snapshot.snapshot(self.processes()):
            self.last_tree = now
        return self.last_tree

    @property
    def _compiles(self) -> bool:
        return any(process["name"] in COMPILERS for process in self.look_at_tree())

    @property
    def known_pids(self) -> set[int]:
        """Of every process that was seen in the tree."""
        return {*self._by_pid, *(entry["pid"] for entry in [*self.last_tree, *self.exits()])}

    def processes(self) -> list[psutil.Process]:
        """The living processes of the server's tree, the supervisor first."""
        root = self._supervisor_pid
        members = process_tree.tree(
            process_tree.SERVER_ID, self._server_id, root=root, session=self._session()
        )
        return sorted(members, key=lambda process: process.pid)

    @property
    def _supervisor_pid(self) -> int | None:
        return None if self._supervisor is None else self._supervisor.pid

    def _start_once(self) -> Server:
        started = time.monotonic()
        self._port, self._has_listened = process_tree.free_port(), False
        self._number_log()  # each attempt has its own: the cause is read from one attempt alone
        self._launch()
        endpoint = Endpoint(
            f"http://{process_tree.LOOPBACK}:{self._port}",
            self._api_key,
            self.configuration.served_name,
        )
        self._wait_until_ready(endpoint, started)
        self.endpoint = endpoint
        self._remember_tree()
        self.pids_when_ready = frozenset(self._by_pid)
        startup_s = time.monotonic() - started
        self.progress = "ready"
        self.notify(StartPhase(f"ready after {startup_s:.1f} s on port {self._port}", ready=True))
        return Server(
            endpoint=endpoint,
            managed=True,
            engine=self.engine.name,
            version=None,
            log=self.log,
            configuration=self.configuration,
            startup_s=startup_s,
            reader=self.engine.name,
            compiled=tuple(self._caches.compiled(self._launched_at)),
        )

    def _launch(self) -> None:
        self._status_file.unlink(missing_ok=True)
        self._output = self.log.open("w", encoding="utf-8", buffering=1)
        environment = dict(self.engine.environment(self.configuration, api_key=self._api_key))
        environment.update(self.added)
        self._caches = CompileCaches.of(environment)
        environment[process_tree.RUN_ID] = self.run_id
        environment[process_tree.SERVER_ID] = self._server_id
        environment[process_tree.OWNER] = process_tree.owner()
        self._scratch = Path(tempfile.mkdtemp(prefix="sm121-", dir=scratch_base()))
        environment["TMPDIR"] = str(self._scratch)
        if self.rank is None:
            of_engine = self.engine.command(self.configuration, port=self._port)
        else:
            assert isinstance(self.engine, protocol.Spanning)
            of_engine = self.engine.rank_command(
                self.configuration, port=self._port, rank=self.rank
            )
        command = [
            *(sys.executable, "-m", "sm121.engines.supervisor"),
            *("--status", str(self._status_file)),
            *("--scratch", str(self._scratch)),
            *("--grace", str(self.limits.stop_s), "--"),
            *of_engine,
        ]
        self.launched, self._launched_at = time.monotonic(), time.time()
        self._supervisor = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def _wait_until_ready(self, endpoint: Endpoint, started: float) -> None:
        deadline = started + self.limits.ready_s
        look_at = started
        watch = self._supervisor_pid  # it takes 1 % of a slow core, which is no work of the server
        activity = Activity(self.log, lambda: [p for p in self.processes() if p.pid != watch])
        probe = ReadinessProbe(endpoint)
        probe.start()
        try:
            while True:
                exit_status = self.exit_status
                if fault := self.fault(settle_s=0.0 if exit_status is None else 3.0):
                    raise fault
                if exit_status is not None:
                    cause = failure.classify(self.log, exit_status)
                    raise (PortTaken if cause.kind == "port" else ServerExited)(
                        f"the server ended with status {exit_status} during start-up "
                        f"(last progress: {self.progress})",
                        cause,
                        self.log,
                    )
                for line in activity.new_lines():
                    self._note_progress(startup_progress(line, self.engine.name))
                self._note_progress(probe.progress)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _CACHES_EVERY_S
                    building = self._caches.building(self._launched_at)
                    if building is not None and self._compiles:  # others have the same caches
                        self._note_progress(f"building kernels (JIT): {building}")
                if probe.ready:
                    listeners = process_tree.listeners(process_tree.LOOPBACK, self._port)
                    self._has_listened = not {*listeners}.isdisjoint(self.processes())
                    if self._has_listened:
                        return
                if time.monotonic() >= deadline:
                    deadline = self._later_deadline(started, deadline)
                idle_s = activity.idle_s()
                if idle_s >= self.limits.stalled_s:
                    message = f"the server neither logged nor used the processor for {idle_s:.0f} s"
                    raise self._failed(ServerStalled, message)
                time.sleep(_POLL_S)
        finally:
            probe.cancelled.set()

    def _later_deadline(self, started: float, deadline: float) -> float:
        """When a start that is over its time must be ready: as long after the last file that it
        compiled as a warm one may take, or from now where a compiler runs. Raises ServerTimedOut:
        it did not compile for so long, or has had all of a cold start's time."""
        latest = time.time() if self._compiles else self._caches.latest(self._launched_at)
        if latest is not None:
            since = time.monotonic() - (time.time() - latest)
            later = min(since + self.limits.ready_s, started + self.limits.cold_s)
            if later > time.monotonic():
                self.on_cold(later - deadline)
                return later
        message = f"the server was not ready within {time.monotonic() - started:.0f} s"
        if latest is not None:
            message += f", {time.time() - latest:.0f} s after the last file that it compiled"
        raise self._failed(ServerTimedOut, message)

    def _failed(self, kind: type[StartError], what: str) -> StartError:
        return kind(f"{what}; last progress: {self.progress}", failure.classify(self.log), self.log)

    def _note_progress(self, progress: str | None) -> None:
        if progress is not None and progress != self.progress:
            self.progress = progress
            self.notify(StartPhase(progress))

    def exits(self) -> list[dict[str, Any]]:
        """How processes of the tree ended so far: pid, name, status (negative: a signal; None:
        its parent has collected it and does not say), monotonic_s (when that was seen), and by_us:
        whether our own stop ended it."""
        entries: list[dict[str, Any]] = self._status().get("exits") or []
        for entry in entries:
            if self._killed_at is not None and entry["monotonic_s"] >= self._killed_at:
                entry["by_us"] = True
        return entries

    @property
    def exit_status(self) -> int | None:
        """Exit status of the engine's main process (negative: a signal); None while it runs."""
        written = self._status().get("exit_status")
        if written is not None:
            return int(written)
        # The supervisor ends only after it has written the status, unless it was killed.
        return None if self._supervisor is None else self._supervisor.poll()

    @property
    def was_stopped(self) -> bool:
        """Whether it was asked to end: by the suite, or by the suite's own end."""
        return self._status().get("stopped_by") is not None

    @property
    def _status_file(self) -> Path:
        return self.log.with_suffix(".status.json")

    def _status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self._status_file.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return status

    def _session(self) -> int | None:
        """Session id of the server: its main process begins one, and so gives it its pid."""
        pid = self._status().get("pid")
        return None if pid is None else int(pid)

    def _remember_tree(self) -> None:
        self._by_pid.update({process.pid: process for process in self.processes()})

    def _memory_returned(self, at_work: Memory | None, patience_s: float = 10.0) -> Returned:
        """Wait until all system and device memory came back, and return what did not in time."""
        before = self._memory_before
        if before is None:
            return Returned()
        deadline = time.monotonic() + patience_s
        while True:
            returned = before.returned(Memory.now(), at_work)
            if returned.is_whole or time.monotonic() >= deadline:
                return returned
            time.sleep(0.2)

    def _number_log(self) -> None:
        number = 1
        while self.log.exists():
            number += 1
            self.log = self.directory / f"server-{self.configuration.name}-{number}.log"


def _ended(supervisor: subprocess.Popen[bytes], *, within_s: float) -> int:
    with supervisor:  # closes its input
        supervisor.terminate()
        try:
            return supervisor.wait(within_s)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            return supervisor.wait()


def scratch_base() -> str:
    """Where temporary files go: vLLM puts unix sockets there, whose paths may have 107 bytes."""
    base = tempfile.gettempdir()
    return base if len(base) <= _LONGEST_SCRATCH_BASE else "/tmp"  # noqa: S108 - mkdtemp follows
