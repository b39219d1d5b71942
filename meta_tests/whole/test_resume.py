"""Runs that are killed at any moment: the files on the disk, and the result of `--resume`."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from meta_tests.fakes import scripted_sessions
from meta_tests.fakes.stored_run_events import require_same
from meta_tests.folders import FAKES
from sm121.cli import main
from sm121.core.errors import UsageError
from sm121.core.json_text import json_text
from sm121.core.verdict import Verdict
from sm121.report import merging
from sm121.run import events, stored_run, verdict_file
from sm121.run.events import Closed, Decided
from sm121.run.verdict_file import VerdictFile

SCENARIO = "meta_tests/whole/scenarios/many_decisions.py"
#: With workers, tests of the stress level are refused, so they are deselected.
WORKERS = ("-n", "2", "-m", "not stress")
#: Fields of a test that may differ between two runs.
TIMES = {"seconds": True}
BAD = ("FAIL", "INVALID", "INCONCLUSIVE")


def shown(file: VerdictFile) -> dict[str, Any]:
    """Return the fields of a verdict file that must be equal in a resumed and a whole run.

    These are all fields except times.
    """
    every = {"verdict", "exit_status", "reason", "finished", "arch", "profile", "levels", "metrics"}
    every |= {"starts", "unproven", "crashes", "changes", "against", "certified", "shard"}
    common = file.model_dump(mode="json", include=every)
    tests = [test.model_dump(mode="json", exclude=TIMES) for test in file.tests]
    return {**common, "tests": tests, "path": file.engine.path.model_dump(mode="json")}


class Runs:
    """Runs of the scenario on one attached server."""

    def __init__(self, start_pytest: Any, options: tuple[str, ...], ran: Path) -> None:
        self._start = start_pytest
        self._options = options
        self._ran = ran

    def start(self, report: Path, *more: str, warm: bool = True) -> Any:
        words = ("--arch", "cpu", *self._options, "--report-dir", str(report), *more, SCENARIO)
        environment = {"SM121_META_RAN": str(self._ran)}
        return self._start(*words, environment=environment, warm=warm)

    def ran(self) -> list[str]:
        """Return the tests that ran since the last call."""
        names = self._ran.read_text().splitlines() if self._ran.is_file() else []
        self._ran.unlink(missing_ok=True)
        return names


@pytest.fixture
def runs(start_pytest, fault_server, tmp_path) -> Runs:
    return Runs(start_pytest, fault_server().options, tmp_path / "ran")


def require_resumed(runs: Runs, whole: VerdictFile, report: Path) -> None:
    """Resume a killed run, and check that it has the verdict of an uninterrupted run."""
    before = stored_run.file_of(report)
    stream = events.read_events(report / events.NAME)
    decided = [each.event.test.id for each in stream.events if isinstance(each.event, Decided)]
    reached = {test.id for test in before.tests if test.message != "not reached"}
    assert reached == {*decided}, "the fold has what was decided"
    assert not before.finished
    shown_ids = {failure.id for failure in stored_run.details_of(report).failures}
    assert {test.id for test in before.tests if test.verdict in BAD} <= shown_ids
    runs.ran()
    resumed = runs.start(report, "--resume")
    assert resumed.wait() == whole.exit_status, resumed.output
    require_same(report)
    after = stored_run.file_of(report)
    assert shown(after) == shown(whole), resumed.output
    shown_ids = {failure.id for failure in stored_run.details_of(report).failures}
    assert shown_ids == {test.id for test in whole.tests if test.verdict in BAD}
    kept = {name for name in decided if "test_kernel" in name or "test_correctness" in name}
    again = {name for name in runs.ran() if name.startswith(("kernel", "correctness"))}
    assert len(again) == 16 - len(kept), (again, kept)


def kill_after(run: Any, report: Path, lines: int, pause_s: float) -> bool:
    """Kill a run shortly after this many lines of events. Return whether it was still running."""
    stream = report / events.NAME
    deadline = time.monotonic() + 60
    while run.process.poll() is None and time.monotonic() < deadline:
        if stream.is_file() and stream.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.002)
    time.sleep(pause_s)
    if run.process.poll() is not None:
        return False
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    return not stored_run.file_of(report).finished


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(3, id="three moments"),
        pytest.param(50, id="fifty moments", marks=pytest.mark.slow("fifty runs, each twice")),
    ],
)
def test_a_run_that_is_killed_at_any_moment_is_resumed(runs, tmp_path, moments):
    """A run that is killed at a random moment can be resumed.

    The moment is a part of a test's duration after some of the events."""
    whole_report = tmp_path / "whole"
    unbroken = runs.start(whole_report)
    unbroken.wait()
    whole = stored_run.file_of(whole_report)
    assert whole.finished and len(runs.ran()) == 19, unbroken.output
    last = len(events.read_events(whole_report / events.NAME).events)
    draw = random.Random(57)
    killed = 0
    for number in range(moments):
        report = tmp_path / f"killed-{number}"
        run = runs.start(report)
        if kill_after(run, report, draw.randint(1, last - 2), draw.uniform(0.0, 0.08)):
            killed += 1
            require_resumed(runs, whole, report)
        shutil.rmtree(report)
    assert killed >= moments * 0.8


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(0, id="no line"),
        pytest.param(1, id="opened"),
        pytest.param(None, id="all before the environment"),
    ],
)
def test_a_run_that_is_killed_before_its_first_test_is_started_from_the_beginning(
    runs, tmp_path, lines
):
    """A run that is killed before its first test is run from the beginning when it is resumed.

    It is killed before any decision, and before the environment was read."""
    runs.start(tmp_path / "whole").wait()
    whole = stored_run.file_of(tmp_path / "whole")
    report = tmp_path / "killed"
    assert kill_after(runs.start(report), report, 8, 0.0)
    written = (report / events.NAME).read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in written]
    count = kinds.index("environment_read") if lines is None else lines
    (report / events.NAME).write_text("".join(written[:count]) + written[count][:20])
    runs.ran()
    resumed = runs.start(report, "--resume")
    assert resumed.wait() == whole.exit_status, resumed.output
    require_same(report)
    assert shown(stored_run.file_of(report)) == shown(whole), resumed.output
    assert len(runs.ran()) == 19
    kinds = [each.event.kind for each in events.read_events(report / events.NAME).events]
    assert kinds.count("opened") == 1 and "resumed" not in kinds


