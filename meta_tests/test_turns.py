"""Several runs on one machine: none measures while another works, and none waits for ever."""

import fcntl
import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest
import servers
from data_rows import from_data

from sm121.measure.turns import Turn, Turns
from sm121.plugin import turns
from sm121.plugin.stash import LEVEL, SESSION

SCENARIO = "meta_tests/scenarios/turns.py"


def _noted(path):
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(float(begin), float(end), "measures" in name) for begin, end, name in rows]


def _overlap(one, other):
    return min(one[1], other[1]) - max(one[0], other[0]) > 0


def _two_runs(start_pytest, tmp_path, *arguments, beside_others):
    notes = [tmp_path / "one.txt", tmp_path / "other.txt"]
    runs = [
        start_pytest(
            SCENARIO, "--arch", "cpu", *arguments,
            # On a busy machine one of them begins seconds after the other.
            environment={"TURNS": str(note), "TMPDIR": str(tmp_path), "SHARES_S": "0.7"},
            beside_others=beside_others,
        )
        for note in notes
    ]  # fmt: skip
    assert [run.wait() for run in runs] == [0, 0], [run.output for run in runs]
    return [_noted(note) for note in notes], runs


@pytest.mark.slow("two runs that sleep by turns")
def test_two_runs_measure_one_after_the_other(start_pytest, tmp_path):
    (one, other), _ = _two_runs(start_pytest, tmp_path, beside_others=False)
    assert len(one) == len(other) == 11
    for mine, its in itertools.product(one, other):
        if mine[2] or its[2]:
            assert not _overlap(mine, its), "measured while the other run worked"
    for mine, its in ((one, other), (other, one)):
        first = min(row[0] for row in mine if row[2])
        last = max(row[1] for row in mine if row[2])
        assert not [row for row in its if row[0] < last and row[1] > first], (
            "the measurements of a run belong together: nothing of another in between"
        )
    assert any(_overlap(a, b) for a, b in itertools.product(one, other)), "nothing was shared"


def test_who_measures_is_not_passed_by_for_ever(tmp_path):
    """Two that share the machine in turn leave no gap; who wants it alone gets it all the same."""
    ended = threading.Event()

    def share():
        turns = Turns(lambda _line: None, tmp_path)
        while not ended.is_set():
            turns.take(Turn.SHARED)
            time.sleep(0.15)
            turns.release()
        turns.close()

    threads = [threading.Thread(target=share) for _ in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.07 * (number + 1))
    alone = Turns(lambda _line: None, tmp_path)
    began = time.monotonic()
    alone.take(Turn.ALONE)
    waited = time.monotonic() - began
    ended.set()
    alone.close()
    for thread in threads:
        thread.join()
    assert waited < 2.0, f"required: at most a test of each, seen: {waited:.1f} s"


@from_data
def test_a_run_with_servers_on_a_gpu_has_the_machine(arch, base_url, obstacle, share):
    target = SimpleNamespace(arch=arch, obstacle=obstacle)
    run = SimpleNamespace(target=target, settings=SimpleNamespace(base_url=base_url))
    config = SimpleNamespace(stash={SESSION: run})
    item = SimpleNamespace(config=config, stash={LEVEL: "smoke"}, fixturenames=())
    assert turns.needs(item) is share
    item.stash[LEVEL] = "performance"
    assert turns.needs(item) is Turn.ALONE, "what is timed is timed alone everywhere"


@pytest.mark.slow("a run with workers")
def test_workers_wait_with_their_controller_and_time_nothing(start_pytest, tmp_path):
    alone = Turns(lambda _line: None, tmp_path)
    alone.take(Turn.ALONE)
    note = tmp_path / "note.txt"
    run = start_pytest(
        SCENARIO, "-n", "2", "--arch", "cpu",
        environment={"TURNS": str(note), "TMPDIR": str(tmp_path)}, beside_others=False,
    )  # fmt: skip
    run.wait_for("one of them measures", 60)
    assert not note.exists(), "no worker was given a test"
    alone.release()
    while not note.exists():
        assert run.process.poll() is None, run.output
        time.sleep(0.05)
    with (
        (tmp_path / f"sm121-{os.getuid()}-turn.lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.wait()
    tests = {test["id"].partition("::")[2]: test for test in run.verdict["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        **{f"test_shares[{n}]": "PASS" for n in range(8)},
        **{f"test_measures[{n}]": "NOT_RUN" for n in range(2)},
        "test_measures_too": "NOT_RUN",
    }, run.output
    assert "run this one without -n" in tests["test_measures_too"]["message"]
    alone.take(Turn.ALONE)
    alone.close()


def test_who_waits_says_for_whom(tmp_path):
    first, lines = Turns(lambda _line: None, tmp_path), []
    first.take(Turn.ALONE)
    second = Turns(lines.append, tmp_path)
    thread = threading.Thread(target=second.take, args=(Turn.SHARED,))
    thread.start()
    time.sleep(3.6)
    first.release()
    thread.join(5.0)
    assert not thread.is_alive() and len(lines) == 1, lines
    assert "one of them measures (pid " in lines[0] and "--share-machine" in lines[0]
    first.close()
    second.close()


def test_a_dead_run_holds_nothing(tmp_path):
    with servers.program("holder-of-a-turn.txt", str(tmp_path)) as holder:
        assert holder.stdout.readline() == "has\n"
    turns = Turns(lambda line: pytest.fail(line), tmp_path)
    turns.take(Turn.ALONE)
    turns.close()


@pytest.mark.slow("another run; a link in place of a file is in test_process_hygiene.py")
def test_a_link_in_place_of_the_lock_is_not_followed(start_pytest, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f"sm121-{os.getuid()}-turn.lock").symlink_to(tmp_path / "precious")
    run = start_pytest(
        SCENARIO, "--arch", "cpu", environment={"TURNS": "x", "TMPDIR": str(tmp_path)},
        beside_others=False,
    )  # fmt: skip
    assert run.wait() == 4 and "turn.lock" in run.output, run.output
    assert (tmp_path / "precious").read_text() == "precious"
