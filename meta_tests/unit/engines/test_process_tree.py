"""Parallel runs do not take each other's directories, servers or reports."""

import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from sm121.core import errors, files
from sm121.engines import dead_runs, listeners, process_tree
from sm121.engines.supervision import status_file_of
from sm121.run import directory

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_only_workers_of_one_run_share_a_directory(tmp_path):
    report = tmp_path / "report"
    shares = [directory.lock_directory(report, "one"), directory.lock_directory(report, "one")]
    assert directory.is_shared(report, "one") and not directory.is_shared(report, "two")
    for share in (None, "two"):
        with pytest.raises(errors.UsageError, match="another run is using it"):
            directory.lock_directory(report, share)
    for share in shares:
        share.lock.close()
    directory.lock_directory(report, "two").lock.close()


def test_files_of_other_runs_and_owners_are_not_overwritten(tmp_path):
    for text in ("first", "second", "third"):
        report = directory.lock_directory(tmp_path)
        (tmp_path / "verdict.json").write_text(text)
        os.utime(tmp_path / "verdict.json", (1e9, 1e9))  # all files have the same time
        report.lock.close()
    directory.lock_directory(tmp_path).lock.close()
    texts = sorted(path.read_text() for path in (tmp_path / "earlier").glob("*/verdict.json"))
    assert texts == ["first", "second", "third"]
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(errors.UsageError, match=r"got a folder with thesis\.tex"):
        directory.lock_directory(tmp_path)


def test_files_are_never_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    report = tmp_path / "report"
    report.mkdir()
    (report / ".verdict.json.draft").symlink_to(victim)
    files.write_text("theirs", report / "verdict.json")
    assert victim.read_text() == "mine" and (report / "verdict.json").read_text() == "theirs"
    (report / ".lock").symlink_to(victim)
    with pytest.raises(errors.UsageError):
        directory.lock_directory(report)
    assert victim.read_text() == "mine"


@pytest.fixture
def server_of():
    """Start a process that looks like a server of the given owner."""
    started = []

    def start(owner: str, run: str) -> subprocess.Popen:
        marks = {process_tree.SERVER_ID: f"{run}/1", process_tree.RUN_ID: run}
        marks[process_tree.OWNER] = owner
        process = subprocess.Popen(SLEEP, env={**os.environ, **marks})
        started.append(process)
        time.sleep(0.3)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_servers_of_dead_runs_are_ended(server_of, monkeypatch):
    dead = subprocess.Popen(["/bin/true"])
    was = process_tree.identity(dead.pid)
    dead.wait()
    orphan = server_of(was, "meta-dead")
    # If a pid is used again, it belongs to another owner.
    reused = server_of(f"{os.getpid()}:12345:{process_tree.owner().split(':')[2]}", "meta-reused")
    alive = server_of(process_tree.owner(), "meta-alive")
    # The clock was set, so the start times that psutil computes differ.
    monkeypatch.setattr(psutil, "boot_time", lambda: 1.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _self: 2.0)
    removed = {ended.run for ended in dead_runs.end_dead_runs()}
    assert {"meta-dead", "meta-reused"} <= removed and "meta-alive" not in removed
    assert orphan.wait(10) != 0 and reused.wait(10) != 0
    assert alive.poll() is None, "a server of a living run is left alone"


@pytest.mark.parametrize("log", ["server-marlin.log", "server-marlin-2.log"])
def test_a_server_that_has_overwritten_its_environment_is_found(tmp_path, log):
    """A server that has overwritten its environment is recognised by its log file. vLLM's engine
    core does this."""
    dead = subprocess.Popen(["/bin/true"])
    was = process_tree.identity(dead.pid)
    dead.wait()
    folders = {"dead": was, "alive": process_tree.owner(), "not ours": None, "another's": was}
    processes = {}
    for name, owner in folders.items():
        folder = tmp_path / name
        folder.mkdir()
        with (folder / log).open("wb") as output:
            process = subprocess.Popen(SLEEP, env={}, stdout=output, start_new_session=True)
        processes[name] = process
        if owner is not None:  # another process may use the log of a server that ended long ago
            session = 1 if name == "another's" else process.pid
            status = {"started_by": owner, "run": f"meta-{name}", "pid": session}
            status_file_of(folder / log).write_text(json.dumps(status))
    try:
        assert "meta-dead" in {ended.run for ended in dead_runs.end_dead_runs()}
        assert processes["dead"].wait(10) != 0
        assert all(process.poll() is None for name, process in processes.items() if name != "dead")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_supervisor_that_lives_ends_its_server_itself(monkeypatch):
    """A living supervisor ends its server itself.

    It is still writing the crash bundle of a killed run. Only a supervisor that hangs is ended."""
    looks: list[None] = []
    supervisor = SimpleNamespace(cmdline=lambda: ["python", "-m", "sm121.engines.supervisor"])

    def find():
        looks.append(None)
        return {"run": [supervisor]} if len(looks) < 3 else {}

    monkeypatch.setattr(dead_runs, "of_dead_runs", find)
    assert dead_runs.end_dead_runs() == [] and len(looks) == 4


@pytest.mark.parametrize(
    ("family", "bound", "found_at"),
    [
        pytest.param(socket.AF_INET, "127.0.0.1", {"127.0.0.1", "0.0.0.0", "::"}, id="IPv4"),
        pytest.param(socket.AF_INET6, "::1", {"::1", "0.0.0.0", "::"}, id="IPv6"),
        pytest.param(
            socket.AF_INET, "0.0.0.0", {"127.0.0.1", "::1", "0.0.0.0", "::", "192.0.2.1"}, id="any"
        ),
    ],
)
def test_the_process_that_listens_at_an_address_is_found(family, bound, found_at):
    """The process that listens at an address is found, and so is its fork.

    A process that only has a connection to the port is not."""
    port = random.randint(20000, 30000)  # a port below those that the system assigns to other tests
    with socket.create_server((bound, port), family=family):
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        fork.start()
        with socket.create_connection((bound, port)):
            found = {}
            for host in ("127.0.0.1", "::1", "0.0.0.0", "::", "192.0.2.1"):
                found[host] = {process.pid for process in listeners.listeners(host, port)}
        fork.kill()
        fork.join()
    expected = {os.getpid(), fork.pid}
    for host, pids in found.items():
        assert pids == (expected if host in found_at else set()), host
    assert listeners.listeners(bound, port) == [], "it is closed"
