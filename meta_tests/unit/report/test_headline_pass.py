"""A PASS lists what it does not prove, and no metric is shown as better than measured."""

import re

import pytest

from meta_tests.fakes.headline_runs import ALL, ended, passed, rate, run_of, slower
from sm121.core.verdict import Verdict
from sm121.report import headline, metric_verdicts, page, summary
from sm121.report.stored import StoredReport
from sm121.run.verdict_file import (
    LevelReport,
    MetricReport,
    VerdictFile,
)


@pytest.mark.parametrize(
    ("levels", "fields", "word"),
    [
        pytest.param(
            ("smoke",),
            {},
            "PASS (not certified: only smoke selected)",
            id="one level",
        ),
        pytest.param(ALL, {"certified": True}, "PASS (certified)", id="a certificate"),
        pytest.param(
            ALL,
            {"shard": {"index": 1, "of": 2, "tests": []}},
            "PASS (not certified: shard 1 of 2)",
            id="a shard",
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
            id="not proven",
        ),
    ],
)
def test_the_word_beside_pass_names_its_limits(levels, fields, word):
    assert headline.headline_of(passed(*levels, **fields)).word == word


def test_a_pass_says_which_level_did_not_run():
    assert str(headline.headline_of(passed(*ALL))) == "PASS: 7 checks passed"
    skipped = ended("test_worse", Verdict.NOT_RUN, "no stored run", "regression",
                    skipped=True)  # fmt: skip
    run = run_of(*passed(*(each for each in ALL if each != "regression")).tests, skipped)
    assert (
        headline.headline_of(run).word
        == "PASS (not certified: regression did not run: no stored run)"
    )
    older = passed(*ALL)
    older.levels["kernel"] = LevelReport()
    older.tests = [test for test in older.tests if test.level != "kernel"]
    assert headline.headline_of(older).word == "PASS (not certified: kernel did not run)"


def test_a_path_that_is_not_proven_stands_beside_the_pass():
    half = passed(*ALL)
    half.engine.path.moe = None
    assert headline.headline_of(half).word == "PASS (not certified: MoE experts not proven)"
    half.engine.dense = True
    assert headline.headline_of(half).word == "PASS"
    half.engine.path.attention = None
    assert headline.headline_of(half).word == "PASS (not certified: attention not proven)"
    half.engine.dense = False
    assert "kernel path not proven" in headline.headline_of(half).word


def test_a_percentile_of_too_few_requests_is_no_evidence(tmp_path):
    def of_requests(requests: int, confidence: float) -> VerdictFile:
        tail = MetricReport(value=640.0, unit="ms", at_most=1000.0, confidence=confidence,
                            rounds=requests, grade="minimum", verdict=Verdict.PASS)  # fmt: skip
        return passed(*ALL, metrics={"ttft_p99": tail})

    run = of_requests(8, 0.077)
    assert (
        headline.headline_of(run).word
        == "PASS (not certified: ttft_p99: p99 of 8 requests: no evidence)"
    )
    judged = metric_verdicts.of_run(run, "ttft_p99")
    assert judged.verdict is not Verdict.PASS
    assert judged.text == "p99 of 8 requests: no evidence (8% confidence; 95% needs 299)"
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


def test_a_metric_of_a_is_not_worse_because_b_is():
    tg32 = {"tg32@d0": rate(59.3, Verdict.PASS)}
    run = run_of(ended("test_b", level="regression"), metrics=tg32, changes=[slower(beside="A")])
    assert metric_verdicts.of_run(run, "tg32@d0").verdict is Verdict.PASS
