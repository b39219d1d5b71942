"""The report of a node becomes a fault only after some time. A silent node ends the server."""

import dataclasses
import json
from collections.abc import Callable, Iterator

import pytest

from meta_tests.fakes.two_ranks import COMMAND
from meta_tests.unit.engines.two_nodes import (
    RUN,
    configuration,
    left_of,
    spanning,
    watch_of,
    with_bounds,
)
from sm121.core import waiting
from sm121.core.configuration import Rank
from sm121.engines import node_process, node_watch, ports
from sm121.engines.node_process import NodeProcess
from sm121.engines.server_errors import ServerError
from sm121.evidence.unanswered import Connection, End

#: How long a state must last to be a fault, and how long the test waits to see that there is no
#: fault, in seconds.
PATIENCE_S = 0.3
WITHOUT_A_FAULT_S = 0.7
WELL = {
    "exit_status": None, "exits": [], "tree": [], "nccl": [], "available_bytes": 1,
    "unreachable": None, "unanswered": [], "address": "10.77.0.2", "kernel": [],
}  # fmt: skip
CUT_OFF = {"unreachable": "Network is unreachable"}
TO_RANK_0 = "10.77.0.2:5 -> 10.77.0.1:6"
UNANSWERED = {"unanswered": [TO_RANK_0]}
STOPPED = {"tree": [{"pid": 7, "name": "python3", "status": "stopped"}]}
RUNNING = {"tree": [{"pid": 7, "name": "python3", "status": "sleeping"}]}


@pytest.fixture
def fault_of(monkeypatch, tmp_path) -> Iterator[Callable[..., ServerError | None]]:
    """Return the fault of a server whose other node reports these states one after the other."""
    nodes = []

    def find(*states: dict, within_s: float = 10.0, **bounds: float) -> ServerError | None:
        patience = {"unreachable_after_s": PATIENCE_S, "stopped_after_s": PATIENCE_S} | bounds
        with_bounds(monkeypatch, **patience)
        answers = [{"host": "spark2"}, *({"state": WELL | state} for state in states)]
        lines = tmp_path / "answers.txt"
        lines.write_text("".join(f"sm121-node {json.dumps(answer)}\n" for answer in answers))
        command = ("sh", "-c", 'cat "$0"; exec cat > /dev/null', str(lines))
        log = tmp_path / "node-1.log"
        log.touch()
        node = NodeProcess(1, command, {}, log)
        nodes.append(node)
        server = spanning(tmp_path, configuration(), "meta-states")
        watch_of(server).others = [node]
        return server.fault(settle_s=within_s)

    yield find
    for node in nodes:
        node.close(5.0)


@pytest.mark.parametrize(
    ("states", "what"),
    [
        pytest.param(
            [{}, CUT_OFF],
            "the link is down: it has not reached this machine for 0 s (Network is unreachable)",
            id="it no longer reaches this machine",
        ),
        pytest.param(
            [{}, CUT_OFF | UNANSWERED],
            "the link is down: it has not reached this machine for 0 s",
            id="nor has its connection an answer",
        ),
        pytest.param(
            [CUT_OFF | UNANSWERED],
            f"the link is down, or a port is blocked: {TO_RANK_0} has no answer for 0 s",
            id="it has never reached this machine, and its connection has no answer",
        ),
        pytest.param(
            [{}, UNANSWERED],
            f"the link is down, or a port is blocked: {TO_RANK_0} has no answer for 0 s",
            id="its connection alone has no answer",
        ),
        pytest.param(
            [STOPPED], "process python3 (7) is stopped by a signal for 0 s", id="it is stopped"
        ),
        pytest.param([{"exit_status": 3}], "its rank ended with status 3", id="its rank ended"),
    ],
)
def test_state_that_lasts_is_a_fault_of_its_node(fault_of, states, what):
    fault = fault_of(*states)
    assert fault is not None and fault.cause.summary.startswith("node 1 (spark2)"), fault
    assert what in fault.cause.summary


@pytest.mark.parametrize(
    "states",
    [
        pytest.param([{}], id="it is well"),
        pytest.param([CUT_OFF], id="it has never reached this machine"),
        pytest.param([{}, CUT_OFF, {}], id="it reaches this machine again"),
        pytest.param([UNANSWERED, {}], id="an answer came"),
        pytest.param([STOPPED, RUNNING], id="it runs again"),
    ],
)
def test_state_that_passes_is_no_fault(fault_of, states):
    assert fault_of(*states, within_s=WITHOUT_A_FAULT_S) is None


def test_a_node_without_reports_is_a_fault(fault_of):
    fault = fault_of({}, silent_after_s=PATIENCE_S)
    assert fault is not None and "it has sent nothing for 0 s" in fault.cause.summary, fault


def test_a_node_that_starts_may_take_longer(fault_of):
    bounds = {"silent_after_s": PATIENCE_S, "answers_within_s": 60.0}
    assert fault_of(within_s=WITHOUT_A_FAULT_S, **bounds) is None
    assert fault_of(**{**bounds, "answers_within_s": PATIENCE_S}) is not None


def test_rank_0_has_no_answer_from_the_node(fault_of, monkeypatch):
    here = End("10.77.0.1", 6)
    to_node = Connection(here, End("10.77.0.2", 5), "1")
    elsewhere = Connection(here, End("10.77.0.3", 5), "2")
    monkeypatch.setattr(node_watch, "unanswered", lambda _processes, _peers: [elsewhere])
    assert fault_of({}, within_s=WITHOUT_A_FAULT_S) is None, "a connection to another node"
    monkeypatch.setattr(node_watch, "unanswered", lambda _processes, _peers: [to_node])
    monkeypatch.setattr(node_watch, "_SAY_EVERY_S", 0.0)
    fault = fault_of({})
    assert fault is not None and f"a port is blocked: {to_node}" in fault.cause.summary, fault


def test_node_whose_suite_is_silent_ends_its_rank(tmp_path):
    port = ports.free_port()
    request = node_process.question(
        configuration(), "start", rank=dataclasses.asdict(Rank(1, 2, "127.0.0.1", port)),
        beacon=("127.0.0.1", port), added={}, stop_s=5, lease_s=0.5, run=RUN,
    )  # fmt: skip
    node = NodeProcess(1, COMMAND, request, tmp_path / "node-1.log")
    assert waiting.until(lambda: left_of(RUN), 10.0), node.last_line
    assert node.wait_for("stopped", 20.0)["survivors"] == []
    assert waiting.until(lambda: node.exit_status == 0, 5.0) and not left_of(RUN)
    node.close(5.0)
