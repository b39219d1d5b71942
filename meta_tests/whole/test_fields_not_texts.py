"""Modules exchange fields instead of texts, so a text that looks like another one has no effect."""

from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.fakes import past_runs
from meta_tests.unit.plugin.test_progress import going
from sm121.core.engine_settings import KernelPathRequirement
from sm121.engines.signs import Signs, Word
from sm121.evidence import ranks, requirement
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart
from sm121.regression import trend
from sm121.run.fingerprint import Fingerprint
from sm121.run.record import ProgressLine
from sm121.run.stored_run import StoredMetric


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "server.log"
    file.write_text("")
    return file


def contradictions(log: Path, attention: str, line: str) -> list[requirement.Contradiction]:
    path = KernelPath(attention=attention, moe="M", kv_layout="L", evidence={"attention": line})
    required = KernelPathRequirement(attention=("A",), source="a test")
    return requirement.contradictions(required, path, log, "stock")


def test_a_contradiction_does_not_depend_on_the_line(log):
    known = contradictions(log, "B", "INFO 10:00 uses B")
    assert contradictions(log, "B", "INFO 10:05 uses B, by another line") == known
    assert contradictions(log, "C", "INFO 10:00 uses B") != known
    assert str(known[0]) == "attention: expected A, got B (INFO 10:00 uses B)"


def test_a_value_with_a_comma_has_its_own_line_as_evidence():
    def rank(number: int, sizes: str) -> ranks.RankPath:
        path = KernelPath(
            log=LogStart(graph_sizes=sizes), evidence={"graph_sizes": f"to capture {sizes}"}
        )
        return ranks.RankPath(rank=number, node="n", path=path)

    both = [rank(0, "PIECEWISE=51, FULL=35"), rank(1, "PIECEWISE=51, FULL=34")]
    (found,) = ranks.contradictions(both, KernelPathRequirement(source="a test"), 2)
    assert "(to capture PIECEWISE=51, FULL=34)" in str(found)


@pytest.mark.parametrize(
    ("kind", "waited_for"),
    [(ProgressLine.PASSING, True), (ProgressLine.READY, False), (ProgressLine.NOTE, False)],
)
def test_the_kind_of_a_line_decides_whether_it_is_waited_for(kind, waited_for):
    progress, _ = going([0.0])
    progress.say("server stock", "readying the cache", kind)
    assert ("readying the cache" in progress.line()) is waited_for
    progress.stop()


def test_a_missing_metric_has_its_name_in_a_field():
    name = "a name with spaces"
    before = past_runs.stored_run("0001", StoredMetric(name, "s", False, None, (1.0,), 1.0))
    (missing,) = trend.missing({}, before)
    assert missing.metric == "a name with spaces"
    assert str(missing) == "a name with spaces was measured in 0001 and not in this run"


def test_a_difference_names_its_field():
    one = Fingerprint(machine={"gpu": "GB10"}, options={"machine": "1"})
    other = Fingerprint(machine={"gpu": "H100"}, options={"machine": "2"})
    fields = {(each.field, each.key) for each in one.differences(other)}
    assert fields == {("machine", "gpu"), ("options", "machine")}


def test_a_withheld_page_changes_only_its_own_sign():
    word = Word("build (debug)", "/props")
    before = Signs(words={word: "1"})
    lost = Signs(withheld=frozenset({"/props"}))
    said = "its build (debug) (/props) was 1 before, and is missing now"
    assert [*before.changes(lost)] == [said]
    assert [*before.changes(replace(lost, withheld=frozenset({"debug"})))] == []