@pytest.mark.parametrize("continued_by", ["report", "resume"])
def test_a_run_that_is_killed_between_its_last_event_and_its_verdict_file(
    runs, tmp_path, continued_by
):
    """A run that is killed between its last event and its verdict file can be resumed.

    All events are written, but verdict.json still contains NOT_RUN. The random moments of another
    test never hit this one."""
    runs.start(tmp_path / "whole").wait()
    whole = stored_run.file_of(tmp_path / "whole")
    report = tmp_path / "killed"
    kills = ("-p", "meta_tests.fakes.killed_at_the_verdict")
    killed = runs.start(report, *kills)
    assert killed.wait() == -signal.SIGKILL, killed.output
    assert isinstance(events.read_events(report / events.NAME).events[-1].event, Closed)
    written = report / verdict_file.NAME
    assert not verdict_file.read(written).finished
    assert shown(stored_run.file_of(report)) == shown(whole)
    if continued_by == "report":
        assert main(["report", str(report)]) == 0
    else:
        resumed = runs.start(report, "--resume", *kills)
        assert resumed.wait() == whole.exit_status, resumed.output
    assert shown(verdict_file.read(written)) == shown(whole)
    require_same(report)
    assert f"**{whole.verdict.value}" in (report / "summary.md").read_text("utf-8")
    refused = runs.start(report, "--resume", *kills)
    assert refused.wait() == 4 and "it has ended with FAIL" in refused.output, refused.output


def test_the_file_of_junitxml_has_the_kept_verdicts_of_a_killed_run(runs, tmp_path):
    """The --junitxml file of a resumed run contains the verdicts that the killed run had decided.

    pytest collects all tests, but runs only those without a verdict."""
    files = [tmp_path / f"{name}.xml" for name in ("whole", "resumed")]
    runs.start(tmp_path / "whole", f"--junitxml={files[0]}").wait()
    report = tmp_path / "report"
    assert kill_after(runs.start(report, f"--junitxml={files[1]}"), report, 20, 0.0)
    decided = stored_run.file_of(report)
    assert any(test.verdict in BAD for test in decided.tests)
    runs.start(report, "--resume", f"--junitxml={files[1]}").wait()
    cases: list[dict[str, list[str]]] = []
    for file in files:
        found = {}
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            tags = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
            found[f"{case.get('classname')}::{case.get('name')}"] = tags
        cases.append(found)
    assert cases[0] == cases[1]
    assert "it did, in kernel-3" in files[1].read_text("utf-8")


