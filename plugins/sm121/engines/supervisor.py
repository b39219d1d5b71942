"""The parent process of a server that the suite starts.

Arguments: ``--status FILE --scratch FOLDER --grace SECONDS -- COMMAND``.

The supervisor runs COMMAND in a session of its own, and writes to FILE how COMMAND ended. In these
cases it ends the whole process tree, with SIGTERM and then SIGKILL:

- when the command has ended,
- on SIGTERM,
- when its standard input ends. This is a pipe from the suite, so even a SIGKILL of the suite ends
  the server.

At the end, the supervisor removes FOLDER and the tree's shared memory. The supervisor is a child
subreaper (prctl(2)): it reaps orphans of the tree, also in a container whose process 1 reaps
nothing.
"""

import argparse
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from sm121.core import files, lock_file
from sm121.core.waiting import until
from sm121.engines.process_tree import OWNER, RUN_ID, become_subreaper, end, pid_of

_POLL_S = 0.05
_LOOK_EVERY_S = 2.0
#: For this many seconds, the processes are read more often than every `_LOOK_EVERY_S`, because a
#: small server may be ready, and lose a process, in a shorter time.
_YOUNG_S = 10.0
_LOOK_AT_THE_YOUNG_EVERY_S = 0.25
#: Seconds between SIGTERM and SIGKILL for processes that outlive the main process. The first number
#: is for a requested stop, the second for a main process that ended by itself.
_POLITE_S = 2.0
_POLITE_AFTER_END_S = 0.5
#: Seconds to wait after SIGKILL until the main process has ended.
_KILLED_WITHIN_S = 10.0
#: The program that adds a crash bundle to verdict.json. It is a process of its own, because this
#: layer does not know the format of verdict.json.
_ADDS_TO_THE_VERDICT = "sm121.run.suite_killed"
_ADDED_WITHIN_S = 60.0
_END_OF_THE_SUITE = "end of the suite"
#: The field ``exit_code`` of /proc/PID/stat (proc(5)), counted from the field after the state.
_EXIT_CODE = 48
#: Signals that are sent on purpose to end a process; other signals mean a crash.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only read, nothing is created there


