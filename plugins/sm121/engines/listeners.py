"""Find the processes that listen at an address, and the servers to which they forward requests."""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

#: State of a socket that listens, in /proc/net/tcp (TCP_LISTEN of the kernel's net/tcp_states.h).
_LISTENS = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses(host: str) -> set[str]:
    """Return the IP addresses of a host; empty if its name cannot be resolved.

    Args:
        host: The name of a host, or an IP address.
    """
    try:
        entries = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return set()
    return {_without_zone(str(entry[4][0])) for entry in entries}


def is_here(host: str) -> bool:
    """Return whether a host is this machine: a loopback address, or one of its own.

    Args:
        host: The name of a host, or an IP address.
    """
    local = set()
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            local.add(_without_zone(str(entry.address)))
    host_addresses = addresses(host)
    return bool(host_addresses) and all(
        address in local or _address(address).is_loopback or _address(address).is_unspecified
        for address in host_addresses
    )


def listeners(host: str, port: int) -> list[psutil.Process]:
    """Return every process of this machine that holds the socket which listens at an address.

    If a server forks, several processes hold the socket: the one that opened it, and its workers.
    Processes of another user, or in a container, are not found. This function reads the table of
    sockets once for each network namespace; psutil would read it once for each process.

    Args:
        host: The name of a host, or an IP address.
        port: The number of the TCP port.
    """
    expected = {_address(address) for address in addresses(host)}
    everywhere = any(address.is_unspecified for address in expected)
    tables: dict[str, dict[str, Address]] = {}
    exact = []
    general = []
    for process in psutil.process_iter():
        # These errors mean that the process has ended, or belongs to another user.
        with contextlib.suppress(psutil.Error, OSError):
            namespace = os.readlink(f"/proc/{process.pid}/ns/net")  # noqa: PTH115
            if namespace not in tables:
                tables[namespace] = _listening_sockets(process.pid, port)
            table = tables[namespace]
            if not table:
                continue
            local = {table[name] for name in _open_files(process.pid) if name in table}
            if local and (everywhere or local & expected):
                exact.append(process)
            if any(address.is_unspecified for address in local):
                general.append(process)
    # The kernel prefers a socket bound to exactly this address over one bound to any address.
    return exact or general


def find_upstream(processes: Iterable[psutil.Process], port: int) -> str | None:
    """Return the address of another server to which the processes of a port are connected.

    While a proxy answers a request, it has a connection to the server behind it. Connections among
    the processes themselves do not count.

    Args:
        processes: The processes that listen, and their children.
        port: The number of the TCP port at which they listen.

    Returns:
        ``host:port``, or None if they have no such connection.
    """
    connections = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            connections += process.net_connections("inet")
    own_ends = {(str(_address(link.laddr.ip)), link.laddr.port) for link in connections}
    for link in connections:
        if link.status == psutil.CONN_ESTABLISHED and link.raddr and link.laddr.port != port:
            host = str(_address(link.raddr.ip))
            if (host, link.raddr.port) not in own_ends:
                return f"{host}:{link.raddr.port}"
    return None


def _listening_sockets(pid: int, port: int) -> dict[str, Address]:
    """Return each socket that listens at a port: its name in /proc/PID/fd, and its address."""
    found = {}
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # this kernel has no IPv6
            lines = Path(f"/proc/{pid}/net/{family}").read_text("ascii").splitlines()
            for line in lines[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTENS and int(number, 16) == port:
                    found[f"socket:[{fields[9]}]"] = _address_of_kernel(address)
    return found


def _open_files(pid: int) -> Iterator[str]:
    """Yield the target of each open file of a process.

    A run reads thousands of open files at the end of each test. Creating a Path for each file would
    make this four times as slow.
    """
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # the file was closed meanwhile
            yield os.readlink(f"{folder}/{number}")  # noqa: PTH115


def _address_of_kernel(text: str) -> Address:
    """Convert an address of /proc/net/tcp, which consists of 32-bit words in native byte order."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    return _unmapped(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _address(text: str) -> Address:
    return _unmapped(ipaddress.ip_address(text))


def _unmapped(address: Address) -> Address:
    """Return the IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
