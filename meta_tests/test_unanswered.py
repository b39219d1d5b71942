"""Whose packets nobody acknowledges: by the kernel's table of connections."""

import socket
from pathlib import Path

import psutil
import pytest

from sm121.evidence import unanswered

#: Rank 1 at 10.77.0.2:50000, rank 0 at 10.77.0.1:29501; the second as torch's sockets have it.
PLAIN = "02004D0A:C350", "01004D0A:733D"
MAPPED = tuple("0000000000000000FFFF0000" + end for end in PLAIN)
PLAIN_6 = "B80D0120000000000000000002000000:C350", "B80D0120000000000000000001000000:733D"
END = ["10.77.0.2:50000 -> 10.77.0.1:29501"]
TABLE = {  # table, ends, state, timer, how often in a row, whether it is ours; what is told
    "data, again and again": ("tcp", PLAIN, "01", "01", 3, True, END),
    "a connection that does not come about": ("tcp", PLAIN, "02", "01", 4, True, END),
    "of torch's store": ("tcp6", MAPPED, "01", "01", 9, True, END),
    "over IPv6": (
        "tcp6", PLAIN_6, "01", "01", 5, True, ["[2001:db8::2]:50000 -> [2001:db8::1]:29501"],
    ),
    "it waits for data": ("tcp", PLAIN, "01", "00", 0, True, []),
    "two packets were lost": ("tcp", PLAIN, "01", "01", 2, True, []),
    "its peer reads nothing": ("tcp", PLAIN, "01", "04", 9, True, []),
    "of another process": ("tcp", PLAIN, "01", "01", 9, False, []),
    "to another host": ("tcp", (PLAIN[0], "08080808:01BB"), "02", "01", 9, True, []),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_connection_without_an_answer(monkeypatch, tmp_path, name):
    table, (local, remote), state, timer, times, is_ours, expected = TABLE[name]
    monkeypatch.setattr(unanswered, "_NET", tmp_path)
    with socket.socket() as ours:
        socket_name = Path(f"/proc/self/fd/{ours.fileno()}").readlink().name
        inode = socket_name.removeprefix("socket:[")[:-1] if is_ours else "1"
        line = f"{local} {remote} {state} 00000001:00000000 {timer}:00000019 {times:08X}"
        tables = {"tcp": "  sl  local_address\n", "tcp6": "  sl  local_address\n"}
        tables[table] += f"   1: {line}     0        0 {inode} 2 0 99 0 0 10 -1\n"
        for file, text in tables.items():
            (tmp_path / file).write_text(text)
        peers = {"10.77.0.1", "2001:db8::1"}
        assert unanswered.unanswered(lambda: [psutil.Process()], peers) == expected


def test_a_kernel_without_such_a_table_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(unanswered, "_NET", tmp_path / "none")
    assert unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1"}) == []
