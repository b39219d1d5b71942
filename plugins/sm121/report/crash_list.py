"""The crashes of a run: the list in verdict.json, and the contents of their bundles."""

from collections.abc import Sequence
from pathlib import Path

from sm121.evidence.crash_bundle import FOLDER, INDEX, BundleIndex, read_index
from sm121.run.machine_report import CrashReport

_MOST_LINES = 20
_MOST_FILES = 50


class Crash(CrashReport):
    """A server that died: its cause, and the files about it.

    Attributes:
        when: When the bundle was written; None without a readable bundle.
        remedy: How to avoid the cause; None if that is unknown.
        reproduce: The command that runs the test again.
        lines: At most 20 lines of the log.
        files: At most 50 files of the bundle, relative to the report directory.
    """

    when: str | None = None
    remedy: str | None = None
    reproduce: str | None = None
    lines: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def read_crashes(listed: Sequence[CrashReport], directory: Path) -> tuple[Crash, ...]:
    """Read the crashes of a run.

    Args:
        listed: The crashes that verdict.json lists.
        directory: The report directory.

    Returns:
        The listed crashes, and crashes with a bundle that are not listed, since the suite may have
        ended before it listed them.
    """
    crashes = [_crash(report, directory) for report in listed]
    bundles = {crash.bundle for crash in crashes}
    folder = directory / FOLDER
    if folder.is_dir():
        for bundle in sorted(folder.iterdir()):
            name = bundle.relative_to(directory).as_posix()
            if bundle.is_dir() and name not in bundles:
                crashes.append(_unlisted(name, directory))
    return tuple(crashes)


def _unlisted(name: str, directory: Path) -> Crash:
    """Return the crash of a bundle that verdict.json does not list."""
    index = _index(_inside(directory, name))
    if index is None:
        summary = f"a crash bundle without a readable {INDEX}: the suite ended while it wrote it"
        report = CrashReport(kind="unknown", summary=summary, owner="", bundle=name)
    else:
        report = CrashReport(
            kind=index.kind,
            summary=index.summary,
            owner=index.owner,
            bundle=name,
            test=index.test,
        )
    return _crash(report, directory)


def _crash(report: CrashReport, directory: Path) -> Crash:
    """Return a listed crash, with the contents of its bundle."""
    crash = Crash(**report.model_dump())
    folder = _inside(directory, report.bundle)
    if folder is not None:
        names = []
        for file in folder.rglob("*"):
            if file.is_file():
                names.append(file.relative_to(directory.resolve()).as_posix())
        crash.files = tuple(sorted(names)[:_MOST_FILES])
    index = _index(folder)
    if index is not None:
        crash.when = index.at
        crash.remedy = index.remedy
        crash.reproduce = index.rerun or None
        crash.lines = tuple(index.lines[:_MOST_LINES])
    return crash


def _inside(directory: Path, bundle: str | None) -> Path | None:
    """Return a bundle's folder; None if it is outside the report directory (untrusted name)."""
    if bundle is None:
        return None
    try:
        folder = (directory / bundle).resolve()
        is_inside = folder.is_relative_to(directory.resolve()) and folder.is_dir()
    except (OSError, ValueError):  # too long, or not a valid file name
        return None
    return folder if is_inside else None


def _index(folder: Path | None) -> BundleIndex | None:
    if folder is None:
        return None
    try:
        return read_index(folder)
    except (OSError, ValueError, RecursionError):
        return None  # the page links the folder anyway
