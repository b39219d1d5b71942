"""Bad input: one line that says what was expected, exit status 4, before anything expensive."""

import functools
import os
import sys
import venv

import pytest

from sm121 import cli
from sm121.core import architecture, data_file, profile
from sm121.core.errors import UsageError
from sm121.core.profile import shipped
from sm121.engines.attached import attach
from sm121.engines.vllm import Vllm
from sm121.evidence import requirement
from sm121.evidence.kernel_path import KernelPath

pytestmark = pytest.mark.timeout(120)

USAGE_ERROR = 4
TEST = "tests/test_smoke.py::test_health"


def refused(run_pytest, *arguments: str) -> str:
    """The one line with which a run is refused."""
    status, run = run_pytest(*arguments, TEST)
    lines = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    assert status == USAGE_ERROR, run.output
    assert len(lines) == 1, run.output
    assert "server" not in run.output.split("collected")[-1] or "starting" not in run.output
    assert not (run.report / "verdict.json").exists() and not run.left(), "nothing was begun"
    return lines[0]


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
                    "--server-log: expected 2, the log of each of its 2 nodes, rank 0 first; "
                    "got README.md"
                ),
            ),
            id="--profile cpu-tiny-gpt-oss-tp2 --base-url",
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
            id="--profile cpu-tiny-gpt-oss-tp2 --base-url (2)",
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
            id="--base-url http://127.0.0.1:9 --server-log README.md",
        ),
        pytest.param(
            ("--launcher", "nnodes"),
            ("--launcher: expected a --profile of nodes",),
            id="--launcher nnodes, --launcher: expected a --profile of",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss", "--node-command", "python3"),
            ("--node-command: expected a --profile of nodes",),
            id="--profile cpu-tiny-gpt-oss --node-command python3",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--launcher", "mpi"),
            ("--launcher mpi: expected nnodes or ray",),
            id="--profile cpu-tiny-gpt-oss-tp2 --launcher mpi",
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
            ("--launcher: an attached server is never started",),
            id="--profile cpu-tiny-gpt-oss-tp2 --base-url (3)",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", "ssh 'spark2"),
            ("--node-command ssh 'spark2: No closing quotation",),
            id="--profile cpu-tiny-gpt-oss-tp2 --node-command ssh",
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
            ("--node-command: expected 1, one of each other node; got 2",),
            id="--profile cpu-tiny-gpt-oss-tp2 --node-command python3",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", " "),
            ("--node-command: expected a command that runs Python on a node",),
            id="--profile cpu-tiny-gpt-oss-tp2 --node-command",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--node-command", "no-such-ssh spark2 python3"),
            ("node 1 (no-such-ssh spark2 python3): no-such-ssh: No such file or directory",),
            id="--profile cpu-tiny-gpt-oss-tp2 --node-command (2)",
        ),
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss-tp2", "--master-addr", "192.0.2.77"),
            ("--master-addr 192.0.2.77: expected an address of this machine",),
            id="--profile cpu-tiny-gpt-oss-tp2 --master-addr",
        ),
        pytest.param(
            ("--engine-arg=--headless",),
            ("--headless is set by the suite itself",),
            id="--engine-arg=--headless, --headless is set by the suite",
        ),
        pytest.param(
            ("--arch", "sm12"),
            ("--arch sm12", "expected one of cpu", "sm121"),
            id="--arch sm12, --arch sm12 expected one of cpu sm121",
        ),
        pytest.param(
            ("--profile", "nothing-like-it"),
            ("--profile nothing-like-it", "cpu-tiny-gpt-oss"),
            id="--profile nothing-like-it, --profile nothing-like-it",
        ),
        pytest.param(
            ("--engine", "tgi"),
            ("--engine tgi", "expected one of vllm"),
            id="--engine tgi, --engine tgi expected one of vllm",
        ),
        pytest.param(
            ("--engine-env", "NOVALUE"),
            ("--engine-env NOVALUE", "expected KEY=VALUE"),
            id="--engine-env NOVALUE, --engine-env NOVALUE expected",
        ),
        pytest.param(
            ("--engine-python", "/nowhere/python"),
            ("/nowhere/python", "no such file"),
            id="--engine-python /nowhere/python, /nowhere/python no",
        ),
        pytest.param(
            ("--model", "/nowhere/model"),
            ("--model /nowhere/model", "expected"),
            id="--model /nowhere/model, --model /nowhere/model expected",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--server-log", "x.log"),
            ("--server-log", "give --base-url"),
            id="--server-log x.log, --server-log give --base-url",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--engine-arg=--enforce-eager"),
            ("--engine-arg with --base-url", "never started"),
            id="--base-url http://127.0.0.1:9",
        ),
        pytest.param(
            ("--base-url", "127.0.0.1:8000"),
            ("expected http://HOST:PORT",),
            id="--base-url 127.0.0.1:8000, expected http://HOST:PORT",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9"),
            ("expected an OpenAI-compatible server", "no answer"),
            id="--base-url http://127.0.0.1:9, expected an",
        ),
        pytest.param(
            ("--arch", "sm121", "--profile", "cpu-tiny-gpt-oss"),
            ("expected a profile for sm121",),
            id="--arch sm121 --profile cpu-tiny-gpt-oss, expected a",
        ),
        pytest.param(
            ("--waivers", "/nowhere.toml"),
            ("--waivers /nowhere.toml", "expected"),
            id="--waivers /nowhere.toml, --waivers /nowhere.toml",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine-arg=--port=1",),
            ("--engine-arg --port=1", "set by the suite itself"),
            id="--engine-arg=--port=1, --engine-arg --port=1 set by the",
        ),
        pytest.param(
            ("--engine-arg=--served-model-name",),
            ("set by the suite itself",),
            id="--engine-arg=--served-model-name, set by the suite",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine-arg=--config=x.yaml",),
            ("set by the suite itself", "with --engine-arg"),
            id="--engine-arg=--config=x.yaml, set by the suite itself",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine-env", "VLLM_API_KEY=x"),
            ("VLLM_API_KEY", "set by the suite itself"),
            id="--engine-env VLLM_API_KEY=x, VLLM_API_KEY set by the",
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--model", "a/b", "--served-model-name", "b"),
            ("--model and --served-model-name: expected one of them",),
            id="--base-url http://127.0.0.1:9 --model a/b",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("-m", "cpu and"),
            ("-m 'cpu and'", "expected not OR left parenthesis"),
            id="-m cpu and, -m 'cpu and' expected not OR left",
        ),
        pytest.param(
            ("--report-dir", "/proc/nope"),
            ("--report-dir /proc/nope", "expected a folder"),
            id="--report-dir /proc/nope, --report-dir /proc/nope",
        ),
        pytest.param(
            ("--arch", "cpu", "--golden", "nowhere.json"),
            ("--golden nowhere.json: expected a file",),
            id="--arch cpu --golden nowhere.json, --golden",
        ),
        pytest.param(
            ("--arch", "cpu", "--record-golden", "no/such/file"),
            ("expected the name of a file in a folder",),
            id="--arch cpu --record-golden no/such/file, expected the",
        ),
        pytest.param(
            ("--arch", "cpu", "--exam", "nowhere.jsonl"),
            ("--exam nowhere.jsonl: expected a file",),
            id="--arch cpu --exam nowhere.jsonl, --exam nowhere.jsonl",
        ),
        pytest.param(
            ("--arch", "cpu", "--reference", "nowhere"),
            ("--reference nowhere: expected a checkpoint folder",),
            id="--arch cpu --reference nowhere, --reference nowhere",
        ),
        pytest.param(
            ("--arch", "cpu", "--configuration", "fp3"),
            ("expected one of profile cpu-tiny-gpt-oss: float32",),
            id="--arch cpu --configuration fp3, expected one of profile",
        ),
        pytest.param(
            ("--plan", "qiuck"),
            (
                (
                    "--plan qiuck: expected one of profile cpu-tiny-gpt-oss: quick, merge, "
                    "full; did you mean quick?"
                ),
            ),
            id="--plan qiuck, --plan qiuck: expected one of profile",
        ),
        pytest.param(
            ("--plan", "quick", "--certify"),
            ("--certify with paths", "--plan quick: expected a run"),
            id="--plan quick --certify, --certify with paths --plan",
        ),
        pytest.param(
            ("--hypothesis", "x.toml"),
            ("expected together with --ab",),
            id="--hypothesis x.toml, expected together with --ab",
        ),
        pytest.param(
            ("--ab", "--port 1", ""),
            ("--port is set by the suite itself",),
            id="--ab --port 1, --port is set by the suite itself",
        ),
        pytest.param(
            ("--ab", "http://127.0.0.1:1", "http://localhost:1/v1"),
            ("the URLs of two servers",),
            id="--ab http://127.0.0.1:1 http://localhost:1/v1, the URLs",
        ),
        pytest.param(
            ("--shard", "0/2"),
            ("--shard 0/2: expected I/N",),
            id="--shard 0/2, --shard 0/2: expected I/N",
        ),
        pytest.param(
            ("--shard", "3/2"),
            ("--shard 3/2: expected I/N",),
            id="--shard 3/2, --shard 3/2: expected I/N",
        ),
        pytest.param(
            ("--shard", "1"), ("--shard 1: expected I/N",), id="--shard 1, --shard 1: expected I/N"
        ),
        pytest.param(
            ("--shard", "a/b"),
            ("--shard a/b: expected I/N",),
            id="--shard a/b, --shard a/b: expected I/N",
        ),
        pytest.param(
            ("--shard", "1/0"),
            ("--shard 1/0: expected I/N",),
            id="--shard 1/0, --shard 1/0: expected I/N",
        ),
        pytest.param(
            ("--depths", ""),
            ("--depths : expected numbers of at least 0",),
            id="--depths, --depths : expected numbers of at least 0",
        ),
        pytest.param(
            ("--depths", "0;4096"),
            ("--depths 0;4096: expected numbers of at least 0",),
            id="--depths 0;4096, --depths 0;4096: expected numbers of",
        ),
        pytest.param(
            ("--depths", "-1"),
            ("--depths -1: expected numbers of at least 0",),
            id="--depths -1, --depths -1: expected numbers of at least 0",
        ),
        pytest.param(
            ("--kernel-provider", "cuda"),
            ("--kernel-provider cuda: expected one of torch, torch-cuda, vllm-cpu, vllm",),
            id="--kernel-provider cuda, --kernel-provider cuda",
        ),
        pytest.param(
            ("--base-url", "http://127.0.0.1:9", "--engine", "ollama"),
            ("--engine ollama: expected one of",),
            id="--base-url http://127.0.0.1:9 --engine ollama, --engine",
        ),
        pytest.param(
            ("--engine", "llama-cpp", "--engine-binary", "/nowhere"),
            ("there is no file /nowhere",),
            id="--engine llama-cpp --engine-binary /nowhere, there is",
        ),
        pytest.param(
            ("--engine-binary", "/bin/sh"),
            ("vllm is started by --engine-python",),
            id="--engine-binary /bin/sh, vllm is started by",
        ),
        pytest.param(
            ("--engine", "sglang", "--profile", "cpu-tiny-gpt-oss"),
            ("this one is for vllm",),
            id="--engine sglang --profile cpu-tiny-gpt-oss, this one is",
        ),
        pytest.param(
            ("--engine", "sglang", "--arch", "cpu"),
            ("no profile is shipped for cpu and sglang",),
            id="--engine sglang --arch cpu, no profile is shipped for",
        ),
    ],
)
def test_one_line_says_what_was_expected(run_pytest, arguments, expected):
    line = refused(run_pytest, *arguments)
    for text in expected:
        assert text in line, line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("--depths=99999999",), "--depths 99999999: expected at most 3968 tokens", id="deep"
        ),
        pytest.param(("--tg=99999",), "--tg 99999: expected at most 4096 tokens", id="long"),
        pytest.param(("--ab", "", ""), "--ab '' '': expected two configurations", id="A is B"),
        pytest.param(
            ("--depth", "0", "4096"),
            "--depth 0 4096: expected one list with commas, as in --depth 0,4096", id="two words",
        ),
        pytest.param(
            ("--concurrency=2", "8"), "expected one list with commas, as in --concurrency 2,8",
            id="behind =",
        ),
        pytest.param(
            ("--concurrency", "0"),
            "--concurrency 0: expected numbers of at least 1, as in --concurrency 4,8", id="nobody",
        ),
        pytest.param(("--plan", "qick"), "quick, merge, full; did you mean quick?", id="qick"),
        pytest.param(
            ("--scores", "python3"), "expected a Python with lm-evaluation-harness: pip install",
            id="python3",
        ),
        pytest.param(
            ("--scores", "no-such-python"), "expected a Python, by its path or its name",
            id="no Python",
        ),
        pytest.param(("--exam", "README.md"), "README.md: line 1: expected JSON", id="text"),
        pytest.param(("--golden", "README.md"), "expected a file of --record-golden", id="golden"),
    ],
)  # fmt: skip
def test_a_refused_request_has_one_line_and_no_table(run_pytest, arguments, expected):
    """Whatever it was refused by: an option alone, or what it contradicts."""
    status, run = run_pytest(*arguments, TEST)
    lines = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    assert status == USAGE_ERROR and len(lines) == 1 and expected in lines[0], run.output
    assert "sm121 conformance ==" not in run.output and "run again" not in run.output
    assert not [entry for entry in run.report.glob("*") if entry.name != ".lock"], "no report"
    assert not run.left()


