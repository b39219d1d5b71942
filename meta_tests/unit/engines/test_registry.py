"""SGLang and llama.cpp: the arguments of their starts, and what their own parsers accept."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.fakes.servers import executable
from sm121.client import completion_json, timed
from sm121.client.patience import Patience
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.engines import llama_cpp, protocol, registry
from sm121.engines.sglang import SGLang
from sm121.engines.vllm import Vllm
from sm121.matrix import axes
from sm121.matrix.space import Space
from sm121.session import plan_command, side_by_side

ENGINES: list[protocol.Engine] = [Vllm(), SGLang(), llama_cpp.LlamaCpp()]


def configuration(engine: str, **changes) -> ServerConfiguration:
    base = ServerConfiguration("n", engine, "/the/program", "/the/model", "canary")
    options = {"arguments": ("--own", "1"), "environment": (("OWN", "2"),)}
    return dataclasses.replace(base, **{**options, **changes})


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_command_line_without_a_secret(engine):
    configured = configuration(engine.name)
    command = engine.command(configured, port=4711)
    environment = engine.environment(configured, api_key="very-secret")
    assert command[0] == "/the/program" and command[-2:] == ["--own", "1"]
    assert command[command.index("--port") + 1] == "4711" and "127.0.0.1" in command
    assert "/the/model" in command and "canary" in command
    for word in command:
        assert "very-secret" not in word
    assert "very-secret" in environment.values() and environment["OWN"] == "2"
    for name in ("--host", "--port", "--api-key"):
        assert name in engine.reserved_arguments
    assert isinstance(engine, protocol.ChecksArguments)


def test_a_gguf_is_a_file_or_a_repository_of_the_hub(tmp_path):
    (tmp_path / "a.gguf").write_text("")
    for model, option in ((str(tmp_path / "a.gguf"), "--model"), ("owner/a-GGUF", "--hf-repo")):
        command = llama_cpp.LlamaCpp().command(configuration("llama-cpp", model=model), port=4711)
        assert command[command.index(model) - 1] == option


def test_the_registry_has_all_of_them():
    assert registry.names() == ("vllm", "sglang", "llama-cpp")
    assert isinstance(registry.engine("llama-cpp"), protocol.Program)
    with pytest.raises(UsageError, match="expected one of vllm, sglang, llama-cpp"):
        registry.engine("tgi")


def test_llama_servers_own_parser_is_asked(tmp_path):
    script = (
        'for word in "$@"; do case $word in\n'
        "--version) echo 'version: 1.2.3 (build 1, commit abc)' >&2; exit 0;;\n"
        "--colour) echo 'error: invalid argument: --colour' >&2; exit 1;;\n"
        "esac; done"
    )
    fake = str(executable(tmp_path / "llama-server", script))
    engine = llama_cpp.LlamaCpp()
    assert engine.check_interpreter(fake, os.environ) == "1.2.3"
    answers = engine.check_arguments(fake, [["-c", "1"], ["--colour"]], os.environ)
    assert answers == [None, "error: invalid argument: --colour"]
    with pytest.raises(UsageError, match="--engine-binary /nowhere: expected llama-server"):
        engine.check_interpreter("/nowhere", os.environ)


def test_an_environment_without_sglang_is_named():
    with pytest.raises(UsageError, match="expected an environment with SGLang, got none"):
        SGLang().check_interpreter(sys.executable, {**os.environ, "PYTHONPATH": ""})
    with pytest.raises(UsageError, match=r"its engine's own parser cannot be run: .*sglang"):
        SGLang().check_arguments(sys.executable, [[]], {**os.environ, "PYTHONPATH": ""})


def test_sglangs_own_parser_takes_what_the_axes_give():
    """SGLang's own parser accepts the arguments of the matrix.

    The test needs SGLang, or its unpacked wheel (with its imports) that SM121_SGLANG names."""
    environment = {**os.environ, "PYTHONPATH": os.environ.get("SM121_SGLANG", "")}
    engine = SGLang()
    try:
        engine.check_interpreter(sys.executable, environment)
    except UsageError:
        pytest.skip("no SGLang here; SM121_SGLANG=PATH names an unpacked wheel and its imports")
    every = arguments_of("sm121", "sglang", "0.5.23")
    assert set(engine.check_arguments(sys.executable, every, environment)) == {None}
    assert engine.check_arguments(sys.executable, [["--colour", "red"]], environment)[0]


def arguments_of(arch: str, engine: str, version: str) -> list:
    """Return the arguments of each value of an architecture's axes."""
    space = Space(axes.load(arch), engine, version)
    arguments = []
    for axis in space.axes:
        for v in space.values(axis):
            arguments.append(space.settings[axis][v].arguments)
    return arguments


