"""The NCCL that a server's processes really mapped, by the digest of its file. The version of a
package does not show it: `LD_PRELOAD`, `VLLM_NCCL_SO_PATH` or a library of the system may be in its
place."""

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from sm121.core.data_file import Record

#: Of a line of /proc/PID/maps: the inode and the path.
_MAPPED = re.compile(
    r"^\S+ \S+ \S+ \S+ (?P<inode>\d+) +(?P<path>/.*/libnccl\.so[.\d]*)(?: \(deleted\))?$"
)


class MappedLibrary(Record):
    """A library that a process of the server mapped."""

    path: str
    sha256: str | None
    """Null where the file was replaced since, or is not to be read from here."""


def nccl(processes: Iterable[psutil.Process]) -> list[MappedLibrary]:
    """Read which files `libnccl.so` of some processes are, by path.

    Args:
        processes: of one server on this machine. Those that have ended, or are another user's, are
            left out.

    Returns:
        A row for each file; empty where no process mapped one.
    """
    rows: dict[tuple[str, str | None], MappedLibrary] = {}
    for process in processes:
        own = Path(f"/proc/{process.pid}")
        try:
            lines = (own / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue  # it has ended, or is not ours to read
        for match in filter(None, map(_MAPPED.match, lines)):
            # Below its root: in a container the path is another file than it is here.
            sha256 = _sha256(own / "root" / match["path"].lstrip("/"), int(match["inode"]))
            rows[match["path"], sha256] = MappedLibrary(path=match["path"], sha256=sha256)
    return sorted(rows.values(), key=lambda row: (row.path, row.sha256 or ""))


def _sha256(file: Path, inode: int) -> str | None:
    try:
        status = file.stat()
        if status.st_ino != inode:
            return None
        return _digest(file, status.st_dev, inode, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


@functools.lru_cache(maxsize=64)
def _digest(file: Path, *_status: int) -> str:
    """Of a file of some hundred MiB: once for each path and status."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def different(by_node: Mapping[str, Sequence[MappedLibrary]]) -> list[str]:
    """Compare the NCCL of each node with that of the first node that shows one.

    Args:
        by_node: the libraries of each node, by its name. A node without a digest is not compared.

    Returns:
        A line for each node that has others.
    """
    digests = {
        node: {row.sha256 for row in rows if row.sha256 is not None}
        for node, rows in by_node.items()
    }
    shown = [(node, of_node) for node, of_node in digests.items() if of_node]
    lines = []
    for (first, expected), (node, of_node) in itertools.product(shown[:1], shown[1:]):
        if of_node != expected:
            lines.append(
                f"libnccl of {node}: expected sha256 {_named(expected)} as {first}, got "
                f"{_named(of_node)}. A collective between two builds of NCCL may hang after 20 "
                "minutes and more (vllm issue 42354). Start all nodes from one image"
            )
    return lines


def _named(digests: Iterable[str]) -> str:
    return ", ".join(sorted(each[:12] for each in digests))
