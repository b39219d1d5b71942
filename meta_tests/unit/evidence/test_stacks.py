"""The stack traces of hanging processes are read, with and without py-spy."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sm121.core.waiting import until
from sm121.evidence import death, failure, process_snapshot, stacks
from sm121.evidence.kernel_messages import KernelMessages

#: A program that prints a line and then hangs in a named function.
HANGS = """
import os, sys, threading, time
def waits_for_the_gpu():
    os.write(1, b"hangs\\n")  # at once: another process may write too
    time.sleep(60)
"""
ALONE = HANGS + "waits_for_the_gpu()"
FORKED = HANGS + "os.fork()\nwaits_for_the_gpu()"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def without_py_spy(monkeypatch):
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Start a program with the handler. Return when each of its processes hangs."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *options: str, processes: int = 1, **variables: str):
        environment = {**os.environ, **variables}
        environment.update(stacks.variables(environment, tmp_path))
        process = subprocess.Popen(
            [sys.executable, *options, "-c", program], env=environment, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        for _ in range(processes):
            assert process.stdout.readline() == "hangs\n"
        return process

    yield run
    for process in started:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


def tree(process: "subprocess.Popen[str]") -> list[dict]:
    root = psutil.Process(process.pid)
    return process_snapshot.snapshot([root, *root.children()])


def folder(tmp_path: Path) -> Path:
    return stacks.folder_in(tmp_path)


def test_a_bus_error_is_in_the_log_and_is_not_taken_for_sigkill(tmp_path):
    environment = {**os.environ, **stacks.variables({}, tmp_path)}
    program = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    log = [*ended.stderr.splitlines(), "Engine core proc EngineCore died unexpectedly."]
    cause = death.cause_of(
        failure.classify_lines(log),
        exits=[{"pid": 7, "name": "VLLM::EngineCore", "status": None}],
        kernel=KernelMessages(),
        kills=0,
        pids={7},
    )
    assert "SIGBUS" in cause.summary and "--shm-size" in str(cause.remedy), ended.stderr
    given = stacks.variables({"PYTHONFAULTHANDLER": ""}, tmp_path)
    assert given["PYTHONFAULTHANDLER"] == ""


@pytest.mark.usefixtures("without_py_spy")
def test_a_process_writes_its_own_stacks(start, tmp_path):
    process = start(ALONE)
    text = stacks.take_stacks(tree(process), folder(tmp_path))
    assert f"({process.pid})\n" in text and "in waits_for_the_gpu" in text
    again = stacks.take_stacks(tree(process), folder(tmp_path))
    assert again.count("in waits_for_the_gpu") == 1, "only what is written for this look"
    assert process.poll() is None, "it goes on"


@pytest.mark.usefixtures("without_py_spy")
def test_a_forked_process_writes_into_a_file_of_its_own(start, tmp_path):
    process = start(FORKED, processes=2)
    text = stacks.take_stacks(tree(process), folder(tmp_path))
    sections = text.split("## ")[1:]
    assert len(sections) == 2
    for section in sections:
        assert section.count("in waits_for_the_gpu") == 1


@pytest.mark.usefixtures("without_py_spy")
def test_another_sitecustomize_is_imported_as_ever(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.of_the_other = True\n")
    program = f"{HANGS}\nimport sitecustomize\nassert sys.of_the_other, sys.path\n"
    program += f"assert sitecustomize.__file__ == {str(other / 'sitecustomize.py')!r}\n"
    program += "assert not any('in_engine' in entry for entry in sys.path)\nwaits_for_the_gpu()"
    process = start(program, PYTHONPATH=str(other))
    assert "in waits_for_the_gpu" in stacks.take_stacks(tree(process), folder(tmp_path))


@pytest.mark.usefixtures("without_py_spy")
def test_a_process_without_the_handler_gets_no_signal(start, tmp_path):
    process = start(ALONE, "-I")
    with pytest.raises(stacks.NoStacks, match="no handler") as error:
        stacks.take_stacks(tree(process), folder(tmp_path))
    assert f"({process.pid})" in str(error.value) and "pip install py-spy" in str(error.value)
    (folder(tmp_path) / str(process.pid)).touch()
    with pytest.raises(stacks.NoStacks, match="the signal would end it"):
        stacks.take_stacks(tree(process), folder(tmp_path))
    assert process.poll() is None


@pytest.mark.usefixtures("without_py_spy")
def test_a_stopped_process_gives_the_reason(start, tmp_path):
    process = start(ALONE)
    process.send_signal(signal.SIGSTOP)
    root = psutil.Process(process.pid)
    assert until(lambda: root.status() == "stopped", 5.0)
    with pytest.raises(stacks.NoStacks, match="a signal has stopped it"):
        stacks.take_stacks(tree(process), folder(tmp_path))


@pytest.mark.skipif(stacks._py_spy() is None, reason="py-spy is not installed")
def test_py_spy_reads_a_stopped_process(start, tmp_path):
    process = start(ALONE)
    process.send_signal(signal.SIGSTOP)
    assert until(lambda: psutil.Process(process.pid).status() == "stopped", 5.0)
    text = stacks.take_stacks(tree(process), folder(tmp_path))
    assert "waits_for_the_gpu" in text and "Python v" in text


def test_py_spy_that_may_not_read_leaves_it_to_the_process(start, tmp_path, monkeypatch):
    refuses = tmp_path / "py-spy"
    refuses.write_text("#!/bin/sh\necho 'Permission Denied: try sudo' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(stacks, "_py_spy", lambda: str(refuses))
    process = start(ALONE)
    assert "in waits_for_the_gpu" in stacks.take_stacks(tree(process), folder(tmp_path))
    isolated = start(ALONE, "-I")
    with pytest.raises(stacks.NoStacks, match="Permission Denied: try sudo, it has no handler"):
        stacks.take_stacks(tree(isolated), folder(tmp_path))


@pytest.mark.usefixtures("without_py_spy")
def test_a_server_that_ends_meanwhile_gives_the_reason(start, tmp_path, monkeypatch):
    """If a server ends while the stack traces are read, the reason is returned.

    Its temporary folder is removed while its last process still runs."""
    process = start(ALONE)
    processes = tree(process)
    with monkeypatch.context() as patch:
        patch.setattr(stacks.os, "kill", lambda pid, number: shutil.rmtree(folder(tmp_path)))
        with pytest.raises(stacks.NoStacks, match="the server has ended meanwhile"):
            stacks.take_stacks(processes, folder(tmp_path))


def test_processes_that_have_ended_have_no_stacks(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    entry = {"pid": ended.pid, "name": "python", "status": "running"}
    with pytest.raises(stacks.NoStacks, match="no process of the server"):
        stacks.take_stacks([entry], tmp_path)
