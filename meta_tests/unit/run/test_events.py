"""The events in run.jsonl are read as they were written, and verdict.json is computed from them."""

import errno
import json
import math
import os
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.fakes import report_runs
from meta_tests.fakes.run_events import new_file
from meta_tests.fakes.stored_run_events import events_of
from meta_tests.folders import DATA, ROOT
from meta_tests.unit.matrix.test_isolation import ended
from sm121.cli import main
from sm121.core.errors import UsageError
from sm121.core.json_text import json_text
from sm121.core.verdict import Verdict
from sm121.engines.signs import Signs, Word
from sm121.run import details, events, fold, merge, stored_run, verdict_file
from sm121.run.cell_record import CellOutcome
from sm121.run.details import FailureDetail, Samples, Series
from sm121.run.event_log import EventLog
from sm121.run.events import Decided, Remarked, Stamped
from sm121.run.verdict_file import TestReport, VerdictFile

STORED = (
    DATA / "verdict-first-version.json",
    ROOT / "docs" / "evidence" / "gb10-stand-in-verdict.json",
)
KINDS = ("pass", "fail", "invalid", "inconclusive", "crash", "hostile")


def write_stream(file: VerdictFile, directory: Path) -> Path:
    """Write the ``run.jsonl`` of a run."""
    directory.mkdir(parents=True, exist_ok=True)
    stream = directory / events.NAME
    lines = [events.to_line(Stamped(0.5, event)) for event in events_of(file)]
    stream.write_text("".join(lines), "ascii")
    return stream


def decided(name: str, verdict: str = "PASS") -> Decided:
    return Decided(TestReport(id=name, level="smoke", verdict=verdict))


def begin(directory: Path) -> EventLog:
    """Return a run's events, of which the first one was appended."""
    file = new_file()
    log = EventLog(file, directory / events.NAME)
    log.append(events_of(file)[0])
    return log


def folded(file: VerdictFile, directory: Path) -> str:
    """Return the verdict.json that follows from a run's events."""
    stream = write_stream(file, directory)
    return json_text(fold.fold(events.read_events(stream).events)) + "\n"


@pytest.mark.parametrize("kind", KINDS)
def test_run_folds_to_the_same_bytes(kind, tmp_path):
    stored = report_runs.write(kind, tmp_path / "stored") / verdict_file.NAME
    assert folded(verdict_file.read(stored), tmp_path / "run") == stored.read_text("utf-8")


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_stored_run_folds_to_the_same_content(stored, tmp_path):
    """A verdict.json computed from a run's events is equal to the stored one.

    Only the fields of later versions are added, and the version is the present one."""
    file = verdict_file.read(stored)
    file.schema_version = verdict_file.SCHEMA_VERSION
    assert folded(file, tmp_path) == json_text(file) + "\n"


def test_every_kind_of_event_is_read_as_it_was_written(tmp_path):
    told = [
        *events_of(verdict_file.read(report_runs.write("crash", tmp_path) / verdict_file.NAME)),
        *events_of(verdict_file.read(report_runs.write("pass", tmp_path) / verdict_file.NAME)),
        Remarked("seen"),
        events.Unproven("not seen"),
        events.EnvironmentNoted("nccl", {"node": ["libnccl.so.2"]}),
        events.ServerAttached(1.5, [(7, 90)], {"created (/v1/models)": "f00d"}, {"n": 3.0}),
        events.Overruled("t", Verdict.INVALID, "why"),
        events.UndecidedDropped(),
        events.Distrusted("the GPU reported an error"),
        events.Resumed(["t"]),
        events.Described("pytest", {"t": "It holds."}),
        events.Sampled("tg32@d0", Samples(unit="tok/s", samples=[52.0], taken=1)),
        events.FailureShown(FailureDetail(id="t", text="E assert")),
        events.HistoryRead({"tg32@d0": Series(unit="tok/s")}, ["no change"]),
        events.CellExamined(ended(CellOutcome.PASS), is_reference=True),
    ]
    kinds = {event.kind for event in told}
    union, _ = typing.get_args(events.Event)
    known = {kind.kind for kind in typing.get_args(union)}
    assert known - kinds <= {"compared", "memory_read"}
    for event in told:
        assert events.from_line(events.to_line(Stamped(1.5, event))) == Stamped(1.5, event)


STARTED = Signs(started=1000.0, processes=frozenset({(7, 90)}))
SEEN = Signs(processes=frozenset({(7, 90), (8, 91)}))
CREATED = Word("created", "/v1/models")
UNBOUND = Signs(words={CREATED: "1000", Word("id", "/v1/models"): "a"}, counters={"tokens": 9.0})


