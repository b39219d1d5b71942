"""`sm121 compare --html` and the forest plot: what two runs differ in, no more than is known."""

import json
import math
import re
from contextlib import contextmanager

import compare_runs
import pytest
import report_runs
from data_rows import altered, from_data

from sm121.cli import main
from sm121.core.verdict import Verdict
from sm121.regression.change import Change
from sm121.report import compare_page, forest, page, stored
from sm121.report.compare_page import Beside, Side
from sm121.run import details, verdict_file
from sm121.run.verdict_file import BESIDE, EngineReport, TestReport, VerdictFile


def beside(one, two) -> Beside:
    first, second = stored.read(one), stored.read(two)
    return Beside(Side("A", "one", first, None), Side("B", "two", second, None))


@contextmanager
def edited(folder):
    """The run of a folder, which is written again with what was changed of it."""
    run = verdict_file.read(folder / "verdict.json")
    yield run
    verdict_file.write(run, folder / "verdict.json")


@pytest.fixture
def pair(tmp_path):
    """The folders of A and B, which is worse."""
    return compare_runs.pair(tmp_path)


def change(beside, name) -> Change:
    return next(each for each, _ in beside.forest.rows if each.metric == name)


def names(beside, group) -> set[str]:
    (rows,) = (each.rows for each in beside.tests if each.id == group)
    return {row.name.rpartition("::")[2] for row in rows}


def test_what_is_new_mended_and_in_both(pair):
    both = beside(*pair)
    assert names(both, "new") == {"test_decode_rate[tg32-d0]", "test_no_metric_is_worse"}
    assert names(both, "mended") == {"test_tool_call"}
    assert names(both, "both") == {"test_known_answers"}
    assert names(both, "only-a") == {"test_cell[cutlass]"} and names(both, "only-b") == set()
    row = next(group for group in both.tests if group.id == "both").rows[0]
    assert row.note == "in the same way", "what was measured may differ"
    assert "2 tests newly fail in B; 1 fixed; 1 in both; 1 ran in A only; " in both.headline
    assert "differ in MoE experts; not proven in one of them: native FP4." in both.headline


def test_a_failure_of_what_did_not_run_before_is_new(pair):
    """And what no longer runs is not fixed."""
    for folder, name in zip(pair, ("test_decode_rate[tg32-d0]", "test_tool_call"), strict=True):
        with edited(folder) as run:
            test = next(test for test in run.tests if test.id.endswith(name))
            test.verdict, test.skipped, test.message = Verdict.NOT_RUN, True, "NOT_RUN: no server"
    both = beside(*pair)
    assert "test_decode_rate[tg32-d0]" in names(both, "new")
    assert names(both, "mended") == set() and "test_tool_call" in names(both, "only-a")
    row = next(r for r in both.tests[0].rows if r.name.endswith("[tg32-d0]"))
    assert (row.a, row.a_said, row.b) == ("NOT_RUN", "no server", "FAIL")


def test_a_crash_is_named(pair, tmp_path):
    crashed = report_runs.write("crash", tmp_path / "crash")
    text = compare_page.html(beside(pair[0], crashed))
    assert "<strong>illegal_memory_access:</strong>" in text


def test_changes_go_by_the_rules_of_the_regression_level(pair):
    both = beside(*pair)
    assert both.apart == []
    decode = change(both, "tg32@d0")
    assert decode.verdict is Verdict.FAIL
    assert decode.percent == "-12.6 %" and decode.bounds.startswith("[-13")
    assert decode.ci_low < decode.ratio < decode.ci_high
    prefill = change(both, "pp2048@d0")
    assert prefill.verdict is Verdict.PASS and prefill.interval is not None
    # What counts neither way in one of them is no change; a tail has no interval of a ratio.
    void = change(both, "tg128@d0")
    assert void.verdict is Verdict.INVALID and not void.decided and void.note == "INVALID in B"
    tail = change(both, "ttft_p99")
    assert tail.interval is None and tail.ratio is not None
    assert both.forest.rows[0][0].verdict is Verdict.FAIL, "what is worse comes first"
    assert [row.name for row in both.only] == ["itl_p99"]
    assert "worse than allowed" in both.headline


