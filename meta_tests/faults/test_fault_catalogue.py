"""Checks of the smoke and correctness levels fail if their fault is injected.

This is a sample on one real vLLM.

A proxy injects protocol faults (`protocol_faults.py`), and a worker extension injects model faults
(`model_faults.py`). The last test kills the server."""

import json
import re
import subprocess
import sys

import httpx
import psutil
import pytest

from meta_tests.fakes import fault_proxy
from meta_tests.fakes.scripted_sessions import attached_engine
from meta_tests.faults import model_faults, protocol_faults
from meta_tests.faults.model_faults import SabotagedServer
from meta_tests.folders import IN_VLLM, ROOT
from sm121.core import profile
from sm121.engines.life import Alive, Dead, ManagedLife

pytestmark = pytest.mark.timeout(1200)

#: The protocol fault that `make test` runs. `make catalogues` runs all of them.
PROTOCOL = "a stream that drops a token"
#: The faults of the model that `make test` runs, and the test that detects each.
MODELS = {
    "one block's scale one step up": model_faults.ORACLE,
    "wrong after a hit of the prefix cache only": model_faults.CACHE,
}


@pytest.fixture(scope="module")
def sabotaged(canary_bf16, tmp_path_factory):
    """Start the real vLLM once for all tests of this module."""
    with SabotagedServer(canary_bf16, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def real_vllm(sabotaged):
    """Return the server with the model that has no fault."""
    sabotaged.put(model_faults.CLEAN)
    return sabotaged.server


@pytest.fixture
def judge(sabotaged, run_pytest):
    """Run tests of the level with an injected fault of the model, as a user does."""

    def run(fault: str, *tests: str, options: tuple[str, ...] = ()):
        sabotaged.put(fault)
        return run_pytest(*sabotaged.arguments(tests), *options, timeout_s=300.0)

    return run


def test_a_sample_of_the_protocol_faults_is_caught(real_vllm, run_pytest):
    endpoint = real_vllm.endpoint
    fault = fault_proxy.FAULTS[PROTOCOL]
    with fault_proxy.FaultProxy.listening(endpoint.base_url, fault, endpoint.api_key) as door:
        status, run = run_pytest(
            protocol_faults.node_id(fault.caught_by), "--arch", "cpu",
            "--base-url", door.base_url, "--api-key", endpoint.api_key,
        )  # fmt: skip
    assert status == 1, run.output
    failed = [test for test in run.verdict["tests"] if test["verdict"] == "FAIL"]
    assert failed and all(", got " in test["message"] for test in failed), failed


@pytest.mark.slow("lies by pairs have a catalogue of their own")
def test_two_faults_at_once_are_detected_by_their_own_tests(real_vllm, tmp_path):
    """If two faults are injected together, each is detected by its own test.

    Without a fault, both tests pass. The second fault affects both tests."""
    tests = {
        "the second stop token is ignored": "test_a_stop_token_ends_the_answer",
        "one id for all completions": "test_answers_have_ids_and_times",
    }
    endpoint = real_vllm.endpoint
    options = f"--base-url={endpoint.base_url}", f"--key={endpoint.api_key}", f"--state={tmp_path}"
    only = f"--output={tmp_path}/page.md", "--only", " or ".join(tests.values())
    command = [sys.executable, "-m", "meta_tests.faults.lies", *options, *only, *tests]
    subprocess.run(command, check=True, cwd=ROOT)
    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines())
    noticed = {}
    for row in rows:
        noticed[row["lie"]] = {test.rpartition("::")[2] for test in row["fails"]}
    assert noticed == {lie: {test} for lie, test in tests.items()}


@pytest.mark.slow("four whole runs; test_against.py has the rules, without an engine")
def test_a_known_failure_is_not_red_and_another_one_is(real_vllm, run_pytest, tmp_path):
    """A failure that the trusted run also has does not make a run fail; another failure does.

    The runs have the same deviation, another one, and one of severity `courtesy`.
    """
    tests = ("test_usage_equals_the_ids", "test_request[prompt-is-a-number]")
    endpoint = real_vllm.endpoint
    faults = fault_proxy.FAULTS
    first = faults["usage counts one token more"]
    with fault_proxy.FaultProxy.listening(endpoint.base_url, first, endpoint.api_key) as door:

        def judged(name: str, fault: str = "") -> tuple[int, dict]:
            report = tmp_path / name
            if fault:
                door.switch(faults[fault])
            _, run = run_pytest(
                *(f"tests/test_correctness.py::{test}" for test in tests),
                "--arch", "cpu", "--base-url", door.base_url, "--api-key", endpoint.api_key,
                f"--report-dir={report}",
                *([] if name == "trusted" else [f"--against={tmp_path / 'trusted'}"]),
            )  # fmt: skip
            assert (report / "verdict.json").is_file(), run.output
            verdict = json.loads((report / "verdict.json").read_text("utf-8"))
            return verdict["exit_status"], verdict

        status, trusted = judged("trusted")
        assert status == 1 and trusted["verdict"] == "FAIL"
        status, run = judged("again")
        assert status == 0, run["reason"]
        assert run["reason"].startswith("not worse than the run of ")
        assert "1 failed and is known" in run["reason"]
        status, run = judged("courtesy", "an error without error object")
        assert status == 0 and len(run["against"]["mended"]) == 1, run["reason"]
        listed = [test["severity"] for test in run["tests"] if test["tolerated"] == "listed"]
        assert listed == ["courtesy"], run["tests"]
        status, run = judged("worse", "500 for 400")
        assert status == 1 and not run["against"]["no_worse"]
        assert len(run["against"]["new"]) == 1 and "500" in run["reason"], run["reason"]


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.slow] * ("block" in f)) for f in MODELS]
)
def test_a_wrong_model_is_noticed(judge, fault):
    status, run = judge(fault, MODELS[fault])
    assert status == 1, f"{fault}: not detected\n{run.output}"
    failed = [test for test in run.verdict["tests"] if test["verdict"] == "FAIL"]
    assert failed and all(", got " in test["message"] for test in failed), failed


