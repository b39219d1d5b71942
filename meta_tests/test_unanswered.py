"""Whose packets nobody acknowledges: by the kernel's table of connections."""

import socket
from pathlib import Path

import psutil
from data_rows import from_data

from sm121.evidence import unanswered


@from_data
def test_connection_without_an_answer(
    monkeypatch, tmp_path, table, local, remote, state, timer, times, inode, expected
):
    monkeypatch.setattr(unanswered, "_NET", tmp_path)
    for name in ("tcp", "tcp6"):
        (tmp_path / name).write_text("  sl  local_address\n")
    with socket.socket() as ours, (tmp_path / (table or "tcp")).open("a") as lines:
        name = Path(f"/proc/self/fd/{ours.fileno()}").readlink().name
        inode = inode or name.removeprefix("socket:[")[:-1]
        entry = f"{local} {remote} {state} 00000001:00000000 {timer}:00000019 {times:08X}"
        lines.write(f"   1: {entry}     0        0 {inode} 2 0 99 0 0 10 -1\n")
        lines.flush()
        ends = unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1", "2001:db8::1"})
    assert ends == ([expected] if expected else [])


def test_a_kernel_without_such_a_table_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(unanswered, "_NET", tmp_path / "none")
    assert unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1"}) == []