@from_data
def test_runs_that_are_not_comparable_are_not_judged(pair, changed, beginning):
    key, part, value = changed
    file = pair[1] / "verdict.json"
    field = key if part is None else f"{key}.{part}"
    file.write_text(json.dumps(altered(json.loads(file.read_text()), {field: value})))
    both = beside(*pair)
    assert any(line.startswith(beginning) for line in both.apart), both.apart
    changes = [each for each, _ in both.forest.rows if each.metric != "tg128@d0"]
    assert changes
    assert all(each.verdict is Verdict.NOT_RUN and not each.decided for each in changes)
    assert "not judged, since the runs are not comparable" in both.headline
    assert "The two are not comparable, so no change is judged." in compare_page.html(both)


def test_an_unfit_machine_decides_nothing(pair):
    with edited(pair[0]) as run:
        run.box.state = "DEGRADED"
    decode = change(beside(*pair), "tg32@d0")
    assert decode.verdict is Verdict.INCONCLUSIVE and "machine of A" in decode.note


def test_without_samples_a_change_has_no_interval(pair):
    (pair[0] / details.NAME).unlink()
    decode = change(beside(*pair), "tg32@d0")
    assert decode.verdict is Verdict.NOT_RUN and decode.interval is None and decode.higher_is_better
    assert (decode.percent, decode.bounds) == ("-12.6 %", "")
    assert decode.note == "no samples are stored"


def test_paths_and_environments_differ_first(pair):
    both = beside(*pair)
    first, second = both.path[:2]
    assert (first.name, first.b) == ("MoE experts", "MARLIN") and "Using 'MARLIN'" in first.b_said
    assert (second.name, second.a, second.b) == ("native FP4", "yes", "not proven")
    assert second.note == "proven in A only" and first.note == ""
    assert not any(row.differs for row in both.path[2:])
    differs, same = both.record
    assert [(row.name, row.a, row.b) for row in differs.rows] == [("cuda_version", "13.0", "13.2")]
    assert "gpus 1 name" in [row.name for row in same.rows]


