"""Find connections whose data is not acknowledged, because a port is blocked or a link is down.

The connections are found with the kernel's counters of retransmissions. The suite sends nothing.
"""

import contextlib
import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

#: The folder with the kernel's tables of connections; see proc_net_tcp in the kernel's docs.
_NET = Path("/proc/self/net")
#: The code of the retransmission timer (``tcp_diag``: 1).
_SENDS_AGAIN = "01"
#: A connection is reported after this many consecutive retransmissions, which take more than a
#: second. A single lost packet causes only one or two.
_TIMES = 3


@dataclass(frozen=True)
class End:
    """One end of a connection."""

    address: str
    port: int

    def __str__(self) -> str:
        if ":" in self.address:
            return f"[{self.address}]:{self.port}"
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Connection:
    """A connection of a process on this machine. Its text is ``A:PORT -> B:PORT``."""

    local: End
    remote: End
    #: The inode of the socket on this machine.
    inode: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.local} -> {self.remote}"


def unanswered(
    processes: Callable[[], Iterable[psutil.Process]], peers: Collection[str]
) -> list[Connection]:
    """Find connections to other nodes whose data is not acknowledged.

    Args:
        processes: Returns the processes of the server. It is called only if some process on this
            machine has such a connection.
        peers: The addresses of the other nodes.

    Returns:
        The connections of the server, sorted by their texts.
    """
    # The tables contain the connections of all processes. Select those to the other nodes.
    connections = [found for found in _repeating(_NET) if found.remote.address in peers]
    if not connections:
        return []
    inodes: set[str] = set()
    for process in processes():
        inodes.update(_sockets(process.pid))
    return sorted((found for found in connections if found.inode in inodes), key=str)


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of the sockets of a process."""
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the file was just closed
                yield str(file.readlink()).removeprefix("socket:[").removesuffix("]")


def _repeating(tables: Path) -> Iterator[Connection]:
    """Yield the connections that have retransmitted data and wait for an acknowledgement."""
    for table in (tables / "tcp", tables / "tcp6"):
        if not table.exists():
            continue
        for line in table.read_text("ascii").splitlines()[1:]:
            _, local, remote, _state, _queues, timer, times, _uid, _waits, inode = line.split()[:10]
            if timer.partition(":")[0] == _SENDS_AGAIN and int(times, 16) >= _TIMES:
                yield Connection(_parse_end(local), _parse_end(remote), inode)


def _parse_end(entry: str) -> End:
    """Parse an address in the kernel's format: little-endian words of four bytes, and the port."""
    words, _, port = entry.partition(":")
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return End(str(address), int(port, 16))
