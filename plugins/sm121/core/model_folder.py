"""Find the folder of a checkpoint on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path


def folder_of(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of a checkpoint, or None if this machine does not have it.

    Args:
        name: A folder, or an id on the Hugging Face hub. For an id, the folder is the snapshot of
            the branch ``main`` in the hub's cache, which engines use, too.
        environment: The environment variables, of which ``HF_HOME`` and ``HF_HUB_CACHE`` name the
            cache.
    """
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
