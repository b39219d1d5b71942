"""The processes that listen at an address, and the servers to which they pass requests on."""

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

    Several hold it if a server forks: the process that opened the socket, and its workers.
    Processes of another user, or in a container, are not found. The table of sockets is read once
    for each network namespace; psutil reads it once for each process.

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
        # Suppressed: the process has ended, or is another user's.
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
    # The kernel prefers a socket at the very address to one that listens at any address.
    return exact or general


def find_upstream(processes: Iterable[psutil.Process], port: int) -> str | None:
    """Return the address to which processes that listen at a port have a connection.

    A proxy has one to its server while it answers. Connections among the processes do not count.

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
    """Return the addresses of the sockets that listen at a port, by their names in /proc/PID/fd."""
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

    A run reads thousands of them at the end of each test; with a Path for each, this would take
    four times as long.
    """
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"{folder}/{number}")  # noqa: PTH115


def _address_of_kernel(text: str) -> Address:
    """Return an address of /proc/net/tcp: words of 32 bits in the machine's byte order."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    return _unmapped(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _address(text: str) -> Address:
    return _unmapped(ipaddress.ip_address(text))


def _unmapped(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, else the address itself."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
