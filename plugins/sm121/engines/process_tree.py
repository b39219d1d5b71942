"""All processes of a server, found in three ways of which each has a hole. By a marker in the
environment: it outlives reparenting, but a process that sets its title (vLLM's engine core and
workers do, with setproctitle) overwrites the memory in which the kernel looks for it. By session:
lost when a child begins its own. By descent: lost when a parent dies, unless a subreaper stands
above it.

Servers of runs that are dead are found by the owner in their environment, and only then ended. A
server's supervisor ends it when the suite dies, so that one is left only where the supervisor was
killed too. Where a process has overwritten its environment, its output still goes to the server's
log, and beside that lies who started the server."""

import contextlib
import ctypes
import ipaddress
import itertools
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.core.waiting import until

_PR_SET_CHILD_SUBREAPER = 36
#: Of /proc/PID/stat, counted from the field after the name.
_START = 19

#: One per run of the suite, in the environment of everything that it starts.
RUN_ID = "SM121_RUN_ID"
#: One per server that is started.
SERVER_ID = "SM121_SERVER_ID"
#: Who started a server: pid and start time of the suite's process, and the boot it was in.
OWNER = "SM121_STARTED_BY"
LOOPBACK = "127.0.0.1"
_SUPERVISOR = "sm121.engines.supervisor"
_SUPERVISED_WITHIN_S = 25.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: State of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Survivor:
    """A process that should be gone."""

    pid: int
    status: str
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.status}) {self.command}"


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Living processes with ``variable=value`` in their environment, except this one."""
    return [
        process
        # None: a zombie, which has no environment, or another user's.
        for process in psutil.process_iter(["environ"])
        if process.pid != os.getpid() and (process.info["environ"] or {}).get(variable) == value
    ]


def tree(
    variable: str, value: str, *, root: int | None = None, session: int | None = None
) -> list[psutil.Process]:
    """Living processes of a server, zombies left out: by marker (`variable`, `value`), by descent
    from the supervisor (`root`, itself too), and by the `session` of the server's main process."""
    members = {process.pid: process for process in marked(variable, value)}
    if root is not None:
        try:
            top = psutil.Process(root)
            members.update({each.pid: each for each in [top, *top.children(recursive=True)]})
        except psutil.NoSuchProcess:
            root = None  # it has ended: what came from it is found in the other two ways
    if session is not None:
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid != os.getpid() and os.getsid(process.pid) == session:
                    members[process.pid] = process
    return [process for process in members.values() if not has_ended(process)]


