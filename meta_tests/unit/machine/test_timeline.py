"""The samples of a server's memory during a load."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from sm121.machine.timeline import Timeline, TimelineSample

MIB = 1 << 20
MAPS_A_FILE = """
import mmap, sys
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[::4096])
print("mapped", flush=True)
sys.stdin.read()
"""


def program(file: Path) -> "subprocess.Popen[str]":
    """Start a program that maps a file until its standard input ends."""
    started = subprocess.Popen(
        [sys.executable, "-c", MAPS_A_FILE, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdout.readline() == "mapped\n"
    return started


def sampled(processes: Callable[[], list[psutil.Process]]) -> TimelineSample:
    endpoint: Any = None
    timeline = Timeline(processes, endpoint, lambda: 0, 0.0, lambda _line: None)
    http: Any = SimpleNamespace(get=lambda _path: SimpleNamespace(status_code=404))
    timeline.sample(http)
    return timeline.samples[-1]


def test_memory_does_not_grow_when_another_program_with_the_same_library_ends(tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(bytes(16 * MIB))
    server = program(library)
    other = program(library)
    try:
        before = sampled(lambda: [psutil.Process(server.pid)])
        other.communicate()
        after = sampled(lambda: [psutil.Process(server.pid)])
    finally:
        other.kill()
        server.communicate()
    assert before.pss_bytes and after.pss_bytes and before.held_bytes and after.held_bytes
    assert after.pss_bytes - before.pss_bytes > 7 * MIB
    assert abs(after.held_bytes - before.held_bytes) < MIB and after.held_bytes > 16 * MIB
