"""What a run came to is one sentence, made of typed fields, and the same wherever it is said."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_runs
import terminal_samples

from sm121.core.verdict import Verdict
from sm121.report import headline, junit, metric_verdicts, page, stored, summary
from sm121.report.crash_list import Crash
from sm121.report.stored import StoredReport
from sm121.run.details import Details, FailureDetail
from sm121.run.verdict_file import (
    AgainstReport,
    ChangeReport,
    CrashReport,
    EngineReport,
    LevelReport,
    MetricReport,
    TestReport,
    VerdictFile,
)

AGAIN = "python -m pytest x::test_one --engine-python /opt/e"


def run_of(*tests: TestReport, **fields: Any) -> VerdictFile:
    """A finished run of these tests, judged."""
    engine = EngineReport(name="vllm", version="0.32.0", managed=True, model="m", startup_s=1.0)
    engine.path.attention = engine.path.moe = "X"
    file = VerdictFile(**{
        "arch": "cpu", "profile": "sm121-gpt-oss-120b", "started": "2026-01-12T09:14:03+00:00",
        "engine": engine, "finished": True, "tests": [*tests], **fields,
    })  # fmt: skip
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


def slower(verdict: Verdict = Verdict.FAIL, **fields: Any) -> ChangeReport:
    return ChangeReport(**{
        "metric": "tg32@d0", "unit": "tok/s", "here": 234.1, "before": 259.1, "worse": 0.0965,
        "allowed": 0.05, "beside": "the trusted run", "verdict": verdict, **fields,
    })  # fmt: skip


CRASH = CrashReport(
    kind="oom", summary="CUDA out of memory", owner="GPU memory", happened="the server died",
    test="x::test_many",
)  # fmt: skip


@pytest.mark.parametrize(
    ("tests", "metrics", "changes", "fields", "sentence"),
    [
        pytest.param(
            ({"name": "test_decode", "metrics": ["tg32@d0"]},),
            {"tg32@d0": {"value": 47.3, "unit": "tok/s", "minimum": 52.0, "verdict": "FAIL"}},
            None,
            None,
            "FAIL: decode tg32@d0 is 47.3 tok/s; 52 required (sm121-gpt-oss-120b)",
            id="name test_decode metrics tg32@d0, tg32@d0 value 47.3",
        ),
        pytest.param(
            ({"name": "test_decode", "metrics": ["tg32@d0"]},),
            {
                "tg32@d0": {
                    "value": 33.6,
                    "unit": "tok/s",
                    "minimum": 52.0,
                    "verdict": "FAIL",
                    "out_of_reach": (
                        "5.17 GB a token: at most 45.4 tok/s on this machine (235 GB/s); "
                        "configuration mxfp4 (--mxfp4-layers all) reads 2.83"
                    ),
                }
            },
            None,
            None,
            (
                "FAIL: decode tg32@d0 is 33.6 tok/s; 52 required (sm121-gpt-oss-120b). It "
                "reads 5.17 GB a token: at most 45.4 tok/s on this machine (235 GB/s); "
                "configuration mxfp4 (--mxfp4-layers all) reads 2.83"
            ),
            id="name test_decode metrics tg32@d0, tg32@d0 value 33.6",
        ),
        pytest.param(
            ({"name": "test_tail", "metrics": ["ttft_p99"]},),
            {"ttft_p99": {"value": 1204.0, "unit": "ms", "at_most": 1000.0, "verdict": "FAIL"}},
            None,
            None,
            (
                "FAIL: time to first token, p99 is 1204 ms; at most 1000 allowed "
                "(sm121-gpt-oss-120b)"
            ),
            id="name test_tail metrics ttft_p99, ttft_p99 value 1204.0",
        ),
        pytest.param(
            ({"name": "--against::tg32@d0", "level": "regression"},),
            None,
            ({},),
            None,
            (
                "FAIL: decode tg32@d0 is 9.7 % slower than the trusted run (259.1 → 234.1 "
                "tok/s; 5 % allowed)"
            ),
            id="name --against:tg32@d0 level regression, FAIL: decode",
        ),
        pytest.param(
            ({"name": "test_b", "level": "regression"},),
            None,
            (
                {"beside": "A"},
                {"metric": "memory_gib", "unit": "GiB", "worse": 0.01, "beside": "A"},
            ),
            None,
            (
                "FAIL: decode tg32@d0 is 9.7 % slower than A (259.1 → 234.1 tok/s; 5 % "
                "allowed), and 1 more metric is"
            ),
            id="name test_b level regression, beside A metric",
        ),
        pytest.param(
            ({"name": "test_many", "level": "stress"},),
            None,
            None,
            {
                "crashes": [
                    {
                        "kind": "oom",
                        "summary": "CUDA out of memory",
                        "owner": "GPU memory",
                        "happened": "the server died",
                        "test": "x::test_many",
                    }
                ]
            },
            "FAIL: the server died in stress: CUDA out of memory",
            id="name test_many level stress, crashes kind oom summary",
        ),
        pytest.param(
            (
                {
                    "name": "test_moe[0]",
                    "level": "kernel",
                    "message": "required: 1, seen: 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
                {
                    "name": "test_moe[1]",
                    "level": "kernel",
                    "message": "required: 1, seen: 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
                {
                    "name": "test_moe[2]",
                    "level": "kernel",
                    "message": "required: 1, seen: 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
            ),
            None,
            None,
            None,
            (
                "FAIL: a kernel differs from the oracle in 3 checks (first: fused_moe of "
                "vllm: required: 1, seen: 2)"
            ),
            id="name test_moe(0) level kernel message required: 1",
        ),
        pytest.param(
            (
                {
                    "name": "test_0",
                    "level": "correctness",
                    "ability": "oracle",
                    "message": "0.3 nats",
                },
                {
                    "name": "test_1",
                    "level": "correctness",
                    "ability": "oracle",
                    "message": "0.3 nats",
                },
                {
                    "name": "test_2",
                    "level": "correctness",
                    "ability": "oracle",
                    "message": "0.3 nats",
                },
                {"name": "test_other", "level": "correctness"},
            ),
            None,
            None,
            None,
            (
                "FAIL: answers differ from the oracle in 3 checks (first: 0.3 nats) (and 1 "
                "more check)"
            ),
            id="name test_0 level correctness ability oracle message",
        ),
        pytest.param(
            (
                {
                    "name": "test_decode",
                    "verdict": "INVALID",
                    "metrics": ["tg32@d0"],
                    "unmet": [
                        {
                            "required": "",
                            "observed": "second_clock: 40 against 47",
                            "about": "tg32@d0",
                        }
                    ],
                },
            ),
            {"tg32@d0": {"value": 47.3, "unit": "tok/s", "minimum": 52.0, "verdict": "INVALID"}},
            None,
            None,
            "INVALID: decode tg32@d0 counts neither way: second_clock: 40 against 47",
            id="name test_decode verdict INVALID metrics tg32@d0 unmet",
        ),
        pytest.param(
            ({"name": "test_decode", "verdict": "INCONCLUSIVE"},),
            None,
            None,
            {"box": {"state": "DEGRADED", "reason": "799 MHz; unplug it for a minute"}},
            "INCONCLUSIVE: the box is DEGRADED: 799 MHz; unplug it for a minute",
            id="name test_decode verdict INCONCLUSIVE, box state",
        ),
        pytest.param(
            ({"name": "test_one", "level": "smoke"},),
            None,
            None,
            {"finished": False},
            "FAIL: test_one: it broke; the run has not finished",
            id="name test_one level smoke, finished False, FAIL",
        ),
        pytest.param(
            ({"name": "test_gate", "metrics": ["some"]},),
            {"some": {"value": 51.998, "unit": "tok/s", "minimum": 52.0, "verdict": "FAIL"}},
            None,
            None,
            "FAIL: some is 51.998 tok/s; 52 required (sm121-gpt-oss-120b)",
            id="a number is never shown as its limit",
        ),
        pytest.param(
            ({"name": "test_gate", "metrics": ["some"]},),
            {"some": {"value": 1000.3, "unit": "ms", "at_most": 1000.0, "verdict": "FAIL"}},
            None,
            None,
            "FAIL: some is 1000.3 ms; at most 1000 allowed (sm121-gpt-oss-120b)",
            id="nor is a time",
        ),
        pytest.param(
            ({"name": "test_gate", "metrics": ["some"]},),
            {"some": {"value": None, "unit": "ms", "at_most": 1.0, "verdict": "FAIL"}},
            None,
            None,
            "FAIL: some is no number; at most 1 allowed (sm121-gpt-oss-120b)",
            id="no number",
        ),
        pytest.param(
            ({"name": "--against::tg32@d0", "level": "regression"},),
            None,
            ({"worse": 0.0503},),
            None,
            (
                "FAIL: decode tg32@d0 is 5.03 % slower than the trusted run (259.1 → 234.1 "
                "tok/s; 5 % allowed)"
            ),
            id="nor is a change",
        ),
    ],
)
def test_a_sentence_is_made_of_fields(tests, metrics, changes, fields, sentence):
    run = run_of(
        *(ended(**test) for test in tests),
        metrics={name: MetricReport(**metric) for name, metric in (metrics or {}).items()},
        changes=[slower(**change) for change in changes or ()],
        **(fields or {}),
    )
    assert str(headline.of(run)) == sentence


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


@pytest.mark.parametrize(
    ("levels", "fields", "word"),
    [
        pytest.param(
            ("smoke",),
            {},
            "PASS (not certified: only smoke asked for)",
            id="smoke, PASS (not certified: only smoke asked for)",
        ),
        pytest.param(
            ALL, {"certified": True}, "PASS (certified)", id="ALL, certified True, PASS (certified)"
        ),
        pytest.param(
            ALL,
            {"shard": {"index": 1, "of": 2, "tests": []}},
            "PASS (not certified: shard 1 of 2)",
            id="ALL, shard index 1 of 2 tests, PASS (not certified",
        ),
        pytest.param(
            ALL,
            {
                "unproven": [
                    "A/B: the kernel path of A is not known: give --server-log",
                    "A/B: the kernel path of B is not known",
                ]
            },
            (
                "PASS (not certified: not proven: A/B: the kernel path of A is not known: "
                "give --server-log and 1 more)"
            ),
            id="ALL, unproven A/B: the kernel path of A is not known",
        ),
    ],
)
def test_a_pass_says_what_it_may_not_be_taken_for(levels, fields, word):
    assert headline.of(passed(*levels, **fields)).word == word


def test_a_pass_says_which_level_did_not_run():
    assert str(headline.of(passed(*ALL))) == "PASS: 7 checks passed"
    skipped = ended("test_worse", Verdict.NOT_RUN, "no stored run", "regression",
                    skipped=True)  # fmt: skip
    run = run_of(*passed(*(each for each in ALL if each != "regression")).tests, skipped)
    assert headline.of(run).word == "PASS (not certified: regression did not run: no stored run)"
    older = passed(*ALL)
    older.levels["kernel"] = LevelReport()
    older.tests = [test for test in older.tests if test.level != "kernel"]
    assert headline.of(older).word == "PASS (not certified: kernel did not run)"


def test_a_path_that_is_not_proven_stands_beside_the_pass():
    half = passed(*ALL)
    half.engine.path.moe = None
    assert headline.of(half).word == "PASS (not certified: MoE experts not proven)"
    half.engine.path.attention = None
    assert "kernel path not proven" in headline.of(half).word


def test_a_percentile_of_too_few_requests_is_no_evidence(tmp_path):
    def of_requests(requests: int, confidence: float) -> VerdictFile:
        tail = MetricReport(value=640.0, unit="ms", at_most=1000.0, confidence=confidence,
                            rounds=requests, grade="minimum", verdict=Verdict.PASS)  # fmt: skip
        return passed(*ALL, metrics={"ttft_p99": tail})

    run = of_requests(8, 0.077)
    assert headline.of(run).word == "PASS (not certified: ttft_p99: p99 of 8 requests: no evidence)"
    judged = metric_verdicts.of_run(run, "ttft_p99")
    assert judged.verdict is not Verdict.PASS
    assert judged.text == "p99 of 8 requests: no evidence (8% confidence; 95% takes 299)"
    for text in (summary.markdown(run), page.html(StoredReport(run, tmp_path))):
        assert "p99 of 8 requests: no evidence" in text
    enough = metric_verdicts.of_run(of_requests(299, 0.9505), "ttft_p99")
    assert (enough.verdict, enough.text) == (Verdict.PASS, "PASS (minimum)")
    assert "little evidence" in metric_verdicts.of_run(of_requests(100, 0.63), "ttft_p99").text


def test_a_tile_is_not_green_where_the_headline_is_red(tmp_path):
    tg32 = {"tg32@d0": rate(234.1, Verdict.PASS, grade="stretch")}
    test = ended("--against::tg32@d0", level="regression")
    run = run_of(test, metrics=tg32, changes=[slower()])
    text = page.html(StoredReport(run, tmp_path))
    tile = re.search(r'<li class="tile (\w+)">.*?</li>', text, re.S)
    assert tile is not None and tile[1] == "FAIL" and "stretch)" not in tile[0], tile
    assert "9.7 % slower than the trusted run" in tile[0]


# What to do


def report_of(run: VerdictFile, folder: Path, **fields) -> StoredReport:
    failed = [FailureDetail(id=test.id, logs=["server.log"]) for test in run.tests]
    stored = Details(command="python -m pytest --against trusted", failures=failed)
    return StoredReport(run, folder, details=stored, **fields)


def test_there_is_one_action(tmp_path):
    gate = run_of(ended("test_decode", metrics=["tg32@d0"]), metrics={"tg32@d0": rate(47.3)})
    report = report_of(gate, tmp_path)
    whole = headline.Action("run again", "python -m pytest --against trusted")
    assert headline.action(report) == whole, "of a run that has not ended"
    report.details.again = AGAIN
    assert headline.action(report) == headline.Action("run again", AGAIN)
    assert headline.action(report_of(passed(*ALL), tmp_path)) is None


def test_the_action_after_a_crash_is_its_remedy_or_its_log(tmp_path):
    run = run_of(ended("test_many", level="stress"), crashes=[CRASH])
    for remedy, action in (
        ("lower --max-num-seqs", ("remedy", "lower --max-num-seqs")),
        (None, ("read", str(tmp_path / "server.log"))),
    ):
        crash = Crash(**CRASH.model_dump(), remedy=remedy)
        report = report_of(run, tmp_path, crashes=(crash,))
        assert headline.action(report) == headline.Action(*action)


def test_everybody_says_the_same_sentence(tmp_path):
    directory = report_runs.write("fail", tmp_path / "fail")
    report = stored.read(directory)
    sentence = headline.of(report.run).sentence
    assert sentence.startswith("decode tg32@d0 is 47.3 tok/s; 52 required (sm121-gpt-oss-120b)")
    plain = summary.markdown(report.run, report).replace("\\", "")
    assert sentence in page.html(report) and f"**FAIL: {sentence}**" in plain
    assert f'name="run.headline" value="FAIL: {sentence}"' in junit.xml(report)


def test_a_slower_run_on_another_path_says_so_and_hides_nothing_else():
    path = "moe: CUTLASS there, MARLIN here"
    names = [f"--against::{name}" for name in ("path moe", "tg32@d0", "gone")]
    run = run_of(
        *(TestReport(id=name, level="regression", verdict="FAIL", message="x") for name in names),
        changes=[slower(before=None, worse=None)],
        against=AgainstReport(run="a run", engine="vllm", path=[path]),
    )
    assert headline.of(run).sentence == (
        "decode tg32@d0 is slower than the trusted run (no number → 234.1 tok/s; 5 % allowed); "
        f"another kernel path ran ({path}) (and 1 more check)"
    )


def test_a_metric_of_a_is_not_worse_because_b_is():
    tg32 = {"tg32@d0": rate(59.3, Verdict.PASS)}
    run = run_of(ended("test_b", level="regression"), metrics=tg32, changes=[slower(beside="A")])
    assert metric_verdicts.of_run(run, "tg32@d0").verdict is Verdict.PASS


def test_a_crash_is_the_cause_of_its_own_failures(tmp_path):
    """The log of another test's server is not read, and what no failure is about leads nothing."""
    floor = CrashReport(kind="memory_floor", summary="1 GiB left", owner="the machine")
    tests = ended("test_moe", level="kernel"), ended("test_many", level="stress")
    run = run_of(*tests, crashes=[floor, CRASH])
    sentence = "the server died in stress: CUDA out of memory (and 1 more check)"
    assert headline.of(run).sentence == sentence
    logs = {"x::test_moe": "other.log", "x::test_many": "its.log"}
    failures = [FailureDetail(id=test, logs=[log]) for test, log in logs.items()]
    crashes = tuple(Crash(**crash.model_dump()) for crash in run.crashes)
    report = StoredReport(run, tmp_path, details=Details(failures=failures), crashes=crashes)
    assert headline.action(report) == headline.Action("read", str(tmp_path / "its.log"))
    assert headline.of(run_of(ended("test_moe"), crashes=[floor])).sentence == "test_moe: it broke"


