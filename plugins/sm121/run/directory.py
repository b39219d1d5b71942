"""The report directory. One run at a time uses it; files of earlier runs are never overwritten."""

import contextlib
import datetime
import fcntl
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sm121.core.errors import UsageError
from sm121.core.lock_file import SERVERS, open_lock, try_lock
from sm121.core.verdict import Verdict

_LOCK = ".lock"
_EARLIER = "earlier"
#: The folder of a run that measured nothing, in that of a run that measured.
_NOT_RUN = "not-run"
_KEPT = (_LOCK, _EARLIER, _NOT_RUN)
WORKERS = "workers"
_SHARED_WITHIN_S = 20.0
_SUPERVISED_WITHIN_S = 20.0


class InUse(UsageError):
    """Another run has the report directory."""


@dataclass
class ReportDirectory:
    """A report directory, taken until its lock is closed."""

    path: Path
    lock: IO[str]
    #: Where the files of an earlier run were moved to; None when there were none.
    earlier: Path | None = None


def take(directory: Path, share: str | None = None) -> ReportDirectory:
    """Take the directory for this run. Files of an earlier run are moved to ``earlier/``.

    Args:
        directory: The folder; it is made if it is not there.
        share: Name of a run of several processes, which may take it at the same time.

    Raises:
        InUse: Another run has it.
        UsageError: It is no report directory, or it cannot be written.
    """
    try:
        return _take(directory, share)
    except OSError as error:
        raise UsageError(
            f"--report-dir {directory}: expected a folder that can be written ({error})"
        ) from error


def of_a_run_that_measures_nothing(directory: Path) -> Path:
    """Return the folder for a run of which nothing can run: a folder of its own in ``directory`` if
    that has the report of a run that measured, else ``directory``."""
    try:
        earlier = json.loads((directory / "verdict.json").read_text("utf-8"))["verdict"]
    except (OSError, ValueError, LookupError, TypeError):
        return directory  # no report, or none that can be read
    return directory if earlier == Verdict.NOT_RUN else directory / _NOT_RUN


def restore(directory: Path, earlier: Path | None) -> None:
    """Remove what a refused run has written there, and put back what it has moved to `earlier`."""
    clear(directory)
    if earlier is None:
        return
    for entry in earlier.iterdir():
        entry.rename(directory / entry.name)
    earlier.rmdir()
    with contextlib.suppress(OSError):  # it has the reports of other runs
        earlier.parent.rmdir()


def clear(directory: Path) -> None:
    """Remove what a run has written there. The reports of earlier runs stay."""
    for entry in directory.iterdir():
        if entry.name in _KEPT:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def is_shared(directory: Path, share: str) -> bool:
    """Whether processes of the named run have taken the directory."""
    try:
        return (directory / _LOCK).read_text("utf-8", "replace") == share
    except OSError:
        return False


def _take(directory: Path, share: str | None) -> ReportDirectory:
    is_report = (directory / "verdict.json").is_file() or (directory / WORKERS).is_dir()
    if directory.is_dir() and not is_report:
        foreign = [item.name for item in directory.iterdir() if item.name not in _KEPT]
        if foreign:
            raise UsageError(
                f"--report-dir {directory}: expected a new or empty folder, or one of an earlier "
                f"run; seen: {sorted(foreign)[0]}"
            )
    directory.mkdir(parents=True, exist_ok=True)
    lock = open_lock(directory / _LOCK, 0o644)
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while not try_lock(lock, fcntl.LOCK_EX):
        if share is not None and try_lock(lock, fcntl.LOCK_SH):
            if _name(lock) == share:
                return ReportDirectory(directory, lock)
        elif share is not None and time.monotonic() < deadline:
            time.sleep(0.05)  # another process of this run prepares it now
            continue
        lock.close()
        raise InUse(
            f"--report-dir {directory}: expected a folder of its own, another run is using it. "
            "Wait for that run, or name another folder with --report-dir=FOLDER"
        )
    earlier = None
    if share is None or _name(lock) != share:
        _wait_for_supervisors(directory)
        if entries := [each for each in directory.iterdir() if each.name not in _KEPT]:
            verdict = directory / "verdict.json"
            written_s = (verdict if verdict.is_file() else directory).stat().st_mtime
            stamp = datetime.datetime.fromtimestamp(written_s).strftime("%Y%m%d-%H%M%S")
            earlier, number = directory / _EARLIER / stamp, 1
            while earlier.exists():
                number += 1
                earlier = directory / _EARLIER / f"{stamp}-{number}"
            earlier.mkdir(parents=True)
            for entry in entries:
                entry.rename(earlier / entry.name)
        lock.seek(0)
        lock.truncate()
        lock.write(share or "")
        lock.flush()
    if share is not None:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return ReportDirectory(directory, lock, earlier)


def _wait_for_supervisors(directory: Path) -> None:
    """Wait for the supervisors of an earlier run that was killed. They still write down what
    happened, and end that run's servers. The wait is bounded: a supervisor that takes longer writes
    to a folder that is no longer its own."""
    deadline = time.monotonic() + _SUPERVISED_WITHIN_S
    for file in (directory / SERVERS, *directory.glob(f"{WORKERS}/*/{SERVERS}")):
        if file.is_file():
            with open_lock(file) as lock:
                while not try_lock(lock, fcntl.LOCK_EX) and time.monotonic() < deadline:
                    time.sleep(0.05)


def _name(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read()
