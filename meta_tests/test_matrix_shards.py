"""Parts of a run make the whole one; a run that was killed goes on."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from sm121 import cli


def shape(verdict: dict) -> dict:
    """What of a verdict does not depend on the clock."""
    return {
        "verdict": verdict["verdict"],
        "exit_status": verdict["exit_status"],
        "levels": verdict["levels"],
        "tests": [(t["id"], t["level"], t["verdict"], t["skipped"]) for t in verdict["tests"]],
    }


def merged(capsys, *directories, output) -> tuple[int, dict]:
    status = cli.main(["merge", *map(str, directories), "--output", str(output)])
    capsys.readouterr()
    return status, json.loads((output / "verdict.json").read_text())


def sets_of(report) -> list:
    matrix = json.loads((report / "matrix" / "matrix.json").read_text())
    return [(one["values"], one["outcome"], one["confirmed"]) for one in matrix["failing_sets"]]


def test_shards_make_the_whole_and_a_missing_one_is_not_run(run_matrix, tmp_path, capsys):
    faults = "fallback:triton"
    _, whole, _ = run_matrix("--matrix", "1", faults=faults)
    parts = []
    for index in (1, 2):
        report = tmp_path / f"shard-{index}"
        _, part, _ = run_matrix("--matrix", "1", "--shard", f"{index}/2", faults=faults,
                                report=report)  # fmt: skip
        assert f"shard {index}/2" in part.output
        parts.append(report)
    status, together = merged(capsys, *parts, output=tmp_path / "merged")
    assert shape(together) == shape(whole.verdict)
    assert status == whole.verdict["exit_status"] == 1
    assert sets_of(tmp_path / "merged") == sets_of(whole.report)
    assert (tmp_path / "merged" / "matrix" / "FEATURE_MATRIX.md").is_file()

    status, alone = merged(capsys, parts[0], output=tmp_path / "alone")
    assert alone["reason"] == "shards that are missing: 2/2"
    left = [test for test in alone["tests"] if "its shard is missing (2/2)" in test["message"]]
    assert left and all(test["verdict"] == "NOT_RUN" for test in left)
    assert status in (1, 5) and alone["verdict"] != "PASS"


def test_merge_refuses_what_is_no_shard(tmp_path, capsys):
    assert cli.main(["merge", str(tmp_path)]) == 4
    assert "expected a report directory with verdict.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_shard_that_is_none(run_pytest, text):
    status, run = run_pytest("--shard", text, "--collect-only", "-q", "tests/test_matrix.py")
    assert status == 4 and f"--shard {text}: expected I/N" in run.output


def test_a_killed_run_goes_on_after_the_last_cell(start_matrix, run_matrix, tmp_path):
    report = tmp_path / "killed"
    boots = tmp_path / "boots.txt"
    first = start_matrix("--matrix", "1", report=report)
    state = report / "matrix" / "state.jsonl"
    deadline = time.monotonic() + 60
    while not (state.is_file() and len(state.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline and first.process.poll() is None, first.output
        time.sleep(0.05)
    first.remember()
    os.killpg(first.process.pid, signal.SIGKILL)
    first.wait()
    for process in first.tree():  # what a killed suite leaves; its own watchdog ends it too
        process.kill()
    before = boots.read_text().splitlines()
    status, run, matrix = run_matrix("--matrix", "1", "--resume", report=report)
    assert status == 0, run.output
    again = boots.read_text().splitlines()[len(before) :]
    ended = [cell["id"] for cell in matrix["cells"] if cell["resumed"]]
    assert len(ended) == 2 and "are taken over" in run.output
    assert {cell["outcome"] for cell in matrix["cells"]} == {"PASS"}
    # The baseline once more, to compare with, and the cells that had no outcome.
    assert len(again) == 1 + len(matrix["cells"]) - len(ended)
    whole = run_matrix("--matrix", "1")[2]
    assert [(c["id"], c["outcome"]) for c in matrix["cells"]] == [
        (c["id"], c["outcome"]) for c in whole["cells"]
    ]


@pytest.mark.slow(why="two runs more")
def test_another_run_is_not_taken_over(run_matrix, tmp_path):
    report = tmp_path / "r"
    run_matrix("--matrix", "1", "-k", "baseline", report=report)
    status, run, matrix = run_matrix("--matrix", "1", "-k", "baseline", "--resume",
                                     "--engine-env", "X=1", report=report)  # fmt: skip
    assert status == 0 and "no cell is taken over: the earlier run was another one" in run.output
    assert not any(cell["resumed"] for cell in matrix["cells"])


def test_kernel_tests_that_ended_are_taken_over(run_pytest, tmp_path):
    notes, report = tmp_path / "notes", tmp_path / "report"
    arguments = ("--arch", "cpu", "meta_tests/scenarios/kernel_resume.py",
                 "--report-dir", str(report))  # fmt: skip
    run_pytest(*arguments, environment={"NOTES": str(notes), "END": "1"})
    assert notes.read_text().split() == ["first", "first", "second"]
    status, run = run_pytest(*arguments, "--resume", environment={"NOTES": str(notes)})
    assert notes.read_text().split() == ["first", "first", "second", "second"], run.output
    verdict = json.loads((report / "verdict.json").read_text())
    assert [test["verdict"] for test in verdict["tests"]] == ["PASS", "FAIL", "PASS"]
    assert verdict["finished"] and verdict["verdict"] == "FAIL" and status == 1
    assert "2 kernel tests are taken over" in run.output
