"""The suite's side of a server's supervisor.

The supervisor is a process of its own (`sm121.engines.supervisor`). It writes a status file beside
the server's log.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sm121.evidence import stacks

#: The maximum length of a base folder: 107 bytes for the path of a Unix socket, minus
#: "/sm121-xxxxxxxx/" and the UUID that vLLM appends.
_LONGEST_SCRATCH_BASE = 107 - 16 - 36


def status_file_of(log: Path) -> Path:
    """Return the status file of the supervisor of a server.

    Args:
        log: The log of the server.
    """
    return log.with_suffix(".status.json")


class Supervision:
    """One start of a server under a supervisor.

    Args:
        log: The file that gets the output of the server and of the supervisor.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        #: The status file of the supervisor.
        self.status_file = status_file_of(log)
        #: The folder of the server's temporary files; None before the start.
        self.scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[str] | None = None

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float
    ) -> None:
        """Start the supervisor, which starts the server.

        Args:
            command: The command of the server.
            environment: Environment variables to add to those of this process.
            grace_s: Seconds that the server gets between SIGTERM and SIGKILL.
        """
        self.status_file.unlink(missing_ok=True)
        self._output = self.log.open("w", encoding="utf-8", buffering=1)
        self.scratch = Path(tempfile.mkdtemp(prefix="sm121-", dir=scratch_base()))
        supervisor = [sys.executable, "-m", "sm121.engines.supervisor"]
        supervisor += ["--status", str(self.status_file)]
        supervisor += ["--scratch", str(self.scratch)]
        supervisor += ["--grace", str(grace_s)]
        variables = {**os.environ, **environment, "TMPDIR": str(self.scratch)}
        variables.update(stacks.variables(variables, self.scratch))
        self._process = subprocess.Popen(
            [*supervisor, "--", *command],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    @property
    def pid(self) -> int | None:
        """The pid of the supervisor; None before the start and after `end`."""
        return None if self._process is None else self._process.pid

    @property
    def stacks_folder(self) -> Path | None:
        """The folder into which the processes write their stack traces; None before the start."""
        return None if self.scratch is None else stacks.folder_in(self.scratch)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the engine's main process; None while it runs."""
        written = self._status().get("exit_status")
        if written is not None:
            return int(written)
        # The supervisor ends only after it has written the status, unless it was killed.
        return None if self._process is None else self._process.poll()

    @property
    def was_stopped(self) -> bool:
        """Whether a stop of the server was requested by the suite, or because the suite ended."""
        return self._status().get("stopped_by") is not None

    @property
    def session(self) -> int | None:
        """The session id of the server, which is the pid of its main process."""
        pid = self._status().get("pid")
        return None if pid is None else int(pid)

    def exits(self) -> list[dict[str, Any]]:
        """Return how processes of the tree have ended so far, as recorded by the supervisor."""
        entries: list[dict[str, Any]] = self._status().get("exits") or []
        return entries

    def end(self, within_s: float) -> int | None:
        """End the supervisor, which ends the server, and close the log.

        Args:
            within_s: The seconds after which the supervisor is killed.

        Returns:
            The exit status of the supervisor; None if the supervisor was not started, or had
            already been ended.
        """
        ended = None
        if self._process is not None:
            ended = _end_process(self._process, within_s)
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None
        return ended

    def remove_scratch(self) -> None:
        """Remove the temporary files that a killed supervisor has left behind."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return status


def _end_process(process: subprocess.Popen[bytes], within_s: float) -> int:
    with process:  # closes the standard input of the supervisor
        process.terminate()
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def scratch_base() -> str:
    """Return the folder for temporary files.

    vLLM creates Unix sockets there, whose paths can have at most 107 bytes.
    """
    base = tempfile.gettempdir()
    return base if len(base) <= _LONGEST_SCRATCH_BASE else "/tmp"  # noqa: S108 - mkdtemp follows