def test_what_did_not_run_says_why_and_is_not_run_once_more(tmp_path):
    why = ended("test_one", Verdict.NOT_RUN, "no GPU is here", skipped=True)
    run = run_of(why)
    assert headline.of(run).sentence.endswith(" (1 of 1: no GPU is here)")
    assert headline.action(report_of(run, tmp_path)) is None
    assert headline.action(report_of(run_of(finished=False), tmp_path)) is not None


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        ("short", "short"),
        ("one thing; another thing that is long", "one thing ..."),
        ("seventeen hundred words", "seventeen ..."),
        ("at /home/somebody/who/is/long", "at /home/somebody ..."),
    ],
)
def test_nothing_is_cut_within_a_word(text, brief):
    assert headline.brief(text, 17) == brief


# The terminal


@pytest.mark.parametrize("name", terminal_samples.RUNS)
def test_the_end_of_a_failing_run_fits_a_screen(name, tmp_path):
    report = tmp_path / "report"
    text = terminal_samples.sample(name, report)
    assert terminal_samples.rows(text) <= terminal_samples.LINES
    read = stored.read(report)
    sentence = str(headline.of(read.run))
    assert sentence in (line.rstrip() for line in text.splitlines()), text
    assert json.loads((report / "verdict.json").read_text())["verdict"] == "FAIL"
    then = headline.action(read)
    assert then is not None and f"{then.kind}: " in text
    if name == "failed-start":
        assert "remedy: lower --gpu-memory-utilization" in text
        assert text.count("CUDA out of memory") == 2, "the cause, and the sentence"
    published = (terminal_samples.FOLDER / f"{name}.txt").read_text("utf-8")
    assert terminal_samples.rows(published) <= terminal_samples.LINES
    assert sentence in published, "python meta_tests/terminal_samples.py writes it anew"
