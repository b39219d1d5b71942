"""The log of an attached server as a stream: from standard input, or from ``docker logs``.

The stream is copied into a file as it arrives; all other modules read that file.
"""

import atexit
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from sm121.core.errors import UsageError
from sm121.core.printable import printable

#: Matches the names and ids of containers that Docker allows. None of them begins with a dash, so a
#: match cannot be read as an option of Docker.
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
#: Maximum bytes of a stream that are kept. The rest is read and dropped, because a full pipe would
#: block its writer.
_KEPT_BYTES = 128 << 20
_BLOCK_BYTES = 1 << 16
#: If no line arrives for this many seconds, the suite assumes that all earlier lines have arrived.
_QUIET_S = 0.5
#: Maximum seconds to wait for earlier lines.
_SETTLED_WITHIN_S = 30.0
_ENDS_WITHIN_S = 5.0
#: A copy of standard input, made before pytest replaces it by /dev/null; empty or one descriptor.
_kept_input: list[int] = []


#: The option for a log file, which error messages suggest in place of a container.
_INSTEAD = "--server-log FILE"


def check_container(name: str, instead: str = _INSTEAD) -> None:
    """Check that the name of a container is valid, and that docker is installed.

    Args:
        name: The name or id of the container.
        instead: The option that the error message suggests in place of a container.

    Raises:
        UsageError: The name is not valid for a container, or docker is not on the PATH.
    """
    if not _CONTAINER.fullmatch(name):
        raise UsageError(
            f"--container {printable(name)!r}: expected the name or the id of a container, as "
            "docker ps shows it (not a path)"
        )
    if shutil.which("docker") is None:
        raise UsageError(
            f"--container {name}: expected docker on the PATH, got none. Name the log itself: "
            f"{instead}"
        )


def keep_standard_input() -> None:
    """Keep a copy of this process's standard input, before pytest replaces it."""
    if not _kept_input:
        _kept_input.append(os.dup(0))


class FollowedLog:
    """A stream that is copied into a file of its own until it ends, or is closed.

    Args:
        source: The stream.
        name: The option that selects the stream, for messages.
        process: The process that writes the stream, if this object must end this process.
    """

    def __init__(
        self, source: IO[bytes], name: str, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        #: The name of the option, for messages.
        self.name = name
        #: A description of the part that was not kept; None as long as everything was kept.
        self.lost: str | None = None
        self._process = process
        self._source = source
        self._folder = Path(tempfile.mkdtemp(prefix="sm121-log-"))
        #: The file with the lines that have arrived.
        self.path = self._folder / "server.log"
        self._came_at = time.monotonic()
        self._thread = threading.Thread(target=self._copy, args=(self.path.open("wb", 0),))
        self._thread.daemon = True
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def of_standard_input(cls) -> "FollowedLog":
        """Follow standard input.

        Raises:
            UsageError: Standard input is a terminal.
        """
        descriptor = _kept_input[0] if _kept_input else os.dup(0)
        if os.isatty(descriptor):
            raise UsageError(
                "--server-log -: expected the server's log on standard input: "
                "docker logs -f NAME 2>&1 | sm121 run --base-url URL --server-log -"
            )
        log = cls(os.fdopen(os.dup(descriptor), "rb", 0), "--server-log -")
        log.settle()
        return log

    @classmethod
    def of_container(
        cls, name: str, *, follow: bool = True, instead: str = _INSTEAD
    ) -> "FollowedLog":
        """Follow ``docker logs`` of a container.

        Args:
            name: The container's name or id.
            follow: Whether to read also the lines that the container writes later.
            instead: The option that the error message suggests in place of a container.

        Raises:
            UsageError: Docker is missing, or has no such container.
        """
        check_container(name, instead)
        command = ["docker", "logs"]
        if follow:
            command.append("--follow")
        process = subprocess.Popen(  # it has its own session, so that Ctrl-C does not end it
            [*command, name],
            bufsize=0,  # a read returns at once with the available bytes
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        log = cls(process.stdout, f"--container {name}", process)
        log.settle()
        if process.poll():
            lines = log.path.read_text("utf-8", "replace").strip().splitlines() or ["no reason"]
            log.close()
            raise UsageError(
                f"--container {name}: expected a container whose log docker can read, got: "
                f"{printable(lines[-1][:300])} Name one of docker ps, or the log: {instead}"
            )
        return log

    def settle(self, *, to_the_end: bool = False) -> None:
        """Wait until all lines that were written before this call have been copied.

        Args:
            to_the_end: Whether to wait until the stream has ended.
        """
        if to_the_end:
            self._thread.join(_SETTLED_WITHIN_S)
        end = time.monotonic() + _SETTLED_WITHIN_S
        while self._thread.is_alive() and time.monotonic() < end:
            has_begun = self.path.stat().st_size > 0 or self._process is None
            if has_begun and time.monotonic() - self._came_at >= _QUIET_S:
                return
            self._thread.join(0.05)
        if self._process is not None and not self._thread.is_alive():
            self._process.wait(_ENDS_WITHIN_S)

    def close(self) -> None:
        """End the stream, and remove the file."""
        atexit.unregister(self.close)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._thread.join(_ENDS_WITHIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, kept: IO[bytes]) -> None:
        size = 0
        with kept, self._source as source:
            while block := source.read(_BLOCK_BYTES):
                self._came_at = time.monotonic()
                if size < _KEPT_BYTES:
                    kept.write(block)
                else:
                    self.lost = f"{self.name}: only the first {_KEPT_BYTES >> 20} MiB were kept"
                size += len(block)
