"""An attached server's log is followed as a stream, from ``docker logs`` or on standard input."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meta_tests.fakes import servers
from meta_tests.folders import DATA, FAKES, ROOT
from sm121 import cli
from sm121.core import waiting
from sm121.core.errors import UsageError
from sm121.engines import followed_log
from sm121.engines.followed_log import FollowedLog

ENGINE = FAKES / "scripted_engine.py"

HEALTH = "tests/test_smoke.py::test_health"
DOCKER = """#!/bin/sh
[ "$1" = logs ] || exit 9
if [ "$2" = --follow ]; then shift; fi
case "$2" in
  served) exec {how} {log};;
  *) echo "Error response from daemon: No such container: $2" >&2; exit 1;;
esac
"""


@dataclass
class Served:
    """A server that looks like vLLM, with its log."""

    url: str
    log: Path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    log = tmp_path / "engine.log"
    port = tmp_path / "port"
    with log.open("w") as stream:
        command = [sys.executable, str(ENGINE), "--port-file", str(port)]
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        assert waiting.until(lambda: port.is_file() and port.read_text() != "", 30.0)
        yield Served(f"http://127.0.0.1:{port.read_text()}", log)
    finally:
        process.terminate()
        process.wait(20)


def docker(folder: Path, log: Path, how: str = "tail -n +1 -f") -> str:
    """A PATH with a docker program that has the log of one container, ``served``."""
    (folder / "bin").mkdir(exist_ok=True)
    servers.executable(folder / "bin" / "docker", DOCKER.format(how=how, log=log))
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def proven(report: Path) -> None:
    """Check that the run proves the kernel path from the log, up to its last line."""
    verdict = json.loads((report / "verdict.json").read_text())
    assert verdict["engine"]["path"]["attention"] == "CPU_ATTN", verdict["unproven"]
    assert not [line for line in verdict["unproven"] if line.startswith("kernel path")]
    assert "GET /health" in (report / "server-attached.log").read_text()


def test_the_log_of_a_container_is_followed_while_the_run_goes_on(run_pytest, served, tmp_path):
    path = docker(tmp_path, served.log)
    words = ("--arch", "cpu", "--base-url", served.url, "--container", "served", HEALTH)
    _, run = run_pytest(*words, environment={"PATH": path, "TMPDIR": str(tmp_path)})
    assert (run.report / "verdict.json").is_file(), run.output
    proven(run.report)
    assert not run.left(), "docker logs --follow has ended"
    assert not [*tmp_path.glob("sm121-log-*")]


@pytest.mark.parametrize(
    "follows",
    [
        pytest.param(True, id="followed", marks=pytest.mark.slow("the healthy twin")),
        pytest.param(False, id="a copy of the past"),
    ],
)
def test_a_log_on_standard_input(served, tmp_path, follows):
    """A log on standard input that does not grow with the suite's requests proves nothing.

    The same holds for a file that does not grow."""
    how = ["tail", "-n", "+1", "-f"] if follows else ["cat"]
    report = tmp_path / "report"
    words = ["--arch", "cpu", "--base-url", served.url, "--server-log", "-"]
    with subprocess.Popen([*how, str(served.log)], stdout=subprocess.PIPE) as stream:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words,
             "--report-dir", str(report), HEALTH],
            cwd=ROOT, stdin=stream.stdout, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        stream.kill()
    assert (report / "verdict.json").is_file(), done.stdout + done.stderr
    if follows:
        proven(report)
    else:
        verdict = json.loads((report / "verdict.json").read_text())
        (line,) = [line for line in verdict["unproven"] if line.startswith("kernel path")]
        assert "--server-log - is not proven to be this server's" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["--container", "gone"], "No such container: gone", id="no such container"),
        pytest.param(["--container", "../etc"], "(not a path)", id="a path"),
        pytest.param(["--container=--help"], "expected the name or the id", id="an option"),
        pytest.param(["--container", "a;b"], "expected the name or the id", id="a shell's word"),
        pytest.param(
            ["--container", "served", "--server-log", "-"], "expected one of them", id="both"
        ),
        pytest.param(["--server-log", "-", "-n2"], "expected a file or --container", id="workers"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(run_pytest, served, tmp_path, words, expected):
    environment = {"PATH": docker(tmp_path, served.log)}
    given = ("--arch", "cpu", "--base-url", served.url, *words, HEALTH)
    status, run = run_pytest(*given, environment=environment)
    (line,) = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    assert status == 4 and expected in line, run.output
    assert not (run.report / "verdict.json").exists()


def test_without_docker_one_line_names_the_alternatives(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"expected docker on the PATH, .* --server-log FILE"):
        followed_log.check_container("served")


def test_a_container_without_a_server_to_attach_to_is_refused(run_pytest, served, tmp_path):
    environment = {"PATH": docker(tmp_path, served.log)}
    status, run = run_pytest("--arch", "cpu", "--container", "served", environment=environment)
    assert status == 4 and "Give --base-url URL" in run.output, run.output


def test_a_stream_without_an_end_is_bounded_and_read_on(monkeypatch, tmp_path):
    """A stream without an end is stored only up to a limit, and read on, because a pipe that nobody
    reads would block the server."""
    monkeypatch.setattr(followed_log, "_KEPT_BYTES", 100_000)
    reading, writing = os.pipe()
    log = FollowedLog(os.fdopen(reading, "rb", 0), "--server-log -")
    with contextlib.closing(log), os.fdopen(writing, "wb") as stream:
        stream.write(b"x" * 1_000_000)
        stream.flush()
        log.settle()
        assert log.path.stat().st_size < 300_000
        assert log.lost is not None and log.lost.startswith("--server-log -: only the first")
    assert not log.path.exists()


def test_the_path_of_a_container(monkeypatch, tmp_path, capsys):
    gb10 = DATA / "gb10" / "unfused_0804_clean.log"
    monkeypatch.setenv("PATH", docker(tmp_path, gb10, how="cat"))
    assert cli.main(["path", "--container", "served"]) == 0
    printed = capsys.readouterr().out
    assert "FLASHINFER_CUTLASS_MXFP4_MXFP8" in printed
    assert cli.main(["path", "--container", "gone"]) == 4
    assert "No such container: gone" in capsys.readouterr().err
    assert cli.main(["path", "--container", "served", str(gb10)]) == 4
