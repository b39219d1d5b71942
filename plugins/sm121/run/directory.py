"""The report directory. Only one run at a time uses it. It also contains earlier runs."""

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
#: The subfolder for a run that measured nothing, if the directory has the report of a run that did.
NOT_RUN = "not-run"
#: Entries that a new run neither moves nor removes.
_KEPT = (_LOCK, EARLIER, NOT_RUN)
#: How long a process waits while another process of the same run prepares the directory.
_SHARED_WITHIN_S = 20.0
#: How long a run waits until the supervisors of an earlier run have ended.
_SUPERVISED_WITHIN_S = 20.0


class InUse(UsageError):
    """Another run is using the report directory."""


@dataclass
class ReportDirectory:
    """A report directory that this run uses until it closes the lock."""

    path: Path
    lock: IO[str]
    #: The folder that the files of an earlier run were moved to; None without such files.
    earlier: Path | None = None


def lock_directory(
    directory: Path, share: str | None = None, *, resume: bool = False
) -> ReportDirectory:
    """Lock the directory for this run, and move files of an earlier run to ``earlier/``.

    Args:
        directory: The folder. It is created if it does not exist.
        share: The name of a run with several processes, which may all use the directory.
        resume: Whether this run continues the run in the directory: then no files are moved.

    Raises:
        InUse: Another run is using the directory.
        UsageError: The folder is not a report directory, or is not writable.
    """
    try:
        return _take(directory, share, resume=resume)
    except OSError as error:
        raise UsageError(
            f"--report-dir {directory}: expected a folder that can be written ({error})"
        ) from error


def of_a_run_that_measures_nothing(directory: Path) -> Path:
    """Return the report folder of a run in which no test can run.

    Args:
        directory: The report directory.

    Returns:
        The subfolder ``not-run`` if ``directory`` contains the report of a run that measured,
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
    """Remove the files of a refused run, and move the earlier run's files back.

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
    with contextlib.suppress(OSError):  # it contains the reports of other runs
        earlier.parent.rmdir()


def clear(directory: Path) -> None:
    """Remove the files of a run, but not the reports of earlier runs.

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
    """Return whether other processes of the same run have locked the directory.

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
            time.sleep(0.05)  # another process of this run is preparing it
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
    """Raise UsageError if a folder contains files but is not a report directory."""
    is_report = any((directory / name).exists() for name in (_REPORT, events.NAME, WORKERS))
    if is_report or not directory.is_dir():
        return
    foreign = sorted(entry.name for entry in directory.iterdir() if entry.name not in _KEPT)
    if foreign:
        raise UsageError(
            f"--report-dir {directory}: expected a new or empty folder, or one of an earlier "
            f"run, got a folder with {foreign[0]}"
        )


def _move_earlier(directory: Path) -> Path | None:
    """Move an earlier run's files to a folder named after its time.

    Return the folder, or None if the directory contains no files of an earlier run.
    """
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

    A supervisor records how the servers ended and stops them. The wait has a limit. A supervisor
    that takes longer writes its last lines to the folder after it was moved.
    """
    deadline = time.monotonic() + _SUPERVISED_WITHIN_S
    for file in (directory / SERVERS, *directory.glob(f"{WORKERS}/*/{SERVERS}")):
        if file.is_file():
            with open_lock(file) as lock:
                while not try_lock(lock, fcntl.LOCK_EX) and time.monotonic() < deadline:
                    time.sleep(0.05)


def _name(lock: IO[str]) -> str:
    """Return the name of the run that holds the lock."""
    lock.seek(0)
    return lock.read()
