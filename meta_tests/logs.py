"""Logs as lists of lines, for tests."""

from __future__ import annotations

from collections.abc import Iterable

from sm121.evidence.kernel_path import KernelPath, LogReader
from sm121.evidence.log_lines import join_wrapped


def read_lines(lines: Iterable[str], engine: str = "vllm") -> KernelPath:
    """As `sm121.evidence.kernel_path.read_log`, of the lines of a log."""
    reader = LogReader(engine)
    for line in join_wrapped(lines):
        reader.take(line)
    return reader.path()
