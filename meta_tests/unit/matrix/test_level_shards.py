"""The shards of a run together give the result of the whole run."""

import json
import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.run_events import stand_in, with_events
from meta_tests.unit.matrix.test_axes import examiner
from meta_tests.unit.matrix.test_isolation import SPACE, ended, record
from sm121 import cli
from sm121.answers import golden
from sm121.answers.agreement import TokenAgreement
from sm121.answers.golden_comparison import GoldenComparison
from sm121.core import profile, waiting
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun
from sm121.matrix import covering, examine, feature_matrix
from sm121.matrix.feature_matrix import MatrixFile
from sm121.matrix.level import MatrixLevel
from sm121.matrix.plan import make_plan
from sm121.matrix.space import identity
from sm121.report import merging
from sm121.run.cell_record import CellOutcome, CellRecord
from sm121.run.events import CellExamined, Resumed

pytestmark = pytest.mark.usefixtures("a_cpu_without_fp8")


def shape(verdict: dict) -> list:
    """Return the part of a verdict that does not depend on time."""
    tests = [(t["id"], t["level"], t["verdict"], t["skipped"]) for t in verdict["tests"]]
    return [verdict["verdict"], verdict["exit_status"], verdict["levels"], tests]


def merged(capsys, *directories, output) -> tuple[int, dict]:
    status = cli.main(["merge", *map(str, directories), "--output", str(output)])
    capsys.readouterr()
    return status, json.loads((output / "verdict.json").read_text())


def sets_of(report) -> list:
    matrix = json.loads((report / "matrix" / "matrix.json").read_text())
    return [(one["values"], one["outcome"], one["confirmed"]) for one in matrix["failing_sets"]]


@pytest.mark.slow("shards of a run of the other levels are merged in test_resume")
def test_shards_make_the_whole_and_a_missing_one_is_not_run(run_matrix, tmp_path, capsys):
    faults = {"faults": "fallback:triton"}
    _, whole, _ = run_matrix("--matrix", "1", **faults)
    parts = [tmp_path / "shard-1", tmp_path / "shard-2"]
    for shard, report in zip(("1/2", "2/2"), parts, strict=True):
        _, part, _ = run_matrix("--matrix", "1", "--shard", shard, report=report, **faults)
        assert f"shard {shard}" in part.output
    status, together = merged(capsys, *parts, output=tmp_path / "merged")
    assert shape(together) == shape(whole.verdict)
    assert status == whole.verdict["exit_status"] == 1
    assert sets_of(tmp_path / "merged") == sets_of(whole.report)
    assert (tmp_path / "merged" / "matrix" / "FEATURE_MATRIX.md").is_file()

    status, alone = merged(capsys, parts[0], output=tmp_path / "alone")
    assert alone["reason"] == "shards that are missing: 2/2"
    missing = [t for t in alone["tests"] if "its shard is missing (2/2)" in t["message"]]
    assert missing and all(test["verdict"] == "NOT_RUN" for test in missing)
    assert status in (1, 5) and alone["verdict"] != "PASS"


def wait_for_cells(run, are_noted) -> None:
    """Wait until a run of the matrix has recorded these cells."""
    file = run.report / "matrix" / "matrix.json"
    text = lambda: file.read_text() if file.is_file() else ""  # noqa: E731
    ended = lambda: run.process.poll() is not None  # noqa: E731
    assert waiting.until(lambda: ended() or are_noted(text()), 60.0, every_s=0.05), run.output
    assert not ended(), run.output


@pytest.mark.slow("a run of the matrix more")
def test_an_interrupted_run_says_what_fails_and_goes_on_with_the_other_cells(start_matrix):
    run = start_matrix("--matrix", "1", faults="refuse:triton crash:flashinfer_cutlass")
    wait_for_cells(run, lambda text: re.search('"outcome": ?"(FAIL|CRASH)"', text))
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 2, run.output
    matrix = json.loads((run.report / "matrix" / "matrix.json").read_text())
    broken = [c for c in matrix["cells"] if c["outcome"] in ("FAIL", "CRASH")]
    assert broken and matrix["interrupted"] and matrix["not_run"]
    text = (run.report / "matrix" / "FEATURE_MATRIX.md").read_text()
    assert "No executed cell" not in text and "**Interrupted: " in text
    assert f"- {broken[0]['outcome']}: `{broken[0]['id']}`" in text
    page = (run.report / "report.html").read_text()
    assert "<strong>Interrupted: " in page and broken[0]["id"] in page

    faults = "refuse:triton crash:flashinfer_cutlass"
    resumed = start_matrix("--matrix", "1", "--resume", report=run.report, faults=faults)
    assert resumed.wait() == 1, resumed.output
    after = json.loads((run.report / "matrix" / "matrix.json").read_text())
    assert not after["interrupted"] and not after["not_run"], resumed.output
    count = len(matrix["cells"])
    assert after["cells"][:count] == matrix["cells"], "they were not examined again"
    assert {cell["values"]["moe"]: cell["outcome"] for cell in after["cells"]} == {
        "marlin": "PASS", "triton": "FAIL", "cutlass": "CRASH",
    }, resumed.output  # fmt: skip
    assert [one["confirmed"] for one in after["failing_sets"]] == [True, True]