@pytest.mark.slow("ten seconds of importing vLLM")
def test_vllms_own_parser_takes_what_the_axes_give():
    every = [*arguments_of("cpu", "vllm", "0.32.0"), *arguments_of("sm121", "vllm", "0.32.0")]
    wrong = ["--moe-backend", "gemv"]
    *answers, refusal = Vllm().check_arguments(sys.executable, [*every, wrong], os.environ)
    assert set(answers) == {None}
    assert refusal is not None and "invalid choice: 'gemv'" in refusal


def test_a_parser_that_cannot_be_asked_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot be run"):
        Vllm().check_arguments("/nowhere/python", [[]], {})


def test_side_by_side_reports_wrong_arguments(tmp_path):
    one = side_by_side.parse("vllm")
    assert one.options == ("--engine", "vllm")
    fake = executable(tmp_path / "llama-server", "")
    other = side_by_side.parse(f"llama-cpp={fake}")
    assert other.options == ("--engine", "llama-cpp", "--engine-binary", str(fake))
    for text in ("tgi", "vllm=/nowhere"):
        with pytest.raises(UsageError):
            side_by_side.parse(text)
    for contestants in ([one], [other, other]):
        with pytest.raises(UsageError, match="two or more engines"):
            compare(contestants, tmp_path)


def compare(contestants: list, folder: Path, progress=print):
    options = {"arch": "cpu", "directory": folder, "extra": ()}
    return side_by_side.run(contestants, **options, progress=progress)


def measured(tmp_path, monkeypatch, statuses, *, writes=True):
    """Call `side_by_side.run` with two engines whose runs end with these statuses.

    The folder has reports of earlier runs."""
    waiting = list(statuses)

    def run(command, **_options):
        (option,) = (word for word in command if word.startswith("--report-dir="))
        report = Path(option.removeprefix("--report-dir="))
        if writes:
            report.mkdir(exist_ok=True)
            (report / "new.json").write_text("{}")
            (report / "new.json").rename(report / "verdict.json")
        return subprocess.CompletedProcess(command, waiting.pop(0))

    for name in ("vllm", "llama-cpp"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "verdict.json").write_text("{}")
    monkeypatch.setattr(side_by_side.subprocess, "run", run)
    monkeypatch.setattr(side_by_side, "check", lambda _one: None)
    monkeypatch.setattr(side_by_side.plan_command, "plan_of", lambda _words: None)
    monkeypatch.setattr(side_by_side.comparison, "read_results", lambda report: report.name)
    monkeypatch.setattr(side_by_side.comparison, "distinct", list)
    both = [side_by_side.Contestant(name, ()) for name in ("vllm", "llama-cpp")]
    return compare(both, tmp_path, lambda _line: None)


@pytest.mark.parametrize(("statuses", "worst"), [((0, 0), 0), ((0, 5), 5), ((1, 5), 1)])
def test_side_by_side_ends_with_the_worst(tmp_path, monkeypatch, statuses, worst):
    assert measured(tmp_path, monkeypatch, statuses) == (["vllm", "llama-cpp"], worst)


def test_side_by_side_takes_no_earlier_run_for_its_own(tmp_path, monkeypatch):
    for status in (2, 3, 4, -9):
        with pytest.raises(UsageError, match=f"llama-cpp: pytest ended with {status}"):
            measured(tmp_path, monkeypatch, (0, status))
    with pytest.raises(UsageError, match="vllm: this run has written no"):
        measured(tmp_path, monkeypatch, (0, 0), writes=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (UsageError("--tp 2: expected one GPU"), "^llama-cpp: --tp 2: expected one GPU$"),
        (plan_command.NoPlan("usage\nno tests ran\n"), "^llama-cpp: expected .* no tests ran$"),
    ],
)
def test_side_by_side_plans_each_run_before_the_first(tmp_path, monkeypatch, fault, message):
    """A refused second engine was found after the run of the first one."""

    def plan_of(words):
        if words[-1] == "llama-cpp":
            raise fault

    monkeypatch.setattr(side_by_side, "check", lambda _one: None)
    monkeypatch.setattr(plan_command, "plan_of", plan_of)
    monkeypatch.setattr(side_by_side.subprocess, "run", lambda *_a, **_o: pytest.fail("a run"))
    both = [side_by_side.Contestant(name, ("--engine", name)) for name in ("vllm", "llama-cpp")]
    with pytest.raises(UsageError, match=message):
        compare(both, tmp_path)


