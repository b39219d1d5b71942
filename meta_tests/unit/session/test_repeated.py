"""`sm121 run --every`: rounds of checks on a running server, and the reports that are kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sm121 import cli
from sm121.client.health import Health
from sm121.core.server import Endpoint
from sm121.core.verdict import Verdict
from sm121.measure.counters import Counters
from sm121.session import repeated
from sm121.session.acceptance import AcceptanceWatch
from sm121.session.repeated import MonitorRound, Records, _Player, repeat


def a_round(number: int, verdict: Verdict = Verdict.PASS) -> MonitorRound:
    return MonitorRound(number, "2026-11-28T12:00:00+00:00", 2.0, verdict, f"{verdict}: 13 checks")


def records_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def play_all(folder: Path, verdicts: list[Verdict]) -> tuple[int, list[str]]:
    """Return the exit status and the printed lines of rounds with these verdicts."""
    stopped = threading.Event()
    left = [*verdicts]
    lines: list[str] = []
    report = folder / "latest"

    def play(number: int) -> tuple[MonitorRound, Path]:
        report.mkdir(parents=True, exist_ok=True)
        (report / "verdict.json").write_text(str(number))
        verdict = left.pop(0)
        if not left:
            stopped.set()
        return a_round(number, verdict), report

    status = repeat(0.0, play, Records(folder), lines.append, stopped=stopped)
    return status, lines


def test_green_rounds_end_with_status_0(tmp_path):
    status, lines = play_all(tmp_path, [Verdict.PASS] * 3)
    assert status == 0
    assert lines[-1] == "stopped after 3 rounds: 3 green, 0 red"
    assert [record["number"] for record in records_of(tmp_path)] == [1, 2, 3]


def test_a_bad_second_round_is_red_and_named_and_the_third_is_green(tmp_path):
    status, lines = play_all(tmp_path, [Verdict.PASS, Verdict.FAIL, Verdict.PASS])
    assert status == 1
    assert [line.startswith("RED ") for line in lines[:3]] == [False, True, False]
    assert (tmp_path / "red-2" / "verdict.json").read_text() == "2"
    assert [record["verdict"] for record in records_of(tmp_path)] == ["PASS", "FAIL", "PASS"]


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_every_verdict_but_pass_is_red(tmp_path, verdict):
    stopped = threading.Event()

    def play(number: int) -> tuple[MonitorRound, None]:
        if number == 2:
            stopped.set()
        return a_round(number, verdict if number == 1 else Verdict.PASS), None

    assert repeat(0.0, play, Records(tmp_path), print, stopped=stopped) == 1


def test_files_stay_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated, "_LARGEST_FILE", 2000)
    play_all(tmp_path, [Verdict.FAIL] * 40)
    reports = sorted(int(path.name[4:]) for path in tmp_path.glob("red-*"))
    assert reports == [1, *range(32, 41)]  # the first deviation and the newest ones
    sizes = [path.stat().st_size for path in tmp_path.glob("rounds*.jsonl")]
    assert len(sizes) == 2
    assert max(sizes) < 2500


def test_a_restarted_command_keeps_numbering_and_the_limit_of_reports(tmp_path):
    """A restarted `sm121 run --every` continues the numbers of the rounds and the limit of reports.

    Five processes use one folder. Ten reports remain, and each line names its own report."""
    for _process in range(5):
        play_all(tmp_path, [Verdict.FAIL, Verdict.PASS, *[Verdict.FAIL] * 10])
    rounds = records_of(tmp_path)
    assert [record["number"] for record in rounds] == list(range(1, 61))
    reports = sorted(int(path.name[4:]) for path in tmp_path.glob("red-*"))
    assert reports == [1, *range(52, 61)]
    for record in rounds:
        if record["report"] is not None and Path(str(record["report"])).is_dir():
            text = (Path(str(record["report"])) / "verdict.json").read_text()
            assert text == str(record["number"])


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ("", 1),
        ('{"number": 7}\n', 8),
        ('{"number": 7}\n{"number": 8, "sta', 8),
        ('[]\n{"number": null}\nno JSON\n', 1),
    ],
    ids=["an empty file", "a whole line", "a line that is cut", "foreign lines"],
)
def test_numbers_go_on_from_the_lines_that_are_left(tmp_path, left, expected):
    (tmp_path / "rounds.jsonl").write_text(left)
    (tmp_path / "red-notes").mkdir()
    play_all(tmp_path, [Verdict.PASS])
    last = (tmp_path / "rounds.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["number"] == expected
    assert (tmp_path / "red-notes").is_dir(), "a folder that is no report stays"


def test_numbers_go_on_from_the_older_file_and_the_reports(tmp_path):
    (tmp_path / "rounds.1.jsonl").write_text('{"number": 30}\n')
    assert Records(tmp_path).newest == 30
    (tmp_path / "red-41").mkdir()
    assert Records(tmp_path).newest == 41


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--every", "10m"], "--every: expected --base-url URL as well"),
        (["--every", "soon", "--base-url", "http://127.0.0.1:1"], "--every soon: expected a dur"),
        (["--every=1m", "--base-url=http://127.0.0.1:1", "--certify"], "--every and --certify"),
        (["--every=1m", "--base-url=http://127.0.0.1:1", "--plan=full"], "--every and --plan"),
        (["--every=1m", "--base-url=http://127.0.0.1:1", "--api-key-file=no"], "a file with the k"),
        (["--every=1m", "--base-url"], "argument --base-url: expected one argument"),
        (["--every"], "argument --every: expected one argument"),
        (
            ["--every", "10m", "--base-url", "http://127.0.0.1:1", "-mkernel"],
            "--every and -m: expected one of them",
        ),
    ],
    ids=["no server", "no duration", "certify", "plan", "no key", "no URL", "no value", "m"],
)
def test_a_wrong_request_is_one_line(words, message, capsys):
    assert cli.main(["run", *words]) == 4
    assert message in capsys.readouterr().err


def loop_against(server, folder: Path, *words: str, **settings) -> subprocess.Popen[str]:
    """Start `sm121 run --every 1s` on a server, in a separate process."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "sm121", "run", "--every", "1s", *server.options]
    command += ["--arch", "cpu", "--served-model-name", "canary", f"--report-dir={folder}/r"]
    return subprocess.Popen(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        **settings,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--bogus"], "unrecognized arguments: --bogus",
            marks=pytest.mark.slow("status 4, as an unknown file has"), id="an unknown option",
        ),
        pytest.param(
            ["tests/no_such_file.py"], "file or directory not found: tests/no_such_file.py",
            id="an unknown file",
        ),
        pytest.param(
            ["-k", "nosuchtest"], "NOT_RUN: ",
            marks=pytest.mark.slow("refused as an unknown file is"), id="no test of this name",
        ),
    ],
)  # fmt: skip
def test_a_first_run_that_is_refused_ends_the_command_with_one_line(
    fault_server, tmp_path, words, message
):
    with loop_against(fault_server(), tmp_path, *words) as loop:
        output, _ = loop.communicate(timeout=120)
    assert loop.returncode == 4, output
    assert len(output.splitlines()) == 1, output
    assert output.startswith("sm121 run: --every: expected a round that runs checks, got NOT_RUN")
    assert message in output
    assert not (tmp_path / "r" / "rounds.jsonl").exists()