@pytest.mark.slow(why="a run with workers")
def test_one_worker_has_all_cells_and_the_whole_has_its_matrix(run_matrix):
    faults = "fallback:triton fallback:flashinfer_cutlass"
    status, run, matrix = run_matrix("-n", "2", "--matrix", "1", faults=faults)
    assert status == 1, run.output
    assert len({log.partition("/server")[0] for c in matrix["cells"] if (log := c["log"])}) == 1
    for cell in matrix["cells"]:
        assert (run.report / cell["log"]).is_file()
    assert {c["values"]["moe"]: c["outcome"] for c in matrix["cells"]} == {
        "marlin": "PASS", "triton": "FALLBACK", "cutlass": "FALLBACK",
    }, run.output  # fmt: skip
    assert matrix["failing_sets"] and (run.report / "matrix" / "FEATURE_MATRIX.md").is_file()
    (about_all,) = [t for t in run.verdict["tests"] if t["id"].endswith("failing_sets")]
    assert about_all["verdict"] == "FAIL", about_all


BASELINE = ended(CellOutcome.PASS)
ONCE = ended(CellOutcome.FAIL, graphs="compiled")


def matrix_of(*records: CellRecord, references: tuple[CellRecord, ...] = ()) -> MatrixFile:
    array = covering.build(SPACE, 1)
    return feature_matrix.build(SPACE, array, records, [], profile="p", references=references)


def text_of(file: MatrixFile) -> str:
    return json.dumps(feature_matrix.as_json(SPACE, file))


@pytest.mark.parametrize("again", [CellOutcome.PASS, CellOutcome.FAIL])
def test_a_failure_that_did_not_recur_is_marked_after_merging(again):
    second = ended(again, isolating=True, graphs="compiled")
    _, whole = feature_matrix.merged([matrix_of(BASELINE), matrix_of(ONCE, second)])
    assert [(c.id, c.isolating) for c in whole.cells] == [
        ("baseline", False), ("graphs=compiled", False), ("graphs=compiled", True),
    ]  # fmt: skip
    (failing,) = whole.failing_sets
    assert failing.confirmed is (again is CellOutcome.FAIL)
    assert failing.confirmed or "failed once, and not in a second start" in failing.text


def test_starts_to_compare_with_are_counted():
    file = matrix_of(ended(CellOutcome.PASS, graphs="compiled"), references=(BASELINE,))
    assert file.spent == {"cells": 1.0, "boots": 2.0, "boot_s": 4.0, "seconds": 6.0}


def test_an_infinite_difference_of_answers_is_null_in_matrix_json(tmp_path, monkeypatch):
    """An infinite difference of answers is null in matrix.json, because JSON has no infinite
    numbers."""
    agreement = TokenAgreement((math.inf,), (False,), (math.nan,), 0, None)
    change = GoldenComparison({"p": agreement}, ())
    monkeypatch.setattr(golden, "compare", lambda *_arguments: change)
    made = examiner(tmp_path, None)
    made.baseline = examine.Baseline(SimpleNamespace(dtype="bfloat16"), None)
    cell = ended(CellOutcome.FAIL, isolating=True)
    examine.Examiner._equivalence(made, cell, Mock())
    feature_matrix.write(SPACE, matrix_of(cell), tmp_path)
    written = (tmp_path / "matrix.json").read_text()
    (row,) = json.loads(written, parse_constant=pytest.fail)["cells"]
    assert row["agreement"] == {"worst_nats": None, "mean_divergence": None, "top1": 0.0}
    assert "| FAIL | inf |" in (tmp_path / feature_matrix.MARKDOWN).read_text()


def wrote(directory: Path, name: str, content: str) -> None:
    folder = directory / name / "matrix"
    folder.mkdir(parents=True)
    (folder / "matrix.json").write_text(content)


