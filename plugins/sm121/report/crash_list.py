"""Crashes of a run: the list in verdict.json, and what their bundles say beyond it."""

import json
from collections.abc import Sequence
from pathlib import Path

from sm121.core import lenient
from sm121.evidence.crash_bundle import FOLDER, INDEX, BundleIndex
from sm121.run.verdict_file import CrashReport

_MOST_LINES = 20
_MOST_FILES = 50


class Crash(CrashReport):
    """A server that died, why, and where everything of it lies."""

    when: str | None = None
    remedy: str | None = None
    reproduce: str | None = None
    lines: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def read(listed: Sequence[CrashReport], directory: Path) -> tuple[Crash, ...]:
    """The crashes that verdict.json lists, and bundles that it does not: the suite itself may have
    ended before it could write them down."""
    crashes = [_crash(report, directory) for report in listed]
    bundles = {crash.bundle for crash in crashes}
    folder = directory / FOLDER
    for bundle in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = bundle.relative_to(directory).as_posix()
        if bundle.is_dir() and name not in bundles:
            unreadable = (
                f"a crash bundle without a readable {INDEX}: the suite ended while it wrote it"
            )
            report = CrashReport(kind="unknown", summary=unreadable, owner="", bundle=name)
            crash = _crash(report, directory)
            if (index := _index(_inside(directory, name))) is not None:
                crash.kind, crash.summary, crash.owner = index.kind, index.summary, index.owner
                crash.test = index.test
            crashes.append(crash)
    return tuple(crashes)


def _crash(report: CrashReport, directory: Path) -> Crash:
    """verdict.json's words stand; the bundle has the lines and how to run again."""
    folder = _inside(directory, report.bundle)
    index = _index(folder)
    crash = Crash(**report.model_dump())
    if folder is not None:
        files = (file for file in folder.rglob("*") if file.is_file())
        names = sorted(file.relative_to(directory.resolve()).as_posix() for file in files)
        crash.files = tuple(names[:_MOST_FILES])
    if index is not None:
        crash.when, crash.remedy, crash.reproduce = index.at, index.remedy, index.rerun or None
        crash.lines = tuple(index.lines[:_MOST_LINES])
    return crash


def _inside(directory: Path, bundle: str | None) -> Path | None:
    """The bundle's folder, if it is one of this report: a name may say anything."""
    if bundle is None:
        return None
    try:
        folder = (directory / bundle).resolve()
        return folder if folder.is_relative_to(directory.resolve()) and folder.is_dir() else None
    except (OSError, ValueError):  # too long, or not a name of a file at all
        return None


def _index(folder: Path | None) -> BundleIndex | None:
    if folder is None:
        return None
    try:
        return lenient.validate(BundleIndex, json.loads((folder / INDEX).read_text("utf-8")))
    except (OSError, ValueError, RecursionError):
        return None  # the page links the folder whatever is in it
