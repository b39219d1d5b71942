"""The state that the agent on another node reports."""

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from sm121.engines import node_agent
from sm121.engines.supervision import Supervision
from sm121.evidence.kernel_messages import KernelMessages

#: No process on this machine has this pid.
PID = 2**22 + 1


class RankOfStatusFile:
    """A rank whose state is read from the status file of its supervisor."""

    def __init__(self, log: Path) -> None:
        self.supervision = Supervision(log)
        self.at = time.monotonic()
        self.launch = self
        self.added = {"VLLM_HOST_IP": "127.0.0.1"}

    def processes(self) -> list[Any]:
        return []

    def exits(self) -> list[dict[str, Any]]:
        return self.supervision.exits()

    @property
    def exit_status(self) -> int | None:
        return self.supervision.exit_status

    def write(self, exit_status: int | None, *ends: tuple[str, int]) -> None:
        exits = []
        for name, status in ends:
            now = time.monotonic()
            end = {"pid": PID, "name": name, "status": status, "monotonic_s": now, "by_us": False}
            exits.append(end)
        content = {"exit_status": exit_status, "exits": exits}
        self.supervision.status_file.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("when", ["before", "in the course of"])
def test_exit_status_is_never_reported_without_the_end_of_its_process(
    tmp_path, monkeypatch, capsys, when
):
    """An exit status is never reported without the end of its process.

    Such a report would not contain a signal or an OOM kill, and rank 0 would take it for the first
    fault."""
    rank = RankOfStatusFile(tmp_path / "server.log")
    helper = ("python", 0)
    rank.write(None, helper)

    def dies(_launched: float) -> KernelMessages:
        rank.write(-signal.SIGKILL, helper, ("VLLM::Worker", -signal.SIGKILL))
        return KernelMessages((f"[1.0] Out of memory: Killed process {PID} (python)",))

    if when == "before":
        dies(0.0)
    monkeypatch.setattr(node_agent.kernel_messages, "since", dies)
    with socket.create_server(("127.0.0.1", 0)) as beacon:
        address = list(beacon.getsockname())
        question = {"beacon": address, "lease_s": 60.0, "rank": {"address": "127.0.0.1"}}
        node_agent._Reporter(rank, question).tell_state()
    line = capsys.readouterr().out.splitlines()[-1]
    state = json.loads(line.removeprefix(node_agent.MARK))["state"]
    ends = [(end["name"], end["status"]) for end in state["exits"]]
    assert state["exit_status"] is None or ("VLLM::Worker", -signal.SIGKILL) in ends
    assert state["kernel"]