@pytest.fixture
def killed(runs, tmp_path):
    """A run that was killed in the middle, with its report directory."""
    report = tmp_path / "report"
    assert kill_after(runs.start(report), report, 12, 0.0)
    return report


@pytest.mark.parametrize(
    ("more", "says"),
    [
        pytest.param(("--plan", "quick"), "its tests or settings differ", id="another plan"),
        pytest.param(
            ("-k", "not stress"),
            "19 tests, but now 17",
            id="other tests",
            marks=pytest.mark.slow("compared as another plan is"),
        ),
        pytest.param(
            ("--shard", "1/2"),
            "tests",
            id="a shard",
            marks=pytest.mark.slow("compared as another plan is"),
        ),
        pytest.param(("-n", "2"), "--resume with -n", id="several processes"),
    ],
)
def test_a_run_that_asks_for_something_else_is_refused(runs, killed, more, says):
    """A resumed run that requests something else than the killed run is refused with one line.

    The killed run can still be resumed."""
    before = (killed / events.NAME).read_bytes()
    refused = runs.start(killed, "--resume", *more)
    assert refused.wait() == 4 and says in refused.output, refused.output
    assert (killed / events.NAME).read_bytes() == before
    assert not (killed / "earlier").exists()


def test_a_run_that_compares_is_not_resumed_without_the_comparison(runs, killed):
    """A run with a comparison cannot be resumed without the comparison.

    The list of tests may be the same without it, because the suite compares at the end of the run.
    """
    stream = killed / events.NAME
    text = stream.read_text()
    assert '"compared": false' in text
    stream.write_text(text.replace('"compared": false', '"compared": true', 1))
    refused = runs.start(killed, "--resume")
    assert refused.wait() == 4, refused.output
    assert "its tests or settings differ: --benchmark-compare given, now not" in refused.output


def test_a_run_on_an_attached_server_is_not_resumed_on_another_process(runs, killed):
    """A run on an attached server cannot be resumed on another process of the server.

    The kept verdicts are about the killed run's server, and the new one may be another build."""
    stream = killed / events.NAME
    text = stream.read_text()
    (attached,) = re.findall(r'.*"server_attached".*\n', text)
    (pid,) = re.findall(r'"processes": \[\[(\d+),', attached)
    stream.write_text(text.replace(attached, attached.replace(pid, "1", 1)))
    refused = runs.start(killed, "--resume")
    assert refused.wait() == 4, refused.output
    line = f"its attached server was started again: its processes were 1, and are {pid} now"
    assert line in refused.output and refused.output.count("\n") <= 2, refused.output


def test_a_run_on_an_attached_server_is_not_resumed_if_its_process_is_no_longer_known(runs, killed):
    """A run cannot be resumed if the process of the attached server can no longer be identified.

    A server that was started again without /metrics must not get the kept verdicts."""
    stream = killed / events.NAME
    text = stream.read_text()
    (attached,) = re.findall(r'.*"server_attached".*\n', text)
    earlier = {**json.loads(attached), "started": 1000.0, "processes": []}
    stream.write_text(text.replace(attached, json.dumps(earlier) + "\n"))
    refused = runs.start(killed, "--resume")
    assert refused.wait() == 4, refused.output
    line = "its attached server may have been started again: expected the start time"
    assert line in refused.output and refused.output.count("\n") <= 2, refused.output


def test_a_run_that_has_ended_is_not_resumed(runs, tmp_path):
    report = tmp_path / "report"
    runs.start(report).wait()
    written = (report / "verdict.json").read_bytes()
    refused = runs.start(report, "--resume")
    assert refused.wait() == 4 and "it has ended with FAIL" in refused.output, refused.output
    assert (report / "verdict.json").read_bytes() == written


