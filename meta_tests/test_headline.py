"""What a run came to is one sentence, made of typed fields, and the same wherever it is said."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import report_runs
import terminal_samples
from data_rows import from_data

from sm121.core import redaction
from sm121.core.verdict import Verdict
from sm121.plugin import reporting
from sm121.report import badge, headline, junit, page, stored, summary
from sm121.report.crash_list import Crash
from sm121.report.stored import StoredReport
from sm121.run import details
from sm121.run.details import Details, FailureDetail
from sm121.run.verdict_file import (
    AgainstReport,
    ChangeReport,
    CrashReport,
    EngineReport,
    LevelReport,
    MetricReport,
    ShardReport,
    TestReport,
    VerdictFile,
)

AGAIN = "python -m pytest x::test_one --engine-python /opt/e"


def run_of(*tests: TestReport, **fields) -> VerdictFile:
    """A finished run of these tests, judged."""
    engine = EngineReport(name="vllm", version="0.32.0", managed=True, model="m", startup_s=1.0)
    engine.path.attention = engine.path.moe = "X"
    given = {"arch": "cpu", "profile": "sm121-gpt-oss-120b", "started": "2026-01-12T09:14:03+00:00",
             "engine": engine, "finished": True, "tests": [*tests], **fields}  # fmt: skip
    file = VerdictFile(**given)
    file.judge()
    file.reason = file.why()
    return file


def ended(
    name: str, verdict: Verdict = Verdict.FAIL, message: str = "it broke",
    level: str = "performance", **fields
) -> TestReport:  # fmt: skip
    return TestReport(id=f"x::{name}", level=level, verdict=verdict, message=message, **fields)


def rate(value: float, verdict: Verdict = Verdict.FAIL, **fields) -> MetricReport:
    return MetricReport(value=value, unit="tok/s", minimum=52.0, verdict=verdict, **fields)


def slower(verdict: Verdict = Verdict.FAIL, **fields) -> ChangeReport:
    given = {"metric": "tg32@d0", "unit": "tok/s", "here": 234.1, "before": 259.1, "worse": 0.0965,
             "allowed": 0.05, "beside": "the trusted run", "verdict": verdict,
             **fields}  # fmt: skip
    return ChangeReport(**given)


CRASH = CrashReport(
    kind="oom", summary="CUDA out of memory", owner="GPU memory", happened="the server died",
    test="x::test_many",
)  # fmt: skip


@from_data
def test_a_sentence_is_made_of_fields(tests, metrics, changes, fields, said):
    run = run_of(
        *(ended(**test) for test in tests),
        metrics={name: MetricReport(**metric) for name, metric in (metrics or {}).items()},
        changes=[slower(**change) for change in changes or ()],
        **(fields or {}),
    )
    assert str(headline.of(run)) == said


def test_the_reason_of_a_failed_run_is_never_that_it_has_not_finished():
    """As with -x: a test was decided, others were not."""
    run = run_of(ended("test_one"), ended("test_two", Verdict.NOT_RUN), finished=False)
    assert run.verdict is Verdict.FAIL
    assert run.reason == "x::test_one: it broke; the run has not finished"
    assert run_of(finished=False).reason == "the run has not finished"


# What a PASS may not be taken for


def passed(*levels: str, **fields) -> VerdictFile:
    return run_of(*(ended("test", Verdict.PASS, "", level) for level in levels), **fields)


ALL = ("smoke", "kernel", "correctness", "stress", "performance", "regression", "matrix")


def test_a_pass_says_what_did_not_run():
    assert str(headline.of(passed(*ALL))) == "PASS: 7 checks passed"
    assert headline.of(passed("smoke")).word == "PASS (not certified: only smoke asked for)"
    skipped = ended("test_worse", Verdict.NOT_RUN, "NOT_RUN: no stored run", "regression",
                    skipped=True)  # fmt: skip
    run = run_of(*passed(*(each for each in ALL if each != "regression")).tests, skipped)
    assert headline.of(run).word == "PASS (not certified: regression did not run: no stored run)"
    assert headline.of(passed(*ALL, certified=True)).word == "PASS (certified)"


def test_what_is_not_proven_stands_beside_the_pass():
    run = passed(*ALL, unproven=["A/B: the kernel path of A is not known: give --server-log",
                                 "A/B: the kernel path of B is not known"])  # fmt: skip
    word = headline.of(run).word
    assert word == (
        "PASS (not certified: not proven: A/B: the kernel path of A is not known: "
        "give --server-log and 1 more)"
    )
    run.engine.path.attention = run.engine.path.moe = None
    assert "kernel path not proven" in headline.of(run).word
    half = passed(*ALL)
    half.engine.path.moe = None
    assert headline.of(half).word == "PASS (not certified: MoE experts not proven)"


def tail(requests: int, confidence: float) -> MetricReport:
    return MetricReport(value=640.0, unit="ms", at_most=1000.0, confidence=confidence,
                        rounds=requests, grade="minimum", verdict=Verdict.PASS)  # fmt: skip


def test_a_percentile_of_too_few_requests_is_no_evidence(tmp_path):
    run = passed(*ALL, metrics={"ttft_p99": tail(8, 0.077)})
    assert headline.of(run).word == "PASS (not certified: ttft_p99: p99 of 8 requests: no evidence)"
    shown, words = headline.judged(run, "ttft_p99")
    assert shown is not Verdict.PASS
    assert words == "p99 of 8 requests: no evidence (8% confidence; 95% takes 299)"
    for text in (summary.markdown(run), page.html(StoredReport(run, tmp_path))):
        assert "p99 of 8 requests: no evidence" in text
    assert headline.judged(passed(*ALL, metrics={"ttft_p99": tail(299, 0.9505)}), "ttft_p99") == (
        Verdict.PASS,
        "PASS (minimum)",
    )
    assert "little evidence" in headline.judged(
        passed(*ALL, metrics={"ttft_p99": tail(100, 0.63)}), "ttft_p99"
    )[1]  # fmt: skip


def test_a_tile_is_not_green_where_the_headline_is_red(tmp_path):
    run = run_of(
        ended("--against::tg32@d0", level="regression"),
        metrics={"tg32@d0": rate(234.1, Verdict.PASS, grade="stretch")},
        changes=[slower()],
    )
    text = page.html(StoredReport(run, tmp_path))
    tile = re.search(r'<li class="tile (\w+)">.*?</li>', text, re.S)
    assert tile is not None and tile[1] == "FAIL" and "stretch)" not in tile[0], tile
    assert "9.7 % slower than the trusted run" in tile[0]


def test_the_badge_of_a_green_run_is_no_certificate(tmp_path):
    (tmp_path / "verdict.json").write_text(passed("smoke").model_dump_json())
    assert "PASS (not certified)" in badge.svg(tmp_path)


# What to do


def report_of(run: VerdictFile, folder: Path, **fields) -> StoredReport:
    known = [FailureDetail(id=test.id, reproduce=AGAIN, logs=["server.log"]) for test in run.tests]
    given = Details(command="python -m pytest --against trusted", failures=known)
    return StoredReport(run, folder, details=given, **fields)


def test_there_is_one_action(tmp_path):
    gate = run_of(ended("test_decode", metrics=["tg32@d0"]), metrics={"tg32@d0": rate(47.3)})
    assert headline.action(report_of(gate, tmp_path)) == headline.Action("run again", AGAIN)
    # A comparison measures nothing itself.
    change = run_of(ended("test_no_metric_is_worse", level="regression"), changes=[slower()])
    told = headline.action(report_of(change, tmp_path))
    assert told == headline.Action("run again", "python -m pytest --against trusted")
    assert headline.action(report_of(passed(*ALL), tmp_path)) is None


def test_the_action_after_a_crash_is_its_remedy_or_its_log(tmp_path):
    run = run_of(ended("test_many", level="stress"), crashes=[CRASH])
    crash = Crash(**CRASH.model_dump(), remedy="lower --max-num-seqs")
    told = headline.action(report_of(run, tmp_path, crashes=(crash,)))
    assert told == headline.Action("remedy", "lower --max-num-seqs")
    unknown = Crash(**CRASH.model_dump())
    told = headline.action(report_of(run, tmp_path, crashes=(unknown,)))
    assert told == headline.Action("read", str(tmp_path / "server.log"))


def test_everybody_says_the_same_sentence(tmp_path):
    directory = report_runs.write("fail", tmp_path / "fail")
    report = stored.read(directory)
    said = headline.of(report.run).sentence
    assert said.startswith("decode tg32@d0 is 47.3 tok/s; 52 required (sm121-gpt-oss-120b)")
    plain = summary.markdown(report.run, report).replace("\\", "")
    assert said in page.html(report) and f"**FAIL: {said}**" in plain
    assert f'name="run.headline" value="FAIL: {said}"' in junit.xml(report)


def test_a_number_is_never_shown_as_its_limit():
    def said(metric: MetricReport) -> str:
        run = run_of(ended("test_gate", metrics=["some"]), metrics={"some": metric})
        return headline.of(run).sentence

    assert said(rate(51.998)) == "some is 51.998 tok/s; 52 required (sm121-gpt-oss-120b)"
    late = MetricReport(value=1000.3, unit="ms", at_most=1000.0, verdict=Verdict.FAIL)
    assert said(late).startswith("some is 1000.3 ms; at most 1000 allowed")
    assert said(MetricReport(value=None, unit="ms", at_most=1.0, verdict=Verdict.FAIL)).startswith(
        "some is no number; at most 1 allowed"
    )
    change = run_of(ended("--against::tg32@d0", level="regression"), changes=[slower(worse=0.0503)])
    assert "5.03 % slower than the trusted run" in headline.of(change).sentence


def test_a_slower_run_on_another_path_says_so_and_hides_nothing_else():
    run = run_of(
        ended("--against::path moe", level="regression"),
        ended("--against::tg32@d0", level="regression"),
        ended("--against::tests/test_x.py::test_gone", level="regression"),
        changes=[slower(before=None, worse=None)],
        against=AgainstReport(run="a run", engine="vllm", path=["moe: CUTLASS there, MARLIN here"]),
    )
    for test, name in zip(run.tests, ("path moe", "tg32@d0", "gone"), strict=True):
        test.id = f"--against::{name}"
    assert headline.of(run).sentence == (
        "decode tg32@d0 is slower than the trusted run (no number → 234.1 tok/s; 5 % allowed); "
        "another kernel path ran (moe: CUTLASS there, MARLIN here) (and 1 more check)"
    )


def test_a_metric_of_a_is_not_worse_because_b_is():
    run = run_of(
        ended("test_b", level="regression"),
        metrics={"tg32@d0": rate(59.3, Verdict.PASS)},
        changes=[slower(beside="A")],
    )
    assert headline.judged(run, "tg32@d0")[0] is Verdict.PASS


def test_a_crash_is_the_cause_of_its_own_failures(tmp_path):
    """The log of another test's server is not read, and what no failure is about leads nothing."""
    floor = CrashReport(kind="memory_floor", summary="1 GiB left", owner="the machine")
    tests = ended("test_moe", level="kernel"), ended("test_many", level="stress")
    run = run_of(*tests, crashes=[floor, CRASH])
    sentence = "the server died in stress: CUDA out of memory (and 1 more check)"
    assert headline.of(run).sentence == sentence
    known = [
        FailureDetail(id="x::test_moe", logs=["other.log"]),
        FailureDetail(id="x::test_many", logs=["its.log"]),
    ]
    crashes = tuple(Crash(**crash.model_dump()) for crash in run.crashes)
    report = StoredReport(run, tmp_path, details=Details(failures=known), crashes=crashes)
    assert headline.action(report) == headline.Action("read", str(tmp_path / "its.log"))
    assert headline.of(run_of(ended("test_moe"), crashes=[floor])).sentence == "test_moe: it broke"


