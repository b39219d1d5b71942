"""The servers that a run of pytest uses."""

import os
import time
from types import SimpleNamespace

import httpx
import pytest

from meta_tests.fakes.fault_engine import FaultEngine
from meta_tests.fakes.servers import executable
from pytest_llm_server.factory import LlmServerFactory
from pytest_llm_server.options import Asked
from pytest_llm_server.server import LlmServer
from pytest_llm_server.servers import Servers
from pytest_llm_server.timer import Timer
from sm121.engines import registry

TOKEN = "hf_" + "aB3" * 10
NO_MEMORY = "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    """The servers of a run, and a factory of servers that die on request."""
    monkeypatch.setattr(registry, "engine", lambda _name: FaultEngine())
    asked = Asked(None, "vllm", "mortal", ("--fault", "obeys"), 60.0)
    servers = Servers(asked, Timer(), lambda: "test_it")
    run = SimpleNamespace(servers=lambda: servers, make_room=lambda: None)
    return servers, LlmServerFactory(run, tmp_path)


def die(server: LlmServer) -> None:
    with server.http(timeout_s=5.0) as http, pytest.raises(httpx.HTTPError):
        http.post("/v1/completions", json={"prompt": "die"}).raise_for_status()


def test_a_message_of_the_driver_at_a_healthy_start_is_no_cause_of_a_later_death(
    mortal, tmp_path, monkeypatch
):
    servers, factory = mortal
    with factory() as server:
        at_start = time.monotonic() - 0.1
        kernel = f"[    0.1] boot\n[{at_start:.6f}] {NO_MEMORY}\n"
        executable(tmp_path / "dmesg", f"cat <<E\n{kernel}E")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        die(server)
        failed = servers.look()
    assert "Cause: killed: " in str(failed)
    assert NO_MEMORY in next(tmp_path.glob("crashes/*/kernel.log")).read_text()


def test_a_token_in_the_log_is_in_no_crash_bundle(mortal, tmp_path):
    servers, factory = mortal
    with factory() as server:
        with server.log.open("a") as log:
            log.write(f"HF_TOKEN={TOKEN}\n")
        die(server)
        failed = servers.look()
    bundled = next(tmp_path.glob("crashes/*/server.log")).read_text()
    assert "HF_TOKEN=[redacted]" in bundled
    assert TOKEN not in bundled + str(failed)
