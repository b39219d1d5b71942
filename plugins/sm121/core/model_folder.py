"""Find the folder of a checkpoint on this machine."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

#: The revision in the arguments that an engine prints: a Python dictionary or a call.
_REVISION = re.compile(r"""(?<![A-Za-z_])'?revision'?[:=]\s*'([^']+)'""")
#: A snapshot in the hub's cache of any machine.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([^/]+)/?")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder contains a checkpoint.

    Args:
        folder: The folder.
    """
    return (folder / "config.json").is_file()


def folder_of(
    name: str, environment: Mapping[str, str] = os.environ, revision: str | None = None
) -> Path | None:
    """Return the folder of a checkpoint, or None if this machine does not have it.

    Args:
        name: A folder, or an id on the Hugging Face hub. For an id, the folder is the snapshot of
            the revision in the hub's cache, which engines use, too.
        environment: The environment variables, of which ``HF_HOME`` and ``HF_HUB_CACHE`` name the
            cache.
        revision: A branch, a tag or a commit; None: the branch ``main``.
    """
    if Path(name).is_dir():
        return Path(name)
    folder = _cached(name, environment)
    revision = revision or "main"
    if ".." in revision or revision.startswith("/"):
        return None
    commit = revision
    with contextlib.suppress(OSError):  # the revision is a commit, or is not in the cache
        commit = (folder / "refs" / revision).read_text("utf-8").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def served_folder(
    name: str, asked: str | None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the folder of the checkpoint that a running server loaded, or None.

    Args:
        name: The folder or the id that the server shows. It may be a snapshot in the cache of the
            server's container.
        asked: The engine's arguments, as its log shows them. They may contain a revision. Without
            one, the folder is that of ``main``, else the only snapshot in the cache.
        environment: The environment variables, which name the hub's cache.
    """
    snapshot = _SNAPSHOT.fullmatch(name)
    if snapshot is not None and not Path(name).is_dir():
        return folder_of(snapshot[1].replace("--", "/", 1), environment, snapshot[2])
    revision = _REVISION.search(asked or "")
    if revision is not None:
        return folder_of(name, environment, revision[1])
    return folder_of(name, environment) or _only_snapshot(name, environment)


def _cached(name: str, environment: Mapping[str, str]) -> Path:
    """Return the folder of a model in the hub's cache."""
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    return hub / f"models--{name.replace('/', '--')}"


def _only_snapshot(name: str, environment: Mapping[str, str]) -> Path | None:
    folder = _cached(name, environment) / "snapshots"
    snapshots = [*folder.iterdir()] if folder.is_dir() else []
    return snapshots[0] if len(snapshots) == 1 else None
