"""SGLang and llama.cpp: what they are started with, and what their own parsers take."""

import asyncio
import contextlib
import dataclasses
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sm121.client import completions, timed
from sm121.client.connection import Patience
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.engines import devices, llama_cpp, protocol, registry
from sm121.engines.sglang import SGLang
from sm121.engines.vllm import Vllm
from sm121.matrix import axes
from tools import side_by_side

ENGINES: list[protocol.Engine] = [Vllm(), SGLang(), llama_cpp.LlamaCpp()]


def configuration(engine: str, **changes) -> ServerConfiguration:
    base = ServerConfiguration("n", engine, "/the/program", "/the/model", "canary")
    options = {"arguments": ("--own", "1"), "environment": (("OWN", "2"),)}
    return dataclasses.replace(base, **{**options, **changes})


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_command_line_without_a_secret(engine):
    own = configuration(engine.name)
    command = engine.command(own, port=4711)
    environment = engine.environment(own, api_key="very-secret")
    assert command[0] == "/the/program" and command[-2:] == ["--own", "1"]
    assert command[command.index("--port") + 1] == "4711" and "127.0.0.1" in command
    assert "/the/model" in command and "canary" in command
    assert not any("very-secret" in word for word in command)
    assert "very-secret" in environment.values() and environment["OWN"] == "2"
    for name in ("--host", "--port", "--api-key"):
        assert name in engine.reserved_arguments
    assert isinstance(engine, protocol.ChecksArguments)


def test_the_registry_has_all_of_them():
    assert registry.names() == ("vllm", "sglang", "llama-cpp")
    assert isinstance(registry.engine("llama-cpp"), protocol.Program)
    with pytest.raises(UsageError, match="expected one of vllm, sglang, llama-cpp"):
        registry.engine("tgi")


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_llama_servers_own_parser_is_asked(tmp_path):
    fake = program(
        tmp_path / "llama-server",
        "import sys\n"
        "for word in sys.argv[1:]:\n"
        "    if word == '--version':\n"
        "        print('version: 1.2.3 (build 1, commit abc)', file=sys.stderr); sys.exit(0)\n"
        "    if word == '--colour':\n"
        "        print('error: invalid argument: --colour', file=sys.stderr); sys.exit(1)\n",
    )
    engine = llama_cpp.LlamaCpp()
    assert engine.check_interpreter(fake, os.environ) == "1.2.3"
    assert engine.check_arguments(fake, [["-c", "1"], ["--colour"]], os.environ) == [
        None,
        "error: invalid argument: --colour",
    ]
    with pytest.raises(UsageError, match="--engine-binary /nowhere: expected llama-server"):
        engine.check_interpreter("/nowhere", os.environ)


def test_an_environment_without_sglang_is_named():
    with pytest.raises(UsageError, match="expected an environment with SGLang, found none"):
        SGLang().check_interpreter(sys.executable, {**os.environ, "PYTHONPATH": ""})
    with pytest.raises(UsageError, match=r"its engine's own parser cannot be asked: .*sglang"):
        SGLang().check_arguments(sys.executable, [[]], {**os.environ, "PYTHONPATH": ""})


def test_sglangs_own_parser_takes_what_the_axes_give():
    """Where SGLang is installed, or its unpacked wheel is on SM121_SGLANG (with its imports)."""
    environment = {**os.environ, "PYTHONPATH": os.environ.get("SM121_SGLANG", "")}
    engine = SGLang()
    try:
        engine.check_interpreter(sys.executable, environment)
    except UsageError:
        pytest.skip("no SGLang here; SM121_SGLANG=PATH names an unpacked wheel and its imports")
    space = axes.Space(axes.load("sm121"), "sglang", "0.5.23")
    given = [space.settings[a][v].arguments for a in space.axes for v in space.values(a)]
    assert set(engine.check_arguments(sys.executable, given, environment)) == {None}
    assert engine.check_arguments(sys.executable, [["--colour", "red"]], environment)[0]


@pytest.mark.slow("ten seconds of importing vLLM")
def test_vllms_own_parser_takes_what_the_axes_give():
    space = axes.Space(axes.load("cpu"), "vllm", "0.32.0")
    values = [(a, v) for a in space.axes for v in space.values(a)]
    given = [space.settings[a][v].arguments for a, v in values]
    upstream = axes.Space(axes.load("sm121"), "vllm", "0.32.0")
    given += [upstream.settings[a][v].arguments for a in upstream.axes for v in upstream.values(a)]
    answers = Vllm().check_arguments(
        sys.executable, [*given, ["--moe-backend", "gemv"]], os.environ
    )
    assert set(answers[:-1]) == {None}
    assert answers[-1] is not None and "invalid choice: 'gemv'" in answers[-1]


def test_a_parser_that_cannot_be_asked_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot be asked"):
        Vllm().check_arguments("/nowhere/python", [[]], {})