def test_side_by_side_tells_how_to_name_an_interpreter(monkeypatch, tmp_path):
    """The message of `side_by_side` says how to name an interpreter.

    Before, it named --engine-python, which the command does not have."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(UsageError, match=r"^sglang: .*Name its interpreter: sglang=PYTHON$"):
        side_by_side.check(side_by_side.parse("sglang"))
    named = f"sglang={sys.executable}"
    with pytest.raises(UsageError, match=f"^{named}: expected an environment with SGLang") as wrong:
        side_by_side.check(side_by_side.parse(named))
    other = f"llama-cpp={executable(tmp_path / 'no-program', 'exit 1').parent / 'no-program'}"
    Path(other.partition("=")[2]).chmod(0o644)
    with pytest.raises(UsageError, match=f"^{other}: expected llama-server") as refused:
        side_by_side.check(side_by_side.parse(other))
    assert "--engine-" not in f"{wrong.value} {refused.value}"


def test_the_advice_on_a_missing_engine_needs_no_checkout(tmp_path):
    """The advice on a missing engine can be followed without a checkout.

    Before, it named `make env`, which an installed wheel does not have."""
    venv.create(tmp_path / "empty", symlinks=True)
    with pytest.raises(UsageError, match="expected an environment with vLLM") as wrong:
        side_by_side.check(side_by_side.parse(f"vllm={tmp_path / 'empty' / 'bin' / 'python'}"))
    assert "`pip install vllm`" in str(wrong.value) and "make" not in str(wrong.value)


def test_side_by_side_asks_every_program_first(tmp_path, monkeypatch):
    fake = str(executable(tmp_path / "llama-server", "exit 1"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError):
        side_by_side.check(side_by_side.Contestant("sglang", (), fake))
    monkeypatch.setattr(side_by_side.subprocess, "run", lambda *_a, **_o: pytest.fail("a run"))
    with pytest.raises(UsageError, match="expected llama-server on the PATH"):
        compare([side_by_side.parse("llama-cpp"), side_by_side.parse("vllm")], tmp_path)


@pytest.mark.parametrize("drops", [False, True])
def test_a_connection_that_the_server_closed_is_opened_again(drops):
    """If the server has closed an idle connection, the request is sent again.

    llama-server closes some connections after a stream without announcing it. A server that reads
    the request and disconnects every time gives no answer."""
    served = []

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            self.asked()
            self.close_connection = True
            if not drops:
                served.append(self.say(self.completion("x", 1, 1)))
                time.sleep(0.01)  # wait, so that the client reuses the connection

    async def measured(url: str) -> list[str | None]:
        request = timed.completion("m", "p", prompt_tokens=1, tokens=1, stream=False)
        async with timed.TimedClient(url, "key") as client:
            batch = await client.run([request] * 3, concurrency=1, patience=Patience(5.0, 5.0))
        return [answer.error for answer in batch.answers]

    with serving(Handler) as url:
        errors = asyncio.run(measured(url))
    assert (all(errors) and not served) if drops else (errors, len(served)) == ([None] * 3, 3)


def test_log_probabilities_as_llama_server_writes_them():
    item = {"id": 7, "token": " a", "logprob": -0.5,
            "top_logprobs": [{"id": 7, "token": " a", "logprob": -0.5},
                             {"id": 9, "token": " b", "logprob": -1.5}]}  # fmt: skip
    answer = completion_json.parse({"choices": [{"text": " a", "logprobs": {"content": [item]}}]})
    (position,) = answer.positions
    assert position.token == "token_id:7" and position.log_probability == -0.5
    assert position.top == {"token_id:7": -0.5, "token_id:9": -1.5}
