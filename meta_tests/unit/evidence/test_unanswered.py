"""A connection whose other end does not answer is found in the kernel's tables."""

import socket
from pathlib import Path

import psutil
import pytest

from sm121.evidence import unanswered


@pytest.mark.parametrize(
    ("table", "local", "remote", "state", "timer", "times", "inode", "expected"),
    [
        pytest.param(
            None,
            "02004D0A:C350",
            "01004D0A:733D",
            "01",
            "01",
            3,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="02004D0A:C350, 01004D0A:733D, 01, 01, 3",
        ),
        # the connection is not established
        pytest.param(
            None,
            "02004D0A:C350",
            "01004D0A:733D",
            "02",
            "01",
            4,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="02004D0A:C350, 01004D0A:733D, 02, 01, 4",
        ),
        # the connection of torch's store
        pytest.param(
            "tcp6",
            "0000000000000000FFFF000002004D0A:C350",
            "0000000000000000FFFF000001004D0A:733D",
            "01",
            "01",
            9,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="tcp6, 0000000000000000FFFF000002004D0A:C350",
        ),
        pytest.param(
            "tcp6",
            "B80D0120000000000000000002000000:C350",
            "B80D0120000000000000000001000000:733D",
            "01",
            "01",
            5,
            None,
            "[2001:db8::2]:50000 -> [2001:db8::1]:29501",
            id="tcp6, B80D0120000000000000000002000000:C350",
        ),
        # In this order: the socket waits for data; two packets were lost; the peer does not read;
        # the socket belongs to another process; the peer is another host.
        (None, "02004D0A:C350", "01004D0A:733D", "01", "00", 0, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "01", 2, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "04", 9, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "01", 9, "1", None),
        (None, "02004D0A:C350", "08080808:01BB", "02", "01", 9, None, None),
    ],
)
def test_connection_without_an_answer(
    monkeypatch, tmp_path, table, local, remote, state, timer, times, inode, expected
):
    monkeypatch.setattr(unanswered, "_NET", tmp_path)
    for name in ("tcp", "tcp6"):
        (tmp_path / name).write_text("  sl  local_address\n")
    with socket.socket() as local_socket, (tmp_path / (table or "tcp")).open("a") as lines:
        name = Path(f"/proc/self/fd/{local_socket.fileno()}").readlink().name
        inode = inode or name.removeprefix("socket:[")[:-1]
        entry = f"{local} {remote} {state} 00000001:00000000 {timer}:00000019 {times:08X}"
        lines.write(f"   1: {entry}     0        0 {inode} 2 0 99 0 0 10 -1\n")
        lines.flush()
        found = unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1", "2001:db8::1"})
    assert [str(connection) for connection in found] == ([expected] if expected else [])
    assert {each.remote.address for each in found} <= {"10.77.0.1", "2001:db8::1"}


def test_a_linux_kernel_without_the_tcp_table_has_no_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(unanswered, "_NET", tmp_path / "none")
    assert unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1"}) == []
