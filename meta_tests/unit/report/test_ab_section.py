"""The A/B section of a report and its forest plot."""

import json
import math
import re

from meta_tests.fakes import ab_runs, report_runs
from sm121.core.verdict import Verdict
from sm121.regression.ab import FILE
from sm121.regression.change import Change
from sm121.report import forest, page, stored


def test_better_is_to_the_right_for_rates_and_times():
    rate = Change("tg32@d0", "tok/s", True, 50.0, 45.0, 0.9, 0.89, 0.91, 1, 0.05, Verdict.FAIL)
    time = Change("ttft_p50", "ms", False, 400.0, 440.0, 1.1, 1.09, 1.11, 1, 0.05, Verdict.FAIL)
    drawn = forest.draw([rate, time])
    (_, one), (_, two) = drawn.rows
    assert one.point == two.point < one.band[0] < one.band[1] == drawn.zero
    assert one.interval[0] < one.point < one.interval[1]
    assert (rate.percent, rate.bounds) == ("-10.0 %", "[-11.0, -9.0]")
    assert (time.percent, time.bounds) == ("+10.0 %", "[+9.0, +11.0]")
    assert "0 %" in [label for _, label in drawn.ticks]
    for x, _ in drawn.ticks:
        assert 0 <= x <= 100


def test_the_axis_holds_data_and_limits_and_an_arrow_what_is_far_out():
    near = Change("a", "tok/s", True, 1.0, 1.01, 1.01, None, None, 1, 0.25, Verdict.PASS)
    far = Change("b", "tok/s", True, 1.0, 9.0, 9.0, 8.0, 10.0, 1, 0.05, Verdict.PASS)
    none = Change("c", "tok/s", True, 0.0, 1.0, None)
    drawn = forest.draw([near, far, none])
    marks = [mark for _, mark in drawn.rows]
    assert marks[0].band[0] > 0 and marks[0].beyond is None
    assert marks[1].beyond == "right" and marks[1].point == 100
    assert marks[2].point is None and none.percent == "not known"
    assert forest.draw([]) is None


def section_of(folder) -> str:
    """Return the part of a report's page that shows the A/B comparison."""
    text = page.html(stored.read(folder))
    assert 'href="#ab"' in text
    return text[text.index('<section id="ab"') :].partition("</section>")[0]


def test_the_report_of_an_a_b_run_has_its_plot(tmp_path):
    section = section_of(ab_runs.ab(tmp_path / "ab"))
    assert "B is worse than A in 1 of 5 metrics: decode tg32 -9.7 % [-10.2, -9.1]." in section
    assert len(re.findall(r'<circle class="point" cx="[\d.]+%"', section)) == 4
    assert len(re.findall(r'<circle class="point hollow" cx="[\d.]+%"', section)) == 1
    assert "(unchanged)" in section and ">--moe-backend marlin</td>" in section
    assert "FLASHINFER_CUTLASS_MXFP4_MXFP8" in section and "MARLIN" in section
    assert "[-10.2, -9.1]</span>" in section and "server-B.log" in section
    alone = stored.read(report_runs.write("pass", tmp_path / "pass"))
    assert '<section id="ab"' not in page.html(alone)


PRICE = {
    "metric": "price_kl", "unit": "nats", "higher_is_better": False, "a": 0.01, "b": 0.03,
    "allowed": 0.005, "verdict": "FAIL", "difference": 0.02,
}  # fmt: skip
SAID = "0.03 nats against 0.01, 0.02 more; 0.005 allowed"


def test_an_older_ab_file_is_shown_with_its_text(tmp_path):
    """The page shows an A/B file of an older version, whose key was ``text``.

    Until 28 November 2026, this text began with the metric's name."""
    folder = ab_runs.ab(tmp_path / "ab")
    file = folder / FILE
    record = json.loads(file.read_text())
    sections = []
    for words in ({"words": SAID}, {"text": f"price_kl: {SAID}"}):
        file.write_text(json.dumps({**record, "outcomes": [{**PRICE, **words}]}))
        report = stored.read(folder)
        assert report.ab is not None, report.run.remarks
        assert report.ab.file.outcomes[0].words == SAID
        sections.append(section_of(folder))
    assert sections[0] == sections[1]
    assert f"B is worse than A in 1 of 1 metrics: price_kl: {SAID}" in sections[0]


def test_a_file_that_cannot_be_read_is_one_remark(tmp_path):
    folder = ab_runs.ab(tmp_path / "ab")
    (folder / FILE).write_text(json.dumps({"sides": ["", ""], "outcomes": [{"text": "x"}]}))
    report = stored.read(folder)
    assert report.ab is None
    (remark,) = [each for each in report.run.remarks if each.startswith(FILE)]
    assert remark.startswith(f"{FILE} cannot be read: ") and "\n" not in remark


def test_unproven_paths_are_named_beside_the_verdict(tmp_path):
    section = section_of(ab_runs.ab(tmp_path / "ab", proven=False, text=report_runs.HOSTILE))
    for side in "AB":
        assert f"{side}&#39;s attention and MoE experts not proven" in section.partition("</p>")[0]
    assert section.count(">not proven</td>") == 4
    assert "<script" not in section and "\x1b" not in section


def test_a_comparison_with_a_value_that_is_infinite_is_shown(tmp_path):
    """The page shows a comparison although a time of side B is infinite.

    A failed request has an infinite time, which is null in the file.
    """
    folder = ab_runs.ab(tmp_path / "ab")
    file = folder / "ab.json"
    record = json.loads(file.read_text())
    record["outcomes"][3] |= {"b": None, "ratio": None, "ci_low": None, "ci_high": None,
                             "verdict": "FAIL"}  # fmt: skip
    file.write_text(json.dumps(record))
    report = stored.read(folder)
    assert report.ab is not None and not [r for r in report.run.remarks if "ab.json" in r]
    assert "B is worse than A in 2 of 5 metrics" in page.html(report)
    never = Change("ttft_p99", "ms", False, 400.0, math.inf, math.inf, math.nan, math.nan, 2,
                       0.05, Verdict.FAIL)  # fmt: skip
    reported = never.report("A")
    assert (reported.here, reported.worse) == (None, None), "verdict.json has no infinity"


def test_the_page_of_a_void_or_missing_comparison(tmp_path):
    folder = ab_runs.ab(tmp_path / "ab")
    file = folder / "ab.json"
    void = json.loads(file.read_text()) | {"void": "a warm cache", "outcomes": []}
    file.write_text(json.dumps(void))
    assert "The comparison does not count: a warm cache" in page.html(stored.read(folder))
    file.write_text('{"sides": 3}')
    report = stored.read(folder)
    assert report.ab is None and any("ab.json" in line for line in report.run.remarks)
