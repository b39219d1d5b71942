"""Where a checkpoint lies on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path


def folder_of(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where a checkpoint lies: the folder itself, or the snapshot of the hub's cache that an engine
    would take; None where it is not here."""
    if Path(name).is_dir():
        return Path(name)
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = hub / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
