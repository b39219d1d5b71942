"""The git checkout of installed software."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sm121.core import digest
from sm121.evidence.environment_record import SourceRecord

_GIT_TIMEOUT_S = 20.0


def read_checkout(file: Path) -> SourceRecord | None:
    """Read the commit of the checkout that tracks a file.

    Args:
        file: The file.

    Returns:
        The commit, and whether tracked files differ from it. None if no checkout tracks the file,
        for example because it is in a virtual environment inside the checkout of another project.
    """
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    source = SourceRecord(sha=sha.strip())
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if status is not None:
        source.dirty = bool(status)
    if status:
        changes = _git(folder, "diff", "HEAD")
        source.changes = None if changes is None else digest.of_value(changes)
    return source


def changed_files(checkout: Path, parts: Sequence[str]) -> list[str] | None:
    """Find the files of a checkout that differ from its commit.

    Args:
        checkout: The folder of the checkout.
        parts: The files and folders to compare.

    Returns:
        The changed files, the untracked files, and the files whose changes git ignores
        (``assume-unchanged``, ``skip-worktree``). None if git does not track the parts.
    """
    status = _git(checkout, "status", "--porcelain", "-uno", "--", *parts)
    flags = _git(checkout, "ls-files", "-v", "--", *parts)
    untracked = _git(checkout, "ls-files", "--others", "--", *parts)
    if status is None or untracked is None or not flags:
        return None
    # A line has two status letters, a space and the path.
    changed = [line[3:] for line in status.splitlines()]
    for line in flags.splitlines():
        flag, _, name = line.partition(" ")
        if flag != "H":  # git marks a file with H if it is tracked and compared with the commit
            changed.append(name)
    for name in untracked.splitlines():
        if "__pycache__/" not in name and not (checkout / name).is_symlink():
            changed.append(name)
    return list(dict.fromkeys(changed))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in a folder, or None if git fails.

    git's environment variables are removed, because they may name another checkout. The checkout
    may belong to another user, as is common in containers.
    """
    git = shutil.which("git")
    if git is None:
        return None
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables["GIT_OPTIONAL_LOCKS"] = "0"
    options = ["-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", str(folder)]
    try:
        run = subprocess.run(
            [git, *options, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env=variables,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None
