"""How verdicts combine, and that nothing is not green."""

from __future__ import annotations

import pytest

from sm121.core.verdict import Verdict, worst
from sm121.report import summary
from sm121.run import verdict_file
from sm121.run.verdict_file import EngineReport, TestReport, VerdictFile


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ((), Verdict.NOT_RUN),
        ((Verdict.PASS,), Verdict.PASS),
        ((Verdict.PASS, Verdict.NOT_RUN), Verdict.NOT_RUN),
        ((Verdict.NOT_RUN, Verdict.INCONCLUSIVE), Verdict.INCONCLUSIVE),
        ((Verdict.INCONCLUSIVE, Verdict.INVALID), Verdict.INVALID),
        ((Verdict.INVALID, Verdict.FAIL, Verdict.PASS), Verdict.FAIL),
    ],
)
def test_the_worst_counts_and_nothing_is_not_run(parts, whole):
    assert worst(parts) is whole


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("PASS", 0), ("FAIL", 1), ("INVALID", 1), ("INCONCLUSIVE", 1), ("NOT_RUN", 5)],
)
def test_exit_status(verdict, status):
    assert Verdict(verdict).exit_status == status


def file_with(*verdicts: Verdict, finished: bool = True, **more) -> VerdictFile:
    tests = [
        TestReport(id=f"t{n}", level="smoke", verdict=verdict, **more)
        for n, verdict in enumerate(verdicts)
    ]
    engine = EngineReport(name="vllm", managed=True, model="m")
    file = VerdictFile(
        arch="cpu", profile="p", started="now", engine=engine, tests=tests, finished=finished
    )
    file.judge()
    return file


def test_an_empty_run_is_not_run():
    assert file_with().verdict is Verdict.NOT_RUN


def test_only_skipped_is_not_run():
    assert file_with(Verdict.NOT_RUN, skipped=True).verdict is Verdict.NOT_RUN


def test_unfinished_is_not_green():
    assert file_with(Verdict.PASS, finished=False).verdict is Verdict.NOT_RUN
    assert file_with(Verdict.FAIL, finished=False).verdict is Verdict.FAIL


def test_summary_shows_model_output_as_text():
    file = file_with(Verdict.FAIL)
    file.tests[0].message = "seen: <script>alert(1)</script> | `x` \n# heading"
    text = summary.markdown(file)
    assert "<script>" not in text and "\\|" in text and "\n# heading" not in text


def test_summary_of_a_hostile_server_has_one_heading():
    file = file_with(Verdict.FAIL)
    file.engine.version = "1 | x |\n\n# PASS\n![](http://example.org/x.png)"
    file.reason = file.engine.version
    text = summary.markdown(file)
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# SM121 conformance: FAIL"
    ]
    assert "![](" not in text


def test_control_characters_are_written_out():
    file = file_with(Verdict.FAIL)
    file.tests[0].message = "seen: \x1b[31m\x00\u202e\ud83d é 中"
    text = summary.markdown(file)
    assert not any(c in text for c in "\x1b\x00\u202e\ud83d") and "\\x1b" in text
    assert "é 中" in text


def test_half_a_surrogate_pair_leaves_a_verdict_that_can_be_read(tmp_path):
    file = file_with(Verdict.FAIL)
    file.remarks.append("seen: \ud83d")
    file.environment["a"] = ["\ud83d"]
    verdict_file.write(file, tmp_path / "verdict.json")
    read = verdict_file.read(tmp_path / "verdict.json")
    assert read.remarks == ["seen: \\ud83d"] and read.environment == {"a": ["\\ud83d"]}
