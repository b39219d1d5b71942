"""Runs that end in different ways; test_run_endings.py starts them in a process."""

import json
import os
import signal
import time

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_passes(client, model):
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=1)
    assert answer.choices[0].text == " Paris"


def test_fails(server):
    assert server is None, "expected no server"


def test_waits(server):
    print("waiting")
    time.sleep(600)


def test_api_server_dies(conformance, server):
    time.sleep(2)  # wait, so that the test has seen the whole process tree
    status = conformance.run.servers.pool.current.launch.log.with_suffix(".status.json")
    os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
    time.sleep(1)


def test_engine_core_dies(conformance, server):
    time.sleep(2)
    (core,) = [
        p
        for p in conformance.run.servers.pool.current.launch.processes()
        if "EngineCor" in p.name()
    ]
    core.kill()
    time.sleep(3)
