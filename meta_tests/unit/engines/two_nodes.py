"""A server on two nodes of this machine: its configuration, its time limits, and what it leaves
behind."""

import os
import sys
from pathlib import Path

import psutil

from meta_tests.fakes.two_ranks import COMMAND, TwoRanks
from sm121.core import data_file
from sm121.core.configuration import ServerConfiguration, Span
from sm121.core.profile_fields import Sourced
from sm121.engines import nodes, process_tree
from sm121.engines.managed import ManagedServer
from sm121.engines.node_watch import NodeWatch
from sm121.engines.spanning import RankNodes
from sm121.engines.starting import StartLimits

#: The id contains the pid of this process, because another worker may start ranks, too.
RUN = f"meta-{os.getpid()}"


def configuration(*arguments: str, command: tuple[str, ...] = COMMAND, address: str | None = None):
    span = Span("nnodes", 2, (command,), address)
    return ServerConfiguration(
        "two", "two-ranks", sys.executable, "none", "canary", arguments, span=span
    )


def spanning(folder: Path, started: ServerConfiguration, run: str = RUN) -> ManagedServer:
    """Return a server with this configuration that has not been started."""
    limits = StartLimits(20, 20, 5)
    others = RankNodes(started, limits.stop_s, run)
    return ManagedServer(started, TwoRanks(), limits, folder, run, other_nodes=others)


def watch_of(server: ManagedServer) -> NodeWatch:
    """Return the watch of the server's other nodes."""
    assert isinstance(server.other_nodes, RankNodes)
    return server.other_nodes.watch


def with_bounds(monkeypatch, **seconds: float) -> None:
    """Return the suite's time limits for nodes with these changes."""
    data = data_file.load("nodes.toml", nodes.NodesFile)
    changed = {name: Sourced(value=value, source="a test") for name, value in seconds.items()}
    monkeypatch.setattr(nodes, "bounds", lambda: data.model_copy(update=changed))


def left_of(run: str) -> list[psutil.Process]:
    return process_tree.marked(process_tree.RUN_ID, run)
