"""Crashes of a run: the list in verdict.json, and the bundles under ``crashes/``. The one place
that knows what their fields are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "crashes"
_INDEX = "bundle.json"
_MOST_LINES = 20
_MOST_FILES = 50


@dataclass(frozen=True)
class Crash:
    """A server that died, why, and where everything of it lies."""

    kind: str
    summary: str
    test: str | None = None
    when: str | None = None
    owner: str | None = None
    remedy: str | None = None
    reproduce: str | None = None
    lines: tuple[str, ...] = ()
    bundle: str | None = None
    files: tuple[str, ...] = ()


def read(raw: Mapping[str, Any], directory: Path) -> tuple[Crash, ...]:
    """The crashes that verdict.json lists (`CrashReport`), and bundles that it does not: the suite
    itself may have ended before it could write them down."""
    listed = [entry for entry in raw.get("crashes") or () if isinstance(entry, dict)]
    found = [_crash(entry, directory) for entry in listed]
    seen = {crash.bundle for crash in found}
    folder = directory / FOLDER
    if folder.is_dir():
        for bundle in sorted(item for item in folder.iterdir() if item.is_dir()):
            name = bundle.relative_to(directory).as_posix()
            if name not in seen:
                found.append(_crash({"bundle": name}, directory))
    return tuple(found)


def _crash(entry: Mapping[str, Any], directory: Path) -> Crash:
    """From an entry of verdict.json and the index of its bundle (`sm121.evidence.crash_bundle`)."""
    bundle = _text(entry.get("bundle"))
    index = _index(directory, bundle)
    lines = index.get("lines")
    return Crash(
        kind=_text(entry.get("kind")) or _text(index.get("class")) or "unknown",
        summary=_text(entry.get("summary"))
        or _text(index.get("summary"))
        or f"a crash bundle without a description: {bundle}",
        test=_text(entry.get("test")) or _text(index.get("test")),
        when=_text(index.get("at")),
        owner=_text(entry.get("owner")) or _text(index.get("owner")),
        remedy=_text(index.get("remedy")),
        reproduce=_text(index.get("rerun")),
        lines=tuple(map(str, lines))[:_MOST_LINES] if isinstance(lines, list) else (),
        bundle=bundle,
        files=_files(directory, bundle),
    )


def _index(directory: Path, bundle: str | None) -> Mapping[str, Any]:
    folder = _inside(directory, bundle)
    if folder is None:
        return {}
    try:
        raw = json.loads((folder / _INDEX).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _inside(directory: Path, bundle: str | None) -> Path | None:
    """The bundle's folder; None where there is none in the report directory."""
    folder = directory / bundle if bundle else None
    if folder is None or not folder.is_dir():
        return None
    return folder if folder.resolve().is_relative_to(directory.resolve()) else None


def _files(directory: Path, bundle: str | None) -> tuple[str, ...]:
    folder = _inside(directory, bundle)
    if folder is None:
        return ()
    files = (item for item in folder.rglob("*") if item.is_file())
    return tuple(sorted(item.relative_to(directory).as_posix() for item in files))[:_MOST_FILES]


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) and value != "" else None