def test_what_did_not_run_says_why_and_is_not_run_once_more(tmp_path):
    why = ended("test_one", Verdict.NOT_RUN, "NOT_RUN: no GPU is here", skipped=True)
    run = run_of(why)
    assert headline.of(run).sentence.endswith(" (1 of 1: no GPU is here)")
    assert headline.action(report_of(run, tmp_path)) is None
    assert headline.action(report_of(run_of(finished=False), tmp_path)) is not None


def test_a_part_of_a_run_and_a_level_without_tests_are_said(tmp_path):
    part = passed(*ALL, shard=ShardReport(index=1, of=2, tests=[]))
    assert headline.of(part).word == "PASS (not certified: shard 1 of 2)"
    older = passed(*ALL)
    older.levels["kernel"] = LevelReport()
    older.tests = [test for test in older.tests if test.level != "kernel"]
    assert headline.of(older).word == "PASS (not certified: kernel did not run)"


@from_data
def test_nothing_is_cut_within_a_word(text, shown):
    assert headline.brief(text, 17) == shown


# The terminal


@pytest.mark.parametrize("name", terminal_samples.RUNS)
def test_the_end_of_a_failing_run_fits_a_screen(name, tmp_path):
    report = tmp_path / "report"
    text = terminal_samples.sample(name, report)
    assert terminal_samples.rows(text) <= terminal_samples.LINES
    found = stored.read(report)
    said = str(headline.of(found.run))
    assert said in (line.rstrip() for line in text.splitlines()), text
    assert json.loads((report / "verdict.json").read_text())["verdict"] == "FAIL"
    then = headline.action(found)
    assert then is not None and f"{then.kind}: " in text
    if name == "failed-start":
        assert "remedy: lower --gpu-memory-utilization" in text
        assert text.count("CUDA out of memory") == 2, "the cause, and the sentence"
    kept = (terminal_samples.FOLDER / f"{name}.txt").read_text("utf-8")
    assert terminal_samples.rows(kept) <= terminal_samples.LINES
    assert said in kept, "python meta_tests/terminal_samples.py writes it anew"