@pytest.mark.parametrize(
    ("before", "now", "proof"),
    [
        pytest.param(STARTED, replace(STARTED, started=1001.0), None, id="the same start"),
        pytest.param(
            STARTED,
            replace(STARTED, started=1060.0),
            "its process started at 1970-01-01 00:17:40Z, but the earlier one at "
            "1970-01-01 00:16:40Z",
            id="another start",
        ),
        pytest.param(SEEN, Signs(processes=frozenset({(7, 90)})), None, id="a process less"),
        pytest.param(
            SEEN,
            Signs(processes=frozenset({(7, 99)})),
            "its processes were 7, 8, and are 7 now",
            id="the same pid anew",
        ),
        pytest.param(STARTED, UNBOUND, None, id="nothing in common"),
        pytest.param(UNBOUND, replace(UNBOUND, counters={"tokens": 10.0}), None, id="more tokens"),
        pytest.param(
            UNBOUND, replace(UNBOUND, counters={"tokens": 4.0}), "its tokens fell from 9 to 4",
            id="fewer tokens",
        ),
        pytest.param(
            UNBOUND,
            replace(UNBOUND, words={CREATED: "1060"}),
            "its created (/v1/models) has changed",
            id="another value",
        ),
    ],
)  # fmt: skip
def test_attached_servers_that_are_two_processes_differ(before, now, proof):
    attached = events.ServerAttached.of(before)
    assert attached.differs_from(events.ServerAttached.of(now)) == proof


@pytest.mark.parametrize(
    ("before", "now", "is_comparable"),
    [
        pytest.param(STARTED, replace(SEEN, started=None), True, id="the pids of both"),
        pytest.param(STARTED, UNBOUND, False, id="neither start nor pids now"),
        pytest.param(Signs(started=1000.0), SEEN, False, id="no start now, no pids before"),
        pytest.param(UNBOUND, UNBOUND, True, id="neither before"),
    ],
)
def test_an_attached_server_is_compared_by_what_was_known_before(before, now, is_comparable):
    attached = events.ServerAttached.of(before)
    assert attached.is_comparable(events.ServerAttached.of(now)) == is_comparable


def test_letters_that_no_json_has_survive_and_numbers_are_null():
    """Characters and numbers that JSON does not allow are stored as in verdict.json: the numbers as
    null."""
    noted = events.EnvironmentNoted("odd", {"path": "a\udc80b", "rate": math.inf})
    read = events.from_line(events.to_line(Stamped(0.0, noted))).event
    assert read.value == {"path": "a\udc80b", "rate": None}


def test_a_torn_last_line_is_left_out(tmp_path):
    log = begin(tmp_path)
    log.append(events.Collected([]))
    log.append(decided("a", "FAIL"))
    stream = tmp_path / events.NAME
    whole = stream.read_bytes()
    for cut in (1, 2, 40):
        stream.write_bytes(whole[:-cut])
        read = events.read_events(stream)
        assert [each.event.kind for each in read.events] == ["opened", "collected"]
        assert whole[: read.size].endswith(b"\n") and read.size < len(whole) - cut


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param('{"at_s": 1, "kind": "decided", "te', "line 2 of run.jsonl", id="torn inside"),
        pytest.param('{"at_s": 1, "kind": "promoted"}', "promoted", id="unknown kind"),
        pytest.param('{"at_s": 1, "kind": "remarked"}', "line", id="without a field"),
        pytest.param("[]", "expected an object", id="no object"),
        pytest.param(
            '{"kind": "opened", "schema_version": 2}', "schema_version 1, got 2", id="later"
        ),
    ],
)
def test_a_line_that_is_no_event_is_refused(tmp_path, line, says):
    begin(tmp_path).append(Remarked("first"))
    stream = tmp_path / events.NAME
    first, *others = stream.read_text().splitlines()
    stream.write_text("\n".join([first, line, *others]) + "\n")
    with pytest.raises(UsageError) as refused:
        stored_run.file_of(tmp_path)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_events_must_begin_with_opened(tmp_path):
    (tmp_path / events.NAME).write_text(events.to_line(Stamped(0.0, Remarked("x"))))
    with pytest.raises(UsageError, match="expected the event opened first, got remarked"):
        stored_run.file_of(tmp_path)
    (tmp_path / events.NAME).write_text("")
    with pytest.raises(UsageError, match="expected events, got none"):
        stored_run.file_of(tmp_path)


def test_an_unfinished_run_is_read_by_its_events(tmp_path):
    log = begin(tmp_path)
    verdict_file.write(log.fold.file, tmp_path / verdict_file.NAME)
    log.append(decided("a", "FAIL"))
    read = stored_run.file_of(tmp_path)
    assert [test.id for test in read.tests] == ["a"] and read.verdict is Verdict.FAIL
    assert not read.finished