def test_a_run_that_has_ended_before_its_first_test_is_not_resumed(runs, tmp_path):
    """A run in which no test could run has ended, even if its environment was not read."""
    report = tmp_path / "report"
    runs.start(report).wait()
    stream = report / events.NAME
    lines = stream.read_text().splitlines(keepends=True)
    kept = [each for each in lines if json.loads(each)["kind"] in ("opened", "collected", "closed")]
    stream.write_text("".join(kept))
    refused = runs.start(report, "--resume")
    assert refused.wait() == 4 and "it has ended with FAIL" in refused.output, refused.output
    assert stream.read_text() == "".join(kept)


def test_there_must_be_a_run_to_resume(runs, tmp_path):
    refused = runs.start(tmp_path / "nothing", "--resume")
    assert refused.wait() == 4 and "expected a run in" in refused.output, refused.output


def test_a_torn_line_is_removed_and_a_second_kill_is_resumed_too(runs, killed, tmp_path):
    whole = tmp_path / "whole"
    runs.start(whole).wait()
    with (killed / events.NAME).open("a") as stream:
        stream.write('{"at_s": 1.0, "kind": "decided", "te')
    lines = (killed / events.NAME).read_bytes().count(b"\n")
    assert kill_after(runs.start(killed, "--resume"), killed, lines + 6, 0.0)
    require_resumed(runs, stored_run.file_of(whole), killed)


def test_a_worse_decision_is_not_mended_by_asking_again(runs, killed):
    """If the smoke level failed before the run was killed, this failure stays in the resumed run.

    The smoke level runs again."""
    stream = killed / events.NAME
    told = stream.read_text()
    smoke = '"id": "meta_tests/whole/scenarios/many_decisions.py::test_smoke"'
    (line,) = [line for line in told.splitlines() if '"decided"' in line and smoke in line]
    failed = line.replace('"verdict": "PASS"', '"verdict": "FAIL"')
    assert failed != line
    stream.write_text(told.replace(line, failed))
    resumed = runs.start(killed, "--resume")
    assert resumed.wait() == 1, resumed.output
    (test,) = [t for t in stored_run.file_of(killed).tests if t.level == "smoke"]
    assert test.verdict == "FAIL"


def test_merged_shards_a_resumed_run_and_one_run_are_equal(runs, tmp_path):
    """Merged shards, one of which was killed and resumed, equal an uninterrupted run."""
    whole = tmp_path / "whole"
    runs.start(whole).wait()
    expected = shown(stored_run.file_of(whole))
    shards = [tmp_path / f"shard-{number}" for number in (1, 2)]
    for number, shard in enumerate(shards, start=1):
        run = runs.start(shard, "--shard", f"{number}/2")
        if number == 1:
            assert kill_after(run, shard, 10, 0.0)
            run = runs.start(shard, "--shard", "1/2", "--resume")
        run.wait()
    merged = merging.write(merging.read_shards(shards), tmp_path / "merged")
    assert shown(merged) == expected


@pytest.mark.slow("two interpreters; test_workers.py has the report of workers")
def test_workers_and_one_run_are_equal(runs, tmp_path):
    whole = tmp_path / "whole"
    runs.start(whole).wait()
    workers = tmp_path / "workers"
    run = runs.start(workers, *WORKERS)
    assert run.wait() == stored_run.file_of(whole).exit_status, run.output
    with_workers = stored_run.file_of(workers)
    expected = {t.id: t.verdict for t in stored_run.file_of(whole).tests if t.level != "stress"}
    assert {test.id: test.verdict for test in with_workers.tests} == expected


def test_a_shard_without_tests_is_merged_if_it_is_of_the_same_run(
    start_pytest, fault_server, tmp_path
):
    """A shard without tests can be merged if it belongs to the same run.

    All tests of one server run in one shard, so the other shards have no tests."""
    asked = ("--arch", "cpu", *fault_server().options, "tests/test_smoke.py::test_health")

    def shard(name: str, status: int, *options: str) -> Path:
        report = tmp_path / name
        run = start_pytest(*asked, *options, f"--report-dir={report}")
        assert run.wait() == status, run.output
        return report

    tested = shard("tested", 0, "--shard=1/2")
    empty = shard("empty", 5, "--shard=2/2")
    file = stored_run.file_of(empty)
    assert file.verdict == "NOT_RUN" and file.fingerprint is not None
    assert "shard 2/2 has none of the 1 tests, because tests of one server" in file.reason
    merged = merging.write(merging.read_shards([tested, empty]), tmp_path / "merged")
    assert (merged.verdict, merged.finished) == (Verdict.PASS, True)
    other = shard("other", 5, "--shard=2/2", "--rounds=7")
    with pytest.raises(UsageError, match=r"another .*rounds"):
        merging.read_shards([tested, other])