def test_one_command_writes_one_file(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page.write(stored.read(pair[0]))
    assert main(["compare", "--html", "pass", "new=fail/verdict.json"]) == 0
    assert capsys.readouterr().out == "compare.html\n"
    text = (tmp_path / "compare.html").read_text()
    assert 'href="pass/report.html"' in text and "B: new" in text
    assert "<code>sm121 report</code> makes one" in text, "B has no report.html"
    assert "<script" not in text and len(text) < 2_000_000
    (tmp_path / "sub").mkdir()
    assert main(["compare", "--html", "--output", "sub/x.html", "pass", "fail"]) == 0
    assert 'href="../pass/report.html"' in (tmp_path / "sub" / "x.html").read_text()


@from_data
def test_what_is_no_pair_is_refused(pair, tmp_path, capsys, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--html", *arguments]) == 4
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


def test_a_run_in_which_everything_fails_is_still_a_small_page(pair):
    with edited(pair[1]) as run:
        failed = run.tests[0].model_copy(update={"verdict": Verdict.FAIL, "message": "<&>" * 2000})
        run.tests = [failed.model_copy(update={"id": f"{failed.id}[{n}]"}) for n in range(4000)]
        run.environment["list"] = {f"<{n}>": "<&>" * 2000 for n in range(4000)}
    text = compare_page.html(beside(*pair))
    assert len(text.encode()) < 2 << 20
    assert "more, which both reports list" in text and "more, which are in verdict.json" in text


def test_hostile_output_is_escaped(tmp_path):
    hostile = report_runs.write("hostile", tmp_path / "hostile")
    text = compare_page.html(beside(hostile, report_runs.write("pass", tmp_path / "pass")))
    assert "<script" not in text and "<img" not in text and "<b>" not in text
    assert "&lt;script&gt;window.owned=1" in text
    assert "\x1b" not in text and "\u202e" not in text


# --- the plot


def test_better_is_to_the_right_whatever_is_better():
    rate = Change("tg32@d0", "tok/s", True, 50.0, 45.0, 0.9, 0.89, 0.91, 1, 0.05, Verdict.FAIL)
    time = Change("ttft_p50", "ms", False, 400.0, 440.0, 1.1, 1.09, 1.11, 1, 0.05, Verdict.FAIL)
    drawn = forest.draw([rate, time])
    (_, one), (_, two) = drawn.rows
    assert one.point == two.point < one.band[0] < one.band[1] == drawn.zero
    assert one.interval[0] < one.point < one.interval[1]
    assert (rate.percent, rate.bounds) == ("-10.0 %", "[-11.0, -9.0]")
    assert (time.percent, time.bounds) == ("+10.0 %", "[+9.0, +11.0]")
    assert "0 %" in [label for _, label in drawn.ticks]
    assert all(0 <= x <= 100 for x, _ in drawn.ticks)


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
    """The A/B comparison in the page of a report."""
    text = page.html(stored.read(folder))
    assert 'href="#ab"' in text
    return text[text.index('<section id="ab"') :].partition("</section>")[0]


def test_the_report_of_an_a_b_run_has_its_plot(tmp_path):
    section = section_of(compare_runs.ab(tmp_path / "ab"))
    assert "B is worse than A in 1 of 5 metrics: decode tg32 -9.7 % [-10.2, -9.1]." in section
    assert len(re.findall(r'<circle class="point" cx="[\d.]+%"', section)) == 4
    assert len(re.findall(r'<circle class="point hollow" cx="[\d.]+%"', section)) == 1
    assert "(as it is)" in section and ">--moe-backend marlin</td>" in section
    assert "FLASHINFER_CUTLASS_MXFP4_MXFP8" in section and "MARLIN" in section
    assert "[-10.2, -9.1]</span>" in section and "server-B.log" in section
    alone = stored.read(report_runs.write("pass", tmp_path / "pass"))
    assert '<section id="ab"' not in page.html(alone)


def test_paths_that_nothing_proves_are_said_beside_the_verdict(tmp_path):
    section = section_of(compare_runs.ab(tmp_path / "ab", proven=False, text=report_runs.HOSTILE))
    for side in "AB":
        assert f"{side}&#39;s attention and MoE experts not proven" in section.partition("</p>")[0]
    assert section.count(">not proven</td>") == 4
    assert "<script" not in section and "\x1b" not in section


def test_a_comparison_with_a_value_that_is_infinite_is_shown(tmp_path):
    """A request of B failed: its time is infinite, and null in the file."""
    folder = compare_runs.ab(tmp_path / "ab")
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


def test_a_comparison_may_be_void_or_none(tmp_path):
    folder = compare_runs.ab(tmp_path / "ab")
    file = folder / "ab.json"
    void = json.loads(file.read_text()) | {"void": "a warm cache", "outcomes": []}
    file.write_text(json.dumps(void))
    assert "Nothing of it counts: a warm cache" in page.html(stored.read(folder))
    file.write_text('{"sides": 3}')
    report = stored.read(folder)
    assert report.ab is None and any("ab.json" in line for line in report.run.remarks)


def _of(folder, run, name):
    verdict_file.write(run, folder / "verdict.json")
    return Side(name, name, stored.read(folder), None)


def test_what_b_lacks_or_died_of_at_its_end_is_in_the_first_sentence(tmp_path):
    """Else nothing new fails in a run that measured nothing, or in one whose server died late."""
    folders = [report_runs.write("pass", tmp_path / name) for name in "ab"]
    one, two = (verdict_file.read(folder / "verdict.json") for folder in folders)
    life = {"id": f"{BESIDE}life of cutlass", "level": "smoke", "message": "it died"}
    two.tests.append(TestReport(**life, verdict=Verdict.FAIL))
    two.metrics.clear()
    two.judge()
    both = Beside(_of(folders[0], one, "A"), _of(folders[1], two, "B"))
    assert both.headline.startswith("1 test newly fails in B; 18 metrics measured in A only")
    assert "life of cutlass" in compare_page.html(both)
    engine = EngineReport(name="", managed=False, model="")
    begun = VerdictFile(arch=None, profile="", started="", engine=engine)
    empty = [_of(folder, begun, name) for folder, name in zip(folders, "AB", strict=True)]
    assert Beside(*empty).headline == (
        "A has not finished; B has not finished; nothing new fails in B; no kernel path is proven."
    )


def test_a_green_run_has_its_reservations_beside_another(tmp_path):
    folder = report_runs.write("pass", tmp_path)
    run = verdict_file.read(folder / "verdict.json")
    run.tests = [test for test in run.tests if test.level == "smoke"]
    run.levels.clear()
    run.judge()
    side = _of(folder, run, "A")
    assert "PASS (not certified: only smoke asked for)" in compare_page.html(Beside(side, side))


def test_thousands_of_metrics_are_still_a_small_page(pair):
    both = beside(*pair)
    for side in both.sides:
        run = side.report.run
        run.metrics |= {f"kernel[{n}]": run.metrics["tg32@d0"] for n in range(4000)}
    text = compare_page.html(both)
    assert len(text.encode()) < 1_500_000 and "more, none of them worse than these" in text