def addresses(host: str) -> set[str]:
    """The addresses of a host's name, or of an address itself; empty where nobody knows it."""
    try:
        return {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def is_here(host: str) -> bool:
    """Whether a host is this machine: a loopback address, or one of its own."""
    local = {
        str(entry.address).partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    }
    host_addresses = addresses(host)
    return bool(host_addresses) and all(
        address in local or _address(address).is_loopback or _address(address).is_unspecified
        for address in host_addresses
    )


def listeners(host: str, port: int) -> list[psutil.Process]:
    """Return every process of this machine that holds the socket which listens at an address.

    Several hold it if a server forks: the process that opened the socket, and its workers.
    Processes of another user, or in a container, are not seen. The table of sockets is read once
    for each network namespace; psutil reads it once for each process.
    """
    expected = {_address(address) for address in addresses(host)}
    everywhere = any(address.is_unspecified for address in expected)
    tables: dict[str, dict[str, Address]] = {}
    exact, general = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            namespace = str(Path(f"/proc/{process.pid}/ns/net").readlink())
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
    # One at the very address is asked before one that takes what comes to any.
    return exact or general


def _listening_sockets(pid: int, port: int) -> dict[str, Address]:
    """The addresses of the sockets that listen at a port, by the names that /proc/PID/fd has."""
    found = {}
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            lines = Path(f"/proc/{pid}/net/{family}").read_text("ascii").splitlines()
            for fields in map(str.split, lines[1:]):
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTENS and int(number, 16) == port:
                    found[f"socket:[{fields[9]}]"] = _of_kernel(address)
    return found


def _open_files(pid: int) -> Iterator[str]:
    """What each open file of a process is."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield str(file.readlink())


def _of_kernel(text: str) -> Address:
    """An address as /proc/net/tcp has it: words of 32 bits in the machine's order."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    return _plain(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def upstream(processes: Iterable[psutil.Process], port: int) -> str | None:
    """Where processes that listen at a port have a connection to, beside those to each other: a
    proxy has one to its server while it answers. None where they have none."""
    connections = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            connections += process.net_connections("inet")
    ends = {(str(_address(each.laddr.ip)), each.laddr.port) for each in connections}
    for each in connections:
        if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.laddr.port != port:
            host = str(_address(each.raddr.ip))
            if (host, each.raddr.port) not in ends:
                return f"{host}:{each.raddr.port}"
    return None


def _address(text: str) -> Address:
    return _plain(ipaddress.ip_address(text))


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def began(pid: int) -> int:
    """When a process began, in ticks since boot: no change of the clock moves that. Raises
    OSError: it is gone."""
    text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return int(text.rpartition(")")[2].split()[_START])


def describe(processes: Iterable[psutil.Process]) -> list[Survivor]:
    """The processes in words, those that ended meanwhile left out."""
    survivors = []
    for process in processes:
        try:
            command = " ".join(process.cmdline()) or process.name()
            survivors.append(Survivor(process.pid, process.status(), command[:160]))
        except psutil.ZombieProcess:  # has no command line, and is what we are looking for
            survivors.append(Survivor(process.pid, psutil.STATUS_ZOMBIE, "(zombie)"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return survivors


def become_subreaper() -> None:
    """Make this process the new parent of orphans among its descendants (prctl(2)), to reap them
    also where process 1 of a container reaps nothing. Raises OSError: the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def reap(pids: Iterable[int]) -> None:
    """Collect those of the processes that have ended and are our children."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # somebody else's child, or collected already


def end(find: Callable[[], list[psutil.Process]], *, polite_s: float, firm_s: float = 5.0) -> int:
    """SIGTERM to what ``find`` returns, SIGKILL after ``polite_s``; number of processes killed.
    ``find`` is asked again each time, since a dying tree may still start processes."""
    send(find(), signal.SIGTERM)
    if until(lambda: not find(), polite_s, every_s=0.05):
        return 0
    killed: set[int] = set()
    deadline = time.monotonic() + firm_s
    while (remaining := find()) and time.monotonic() < deadline:
        send(remaining, signal.SIGKILL)
        killed.update(process.pid for process in remaining)
        time.sleep(0.05)
    return len(killed)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each of the processes that still lives."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago. Somebody may take it first: whoever binds it retries."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def owner() -> str:
    """This process, as an owner."""
    return identity(os.getpid())


def identity(pid: int) -> str:
    """A name of a process that no other process ever gets: ``pid:ticks:boot``. Raises
    FileNotFoundError: there is no such process."""
    return f"{pid}:{began(pid)}:{_BOOT.read_text('ascii').strip()}"


def of_dead_runs() -> dict[str, list[psutil.Process]]:
    """Processes of servers whose owner is dead, by run id."""
    by_run: dict[str, list[psutil.Process]] = {}
    namespace = _pid_namespace(os.getpid())
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if SERVER_ID not in variables or OWNER not in variables:
                variables = _written_beside_the_log(process)
            # In another container the same pid is another process.
            if (
                OWNER not in variables
                or _pid_namespace(process.pid) != namespace
                or _lives(variables[OWNER])
            ):
                continue
            run = variables.get(RUN_ID, "")
            mine = by_run.setdefault(run, [])
            for each in (process, *process.children(recursive=True)):
                if each not in mine:
                    mine.append(each)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return by_run


def _written_beside_the_log(process: psutil.Process) -> dict[str, str]:
    """Owner and run of a process of a server's session whose output goes to that server's log, as
    the supervisor wrote them down; nothing of any other process."""
    log = Path(f"/proc/{process.pid}/fd/1").readlink()
    start = re.fullmatch(r"(server-.+?)(?:-\d+)?\.log", log.name)
    if start is None or process.uids().real != os.getuid():
        return {}
    for name in (log.stem, start[1]):  # a later start of a configuration has a log of its own
        try:
            status = json.loads((log.parent / f"{name}.status.json").read_text("utf-8"))
            if status["pid"] == os.getsid(process.pid):
                return {OWNER: str(status["started_by"]), RUN_ID: str(status["run"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no status of ours, or one of an earlier version of the suite
    return {}


def end_dead_runs() -> list[tuple[str, list[Survivor]]]:
    """End what `of_dead_runs` finds; what it was, by run id. A supervisor that lives is given time
    to write down what happened, and to end its server itself."""

    def is_alone() -> bool:
        for process in itertools.chain.from_iterable(of_dead_runs().values()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if _SUPERVISOR in process.cmdline():
                    return False
        return True

    until(is_alone, _SUPERVISED_WITHIN_S, every_s=0.5)
    removed = []
    for run, processes in of_dead_runs().items():
        removed.append((run, describe(processes)))

        def remaining(own: list[psutil.Process] = processes) -> list[psutil.Process]:
            return [each for each in own if not has_ended(each)]

        end(remaining, polite_s=5.0)
    return removed


def _lives(text: str) -> bool:
    pid = text.partition(":")[0]
    if not pid.isdecimal():
        return True  # not written by the suite: its owner is not known to be dead
    try:
        now = identity(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return now == text


def _pid_namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