def test_a_killed_shard_is_merged_by_its_events(runs, tmp_path):
    """A killed shard is merged with the verdicts that its events contain.

    The merged run does not pass, and the other tests of the killed shard are NOT_RUN.
    """
    shards = [tmp_path / f"shard-{number}" for number in (1, 2)]
    assert kill_after(runs.start(shards[0], "--shard", "1/2"), shards[0], 10, 0.0)
    runs.start(shards[1], "--shard", "2/2").wait()
    decided = {t.id for t in stored_run.file_of(shards[0]).tests if t.message != "not reached"}
    merged = merging.write(merging.read_shards(shards), tmp_path / "merged")
    assert decided and not merged.finished
    assert decided <= {test.id for test in merged.tests if test.message != "not reached"}


def test_a_run_of_several_processes_that_was_killed_is_read_by_its_parts(runs, tmp_path):
    report = tmp_path / "report"
    run = runs.start(report, *WORKERS)
    streams = [report / "workers" / name / events.NAME for name in ("gw0", "gw1")]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = [stream.read_text() for stream in streams if stream.is_file()]
        if sum(text.count('"decided"') for text in told) >= 6:
            break
        time.sleep(0.01)
    run.remember()
    for process in [*run.tree(), psutil.Process(run.process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()
    decided = set()
    for stream in streams:
        for each in events.read_events(stream).events:
            if isinstance(each.event, Decided):
                decided.add(each.event.test.id)
    file = stored_run.file_of(report)
    assert not file.finished and len(decided) >= 6
    assert decided <= {test.id for test in file.tests if test.message != "not reached"}
    assert main(["report", str(report)]) == 0
    assert (report / "verdict.json").read_text("utf-8") == json_text(file) + "\n"


@pytest.mark.slow("parts of which one was killed are read below")
def test_parts_that_all_ended_are_no_verdict_of_the_run_that_did_not_join_them(runs, tmp_path):
    """If the controller is killed after its workers have ended, the run has no verdict.

    The controller had not yet judged the machine, the kernel's messages and the stored runs."""
    report = tmp_path / "report"
    runs.start(report, *WORKERS).wait()
    (report / "verdict.json").unlink()
    assert all(part.finished for part in stored_run.parts_of(report).values())
    file = stored_run.file_of(report)
    assert not file.finished and file.verdict is not Verdict.PASS
    assert "has not finished" in file.reason, file.reason


@pytest.mark.slow("starts two servers; the others attach")
def test_a_run_with_a_server_of_its_own_is_resumed_with_another(start_pytest, tmp_path):
    """A killed run that had started its own server is resumed with a new server.

    The supervisor has ended the first server, whose log remains."""
    environment = {**scripted_sessions.VARIABLES, "SM121_META_RAN": str(tmp_path / "ran")}
    engine = ("--engine-python", str(FAKES / "fake_python.py"), "--kernel-trace", "off")

    def start(report: Path, *more: str) -> Any:
        words = ("--arch", "cpu", *engine, "--report-dir", str(report), *more, SCENARIO)
        return start_pytest(*words, environment=environment)

    start(tmp_path / "whole").wait()
    whole = stored_run.file_of(tmp_path / "whole")
    report = tmp_path / "killed"
    killed = start(report)
    assert kill_after(killed, report, 24, 0.0)
    resumed = start(report, "--resume")
    assert resumed.wait() == whole.exit_status, resumed.output
    require_same(report)
    after = stored_run.file_of(report)
    assert [(test.id, test.verdict) for test in after.tests] == [
        (test.id, test.verdict) for test in whole.tests
    ]
    assert after.verdict == whole.verdict and after.engine.path == whole.engine.path
    logs = [start.log for start in after.starts]
    assert len(logs) == 2 and len({*logs}) == 2 and all((report / log).is_file() for log in logs)
    assert resumed.left() == killed.left() == []