class _Refused:
    """A run that ends with exit status 5."""

    def __init__(self, *_arguments, **_settings) -> None:
        pass

    def wait(self) -> int:
        return 5


def test_a_later_run_that_is_refused_is_a_red_round(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated.subprocess, "Popen", _Refused)
    monkeypatch.setattr(repeated.health, "check", lambda *_, **__: Health(True, ""))
    outcomes = [(Verdict.PASS, "PASS"), (Verdict.NOT_RUN, "NOT_RUN: nothing ran")]
    monkeypatch.setattr(_Player, "_outcome", lambda _player, _status: outcomes.pop(0))
    watch = AcceptanceWatch(lambda: Counters({}))
    player = _Player([], tmp_path, Endpoint("http://127.0.0.1:1", "none", ""), watch)
    assert [player.play(number)[0].verdict for number in (1, 2)] == [Verdict.PASS, Verdict.NOT_RUN]


#: A program in which Python ignores an interrupt, because it occurs in a `__del__`, as in callbacks
#: of Python's imports.
DROPS_INTERRUPTS = """\
import time
from concurrent.futures import ThreadPoolExecutor
class Deaf:
    def __del__(self):
        open("deaf", "w").close()
        time.sleep(30)
Deaf()
time.sleep(30)
"""


def test_a_stop_ends_a_round_that_drops_interrupts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", DROPS_INTERRUPTS]
    monkeypatch.setattr(repeated.own_tests, "command", lambda *_: command)
    monkeypatch.setattr(repeated.health, "check", lambda *_, **__: Health(True, ""))
    watch = AcceptanceWatch(lambda: Counters({}))
    player = _Player([], tmp_path, Endpoint("http://127.0.0.1:1", "none", ""), watch)
    with ThreadPoolExecutor() as pool:
        played = pool.submit(player.play, 1)
        wait_for(Path("deaf").exists)
        player.stop()
        round_, _ = played.result(15)
    assert round_.verdict is Verdict.NOT_RUN


@pytest.fixture
def hang_ups_arrive():
    """Make this process receive SIGHUP.

    Under nohup it ignores the signal, and so would its children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow("handled as SIGTERM is")),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow("handled as SIGTERM is")),
    ],
)
@pytest.mark.usefixtures("hang_ups_arrive")
def test_a_signal_ends_the_loop_and_its_run(fault_server, tmp_path, number):
    with loop_against(fault_server(), tmp_path) as loop:
        wait_for(lambda: psutil.Process(loop.pid).children())
        runs = psutil.Process(loop.pid).children(recursive=True)
        loop.send_signal(number)
        output, _ = loop.communicate(timeout=60)
    assert "stopped after 0 rounds" in output.splitlines()[-1], output
    assert loop.returncode == 5, output
    for run in runs:
        assert not run.is_running()


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with repeated._signals(None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_rounds_against_a_server_that_ends_are_red_until_a_signal(fault_server, tmp_path):
    """After the server has ended, each further round fails until a signal ends the loop.

    The server ends after round 1. SIGTERM ends the loop, and no process remains."""
    server = fault_server()
    with loop_against(server, tmp_path) as loop:
        file = tmp_path / "r" / "rounds.jsonl"
        wait_for(lambda: file.is_file())
        server.process.terminate()
        wait_for(lambda: len(file.read_text().splitlines()) >= 3)
        loop.send_signal(signal.SIGTERM)
        output, _ = loop.communicate(timeout=60)
    rounds = records_of(tmp_path / "r")
    assert loop.returncode == 1, output
    assert rounds[0]["verdict"] == "FAIL", "the fault server has no model: checks of it fail"
    assert (tmp_path / "r" / "red-1" / "verdict.json").is_file()
    assert rounds[2]["verdict"] == "FAIL" and "refused" in str(rounds[2]["sentence"]), output
    assert "stopped after" in output
    assert "latest" not in str(rounds[-1]["report"])


def wait_for(holds, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