def test_a_finished_run_is_read_by_its_verdict(tmp_path):
    file = verdict_file.read(report_runs.write("pass", tmp_path) / verdict_file.NAME)
    (tmp_path / events.NAME).write_text("no event\n")
    assert stored_run.file_of(tmp_path) == file


def test_the_fold_shares_nothing_with_who_emits(tmp_path):
    log = begin(tmp_path)
    event = decided("a")
    log.append(event)
    event.test.message = "changed later"
    assert log.fold.file.tests[0].message == ""


def test_a_line_that_could_not_be_written_is_written_before_the_next(tmp_path, monkeypatch):
    log = begin(tmp_path)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 20:
            return write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(decided("a"))
    monkeypatch.undo()
    log.append(decided("b"))
    read = events.read_events(tmp_path / events.NAME).events
    assert [each.event.test.id for each in read[1:]] == ["a", "b"]
    assert [test.id for test in log.fold.file.tests] == ["a", "b"]


def test_a_directory_that_is_gone_is_noticed(tmp_path):
    log = begin(tmp_path)
    (tmp_path / events.NAME).unlink()
    with pytest.raises(FileNotFoundError):
        log.append(decided("a"))
    assert not (tmp_path / events.NAME).exists()


def test_details_of_a_killed_run_are_a_fold_of_its_events(tmp_path):
    log = begin(tmp_path)
    log.append(events.Described("pytest x", {"t": "It holds."}))
    for text in ("E first", "E in its teardown, too"):
        log.append(events.FailureShown(FailureDetail(id="t", text=text)))
    for rate in (51.0, 52.0):
        log.append(events.Sampled("tg32@d0", Samples(unit="tok/s", samples=[rate])))
    known = stored_run.details_of(tmp_path)
    assert known.command == "pytest x" and known.requirements == {"t": "It holds."}
    assert [failure.text for failure in known.failures] == ["E in its teardown, too"]
    assert known.samples["tg32@d0"].samples == [52.0]
    details.write_details(details.Details(command="pytest y"), tmp_path)
    assert stored_run.details_of(tmp_path).command == "pytest y", "the run has ended"


def test_a_decision_after_the_end_opens_the_run_again(tmp_path):
    file = verdict_file.read(report_runs.write("pass", tmp_path) / verdict_file.NAME)
    told = [Stamped(0.0, event) for event in events_of(file)]
    assert fold.fold(told).finished
    left = TestReport(id="end of the run::x", level="smoke", verdict="FAIL")
    again = fold.fold([*told, Stamped(1.0, Decided(left))])
    assert not again.finished and again.verdict is Verdict.FAIL


def test_an_interrupted_run_has_the_status_of_pytest(tmp_path):
    file = verdict_file.read(report_runs.write("pass", tmp_path) / verdict_file.NAME)
    *told, closed = events_of(file)
    ended = replace(closed, finished=False, interrupted=True, verdict=Verdict.NOT_RUN)
    interrupted = fold.fold([Stamped(0.0, event) for event in [*told, ended]])
    assert interrupted.verdict is Verdict.NOT_RUN and interrupted.exit_status == 2
    assert merge.contradiction(interrupted) is None, "it was not edited"


def test_lines_can_be_read_by_any_program(tmp_path):
    begin(tmp_path).append(decided("a"))
    rows = [json.loads(line) for line in (tmp_path / events.NAME).read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["opened", "decided"]
    assert rows[0]["schema_version"] == 1 and rows[1]["test"]["id"] == "a"


def test_the_report_of_a_killed_run_has_what_was_decided(tmp_path):
    log = begin(tmp_path)
    verdict_file.write(log.fold.file, tmp_path / verdict_file.NAME)
    log.append(decided("a", "FAIL"))
    assert main(["report", str(tmp_path)]) == 0
    written = (tmp_path / verdict_file.NAME).read_text("utf-8")
    assert written == json_text(stored_run.file_of(tmp_path)) + "\n" and '"FAIL"' in written
    assert "FAIL" in (tmp_path / "summary.md").read_text("utf-8")


#: Matches code that changes a run's verdict file without an event.
PAST_THE_EVENTS = re.compile(
    r"\.file\.[\w.]+(?:\[[^\]]*\])? (?:[-+|]?=) |\.file\.\w+\.(?:append|extend|update|setdefault)\("
)


def test_nothing_changes_the_file_of_a_run_but_its_events():
    assert PAST_THE_EVENTS.search("self.run.file.metrics[name] = MetricReport(value=None)")
    assert PAST_THE_EVENTS.search("harness.file.remarks.append(line)")
    changes = []
    for module in {*(ROOT / "plugins" / "sm121").rglob("*.py")} - {Path(fold.__file__)}:
        for number, line in enumerate(module.read_text("utf-8").splitlines(), start=1):
            if PAST_THE_EVENTS.search(line):
                changes.append(f"{module.name}:{number}: {line.strip()}")
    assert changes == []
