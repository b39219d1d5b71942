"""Identify the NCCL library that a server's processes have mapped, by the digest of its file.

The version of the installed package is not sufficient: `LD_PRELOAD`, `VLLM_NCCL_SO_PATH` or a
system library may replace the package's library.
"""

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from sm121.core.data_file import Record

#: A line of /proc/PID/maps with its inode and path; see proc_pid_maps(5).
_MAPPED = re.compile(
    r"^\S+ \S+ \S+ \S+ (?P<inode>\d+) +(?P<path>/.*/libnccl\.so[.\d]*)(?: \(deleted\))?$"
)

#: The number of characters of a digest in a message.
_DIGEST_LENGTH = 12


class MappedLibrary(Record):
    """A library that a process of the server mapped."""

    #: The path as the process sees it, for example in its container.
    path: str
    #: The digest of the file; null if the file was replaced after the start, or cannot be read.
    sha256: str | None


def nccl(processes: Iterable[psutil.Process]) -> list[MappedLibrary]:
    """Find the files that the processes of a server mapped as `libnccl.so`.

    Args:
        processes: The processes, on this machine. Processes that have ended or belong to another
            user are skipped.

    Returns:
        An entry for each file, sorted by path; empty if no process mapped such a file.
    """
    rows: dict[tuple[str, str | None], MappedLibrary] = {}
    for process in processes:
        own = Path(f"/proc/{process.pid}")
        try:
            lines = (own / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        for line in lines:
            match = _MAPPED.match(line)
            if match is None:
                continue
            # Read the file in the root folder of the process, which may be in a container.
            sha256 = _sha256(own / "root" / match["path"].lstrip("/"), int(match["inode"]))
            rows[match["path"], sha256] = MappedLibrary(path=match["path"], sha256=sha256)
    return sorted(rows.values(), key=lambda row: (row.path, row.sha256 or ""))


def _sha256(file: Path, inode: int) -> str | None:
    """Return the digest of a mapped file, or None if the path now leads to another file."""
    try:
        status = file.stat()
        if status.st_ino != inode:
            return None
        return _digest(file, status.st_dev, inode, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


@functools.lru_cache(maxsize=64)
def _digest(file: Path, *_status: int) -> str:
    """Return the digest of a file. Digests are cached, because the library has some hundred MiB."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def different(by_node: Mapping[str, Sequence[MappedLibrary]]) -> list[str]:
    """Compare the NCCL libraries of each node with those of the first node that has a digest.

    Args:
        by_node: The libraries of each node; the keys are the nodes' names. Nodes without a digest
            are not compared.

    Returns:
        A line for each node with other libraries.
    """
    digests: dict[str, set[str]] = {}
    for node, rows in by_node.items():
        of_node = {row.sha256 for row in rows if row.sha256 is not None}
        if of_node:
            digests[node] = of_node
    if not digests:
        return []
    first, expected = next(iter(digests.items()))
    lines: list[str] = []
    for node, of_node in digests.items():
        if of_node != expected:
            lines.append(
                f"libnccl of {node}: expected sha256 {_shortened(expected)} as {first}, got "
                f"{_shortened(of_node)}. A collective between two builds of NCCL may hang after 20 "
                "minutes and more (vllm issue 42354). Start all nodes from one image"
            )
    return lines


def _shortened(digests: Iterable[str]) -> str:
    return ", ".join(sorted(digest[:_DIGEST_LENGTH] for digest in digests))