def test_run_again_has_what_was_given(fault_server, run_pytest, tmp_path):
    """Values with = and behind a space, and spaces; what selects others is left out."""
    server = fault_server()
    log = tmp_path / "a log"
    log.write_text("it says nothing\n")
    _, run = run_pytest(
        *("--arch=cpu", *server.options),
        *("-m", "cpu", "-k", "fail or pass", "-q", "--engine=openai"),
        *("--server-log", str(log), "--rounds=9", "--tb=short"),
        "meta_tests/scenarios/verdicts.py::test_fail",
    )
    (failure,) = details.read(run.report).failures
    words = shlex.split(failure.reproduce or "")
    assert words[:4] == ["python", "-m", "pytest", "meta_tests/scenarios/verdicts.py::test_fail"]
    for given in (["--server-log", str(log)], ["--rounds=9"], ["-m", "cpu"]):
        at = words.index(given[0], 3)
        assert words[at : at + len(given)] == given, words
    assert "-k" not in words and "-q" not in words


def started(folder: Path, *arguments: str):
    """As much of pytest's configuration as a command is made of."""
    return SimpleNamespace(
        invocation_params=SimpleNamespace(args=arguments, dir=folder),
        option=SimpleNamespace(file_or_dir=["tests"]),
        inipath=None,
    )


@pytest.mark.parametrize("b", ["-nkvo", "-n 128", "-q", "--dist layer"])
def test_run_again_has_the_arguments_of_an_engine(b, tmp_path):
    """They may look like options of pytest that are left out."""
    given = started(
        tmp_path, "--ab", "", b, "-n", "2", "--numprocesses", "2", "--lf", "-q", "tests"
    )
    assert reporting._repeated(given) == ["--ab", "", b]


def test_no_quote_hides_a_secret_in_a_command(tmp_path):
    key = "it's-a-Secret-7"
    session = SimpleNamespace(redact=lambda text: redaction.redact(text, {key}))
    line = reporting._line(session, started(tmp_path), ["--api-key", key, f"--engine-env=A={key}"])
    assert "Secret-7" not in line
    assert shlex.split(line)[3:] == ["--api-key", "[redacted]", "--engine-env=A=[redacted]"]
