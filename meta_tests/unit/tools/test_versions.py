"""The page on releases of vLLM is made from the recorded runs and the present data files."""

import json

from meta_tests.folders import ROOT
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.run.verdict_file import EngineReport, TestReport, VerdictFile
from tools import versions

ENGINE = EngineReport(name="vllm", managed=True, model="canary")


def test_the_page_has_the_known_bugs_of_today():
    """Without new runs, the page still shows the known bugs of today.

    `make versions` takes an hour, and the page without new runs takes no time.
    """
    known = json.loads(versions.DATA.read_text("utf-8"))
    page = (ROOT / "docs" / "tables" / "vllm-versions.md").read_text("utf-8")
    assert page == versions.page(known)


def test_the_page_counts_the_deviations_and_the_closed_ranges_of_a_run():
    """The tool searched the run's remarks for a text that only the tests' results contain."""
    tests = [
        TestReport(
            id="tests/test_correctness.py::test_request[wrong-key]",
            level="correctness",
            verdict=Verdict.PASS,
            symptoms=["wrong-key: a known deviation of vLLM >=0.24: no error object"],
            mended=["one-model: served is a known deviation, but 0.40.0 does not show it"],
        ),
        TestReport(
            id="tests/test_correctness.py::test_answers[a-choice]",
            level="correctness",
            verdict=Verdict.FAIL,
            message="expected 200, got 500; known bug of <0.32: a 500 (vllm/issues/22519)",
            unmet=[Fact("200", "500")],
            known_bug="<0.32: a 500 (vllm/issues/22519)",
        ),
    ]
    run = VerdictFile(arch="cpu", profile="p", started="now", engine=ENGINE, tests=tests)
    found = versions.results(run)
    assert found["deviations"] == tests[0].symptoms
    assert found["mended"] == tests[0].mended
    assert [row["message"] for row in found["failed"]] == ["expected 200, got 500"]
    row = {"torch": "2.11.0", "refused": [], "minutes": 4.6, "before": None, "unknown": []}
    page = versions.page({"0.40.0": row | found | {"asked": ""}})
    assert "| `test_answers[a-choice]` | blocker | expected 200, got 500 | <0.32: " in page.replace(
        "&lt;", "<"
    )
    assert "- 0.40.0: one-model: " in page