def test_side_by_side_says_what_is_wrong(tmp_path):
    one = side_by_side.parse("vllm")
    assert one.options == ("--engine", "vllm")
    fake = program(tmp_path / "llama-server", "")
    other = side_by_side.parse(f"llama-cpp={fake}")
    assert other.options == ("--engine", "llama-cpp", "--engine-binary", fake)
    for text in ("tgi", "vllm=/nowhere"):
        with pytest.raises(UsageError):
            side_by_side.parse(text)
    options = {"arch": "cpu", "tests": tmp_path, "directory": tmp_path, "extra": (),
               "progress": print}  # fmt: skip
    with pytest.raises(UsageError, match="two or more engines"):
        side_by_side.run([one], **options)
    with pytest.raises(UsageError, match="the folder of the levels"):
        side_by_side.run([one, other], **options)


def measured(tmp_path, monkeypatch, statuses, *, writes=True):
    """`side_by_side.run` of two engines whose runs end so, over the reports of earlier ones."""
    (tmp_path / "test_performance.py").write_text("")
    waiting, told = list(statuses), []

    def run(command, **_options):
        report = Path(command[command.index("--report-dir") + 1])
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
    monkeypatch.setattr(side_by_side.comparison, "read", lambda report: report.name)
    monkeypatch.setattr(side_by_side.comparison, "distinct", list)
    both = [side_by_side.Contestant(name, ()) for name in ("vllm", "llama-cpp")]
    return side_by_side.run(both, arch="cpu", tests=tmp_path, directory=tmp_path, extra=(),
                            progress=told.append)  # fmt: skip


@pytest.mark.parametrize(("statuses", "worst"), [((0, 0), 0), ((0, 5), 5), ((1, 5), 1)])
def test_side_by_side_ends_with_the_worst(tmp_path, monkeypatch, statuses, worst):
    assert measured(tmp_path, monkeypatch, statuses) == (["vllm", "llama-cpp"], worst)


def test_side_by_side_takes_no_earlier_run_for_its_own(tmp_path, monkeypatch):
    for status in (2, 3, 4, -9):
        with pytest.raises(UsageError, match=f"llama-cpp: pytest ended with {status}"):
            measured(tmp_path, monkeypatch, (0, status))
    with pytest.raises(UsageError, match="vllm: this run has written no"):
        measured(tmp_path, monkeypatch, (0, 0), writes=False)


def test_side_by_side_asks_every_program_first(tmp_path, monkeypatch):
    fake = program(tmp_path / "llama-server", "exit 1")
    (tmp_path / "test_performance.py").write_text("")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError):
        side_by_side.check(side_by_side.Contestant("sglang", (), fake))
    monkeypatch.setattr(side_by_side.subprocess, "run", lambda *_a, **_o: pytest.fail("a run"))
    both = [side_by_side.parse("llama-cpp"), side_by_side.parse("vllm")]
    with pytest.raises(UsageError, match="expected llama-server on the PATH"):
        side_by_side.run(both, arch="cpu", tests=tmp_path, directory=tmp_path, extra=(),
                         progress=print)  # fmt: skip


def test_each_worker_has_its_device_and_each_device_one_server(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.environment(None, 4) == () == devices.environment("gw0", 0)
    assert devices.environment("gw5", 4) == (("CUDA_VISIBLE_DEVICES", "1"),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert devices.of_worker("gw1", 8) == "3" and devices.of_worker("gw2", 8) == "2"
    first, other, same = (devices.lock(f"gw{n}", tmp_path, 8) for n in range(3))
    first.acquire()
    first.acquire()
    other.acquire()
    taken: list[str] = []
    waiting = threading.Thread(target=lambda: (same.acquire(), taken.append("same")))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and not taken
    first.release()
    waiting.join(10)
    assert taken == ["same"]
    same.release()
    other.release()


def test_a_device_is_not_locked_through_a_planted_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    planted = tmp_path / ".device-cpu.lock"
    planted.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        devices.lock("gw0", tmp_path, 0).acquire()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_connection_that_the_server_closed_is_opened_again():
    """llama-server closes some connections when a stream has ended, without saying so before."""

    async def measured(drop: bool) -> list[str | None]:
        served = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            while line := await reader.readline():
                length = 0
                while line.strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                    line = await reader.readline()
                await reader.readexactly(length)
                if drop:  # it has read the request, and hangs up every time
                    break
                body = b'{"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}'
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                writer.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
                await writer.drain()
                served += 1
                await asyncio.sleep(0.01)  # the client takes the connection for a good one
                break
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = timed.completion("m", "p", prompt_tokens=1, tokens=1, stream=False)
        async with server, timed.TimedClient(f"http://127.0.0.1:{port}", "key") as client:
            batch = await client.run([request] * 3, concurrency=1, patience=Patience(5.0, 5.0))
        await asyncio.sleep(0.1)
        assert drop or served == 3
        return [answer.error for answer in batch.answers]

    assert asyncio.run(measured(drop=False)) == [None, None, None]
    errors = asyncio.run(measured(drop=True))
    assert all(errors), errors


def test_log_probabilities_as_llama_server_writes_them():
    item = {"id": 7, "token": " a", "logprob": -0.5,
            "top_logprobs": [{"id": 7, "token": " a", "logprob": -0.5},
                             {"id": 9, "token": " b", "logprob": -1.5}]}  # fmt: skip
    answer = completions.parse({"choices": [{"text": " a", "logprobs": {"content": [item]}}]})
    (position,) = answer.positions
    assert position.token == "token_id:7" and position.log_probability == -0.5
    assert position.top == {"token_id:7": -0.5, "token_id:9": -1.5}
