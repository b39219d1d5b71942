"""A connection without an answer is a fault of the node at its other end."""

import time

import pytest

from meta_tests.fakes.two_ranks import TwoRanks
from meta_tests.unit.engines.two_nodes import configuration, spanning, watch_of
from sm121.core import waiting
from sm121.engines import nodes, registry
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError
from sm121.evidence.unanswered import Connection, End


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._ENGINES, TwoRanks.name, TwoRanks())
    server = spanning(tmp_path, configuration())
    server.start()
    yield server
    server.stop()


def faults_of_connection(server: ManagedServer, address: str) -> list[str]:
    """Return the faults of node 1 if a connection to this address gets no answer for too long."""
    connection = Connection(End("192.0.2.7", 29500), End(address, 40000), inode="1")
    patience_s = nodes.bounds().unreachable_after_s.value
    watch = watch_of(server)
    watch.unanswered_since = {connection: time.monotonic() - patience_s}
    losses = watch._faults_of_link(watch.others[0], time.monotonic())
    log = server.launch.log
    return [loss.error(ServerError, log).cause.summary for loss in losses]


def test_a_connection_without_an_answer_is_a_fault_of_the_node_at_its_far_end(started):
    node = watch_of(started).others[0]
    assert waiting.until(lambda: "address" in node.state, 20.0), "the node has reported"
    address = node.state["address"]
    (fault,) = faults_of_connection(started, address)
    assert f"192.0.2.7:29500 -> {address}:40000 has no answer for" in fault
    assert faults_of_connection(started, "192.0.2.1") == []
