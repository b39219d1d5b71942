"""A load on the real vLLM in which one of its processes is killed;
meta_tests/faults/stress_faults.py starts it in a process. SM121_META_VICTIM: api, core or worker.
"""

import json
import os
import signal
import threading
import time

import pytest

pytestmark = [pytest.mark.stress, pytest.mark.applies_to("cpu", "gpu")]

NAMES = {"core": "EngineCor", "worker": "Worker"}


def victim(conformance) -> int:
    managed = conformance.run.servers.pool.current
    which = os.environ["SM121_META_VICTIM"]
    if which == "api":
        return json.loads(managed.launch.log.with_suffix(".status.json").read_text())["pid"]
    processes = []
    for p in managed.launch.processes():
        if any(NAMES[which] in part for part in shown(p)):
            processes.append(p)
    return processes[0].pid


def shown(process) -> list[str]:
    return [process.name(), " ".join(process.cmdline())]


def test_killed_under_load(conformance, stress):
    pid = victim(conformance)
    threading.Timer(2.0, os.kill, (pid, signal.SIGKILL)).start()
    time.sleep(0.5)
    stress.sustained()
    stress.sustained()


def test_serves_afterwards(client, model):
    """A new server has replaced the killed one, and answers requests."""
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=1)
    assert answer.choices[0].text == " Paris"
