"""The result of a run is one sentence, made from typed fields, and the same in every output."""

import pytest

from meta_tests.fakes import report_runs
from meta_tests.fakes.headline_runs import ended, run_of, slower
from sm121.core import unmet
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.report import headline, junit, page, stored, summary
from sm121.run.verdict_file import (
    AGAINST,
    AgainstReport,
    MetricReport,
    TestReport,
)


@pytest.mark.parametrize(
    ("tests", "metrics", "changes", "fields", "sentence"),
    [
        pytest.param(
            ({"name": "test_decode", "metrics": ["tg32@d0"]},),
            {"tg32@d0": {"value": 47.3, "unit": "tok/s", "minimum": 52.0, "verdict": "FAIL"}},
            None,
            None,
            "FAIL: decode tg32@d0 is 47.3 tok/s; 52 required (sm121-gpt-oss-120b)",
            id="a gate",
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
            id="a gate that this machine cannot reach",
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
            id="a time over its limit",
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
            id="slower than the trusted run",
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
            id="two metrics worse than A",
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
            id="a crash",
        ),
        pytest.param(
            (
                {
                    "name": "test_moe[0]",
                    "level": "kernel",
                    "message": "expected 1, got 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
                {
                    "name": "test_moe[1]",
                    "level": "kernel",
                    "message": "expected 1, got 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
                {
                    "name": "test_moe[2]",
                    "level": "kernel",
                    "message": "expected 1, got 2",
                    "kernel": {"operation": "fused_moe", "provider": "vllm"},
                },
            ),
            None,
            None,
            None,
            (
                "FAIL: a kernel differs from the oracle in 3 checks (first: fused_moe of "
                "vllm: expected 1, got 2)"
            ),
            id="one kernel in three checks",
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
            id="three answers, and another check",
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
            "INVALID: decode tg32@d0 is not valid: second_clock: 40 against 47",
            id="a rate of two clocks",
        ),
        pytest.param(
            ({"name": "test_decode", "verdict": "INCONCLUSIVE"},),
            None,
            None,
            {"box": {"state": "DEGRADED", "reason": "799 MHz; unplug it for a minute"}},
            "INCONCLUSIVE: the machine is DEGRADED: 799 MHz; unplug it for a minute",
            id="a DEGRADED box",
        ),
        pytest.param(
            ({"name": "test_one", "level": "smoke"},),
            None,
            None,
            {"finished": False},
            "FAIL: test_one: it broke; the run has not finished",
            id="the run has not finished",
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
    assert str(headline.headline_of(run)) == sentence


def test_the_reason_of_a_failed_run_is_never_that_it_has_not_finished():
    """If a failed run also has undecided tests, its reason is the failed test.

    This happens in a run with -x.
    """
    run = run_of(ended("test_one"), ended("test_two", Verdict.NOT_RUN), finished=False)
    assert run.verdict is Verdict.FAIL
    assert run.reason == "x::test_one: it broke; the run has not finished"
    assert run_of(finished=False).reason == "the run has not finished"


def test_page_summary_and_terminal_have_the_same_sentence(tmp_path):
    directory = report_runs.write("fail", tmp_path / "fail")
    report = stored.read(directory)
    sentence = headline.headline_of(report.run).sentence
    assert sentence.startswith("decode tg32@d0 is 47.3 tok/s; 52 required (sm121-gpt-oss-120b)")
    plain = summary.markdown(report.run, report).replace("\\", "")
    assert sentence in page.html(report) and f"**FAIL: {sentence}**" in plain
    assert f'name="run.headline" value="FAIL: {sentence}"' in junit.xml(report)


def test_a_slower_run_on_another_path_says_so_and_hides_nothing_else():
    path = "moe: CUTLASS in the trusted run, MARLIN in this run"
    run = run_of(
        TestReport.of(f"{AGAINST}path moe", "regression", Fact("x", kind=unmet.OF_PATH)),
        TestReport.of(f"{AGAINST}tg32@d0", "regression", Fact("x")),
        TestReport.of(f"{AGAINST}gone", "regression", Fact("x")),
        changes=[slower(before=None, worse=None)],
        against=AgainstReport(run="a run", engine="vllm", path=[path]),
    )
    assert headline.headline_of(run).sentence == (
        "decode tg32@d0 is slower than the trusted run (no number → 234.1 tok/s; 5 % allowed); "
        f"another kernel path ran ({path}) (and 1 more check)"
    )


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
