"""Crashes of a run: the list in verdict.json, and the bundles under ``crashes/``. The one place
that knows what their fields are called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "crashes"
_BUNDLE_FILES = ("bundle.json", "crash.json", "manifest.json", "cause.json")
_KIND = ("kind", "class", "cause_kind")
_SUMMARY = ("summary", "message", "what")
_WHEN = ("at", "when", "time")
_WHERE = ("bundle", "path", "directory", "folder")
_MOST_LINES = 20


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
    """The crashes that verdict.json lists, and bundles that it does not: the suite itself may have
    ended before it could write them down."""
    listed = raw.get("crashes")
    found = [
        crash
        for entry in (listed if isinstance(listed, list) else [])
        if (crash := _crash(entry, directory)) is not None
    ]
    seen = {crash.bundle for crash in found}
    folder = directory / FOLDER
    if folder.is_dir():
        for bundle in sorted(item for item in folder.iterdir() if item.is_dir()):
            name = bundle.relative_to(directory).as_posix()
            crash = _crash({"bundle": name}, directory) if name not in seen else None
            if crash is not None:
                found.append(crash)
    return tuple(found)


def _crash(entry: Any, directory: Path) -> Crash | None:
    if isinstance(entry, str):
        entry = {"summary": entry}
    if not isinstance(entry, dict):
        return None
    cause = entry.get("cause")
    bundle = _first(entry, _WHERE)
    described = _described(directory, bundle)
    flat: dict[str, Any] = {**described, **(cause if isinstance(cause, dict) else {})}
    flat.update({key: value for key, value in entry.items() if value is not None})
    lines = flat.get("lines") or flat.get("evidence") or ()
    if isinstance(lines, str):
        lines = lines.splitlines()
    return Crash(
        kind=_first(flat, _KIND) or "unknown",
        summary=_first(flat, _SUMMARY) or "the server died; its log says no more",
        test=_first(flat, ("test", "during", "test_id")),
        when=_first(flat, _WHEN),
        owner=_first(flat, ("owner",)),
        remedy=_first(flat, ("remedy",)),
        reproduce=_first(flat, ("rerun", "reproduce", "command")),
        lines=tuple(map(str, lines))[:_MOST_LINES] if isinstance(lines, Iterable) else (),
        bundle=bundle,
        files=_files(directory, bundle),
    )


def _described(directory: Path, bundle: str | None) -> dict[str, Any]:
    """What the bundle says of itself beyond what verdict.json has of it."""
    if bundle is None or not (directory / bundle).resolve().is_relative_to(directory.resolve()):
        return {}
    return _bundle_entry(directory / bundle) if (directory / bundle).is_dir() else {}


def _bundle_entry(bundle: Path) -> dict[str, Any]:
    for name in _BUNDLE_FILES:
        try:
            raw = json.loads((bundle / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(raw, dict):
            return raw
    return {"kind": "unknown", "summary": f"a crash bundle without a description: {bundle.name}"}


def _files(directory: Path, bundle: str | None) -> tuple[str, ...]:
    if bundle is None:
        return ()
    folder = directory / bundle
    if not folder.is_dir() or not folder.resolve().is_relative_to(directory.resolve()):
        return ()
    return tuple(
        sorted(
            item.relative_to(directory).as_posix() for item in folder.rglob("*") if item.is_file()
        )
    )[:50]


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next(
        (str(entry[name]) for name in names if isinstance(entry.get(name), (str, int, float))), None
    )