def test_the_report_of_the_run_before_stays(run_pytest, tmp_path):
    """A request that is refused when the run was open puts it back."""
    report = tmp_path / "report"
    (report).mkdir()
    (report / "verdict.json").write_text("{}")
    status, run = run_pytest(f"--report-dir={report}", "--exam", "README.md", TEST)
    assert status == USAGE_ERROR, run.output
    assert (report / "verdict.json").read_text() == "{}" and not (report / "earlier").exists()
    assert run_pytest("--collect-only", f"--report-dir={report}", TEST)[0] == 0


@pytest.mark.parametrize("depths", ["0", "0,3968"])
def test_a_depth_that_fits_is_no_mistake(run_pytest, depths):
    status, run = run_pytest("--collect-only", f"--depths={depths}", "tests/test_performance.py")
    assert status == 0, run.output


@pytest.mark.parametrize("name", ["gb10", "GB10", "sm121"])
def test_the_chip_s_name_is_one_of_its_architecture(run_pytest, name):
    status, run = run_pytest("--arch", name, TEST)
    assert status == 5 and "NOT_RUN: sm121 was asked for" in run.output, run.output
    assert run.verdict["arch"] == "sm121"


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
            id="html, answered with text/html, not a list of models",
        ),
        pytest.param("no-models", (), "not a list of models", id="no-models, not a list of models"),
        pytest.param(
            "none",
            ("--served-model-name", "gpt-oss-120b"),
            "it serves canary",
            id="none, --served-model-name gpt-oss-120b, it serves canary",
        ),
        pytest.param(
            "none",
            ("--model", "gpt-oss-120b"),
            "it serves canary; name one with --model",
            id="none, --model gpt-oss-120b, it serves canary; name one",
        ),
        pytest.param("none", ("--api-key", "wrong"), "401", id="none, --api-key wrong, 401"),
        pytest.param(
            "dripping",
            (),
            "no whole answer within",
            id="dripping, no whole answer within",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "another-model",
            (),
            "expected a server of 'canary', it serves llama-3-8b",
            id="another-model, expected a server of 'canary', it serves",
        ),
    ],
)
def test_a_server_that_is_not_the_one(run_pytest, fault_server, fault, arguments, expected):
    server = fault_server(fault)
    key = () if "--api-key" in arguments else ("--api-key", server.key)
    line = refused(run_pytest, "--arch", "cpu", "--base-url", server.base_url, *key, *arguments)
    assert expected in line, line


