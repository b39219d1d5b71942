"""Every check of the smoke and correctness levels is seen failing on the fault that it exists for.

The faults are put by a proxy in front of the real vLLM; wrong models are in test_model_faults.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
from fault_proxy import FAULTS, Fault, FaultProxy

from sm121 import profile
from sm121.engines.configuration import ServerConfiguration, environment_items
from sm121.engines.managed import ManagedServer, Patience
from sm121.engines.vllm import Vllm

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
PROFILE = profile.load("cpu-tiny-gpt-oss")


def vllm_serving(model: Path, directory: Path) -> ManagedServer:
    own = PROFILE.configurations[PROFILE.under_test]
    configuration = ServerConfiguration(
        name=PROFILE.under_test,
        engine="vllm",
        python=sys.executable,
        model=str(model),
        served_name=PROFILE.model.served_name,
        arguments=(*PROFILE.engine.arguments, *own.arguments),
        environment=environment_items(PROFILE.engine.environment),
        speaking_worker=True,
    )
    patience = Patience(ready_s=300, stalled_s=120, stop_s=20)
    return ManagedServer(configuration, Vllm(), patience, directory, "meta-catalogue")


@pytest.fixture(scope="module")
def managed_vllm(canary_bf16, tmp_path_factory):
    """The real vLLM on the canary, shared by all faults of the proxy."""
    managed = vllm_serving(canary_bf16, tmp_path_factory.mktemp("vllm"))
    server = managed.start()
    yield managed, server
    managed.stop()


@pytest.fixture(scope="module")
def real_vllm(managed_vllm):
    """Where the real vLLM answers."""
    return managed_vllm[1]


@pytest.fixture
def judge(real_vllm, run_pytest):
    """Run the suite's tests of some names against the real server behind a fault."""

    def run(fault: Fault, *tests: str):
        with FaultProxy(real_vllm.endpoint.base_url, fault) as proxy:
            return run_pytest(
                "--arch", "cpu", "--base-url", proxy.base_url,
                "--api-key", real_vllm.endpoint.api_key, "-k", " or ".join(tests),
            )  # fmt: skip

    return run


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(judge, name):
    fault = FAULTS[name]
    status, run = judge(fault, fault.caught_by)
    assert status == 1, f"{name}: not caught\n{run.output}"
    failed = [test for test in run.verdict["tests"] if test["verdict"] == "FAIL"]
    assert failed and all("required" in test["message"] for test in failed), failed


def test_the_clean_server_passes_every_test_of_the_catalogue(judge):
    tests = {fault.caught_by for fault in FAULTS.values()}
    status, run = judge(Fault("none", ""), *tests)
    assert status == 0, run.output
    assert sum(test["verdict"] == "PASS" for test in run.verdict["tests"]) >= len(tests)


def test_the_server_listens_on_the_loopback_only(managed_vllm):
    managed, _ = managed_vllm
    listening = {
        connection.laddr.ip
        for process in managed.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}, listening


@pytest.mark.parametrize(
    ("log", "test", "expected"),
    [
        ("vllm-0.32-cpu-stopped.log", "test_every_variable", "VLLM_ATTENTION_BACKEND"),
        (
            "vllm-0.32-cpu-stopped.log",
            "test_kernel_path",
            "attention: required CPU_ATTN, seen None",
        ),
        ("vllm-0.32-port-held.log", "test_start_up_log", "required: no failure"),
    ],
)
def test_what_the_log_shows_is_caught(fault_server, run_pytest, log, test, expected):
    server = fault_server()
    status, run = run_pytest(
        "--arch", "cpu", "--base-url", server.base_url, "--api-key", server.key,
        "--server-log", str(HERE / "data" / log), "tests", "-k", test,
    )  # fmt: skip
    assert status == 1, run.output
    assert expected in json.dumps(run.verdict["tests"]), run.verdict["tests"]


def test_an_import_from_another_environments_packages_is_caught(run_pytest, tmp_path, canary_bf16):
    packages = tmp_path / "other" / "lib" / "site-packages"
    (packages / "flashinfer").mkdir(parents=True)
    (packages / "flashinfer" / "__init__.py").touch()
    status, run = run_pytest(
        "--arch", "cpu", "tests/test_smoke.py", "-k", "test_imports",
        environment={"PYTHONPATH": str(packages)},
    )  # fmt: skip
    assert status == 1 and "flashinfer: required from" in run.output, run.output


def test_an_import_from_the_wrong_place_is_caught(run_pytest, tmp_path, canary_bf16):
    """A checkout that the profile expects exists, and vLLM comes from elsewhere."""
    (tmp_path / "checkout" / "vllm").mkdir(parents=True)
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    checkouts = f'[engine.checkouts]\nvllm = "{tmp_path}/checkout"\n\n[engine.needs]'
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("[engine.needs]", checkouts))
    status, run = run_pytest("--profile", str(file), "tests/test_smoke.py", "-k", "test_imports")
    assert status == 1, run.output
    message = run.verdict["tests"][0]["message"]
    assert re.search(r"vllm: required from the checkout .*/checkout, seen .*vllm", message), message
