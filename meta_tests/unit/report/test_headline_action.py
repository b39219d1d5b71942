"""A failed run has one next step beside its headline, and both fit at the end of a screen."""

import json
from pathlib import Path

import pytest

from meta_tests.fakes.headline_runs import ALL, CRASH, ended, passed, rate, run_of
from meta_tests.whole import terminal_samples
from sm121.core.verdict import Verdict
from sm121.report import headline, page, stored, summary
from sm121.report.crash_list import Crash
from sm121.report.stored import StoredReport
from sm121.run.details import Details, FailureDetail
from sm121.run.machine_report import CrashReport
from sm121.run.verdict_file import VerdictFile

AGAIN = "python -m pytest x::test_one --engine-python /opt/e"


def report_of(run: VerdictFile, folder: Path, **fields) -> StoredReport:
    failed = [FailureDetail(id=test.id, logs=["server.log"]) for test in run.tests]
    stored = Details(command="python -m pytest --against trusted", failures=failed)
    return StoredReport(run, folder, details=stored, **fields)


def test_a_failed_run_has_one_next_step(tmp_path):
    gate = run_of(ended("test_decode", metrics=["tg32@d0"]), metrics={"tg32@d0": rate(47.3)})
    report = report_of(gate, tmp_path)
    whole = headline.Action("run again", "python -m pytest --against trusted")
    assert headline.action(report) == whole, "of a run that has not ended"
    report.details.again = AGAIN
    assert headline.action(report) == headline.Action("run again", AGAIN)
    assert headline.action(report_of(passed(*ALL), tmp_path)) is None


UNFIT = {"state": "DEGRADED", "reason": "799 MHz", "remedy": "unplug the machine for a minute"}
UNDECIDED = Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("metric", "box", "title", "more"),
    [
        (rate(51.0, UNDECIDED, rounds=20), UNFIT, f"{UNFIT['remedy']}, then run again", ""),
        (rate(51.0, UNDECIDED), {**UNFIT, "remedy": None}, "quiet the machine, then run again", ""),
        (rate(51.0, UNDECIDED, rounds=20), {}, "run again with more rounds", " --rounds 40"),
        (rate(51.0, UNDECIDED, rounds=20, start_spread=0.01), {}, "run again", ""),
        (rate(51.0, UNDECIDED, rounds=20, clock="chunks"), {}, "run again", ""),
        (rate(51.0, Verdict.FAIL, rounds=20), UNFIT, "run again", ""),
    ],
    ids=["the box", "an older file", "the noise", "starts differ", "chunks", "a failure"],
)
def test_an_inconclusive_run_has_the_action_of_its_cause(metric, box, title, more, tmp_path):
    test = ended("test_decode", metric.verdict, metrics=["tg32@d0"])
    run = run_of(test, metrics={"tg32@d0": metric}, box=box)
    report = report_of(run, tmp_path)
    action = headline.action(report)
    command = f"python -m pytest --against trusted{more}"
    assert action is not None
    assert (action.kind, action.title, action.text) == ("run again", title, command)
    page_text = " ".join(page.html(report).split())
    assert page_text.count(f"<strong>{action.heading}</strong>") == 1
    assert "Quiet the machine" not in page_text.replace(action.heading, "")
    assert f"{action.heading}:" in summary.markdown(run, report)


def test_a_certificate_is_not_run_again_with_an_option_that_it_refuses(tmp_path):
    metric = rate(51.0, UNDECIDED, rounds=20)
    test = ended("test_decode", UNDECIDED, metrics=["tg32@d0"])
    run = run_of(test, metrics={"tg32@d0": metric}, certificate_levels=["performance"])
    report = report_of(run, tmp_path)
    report.details.command = "python -m pytest --certify"
    whole = headline.Action("run again", "python -m pytest --certify")
    assert headline.action(report) == whole, "--certify with --rounds is refused"
    report.details.again = AGAIN  # the command names the test and has no --certify
    named = headline.Action("run again", f"{AGAIN} --rounds 40", "run again with more rounds")
    assert headline.action(report) == named


def test_without_a_command_the_remedy_of_the_box_stands_alone(tmp_path):
    run = run_of(ended("test_decode", UNDECIDED), box=UNFIT)
    action = headline.action(StoredReport(run, tmp_path))
    assert action == headline.Action("remedy", "unplug the machine for a minute")


def test_the_action_after_a_crash_is_its_remedy_or_its_log(tmp_path):
    run = run_of(ended("test_many", level="stress"), crashes=[CRASH])
    for remedy, action in (
        ("lower --max-num-seqs", ("remedy", "lower --max-num-seqs")),
        (None, ("read", str(tmp_path / "server.log"))),
    ):
        crash = Crash(**CRASH.model_dump(), remedy=remedy)
        report = report_of(run, tmp_path, crashes=(crash,))
        assert headline.action(report) == headline.Action(*action)


def test_a_crash_is_the_cause_of_its_own_failures(tmp_path):
    """After a crash, the next step of the report is to read the log of the crashed server.

    The log of another test's server is not read, and a log without a failure comes last."""
    floor = CrashReport(kind="memory_floor", summary="1 GiB left", owner="the machine")
    tests = ended("test_moe", level="kernel"), ended("test_many", level="stress")
    run = run_of(*tests, crashes=[floor, CRASH])
    sentence = "the server died in stress: CUDA out of memory (and 1 more check)"
    assert headline.headline_of(run).sentence == sentence
    logs = {"x::test_moe": "other.log", "x::test_many": "its.log"}
    failures = [FailureDetail(id=test, logs=[log]) for test, log in logs.items()]
    crashes = tuple(Crash(**crash.model_dump()) for crash in run.crashes)
    report = StoredReport(run, tmp_path, details=Details(failures=failures), crashes=crashes)
    assert headline.action(report) == headline.Action("read", str(tmp_path / "its.log"))
    assert (
        headline.headline_of(run_of(ended("test_moe"), crashes=[floor])).sentence
        == "test_moe: it broke"
    )


def test_a_run_that_was_not_run_has_a_reason_and_no_repeat_command(tmp_path):
    why = ended("test_one", Verdict.NOT_RUN, "no GPU is here", skipped=True)
    run = run_of(why)
    assert headline.headline_of(run).sentence.endswith(" (1 of 1: no GPU is here)")
    assert headline.action(report_of(run, tmp_path)) is None
    assert headline.action(report_of(run_of(finished=False), tmp_path)) is not None


@pytest.mark.parametrize(
    "name",
    [
        "failed-gate",
        pytest.param("failed-start", marks=pytest.mark.slow("4 s of CPU; a gate fails beside it")),
        pytest.param("wrong-answer", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_failing_run_fits_a_screen(name, tmp_path):
    report = tmp_path / "report"
    text = terminal_samples.sample(name, report)
    assert terminal_samples.rows(text) <= terminal_samples.LINES
    read = stored.read(report)
    sentence = str(headline.headline_of(read.run))
    assert sentence in (line.rstrip() for line in text.splitlines()), text
    assert json.loads((report / "verdict.json").read_text())["verdict"] == "FAIL"
    then = headline.action(read)
    assert then is not None and f"{then.kind}: " in text
    if name == "failed-start":
        assert "remedy: lower --gpu-memory-utilization" in text
        assert text.count("CUDA out of memory") == 2, "the cause, and the sentence"
    published = (terminal_samples.FOLDER / f"{name}.txt").read_text("utf-8")
    assert terminal_samples.rows(published) <= terminal_samples.LINES
    assert sentence in published, "python -m meta_tests.whole.terminal_samples writes it anew"
