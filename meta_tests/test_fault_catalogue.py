"""Every check of the smoke and correctness levels is seen failing on the fault that it exists for.
The faults are put by a proxy in front of the real vLLM; wrong models are in
test_model_faults.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import fault_proxy
import httpx
import protocol_faults
import psutil
import pytest
from data_rows import from_data
from false_greens.engine import attached_engine
from protocol_faults import vllm_serving

from sm121.core import profile

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent


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


#: One of each kind of the protocol faults. The others take longer: `make catalogues`.
SAMPLE = (
    "another model's name",
    "usage counts one token more",
    "the stop string is in the text",
    "a stream that drops a token",
    "a stream cut off, with status 200",
    "no [DONE]",
    "a call that is text",
    "200 for an error",
    "dead after an error",
)


def test_a_sample_of_the_protocol_faults_is_caught(real_vllm):
    endpoint = real_vllm.endpoint
    found = list(protocol_faults.outcomes(endpoint.base_url, endpoint.api_key, SAMPLE))
    survivors = [outcome for outcome in found if not outcome.killed]
    assert len(found) == len(SAMPLE) and not survivors, survivors


@pytest.mark.slow("`make conformance` runs the same tests on a server of its own")
def test_the_clean_server_passes_the_tests_of_the_sample(real_vllm):
    endpoint = real_vllm.endpoint
    tests = [fault_proxy.FAULTS[name].caught_by for name in SAMPLE]
    (clean,) = protocol_faults.outcomes(endpoint.base_url, endpoint.api_key, [], clean=tests)
    assert clean.status == 0, clean
    assert all(verdict == "PASS" for _, verdict, _ in clean.tests), clean


def test_two_lies_at_once_are_told_apart(real_vllm, tmp_path):
    """Each is noticed by its own test; without a lie both pass. The second touches both tests."""
    own = {"the second stop token is ignored": "test_a_stop_token_ends_the_answer"}
    own["one id for all completions"] = "test_answers_have_ids_and_times"
    endpoint, script = real_vllm.endpoint, str(HERE / "lies.py")
    options = f"--base-url={endpoint.base_url}", f"--key={endpoint.api_key}", f"--state={tmp_path}"
    only = f"--output={tmp_path}/page.md", "--only", " or ".join(own.values())
    subprocess.run([sys.executable, script, *options, *only, *own], check=True)
    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines())
    noticed = {row["lie"]: {test.rpartition("::")[2] for test in row["fails"]} for row in rows}
    assert noticed == {lie: {test} for lie, test in own.items()}


def test_a_known_failure_is_not_red_and_another_one_is(real_vllm, run_pytest, tmp_path):
    """Whole runs against a trusted one: the same deviation, another one, and a mere courtesy."""
    usage, refused = "test_usage_equals_the_ids", "test_request[prompt-is-a-number]"
    endpoint, faults = real_vllm.endpoint, fault_proxy.FAULTS
    first = faults["usage counts one token more"]
    with fault_proxy.FaultProxy.listening(endpoint.base_url, first, endpoint.api_key) as door:

        def judged(name: str, *options: str) -> tuple[int, dict]:
            report = tmp_path / name
            status, run = run_pytest(
                *(f"tests/test_correctness.py::{test}" for test in (usage, refused)),
                "--arch", "cpu", "--base-url", door.base_url, "--api-key", endpoint.api_key,
                "--report-dir", str(report), *options,
            )  # fmt: skip
            assert (report / "verdict.json").is_file(), run.output
            return status, json.loads((report / "verdict.json").read_text("utf-8"))

        status, trusted = judged("trusted")
        assert status == 1 and trusted["verdict"] == "FAIL"
        against = "--against", str(tmp_path / "trusted")
        status, run = judged("again", *against)
        assert status == 0, run["reason"]
        assert (
            run["reason"].startswith("no worse than the run of ")
            and "1 failed and is known" in (run["reason"])
        )
        door.switch(faults["an error without error object"])
        status, run = judged("courtesy", *against)
        assert status == 0 and len(run["against"]["mended"]) == 1, run["reason"]
        listed = [test for test in run["tests"] if test["tolerated"] == "listed"]
        assert [test["severity"] for test in listed] == ["courtesy"], run["tests"]
        door.switch(faults["500 for 400"])
        status, run = judged("worse", *against)
        assert status == 1 and not run["against"]["no_worse"]
        assert len(run["against"]["new"]) == 1 and "500" in run["reason"], run["reason"]


def test_the_server_listens_on_the_loopback_only(managed_vllm):
    managed, _ = managed_vllm
    listening = {
        connection.laddr.ip
        for process in managed.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}, listening


@from_data
def test_what_the_log_shows_is_caught(run_pytest, tmp_path, line, test, expected):
    log = tmp_path / "server.log"
    with attached_engine(log) as (url, _):
        httpx.get(f"{url}/meta", params={"do": "print", "text": line})
        status, run = run_pytest(
            "--arch", "cpu", "--base-url", url, "--server-log", str(log), "tests", "-k", test
        )
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
