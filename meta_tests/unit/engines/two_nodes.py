"""A server on two nodes of this machine: its configuration, its bounds, and what it leaves."""

import os
import sys

import psutil

from meta_tests.fakes.two_ranks import COMMAND
from sm121.core import data_file
from sm121.core.configuration import ServerConfiguration, Span
from sm121.core.profile_fields import Sourced
from sm121.engines import nodes, process_tree

#: Of this process: another worker may start ranks of its own.
RUN = f"meta-{os.getpid()}"


def configuration(*arguments: str, command: tuple[str, ...] = COMMAND, address: str | None = None):
    span = Span("nnodes", 2, (command,), address)
    return ServerConfiguration(
        "two", "two-ranks", sys.executable, "none", "canary", arguments, span=span
    )


def with_bounds(monkeypatch, **seconds: float) -> None:
    """The suite's bounds of nodes, but for these."""
    data = data_file.load("nodes.toml", nodes.NodesFile)
    changed = {name: Sourced(value=value, source="a test") for name, value in seconds.items()}
    monkeypatch.setattr(nodes, "bounds", lambda: data.model_copy(update=changed))


def left_of(run: str) -> list[psutil.Process]:
    return process_tree.marked(process_tree.RUN_ID, run)