@pytest.mark.slow("what such a file tells is in test_golden.py, without an engine")
def test_a_golden_file_detects_a_wrong_model(judge, tmp_path):
    golden = str(tmp_path / "golden.json")
    for option in ("--record-golden", "--golden"):
        status, run = judge(model_faults.CLEAN, "golden", options=(option, golden))
        assert status == 0, run.output
    assert any("top-1 agreement 100.00%" in line for line in run.verdict["remarks"])
    status, run = judge("YaRN factor 16 for 32", "golden", options=("--golden", golden))
    assert status == 1, run.output
    message = run.verdict["tests"][0]["message"]
    assert re.match(r"prompt '[\w ]+': token \d+ .*the first of \d that differ", message), message


@pytest.mark.parametrize(
    ("line", "test", "expected"),
    [
        pytest.param(
            (
                "WARNING 11-20 10:00:00 [envs.py:2027] Unknown vLLM environment variable "
                "detected: VLLM_ATTENTION_BACKEND"
            ),
            "test_every_variable",
            "VLLM_ATTENTION_BACKEND",
            id="WARNING 11-20 10:00:00 (envs.py:2027) Unknown vLLM",
        ),
        pytest.param(
            (
                "(Worker pid=3) INFO 11-20 10:00:00 [sm121_probe.py:40] Resolved attention "
                "backend: TORCH_SDPA (Impl), 2 layers; in all 2 with sinks, 0 with a window"
            ),
            "test_kernel_path_is",
            "attention: expected one value, got CPU_ATTN and TORCH_SDPA",
            id="(Worker pid=3) INFO 11-20 10:00:00 (sm121_probe.py:40)",
        ),
        pytest.param(
            "torch.OutOfMemoryError: CUDA out of memory.",
            "test_start_up_log",
            "expected no fail",
            id="torch.OutOfMemoryError: CUDA out of memory.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "openai_harmony.HarmonyError: unexpected tokens remaining in message header",
            "test_no_harmony_error",
            "expected no HarmonyError",
            id="openai_harmony.HarmonyError: unexpected tokens",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_log_lines_fail_their_tests(run_pytest, tmp_path, line, test, expected):
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
    assert status == 1 and "flashinfer: expected " in run.output, run.output


def test_an_import_from_the_wrong_place_is_caught(run_pytest, tmp_path, canary_bf16):
    """A run detects that vLLM is not imported from the checkout that its profile expects."""
    (tmp_path / "checkout" / "vllm").mkdir(parents=True)
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    checkouts = f'[engine.checkouts]\nvllm = "{tmp_path}/checkout"\n\n[engine.needs]'
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("[engine.needs]", checkouts))
    status, run = run_pytest(f"--profile={file}", "tests/test_smoke.py", "-k", "test_imports")
    assert status == 1, run.output
    message = run.verdict["tests"][0]["message"]
    assert re.search(r"vllm: expected the one of the checkout .*/checkout, got .*vllm", message), (
        message
    )


def test_the_saboteur_of_models_and_its_catalogue_name_the_same_faults():
    text = (IN_VLLM / "model_saboteur.py").read_text("utf-8")
    names = re.findall(r'^(?:@patch\(|    )"(.+?)"(?:\)$|, Patcher\.\w+\)$|: )', text, re.M)
    assert set(names) == set(model_faults.FAULTS)
    assert len(model_faults.FAULTS) >= 25


def test_the_published_table_of_models_is_of_these_faults():
    published = model_faults.TABLE.read_text("utf-8")
    missing = [name for name in model_faults.FAULTS if f"| {name} |" not in published]
    assert not missing, "run python -m meta_tests.faults.model_faults"
    assert "**survives**" not in published
    reasons = []
    for table in model_faults.NOT_FOR.values():
        reasons.extend(table.values())
    for reason in reasons:
        assert reason in published


def test_an_engine_that_is_killed_is_dead_and_leaves_nothing(sabotaged):
    """If the engine core is killed, the suite finds the server dead, and no process is left behind.

    The API server ends some seconds after its core. This test runs last.
    """
    managed = sabotaged.managed
    listening = set()
    serving = []
    for process in managed.launch.processes():
        every = process.net_connections(kind="inet")
        addresses = {c.laddr for c in every if c.status == psutil.CONN_LISTEN}
        listening |= {address.ip for address in addresses}
        if managed.launch.port in {address.port for address in addresses}:
            serving.append(process.name())
    assert listening == {"127.0.0.1"}, f"expected the loopback only, got {listening}"
    assert len(serving) == 1, f"expected the port of the API server alone, got {serving}"
    life = ManagedLife(managed)
    tree = managed.launch.processes()
    assert isinstance(life.state(), Alive)
    (core,) = [process for process in tree if process.name().startswith("VLLM::EngineCor")]
    core.kill()
    state = life.after_failure()
    assert isinstance(state, Dead) and state.evidence == managed.launch.log, state
    report = managed.stop()
    assert not report.survivors and not any(psutil.pid_exists(p.pid) for p in tree), report