def test_the_only_model_of_a_server_needs_no_name_where_it_is_the_profile_s(fault_server):
    server = fault_server("whole-name")
    probe = functools.partial(attach, server.base_url, api_key=server.key, log=None)
    attached = probe(served_name=None, default_name="canary")
    assert attached.endpoint.served_name == "openai/canary"
    with pytest.raises(UsageError, match="serves openai/canary; name one with --model"):
        probe(served_name="canary", default_name="canary")


def test_an_interpreter_without_vllm(run_pytest, tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    line = refused(run_pytest, "--engine-python", str(tmp_path / "empty" / "bin" / "python"))
    assert "expected an environment with vLLM" in line


def test_a_model_folder_without_config(run_pytest, tmp_path):
    assert "config.json" in refused(run_pytest, "--model", str(tmp_path))


def test_an_unknown_profile_key_is_named_with_its_file(run_pytest, tmp_path):
    text = shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("stalled_after_s", "staled_after_s"))
    line = refused(run_pytest, "--profile", str(file))
    assert str(file) in line and "engine.staled_after_s" in line and "stalled_after_s" in line


def test_a_report_folder_with_other_things_in_it(run_pytest, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    line = refused(run_pytest, "--report-dir", str(tmp_path))
    assert "expected a new or empty folder" in line
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_an_unknown_marker_is_refused(run_pytest):
    status, run = run_pytest("meta_tests/scenarios/verdicts.py", "-m", "sm12")
    assert status in (4, 5), run.output


@pytest.mark.slow("it collects everything")
def test_collecting_starts_and_needs_nothing(run_pytest):
    status, run = run_pytest("--collect-only", "-q", "--engine-python", sys.executable)
    assert status == 0, run.output
    assert not run.report.exists()


def test_nothing_is_started_on_a_machine_that_is_not_fit(run_pytest, tmp_path, canary_bf16):
    """The first smoke test says why; the tests that need a server are NOT_RUN, none is started."""
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
            id="__version__ = version = '9.9.9', 9.9.9",
        ),
        (None, None),
    ],
)
def test_the_version_is_of_the_checkout_that_is_imported(tmp_path, version_file, expected):
    """Not of the vLLM that is installed beside it; unknown when the checkout does not say."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    if version_file:
        (tmp_path / "vllm" / "_version.py").write_text(version_file)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert Vllm().check_interpreter(sys.executable, environment) == expected


def test_the_rules_of_each_configuration_are_looked_at(tmp_path):
    """A signature that no log has is missed, for the baseline as for the configuration judged."""
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    altered = text.replace(r"Using \\w*CPUUnquantizedExperts", "NEVER IN ANY LOG")
    mine = data_file.parse(altered, profile.Profile, "profile mine")
    assert "NEVER IN ANY LOG" in str(mine.kernel_path)
    log = tmp_path / "server.log"
    log.write_text("Using CPUUnquantizedExperts MoE backend\n")
    for name in (mine.under_test, mine.baseline):
        wrong = requirement.contradictions(mine.kernel_path, KernelPath(), log, name)
        assert any("NEVER IN ANY LOG" in each.text for each in wrong), (name, wrong)


def test_a_request_refused_after_the_run_was_opened_leaves_one_line(run_pytest, tmp_path):
    """Neither a table of levels nor a command to run again."""
    golden = tmp_path / "golden.json"
    golden.write_text("{}")
    arguments = ("--arch", "cpu", "--golden", str(golden), "tests/test_correctness.py")
    status, run = run_pytest(*arguments)
    assert status == USAGE_ERROR and "expected a file of --record-golden" in run.output
    for text in ("sm121 conformance", "run again", "NOT_RUN", "level "):
        assert text not in run.output.split("collected")[-1], run.output
