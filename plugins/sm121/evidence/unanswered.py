"""Connections whose other end acknowledges nothing: a port is blocked, or the link is down. The
kernel's own count of what it has sent again tells that; nothing is sent to find it out."""

import contextlib
import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import psutil

_NET = Path("/proc/self/net")
#: Its timer is that of a retransmission (``tcp_diag``: 1).
_SENDS_AGAIN = "01"
#: With so many in a row, a second and more has passed: a lost packet takes one or two.
_TIMES = 3


def unanswered(
    processes: Callable[[], Iterable[psutil.Process]], peers: Collection[str]
) -> list[str]:
    """Connections of these processes to one of `peers`, as ``A:PORT -> B:PORT``, if any is told."""
    ends = {
        inode: f"{local} -> {remote}"
        for inode, local, remote in _repeated(_NET)
        if remote.rpartition(":")[0].strip("[]") in peers
    }
    # The table is of all processes. Whose they are is asked where there is trouble alone.
    of_server = {inode for each in processes() for inode in _sockets(each.pid)} if ends else set()
    return sorted(end for inode, end in ends.items() if inode in of_server)


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                yield str(file.readlink()).removeprefix("socket:[").removesuffix("]")


def _repeated(tables: Path) -> Iterator[tuple[str, str, str]]:
    for table in filter(Path.exists, (tables / "tcp", tables / "tcp6")):
        for line in table.read_text("ascii").splitlines()[1:]:
            _, local, remote, _state, _queues, timer, times, _uid, _waits, inode = line.split()[:10]
            if timer.partition(":")[0] == _SENDS_AGAIN and int(times, 16) >= _TIMES:
                yield inode, _end(local), _end(remote)


def _end(entry: str) -> str:
    """As people write it. The kernel writes words of four bytes, the last byte of each first."""
    words, _, port = entry.partition(":")
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    text = str(mapped or address)
    return f"[{text}]:{int(port, 16)}" if ":" in text else f"{text}:{int(port, 16)}"