class Examiner:
    """An examiner in which cells with compiled graphs fail, without a start."""

    def __init__(self) -> None:
        self.baseline = object()
        self.started: list[str] = []

    def examine(self, planned, _configuration, *, isolating=False):
        self.started.append(identity(SPACE, planned.cell))
        self.baseline = object()
        broken = planned.cell["graphs"] == "compiled"
        outcome = CellOutcome.FAIL if broken else CellOutcome.PASS
        return record(SPACE, planned.cell, outcome, isolating)


def level(tmp_path: Path, *, limit_s: float = 100.0, obstacle: str | None = None) -> MatrixLevel:
    """Return a level whose baseline was examined, and whose cells with compiled graphs fail."""
    cpu = profile.load("cpu-tiny-gpt-oss")
    cpu = cpu.model_copy(update={"test_timeout_s": {"matrix": limit_s}})
    configuration = ServerConfiguration("n", "vllm", "python", "m", "canary")
    run = stand_in(
        profile=cpu, directory=tmp_path, attached=None, by_name={cpu.under_test:
        configuration}, managed=lambda _name: configuration, pool=None,
        obstacle=lambda: obstacle, say=lambda *_words: None, redact=lambda text: text,
        file=SimpleNamespace(fingerprint=None), start_anew=lambda _configuration: None,
    )  # fmt: skip
    with_events(run)
    for cell in (BASELINE, ended(CellOutcome.FAIL, graphs="compiled", seqs="1")):
        run.record.emit(CellExamined(cell))
    made = MatrixLevel(run, make_plan(cpu, SPACE, strength="1"))
    made._examiner = Examiner()
    made.reported = []
    write = made._found
    made._found = lambda sets: (made.reported.append(list(sets)), write(sets))
    return made


def test_isolating_ends_before_the_tests_time_does(tmp_path):
    run = level(tmp_path)
    with pytest.raises(AssertionError, match="graphs=compiled: FAIL"):
        run.isolate()
    assert run._examiner.started == ["graphs=compiled,seqs=1", "graphs=compiled"]
    # Reported while the set is isolated, and at the end.
    assert len(run.reported) == 2 and all(run.reported)
    written = json.loads((tmp_path / "matrix" / "matrix.json").read_text())
    assert [one["confirmed"] for one in written["failing_sets"]] == [True]


@pytest.mark.parametrize("changed", [{"obstacle": "the GPU fell"}, {"limit_s": 17.0}])
def test_nothing_is_started_where_nothing_can_be_trusted_or_no_time_is_left(tmp_path, changed):
    """If no result can be trusted, or no time is left, nothing is started. 15 s are reserved for
    the end of the test, and a cell takes 3 s."""
    run = level(tmp_path, **changed)
    with pytest.raises(AssertionError, match="not isolated"):
        run.isolate()
    assert not run._examiner.started
    if "obstacle" in changed:
        with pytest.raises(NotRun, match="the GPU fell"):
            run.examine(covering.Planned(ONCE.values, ("array",)))


def test_a_resumed_level_examines_what_has_no_outcome_and_the_baseline(tmp_path):
    """A resumed level examines the cells without an outcome, and the baseline again.

    The baseline of the killed process is a cell in the result. The new one is only for comparison.
    """
    run = level(tmp_path)
    run._examiner.baseline = None
    for event in (CellExamined(ended(CellOutcome.NOT_RUN, seqs="1")), Resumed([])):
        run.run.record.emit(event)
    run.judge(covering.Planned(BASELINE.values, ("array",)))
    assert not run._examiner.started
    run.judge(covering.Planned(ended(CellOutcome.PASS, seqs="1").values, ("array",)))
    assert run._examiner.started == ["baseline", "seqs=1"]
    written = json.loads((tmp_path / "matrix" / "matrix.json").read_text())
    names = [cell["id"] for cell in written["cells"]]
    assert names == ["baseline", "graphs=compiled,seqs=1", "seqs=1"]
    assert written["spent"]["boots"] == 4.0


def test_a_shard_whose_matrix_cannot_be_read_is_refused(tmp_path):
    """A shard whose matrix cannot be read is refused.

    Otherwise, FEATURE_MATRIX.md would lack its cells without a message."""
    wrote(tmp_path, "part", "{ half")
    with pytest.raises(UsageError, match=r"the matrix in part cannot be read"):
        merging.write_matrix(tmp_path, ["part"])
    for name, options in (("one", None), ("two", ["--y"])):
        part = matrix_of(BASELINE).model_copy(update={"options": options})
        wrote(tmp_path, name, text_of(part))
    with pytest.raises(UsageError, match="matrices of the shards differ in their options"):
        merging.write_matrix(tmp_path, ["one", "two"])