@dataclass
class _Processes:
    """The processes that were found in the tree, and how they ended."""

    #: The name of each process that was found; the keys are pids.
    names: dict[int, str] = field(default_factory=dict)
    #: The pid of each watched process. The key is a descriptor that becomes readable when the
    #: process ends.
    watched: dict[int, int] = field(default_factory=dict)
    #: The exit status of each process that has ended (None if it is unknown); the keys are pids.
    _exits: dict[int, int | None] = field(default_factory=dict)
    #: When the end of each process was noticed (``time.monotonic``); the keys are pids.
    _ended_at: dict[int, float] = field(default_factory=dict)

    def watch(self, pid: int) -> None:
        """Watch for the end of a process, to record it before the process's parent reaps it."""
        if pid not in self._exits and pid not in self.watched.values():
            with contextlib.suppress(OSError):
                self.watched[os.pidfd_open(pid)] = pid

    def note_end(self, pid: int) -> None:
        """Record that a process has ended. It may not have been reaped yet."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2]
        except OSError:
            self.note_status(pid, None)  # the process's parent has already reaped it
        else:
            state, *others = fields.split()
            status = None
            if state == "Z":
                status = os.waitstatus_to_exitcode(int(others[_EXIT_CODE]))
            self.note_status(pid, status)

    def note_status(self, pid: int, status: int | None) -> None:
        """Record the exit status of a process that has ended; None if the status is unknown."""
        self._ended_at.setdefault(pid, time.monotonic())
        if status is not None or pid not in self._exits:
            self._exits[pid] = status

    def records(self, ending_s: float | None) -> list[dict[str, Any]]:
        """Return a record for each ended process, in the order of the pids.

        `ending_s` is the time when the supervisor began to end the tree.
        """
        records = []
        for pid, status in sorted(self._exits.items()):
            record = {
                "pid": pid,
                "name": self.names.get(pid),
                "status": status,
                "monotonic_s": round(self._ended_at[pid], 3),
                "by_us": self._is_by_us(pid, status, ending_s),
            }
            records.append(record)
        return records

    def _is_by_us(self, pid: int, status: int | None, ending_s: float | None) -> bool:
        """Return whether the supervisor's stop ended a process.

        An engine that gets a stop signal kills its own workers, so their ends count as caused by
        the stop. A crash during the stop does not.
        """
        crashed = status is not None and status < 0 and -status not in _ENDING
        return ending_s is not None and self._ended_at[pid] >= ending_s and not crashed


class _Supervisor:
    """Runs a server, records how its processes end, and ends those that remain."""

    def __init__(self, command: list[str], status: Path, scratch: Path, grace_s: float) -> None:
        self._command = command
        self._status = status
        self._scratch = scratch
        self._segments: set[Path] = set()
        self._grace_s = grace_s
        self._stop_requested: str | None = None
        self._main_pid = 0
        self._main_status: int | None = None
        self._began = time.monotonic()
        self._next_look = 0.0
        self._processes = _Processes()
        #: When the supervisor began to end the tree (``time.monotonic``); None before.
        self._ending_s: float | None = None
        self._could_not_write = False
        #: A lock on the folder, held until this process ends. The next run in this folder waits for
        #: it.
        self._lock: IO[str] | None = None

    def run(self) -> int:
        become_subreaper()
        with contextlib.suppress(OSError):  # if the folder is not writable, no other run can use it
            self._lock = lock_file.open_lock(self._status.parent / lock_file.SERVERS)
            lock_file.try_lock(self._lock, fcntl.LOCK_SH)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the suite handles Ctrl-C
        signal.signal(signal.SIGTERM, self._on_sigterm)
        server = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._main_pid = server.pid
        try:
            self._watch_over_it()
        finally:  # end all processes of the server after any error above
            self._ending_s = self._ending_s or time.monotonic()
            polite_s = _POLITE_S if self._stop_requested else _POLITE_AFTER_END_S
            killed = end(self._tree, polite_s=polite_s)
            self._reap()
            shutil.rmtree(self._scratch, ignore_errors=True)
            for segment in self._segments:
                with contextlib.suppress(OSError):
                    segment.unlink(missing_ok=True)
        if killed:
            _say(f"killed {killed} processes that were left")
        if self._stop_requested == _END_OF_THE_SUITE:
            self._redact_log()
        status = self._main_status or 0
        return status if status >= 0 else 128 - status

    def _watch_over_it(self) -> None:
        self._report()
        while self._main_status is None and self._stop_requested is None:
            self._note_segments()
            if self._input_ended():
                self._stop_requested = _END_OF_THE_SUITE
            self._reap()
        if self._stop_requested == _END_OF_THE_SUITE:
            self._tell_of_the_suite()
        if self._main_status is None:
            self._stop()
        self._report()

    def _stop(self) -> None:
        """Stop the main process first, so that it can end its own children in order."""
        _say(f"stopping the server: {self._stop_requested}")
        self._ending_s = time.monotonic()
        if not self._signal_main(signal.SIGTERM, self._grace_s):
            self._signal_main(signal.SIGKILL, _KILLED_WITHIN_S)

    def _signal_main(self, number: signal.Signals, patience_s: float) -> bool:
        """Send a signal to the main process, and return whether it has ended in time."""
        # The process has just ended, and `_reap` will reap it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._main_pid, number)
        return until(self._reap, patience_s, every_s=_POLL_S)

    def _tree(self) -> list[psutil.Process]:
        """Return all descendants. They include orphans, because this process is a subreaper."""
        self._reap()
        return psutil.Process().children(recursive=True)

    def _note_segments(self) -> None:
        """Store the names of the tree's shared memory, which are unreadable after its end."""
        now = time.monotonic()
        if now < self._next_look:
            return
        is_young = now - self._began < _YOUNG_S
        self._next_look = now + (_LOOK_AT_THE_YOUNG_EVERY_S if is_young else _LOOK_EVERY_S)
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes.names[process.pid] = process.name()
            self._processes.watch(process.pid)
            self._segments.update(_segments_of(process.pid))

    def _reap(self) -> bool:
        """Reap every child that has ended, and return whether the main process has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                return self._main_status is not None
            self._processes.note_status(pid, os.waitstatus_to_exitcode(status))
            if pid == self._main_pid:
                self._main_status = os.waitstatus_to_exitcode(status)

    def _tell_of_the_suite(self) -> None:
        from sm121.evidence import suite_death

        try:
            suite = pid_of(os.environ.get(OWNER, ""))
            bundle = suite_death.write_crash_bundle(
                self._status, self._processes.names, self._main_pid, suite=suite
            )
            subprocess.run(
                [sys.executable, "-m", _ADDS_TO_THE_VERDICT, self._status.parent, bundle],
                stdin=subprocess.DEVNULL,
                timeout=_ADDED_WITHIN_S,
                check=True,
            )
        except Exception as error:  # noqa: BLE001 - the server must be ended all the same
            _say(f"the crash could not be recorded: {type(error).__name__}: {error}")

    def _redact_log(self) -> None:
        from sm121.core import redaction

        try:
            log = Path("/proc/self/fd/1").resolve()
            if log.is_file():
                redaction.redact_file(log, redaction.secrets_of(os.environ))
        except OSError as error:
            _say(f"the log may contain secrets that could not be removed: {error}")

    def _input_ended(self) -> bool:
        watched = self._processes.watched
        ready, _, _ = select.select([0, *watched], [], [], _POLL_S)
        for descriptor in ready:
            if descriptor in watched:
                self._processes.note_end(watched.pop(descriptor))
                if self._main_status is None:
                    self._report()
                os.close(descriptor)
        return 0 in ready and os.read(0, 1024) == b""

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        self._stop_requested = self._stop_requested or "SIGTERM"

    def _report(self) -> None:
        """Write the status file."""
        content = {
            "started_by": os.environ.get(OWNER, ""),
            "run": os.environ.get(RUN_ID, ""),
            "pid": self._main_pid,
            "exit_status": self._main_status,
            "stopped_by": self._stop_requested,
            "exits": self._processes.records(self._ending_s),
        }
        try:
            files.write_text(json.dumps(content), self._status)
        except OSError as error:  # the disk is full; continue to watch and end the server
            if not self._could_not_write:
                _say(f"{self._status}: cannot be written: {error.strerror or error}")
            self._could_not_write = True


def _segments_of(pid: int) -> set[Path]:
    """Return the engine's shared memory segments that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return set()  # the process has ended, or its maps cannot be read
    segments = set()
    for line in maps.splitlines():
        name = line.partition(f"{_SHARED_MEMORY}/")[2]
        of_engine = name.startswith(("psm_", "sem.mp-")) or "-cpushm_" in name
        if of_engine and not name.endswith(" (deleted)"):
            segments.add(_SHARED_MEMORY / name)
    return segments


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"[sm121 supervisor] {line}\n".encode(errors="replace"))


def main(arguments: list[str]) -> int:
    """Run a server, and end it.

    Args:
        arguments: The command line, without the name of the program.

    Returns:
        The exit status of the server, or 128 plus the signal that ended the server.
    """
    parser = argparse.ArgumentParser(prog="sm121.engines.supervisor")
    parser.add_argument("--status", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    return _Supervisor(options.command, options.status, options.scratch, options.grace).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
