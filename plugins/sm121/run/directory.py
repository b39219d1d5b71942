"""The report directory. One run at a time uses it, and files of earlier runs are kept."""

import contextlib
import datetime
import fcntl
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sm121.core.errors import UsageError
from sm121.core.lock_file import SERVERS, open_lock, try_lock
from sm121.core.verdict import Verdict
from sm121.run import events, stored_run, verdict_file
from sm121.run.stored_run import WORKERS

_LOCK = ".lock"
#: The folder of the reports of earlier runs.
EARLIER = "earlier"
_REPORT = verdict_file.NAME
#: The folder of a run that measured nothing, in that of a run that measured.
NOT_RUN = "not-run"
#: Entries that no run moves or removes.
_KEPT = (_LOCK, EARLIER, NOT_RUN)
#: How long a process waits for another process of its run that prepares the directory.
_SHARED_WITHIN_S = 20.0
#: How long a run waits for the supervisors of an earlier run.
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


def take(directory: Path, share: str | None = None, *, resume: bool = False) -> ReportDirectory:
    """Take the directory for this run. Files of an earlier run are moved to ``earlier/``.

    Args:
        directory: The folder; it is made if it is not there.
        share: Name of a run of several processes, which may take it at the same time.
        resume: Whether the run of the directory goes on: its files stay.

    Raises:
        InUse: Another run has it.
        UsageError: It is no report directory, or it cannot be written.
    """
    try:
        return _take(directory, share, resume=resume)
    except OSError as error:
        raise UsageError(
            f"--report-dir {directory}: expected a folder that can be written ({error})"
        ) from error


def of_a_run_that_measures_nothing(directory: Path) -> Path:
    """Return the folder for a run of which nothing can run.

    Args:
        directory: The report directory.

    Returns:
        A folder of its own in ``directory`` if that has the report of a run that measured,
        otherwise ``directory``.
    """
    try:
        earlier = stored_run.file_of(directory)
    except UsageError:
        return directory  # no report, or none that can be read
    if earlier.verdict is Verdict.NOT_RUN:
        return directory
    return directory / NOT_RUN


def earlier_reports(directory: Path) -> list[Path]:
    """Return the folders of earlier runs in a report directory, the newest first.

    Args:
        directory: The report directory.
    """
    dated = []
    for folder in (directory / EARLIER).glob("*"):
        try:
            dated.append((stored_run.file_of(folder).started, folder))
        except UsageError:  # no report, or none that can be read
            continue
    return [folder for _, folder in sorted(dated, reverse=True)]


def restore(directory: Path, earlier: Path | None) -> None:
    """Remove the files of a refused run, and put back the files that it has moved.

    Args:
        directory: The report directory.
        earlier: The folder of the moved files; None if there were none.
    """
    clear(directory)
    if earlier is None:
        return
    for entry in earlier.iterdir():
        entry.rename(directory / entry.name)
    earlier.rmdir()
    with contextlib.suppress(OSError):  # it has the reports of other runs
        earlier.parent.rmdir()


def clear(directory: Path) -> None:
    """Remove the files of a run. The reports of earlier runs stay.

    Args:
        directory: The report directory.
    """
    for entry in directory.iterdir():
        if entry.name in _KEPT:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def is_shared(directory: Path, share: str) -> bool:
    """Return whether processes of a run have taken the directory.

    Args:
        directory: The report directory.
        share: The name of the run.
    """
    try:
        return (directory / _LOCK).read_text("utf-8", "replace") == share
    except OSError:
        return False


def _take(directory: Path, share: str | None, *, resume: bool) -> ReportDirectory:
    _refuse_foreign(directory)
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
        if not resume:
            earlier = _move_earlier(directory)
        lock.seek(0)
        lock.truncate()
        lock.write(share or "")
        lock.flush()
    if share is not None:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return ReportDirectory(directory, lock, earlier)


def _refuse_foreign(directory: Path) -> None:
    """Raise UsageError if a folder has files and is no report directory."""
    is_report = any((directory / name).exists() for name in (_REPORT, events.NAME, WORKERS))
    if is_report or not directory.is_dir():
        return
    foreign = sorted(entry.name for entry in directory.iterdir() if entry.name not in _KEPT)
    if foreign:
        raise UsageError(
            f"--report-dir {directory}: expected a new or empty folder, or one of an earlier "
            f"run; seen: {foreign[0]}"
        )


def _move_earlier(directory: Path) -> Path | None:
    """Move the files of an earlier run to a folder of its time; None if there are no files."""
    entries = [entry for entry in directory.iterdir() if entry.name not in _KEPT]
    if not entries:
        return None
    dated = directory / _REPORT
    if not dated.is_file():
        dated = directory
    written = datetime.datetime.fromtimestamp(dated.stat().st_mtime)
    stamp = written.strftime("%Y%m%d-%H%M%S")
    earlier = directory / EARLIER / stamp
    number = 1
    while earlier.exists():
        number += 1
        earlier = directory / EARLIER / f"{stamp}-{number}"
    earlier.mkdir(parents=True)
    for entry in entries:
        entry.rename(earlier / entry.name)
    return earlier


def _wait_for_supervisors(directory: Path) -> None:
    """Wait for the supervisors of an earlier run that was killed.

    They still write down what happened, and end that run's servers. The wait is bounded: a
    supervisor that takes longer writes to a folder that is no longer its own.
    """
    deadline = time.monotonic() + _SUPERVISED_WITHIN_S
    for file in (directory / SERVERS, *directory.glob(f"{WORKERS}/*/{SERVERS}")):
        if file.is_file():
            with open_lock(file) as lock:
                while not try_lock(lock, fcntl.LOCK_EX) and time.monotonic() < deadline:
                    time.sleep(0.05)


def _name(lock: IO[str]) -> str:
    """Return the name of the run that has the lock."""
    lock.seek(0)
    return lock.read()
