"""What is written of a run: readable by people and by CI, whatever is missing or hostile in it."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_runs
from data_rows import from_data, table

from sm121.cli import main
from sm121.client.timed_answer import Chunk, TimedAnswer
from sm121.core import lenient, numbers, unmet
from sm121.core.verdict import Verdict
from sm121.evidence import crash_bundle, log_lines
from sm121.matrix.feature_matrix import MatrixFile
from sm121.report import (
    charts,
    comparison,
    crash_list,
    findings,
    headline,
    junit,
    metric_names,
    page,
    references,
    short_names,
    stored,
    summary,
    timelines,
)
from sm121.run import details, verdict_file
from sm121.run.verdict_file import CrashReport, MemoryReport
from sm121.stress.memory import MemoryFile

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
SCENARIOS = "meta_tests/scenarios/verdicts.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = ("pass", "fail", "invalid", "inconclusive", "crash", "hostile")
    return {kind: report_runs.write(kind, folder / kind) for kind in kinds}


class Tags(HTMLParser):
    """Elements that were opened and not closed, and every element there is."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.all: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.all.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


@pytest.mark.parametrize("kind", ["pass", "fail", "invalid", "inconclusive", "crash", "hostile"])
def test_the_page_is_sound_small_and_alone(runs, kind):
    text = page.html(stored.read(runs[kind]))
    assert len(text.encode()) < 2_000_000
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.all.count("script") == 3 and "img" not in tags.all and "iframe" not in tags.all
    policy = html.unescape(text.partition('Policy" content="')[2].partition('">')[0])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_a_run_in_which_everything_fails_is_still_a_page_that_opens(runs):
    found = stored.read(runs["pass"])
    for count in range(3000):
        test = found.run.tests[0].model_copy(
            update={"id": f"tests/test_kernel.py::test_x[{count}]"}
        )
        found.run.tests.append(test)
        if count % 5 == 0:
            test.verdict, test.unmet = Verdict.FAIL, [unmet.Fact("0", f"{count}" + "x" * 500)]
            failure = details.FailureDetail(id=test.id, text="y" * 20_000, reproduce="pytest")
            found.details.failures.append(failure)
    text = page.html(found)
    assert len(text.encode()) <= 2_000_000 and "500 more findings" in text
    assert text.count("Left out, to keep this page small: what pytest showed") == 1
    assert "Left out" not in page.html(stored.read(runs["pass"]))


@pytest.mark.parametrize("what", ["failures", "reasons", "remarks", "metrics", "waived", "record"])
def test_a_page_is_2_mb_at_most_whatever_fills_it(runs, what):
    found = stored.read(runs["fail"])
    run, said = found.run, headline.of(found.run).sentence
    text = "y" * 590
    first = run.tests[0]
    verdict = Verdict.FAIL if what in ("failures", "waived") else Verdict.NOT_RUN
    if what in ("failures", "reasons", "waived"):
        run.tests += [
            first.model_copy(
                update={"id": f"{first.id}[{'p' * 400}{n}]", "verdict": verdict, "level": "matrix",
                        "message": f"{n} {text}", "waived": what == "waived"}
            )
            for n in range(2000)
        ]  # fmt: skip
        said = headline.of(run).sentence
    run.remarks += [text] * 5000 * (what == "remarks")
    run.environment["log"] = text * 5000 * (what == "record")
    if what == "metrics":
        run.metrics |= {f"kernel[{n}]": run.metrics["tg32@d0"] for n in range(5000)}
    page_ = page.html(found)
    assert len(page_.encode()) <= 2_000_000
    assert html.escape(said).replace("&#x27;", "&#39;") in page_, "the sentence is of the whole run"
    assert "all but the beginning of long lists" in page_ and "test_decode_rate[tg32-d0]" in page_


def test_numbers_that_are_none_are_not_known(runs, tmp_path, capsys):
    """As Python writes them, which no other reader of JSON takes."""
    file = tmp_path / "verdict.json"
    run = json.loads((runs["fail"] / "verdict.json").read_text())
    run["metrics"]["tg32@d0"] |= {"value": float("inf"), "ci_low": float("nan")}
    file.write_text(json.dumps(run))
    assert main(["report", str(tmp_path)]) == 0
    assert "decode tg32@d0 is no number; 52 required" in (tmp_path / "report.html").read_text()


def test_a_directory_with_nothing_but_the_verdict(runs, tmp_path):
    shutil.copy(runs["fail"] / "verdict.json", tmp_path)
    text = page.html(stored.read(tmp_path))
    assert "required" in text
    absent = re.findall(r'<p[^>]*id="absent">(.*?)</p>', text)
    assert len(absent) == 1, "one line, not a card for each"
    for part in ("latency distributions (details.json has no", "memory over the run", "matrix"):
        assert part in absent[0], part
    assert 'id="latency"' not in text and 'href="#latency"' not in text
    found = stored.read(runs["crash"])
    del found.run.levels["matrix"]
    assert (
        'id="absent">Not in this run: rates, latency distributions, paths of requests (performance '
        "did not run); matrix (matrix was not selected); history (regression did not run).<"
    ) in page.html(found)


def test_what_cannot_be_read_is_not_shown(runs, tmp_path):
    shutil.copy(runs["pass"] / "verdict.json", tmp_path)
    (tmp_path / "matrix").mkdir()
    for name in ("details.json", "memory.json", "matrix/matrix.json"):
        (tmp_path / name).write_text("{]")
    found = stored.read(tmp_path)
    assert found.memory is None and found.matrix is None and found.details == details.Details()
    assert [line.partition(":")[0] for line in found.run.remarks[-2:]] == [
        "memory.json cannot be read", "matrix/matrix.json cannot be read"
    ]  # fmt: skip
    assert "Not in this run: " in page.html(found)


def test_a_run_of_the_first_version_is_read_by_all(tmp_path, capsys):
    shutil.copy(DATA / "verdict-first-version.json", tmp_path / "verdict.json")
    assert main(["report", str(tmp_path)]) == 0
    assert "31.6" in (tmp_path / "report.html").read_text()
    assert main(["testlog", str(tmp_path), "--feature", "old"]) == 0
    assert "NEEDS FIXES" in capsys.readouterr().out
    source = comparison.read(tmp_path)
    assert source.row("tg32@d0").report.value == 31.6


def test_a_run_of_a_later_version_is_read_without_what_is_new(runs, tmp_path):
    raw = json.loads((runs["pass"] / "verdict.json").read_text())
    raw["schema_version"] = verdict_file.SCHEMA_VERSION + 1
    raw["new"] = {"a": 1}
    raw["engine"]["new"] = 2
    raw["engine"]["path"]["new"] = 3
    raw["tests"][0]["new"] = raw["metrics"]["tg32@d0"]["new"] = 4
    (tmp_path / "verdict.json").write_text(json.dumps(raw))
    found = stored.read(tmp_path)
    assert found.run.verdict is Verdict.PASS
    assert found.run.schema_version == verdict_file.SCHEMA_VERSION + 1


def _shard(directory, source, index, of=2, **changes):
    """A constructed run as one of the shards of a whole, with a key of a later version."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("matrix"))
    raw = json.loads((directory / "verdict.json").read_text()) | changes
    whole = [{"id": test["id"], "level": test["level"]} for test in raw["tests"]]
    raw["shard"] = {"index": index, "of": of, "tests": whole, "new": 1}
    raw["new"] = raw["engine"]["new"] = 1
    (directory / "verdict.json").write_text(json.dumps(raw))
    return directory


def test_merged_shards_have_everything_that_a_run_has(runs, tmp_path, capsys):
    """The crash, the failures and the memory are in the second one, which a later version wrote."""
    one = _shard(tmp_path / "one", runs["pass"], 1, memory=None, starts=[])
    memory = {"file": "memory.json", "device_memory": "x", "samples": 180}
    two = _shard(tmp_path / "two", runs["crash"], 2, memory=memory, environment={"only": "here"})
    output = tmp_path / "merged"
    for _ in range(2):  # a second time over the first
        assert main(["merge", str(one), str(two), "--output", str(output)]) == 1
    for name in ("verdict.json", "summary.md", "details.json", "junit.xml", "report.html"):
        assert (output / name).is_file(), name
    found = stored.read(output)
    assert found.run.verdict is Verdict.FAIL and found.run.shard is None
    (crash,) = found.crashes
    assert crash.bundle.startswith("shards/2/crashes/") and crash.files, crash
    assert (output / crash.bundle / "bundle.json").is_file()
    assert found.memory is not None, "its file is where verdict.json says"
    assert all((output / start.log).is_file() for start in found.run.starts) and found.run.starts
    assert found.details.failures == details.read(two).failures != []
    assert found.details.samples and found.details.requirements
    assert found.run.environment["other_shards"]["2"]["only"] == "here"
    assert crash.kind in (output / "report.html").read_text()
    capsys.readouterr()
    assert main(["merge", str(one), str(two), "--output", str(two)]) == 4
    assert "another folder than that of a shard" in capsys.readouterr().err


def test_an_old_run_is_merged_and_read_by_its_name(tmp_path, capsys):
    raw = json.loads((DATA / "verdict-first-version.json").read_text())
    (tmp_path / "old").mkdir()
    whole = [{"id": test["id"], "level": test["level"]} for test in raw["tests"]]
    raw |= {"shard": {"index": 1, "of": 1, "tests": whole}, "later": 1}
    file = tmp_path / "old" / "verdict.json"
    file.write_text(json.dumps(raw))
    assert verdict_file.read(file).verdict.value == raw["verdict"]
    status = main(["merge", str(tmp_path / "old"), "--output", str(tmp_path / "new")])
    merged = verdict_file.read(tmp_path / "new" / "verdict.json")
    assert (status, merged.verdict.value) == (raw["exit_status"], raw["verdict"])
    assert comparison.read(tmp_path / "new").row("tg32@d0").report.value == 31.6
    capsys.readouterr()


def test_junit_has_levels_as_suites_and_verdicts_as_properties(runs):
    for kind in ("fail", "invalid", "hostile"):
        found = stored.read(runs[kind])
        root = ElementTree.fromstring(junit.xml(found))
        assert [suite.get("name") for suite in root] == list(
            dict.fromkeys(test.level for test in found.run.tests)
        )
        assert int(root.get("tests")) == len(found.run.tests)
        for suite in root:
            level = found.run.levels[suite.get("name")]
            properties = {p.get("name"): p.get("value") for p in suite.find("properties")}
            assert properties["verdict"] == level.verdict.value
            assert int(suite.get("failures")) == level.failed
            assert int(suite.get("errors")) == level.invalid + level.inconclusive
            for case in suite.iter("testcase"):
                assert case.find("properties/property[@name='verdict']") is not None


def test_junit_is_not_green_when_the_run_is_not(runs):
    """A certificate was refused, and every test passed: readers see cases alone."""
    found = stored.read(runs["pass"])
    assert "run" not in [suite.get("name") for suite in ElementTree.fromstring(junit.xml(found))]
    for verdict in (Verdict.NOT_RUN, Verdict.INVALID):
        found.run.settle(verdict)
        found.run.reason = "not certified: 3 of regression skipped"
        root = ElementTree.fromstring(junit.xml(found))
        suite = root[-1]
        assert suite.get("name") == "run" and root.get("errors") == suite.get("errors") == "1"
        error = suite.find("testcase/error")
        assert error.get("message") == found.run.reason and error.get("type") == verdict.value
        assert int(root.get("tests")) == len(found.run.tests) + 1


def test_a_pass_says_what_did_not_run_and_gates_nothing_that_has_none(runs):
    found = stored.read(runs["pass"])
    found.run.tests[0].skipped, found.run.tests[0].verdict = True, Verdict.NOT_RUN
    held = len(found.run.tests) - 1
    assert found.run.why() == f"{held} checks passed; 1 did not run"
    found.run.metrics["tg32@d0"].minimum = found.run.metrics["tg32@d0"].target = None
    found.run.metrics["tg32@d0"].stretch = None
    for metric in [
        name for name in found.run.metrics if name.startswith("tg") and name != "tg32@d0"
    ]:
        del found.run.metrics[metric]
    text = page.html(found)
    assert "What did not run is listed under Levels." in text
    assert "no gate · <strong>measured</strong>" in text


@pytest.mark.parametrize("kind", ["pass", "fail", "hostile"])
def test_the_summary_is_short(runs, kind):
    text = summary.markdown(stored.read(runs[kind]).run)
    assert len(text) < 6000 and len(text.splitlines()) < 60
    assert "<script" not in text and "\x1b" not in text


@from_data
def test_a_number_is_digits_that_can_be_copied(value, shown):
    assert numbers.number(value) == shown
    assert not shown or float(shown) == pytest.approx(value, rel=5e-4)


def test_a_large_rate_is_the_same_number_wherever_it_is_shown(runs):
    found = stored.read(runs["pass"])
    rate = found.run.metrics["pp2048@d0"]
    rate.value, rate.ci_low, rate.ci_high = 17280.4, 17210.0, 17350.0
    for text in (page.html(found), summary.markdown(found.run)):
        assert "17280 tok/s" in text and "17210 to 17350" in text
        assert not re.search(r"1[.]7\d*e\+|17[^0-9]280|\\u202f|\u202f", text)
    charts_ = page._charts(found)["rates"]
    figures = json.dumps([chart.figure for chart in charts_])
    assert "y:.5~r" in figures and '"exponentformat": "none"' in figures
    assert "pp2048 at depth 0: 17280 tok/s (17210 to 17350, 95% sure), PASS" in figures
    assert all(chart.figure["layout"]["separators"] == "." for chart in charts_), "no 17,280"


def _decode(found):
    return next(chart for chart in page._charts(found)["rates"] if chart.id == "decode")


def test_axes_hold_data_and_gates_and_a_far_roofline_is_a_label(runs):
    found = stored.read(runs["fail"])
    near = _decode(found)
    assert "roofline (memory)" in [trace.get("name") for trace in near.figure["data"]]
    for name, metric in found.run.metrics.items():
        if name.startswith("tg"):
            metric.roofline = metric.value / 815.0
    far = _decode(found)
    assert "roofline (memory)" not in [trace.get("name") for trace in far.figure["data"]]
    labels = [note["text"] for note in far.figure["layout"]["annotations"]]
    assert labels[-1] == "\u2191 memory allows 815 tok/s, off the scale"
    assert "memory allows 815 tok/s, off the scale" in far.text
    low, high = far.figure["layout"]["yaxis"]["range"]
    assert low == 0.0 and 61.0 < high < 75.0, "of the stretch goal, not of the roofline"
    only = {name: m for name, m in found.run.metrics.items() if name == "tg32@d0"}
    found.run.metrics, found.run.arch = only, "sm90"
    one = _decode(found)
    low, high = one.figure["layout"]["yaxis"]["range"]
    assert 30 < low < 46.5 and 61 < high < 70 and f"begins at {numbers.number(low)}" in one.note


def test_gates_have_their_number_beside_them(runs):
    found = stored.read(runs["fail"])
    decode = _decode(found)
    notes = {note["text"]: note for note in decode.figure["layout"]["annotations"]}
    assert {"52 required", "47", "58 target, 61 stretch"} <= set(notes), "near ones share a label"
    assert (notes["52 required"]["x"], notes["52 required"]["y"]) == (0, 52.0)
    assert notes["47"]["x"] == 1, "the place of the category: plotly takes its name for a number"
    assert notes["52 required"]["yshift"] > 0, "47.3 is below it"
    found = stored.read(runs["pass"])
    assert _decode(found).figure["layout"]["annotations"][0]["yshift"] < 0
    for metric in found.run.metrics.values():
        metric.value, metric.ci_low, metric.ci_high = 5 * metric.value, None, None
    labels = [note["text"] for note in _decode(found).figure["layout"]["annotations"]]
    assert labels[0] == "52 required, 58 target, 61 stretch", "of a GPU five times as fast"


def test_points_that_decide_nothing_are_hollow(runs):
    looks = {}
    for kind in ("pass", "invalid", "inconclusive"):
        decode = _decode(stored.read(runs[kind]))
        points = {trace.get("name"): trace.get("marker") for trace in decode.figure["data"]}
        gated, other = points["tg32, this run"], points["tg128, this run"]
        looks[kind] = gated["symbol"][0], gated["color"][0] == "var(--card)", other["color"][0]
        legend = [name for name, _, _ in decode.legend]
        assert ("no gate" in legend) is (kind == "pass")
        assert (f"{kind.upper()}: counts neither way" in legend) is (kind != "pass")
    assert looks["pass"] == ("circle", False, "var(--card)")
    assert looks["invalid"][:2] == looks["inconclusive"][:2] == ("circle-x", True)


def test_a_history_says_how_this_run_lies_against_the_level(runs):
    for kind, words in (
        ("fail", "This run, 47.3 tok/s, is 11.8 % below the level of the 4 runs before it (53.6), "
                 "which is worse"),
        ("pass", "is 0.9 % above the level of the 4 runs before it (53.6), which is better"),
    ):  # fmt: skip
        (chart,) = page._charts(stored.read(runs[kind]))["history"]
        assert words in chart.note and "no change" not in chart.note
        axis = chart.figure["layout"]["xaxis"]
        assert (axis["tick0"], axis["dtick"], axis["range"]) == (1, 1, [0.5, 12.5])
        levels = [trace["x"] for trace in chart.figure["data"][1:]]
        assert levels[-1][1] < 12, "this run is not in the level that it is compared with"
    series = details.Series(
        unit="ms",
        higher_is_better=False,
        points=[details.SeriesPoint(run=f"{n}", value=v) for n, v in enumerate((0.0, 5.0))],
    )
    (chart,) = charts.histories(details.Details(history={"e2e_p50": series}), [])
    assert "after 0 ms" in chart.note


def test_each_place_with_a_verdict_of_a_metric_says_how_sure_it_is(runs):
    found = stored.read(runs["pass"])
    metric = found.run.metrics["ttft_p99"]
    metric.ci_low = metric.ci_high = None
    metric.confidence = 0.077
    for starts, words in ((None, ""), (1, ", of one start"), (6, ", of 6 starts")):
        metric.starts = starts
        text = page.html(found)
        tile = text.partition("time to first token, p99")[2].partition("</li>")[0]
        row = text.partition("<code>ttft_p99</code>")[2].partition("</tr>")[0]
        assert f"8% sure{words}<" in tile and f"8% sure{words}<" in row
        assert f"8% sure{words} |" in summary.markdown(found.run)
    decode = _decode(found)
    assert any("95% sure" in cell for row in decode.rows for cell in row)


def test_what_was_not_held_against_anything_is_measured_not_passed(runs):
    text = page.html(stored.read(runs["pass"]))
    row = text.partition("<code>tg128@d0</code>")[2].partition("</tr>")[0]
    assert ">measured<" in row and ">PASS<" not in row
    assert ">PASS<" in text.partition("<code>tg32@d0</code>")[2].partition("</tr>")[0]


@from_data
def test_a_long_name_of_a_kernel_is_folded(runs, name, short):
    assert short_names.kernel(name) == short
    found = stored.read(runs["pass"])
    found.run.engine.kernels.kernels[0].name = name
    text = html.unescape(page.html(found))
    assert f"<code>{short}</code></summary>" in text or name == short
    assert name in text, "the whole of it is there"


def test_a_test_has_the_same_link_in_every_run():
    ids = ["tests/test_performance.py::test_decode_rate[tg32-d0]", "\u202e<b>", "a", "A"]
    assert short_names.anchors(ids) == {
        ids[0]: "test-performance-test-decode-rate-tg32-d0",
        ids[1]: "test-b",
        "a": "test-a",
        "A": "test-a--2",
    }
    assert short_names.anchors(ids[:1]) == {ids[0]: "test-performance-test-decode-rate-tg32-d0"}


@pytest.mark.parametrize("around", range(0, 1400, 53))
def test_evidence_is_cut_between_words(around):
    line = ", ".join(f"some_option{place}=value.{place}" for place in range(60))
    shown = log_lines.cut(line, 200, around=around)
    assert len(shown) <= 200 and line[around] in shown
    kept = shown.strip("\u2026")
    start = line.index(kept)
    assert (start == 0) is not shown.startswith("\u2026")
    words = {*re.findall(r"[\w.]+", line)}
    assert {*re.findall(r"[\w.]+", kept)} <= words, "no part of a word"
    assert start <= around < start + len(kept)
    assert log_lines.cut("x" * 900, 400) == "x" * 399 + "\u2026"


def _record(sent, chunks, ended, **more):
    answer = TimedAnswer(sent, ended, asked_tokens=4, asked_prompt=612, **more)
    answer.chunks = [Chunk(at, 1, None, True, True, None) for at in chunks]
    return json.dumps({"kind": "long", **asdict(answer), "later": 1}) + "\n"


def test_the_path_of_the_median_and_the_slowest_request(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    ms = 10**6
    (folder / "d100-c2.jsonl").write_text(
        _record(5 * ms, [15 * ms, 17 * ms, 29 * ms, 31 * ms, 34 * ms, 36 * ms], 40 * ms)
        + _record(5 * ms, [15 * ms, 16 * ms, 17 * ms], 20 * ms)
        + _record(5 * ms, [], 9 * ms, error="reset")
        + json.dumps({"kind": "short"}) + "\n"
    )  # fmt: skip
    (cell,) = timelines.read(tmp_path).cells
    assert cell.name == "pp512 tg4 at depth 100, 2 streams" and cell.requests == 3
    median, slowest = cell.paths
    assert (median.which, median.first_ms, median.end_ms, median.tokens) == ("median", 10, 35, 6)
    assert median.chunks_ms == (10, 12, 24, 26, 29, 31) and median.gap_ms == 2
    assert [(gap.begins_ms, gap.ms, gap.after) for gap in median.gaps] == [
        (10, 2, 1), (12, 12, 2), (26, 3, 4)
    ]  # fmt: skip
    template = page.environment().get_template("requests.html.j2")
    html = template.render(paths=timelines.read(tmp_path))
    assert "The slowest request: no chunk, 0 chunks, failed after 4 ms." in html
    assert slowest.error == "reset", "a failed request is infinitely slow"
    assert 'd="M285.7 0V24M342.9 0V24' in html and 'd="M1000.0 0V24"' in html


def test_records_that_cannot_be_read_or_are_too_many_are_said(tmp_path, monkeypatch):
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "d0-c1.jsonl").write_text("{]\n")
    (folder / "d0-c2.jsonl").write_text('{"kind": "long"}\n[]\n')
    (folder / "d0-c4.jsonl").write_text("")
    (folder / "other.jsonl").write_text("{]")
    (folder / "d1-c1.jsonl").symlink_to("/dev/zero")
    (folder / "d2-c1.jsonl").write_text(_record(0, [10**6, 2 * 10**6], 3 * 10**6))
    found = timelines.read(tmp_path)
    assert [line.partition(" ")[0] for line in found.left_out] == [
        "records/d0-c1.jsonl", "records/d0-c2.jsonl"
    ]  # fmt: skip
    (cell,) = found.cells
    assert [path.which for path in cell.paths] == ["only"] and cell.paths[0].gaps == ()
    monkeypatch.setattr(timelines, "_MOST_BYTES", 20)
    assert timelines.read(tmp_path).left_out[-1] == "records/d2-c1.jsonl: more than a page shows"
    assert timelines.read(tmp_path / "none") == ([], [])


def test_a_model_calls_nobody_in_a_pull_request():
    assert "@torvalds" not in summary.plain("hello @torvalds")
    assert summary.plain("tg32@d0") == "tg32@d0"


def test_tests_that_say_the_same_stand_together(runs):
    found = findings.grouped(stored.read(runs["inconclusive"]))
    assert len(found) == 1 and len(found[0].ids) == 3
    first = findings.grouped(stored.read(runs["fail"]))[0]
    assert first.required == "tg32@d0: at least 52 tok/s"
    assert first.observed.startswith("47.3 tok/s")
    assert first.requirement and first.detail.reproduce
    assert first.evidence == ("server-cutlass.log", "records")


def test_evidence_is_of_the_tests_own_server(runs, tmp_path):
    shutil.copytree(runs["fail"], tmp_path / "run")
    for name in ("server-other.log", "server-other.status.json", "server-cutlass.status.json"):
        (tmp_path / "run" / name).write_text("x")
    report = stored.read(tmp_path / "run")
    other = {"configuration": "other", "log": "server-other.log"}
    report.run.starts.append(report.run.starts[0].model_copy(update=other))
    assert findings.grouped(report)[0].evidence == ("server-cutlass.log", "records")
    detail = next(d for d in report.details.failures if d.id == findings.failures(report.run)[0].id)
    detail.logs = ["server-other.log"]
    assert findings.grouped(report)[0].evidence == ("server-other.log", "records")
    detail.logs = []
    assert findings.grouped(report)[0].evidence == ("records",)


@pytest.mark.slow("a run of the matrix")
def test_a_failure_notes_the_logs_of_its_server(run_matrix):
    """One cell falls back: its own log is the evidence, not those of all cells."""
    status, run, _ = run_matrix("--matrix", "1", faults="fallback:triton")
    assert status == 1 and len(run.verdict["starts"]) > 2
    noted = [failure.logs for failure in details.read(run.report).failures]
    cells = [logs for logs in noted if logs]
    assert cells and all(len(logs) < len(run.verdict["starts"]) for logs in cells)
    assert all((run.report / log).is_file() for logs in cells for log in logs)


def test_references_are_drawn_only_beside_what_they_are_of(runs):
    known = references.load()
    by_name = {item.name: item.values for item in known.reference}
    assert by_name["llama.cpp"]["tg32@d0"] == 57.85 and by_name["SGLang"]["tg32@d0"] == 52.37
    run = stored.read(runs["pass"]).run
    assert known.comparable(run) is None and "llama.cpp (tg32)" in page.html(
        stored.read(runs["pass"])
    )
    run.arch = "cpu"
    assert known.comparable(run) == "they are of sm121, this run is of cpu"


def test_memory_is_shown_as_it_was_sampled(runs):
    found = MemoryFile.model_validate_json((runs["pass"] / "memory.json").read_text())
    chart = charts.memory(found)
    assert [row[0] for row in chart.rows][:2] == ["server's processes", "host memory available"]
    pss, *_, cache = chart.figure["data"]
    assert pss["x"][0] == 0.0 and len(pss["x"]) == len(found.samples)
    assert pss["y"][-1] == round(found.samples[-1].pss_bytes / 2**30, 4)
    assert max(share for share in cache["y"] if share is not None) <= 100
    many = found.model_copy(update={"samples": found.samples * 50})
    assert len(charts.memory(many).figure["data"][0]["x"]) <= 1800, "a chart of a soak stays small"
    assert charts.memory(found.model_copy(update={"samples": []})) is None


def test_the_memory_of_a_worker_is_found_where_verdict_json_says(runs, tmp_path):
    run = verdict_file.read(runs["pass"] / "verdict.json")
    run.memory = MemoryReport(file="workers/gw0/memory.json", device_memory="x", samples=1)
    verdict_file.write(run, tmp_path / "verdict.json")
    (tmp_path / "workers" / "gw0").mkdir(parents=True)
    shutil.copy(runs["pass"] / "memory.json", tmp_path / "workers" / "gw0")
    assert stored.read(tmp_path).memory is not None
    run.memory.file = str(runs["pass"] / "memory.json")
    verdict_file.write(run, tmp_path / "verdict.json")
    outside = stored.read(tmp_path)
    assert outside.memory is None and "not in the report directory" in outside.run.remarks[-1]


def test_a_matrix_is_shown_with_every_declared_value(runs, tmp_path):
    file = MatrixFile.model_validate_json((runs["pass"] / "matrix" / "matrix.json").read_text())
    found = stored.read(runs["pass"])
    text = page.html(found)
    own = text.partition(f'<span class="thin small">{file.cells[1].id}</span>')[2].partition(
        "</tr>"
    )[0]
    assert re.findall(r'<span class="muted">(.*?)</span>', own) == [
        "took 61 s",
        "tg32@d0 53.1 (100% of the baseline)",
    ]
    assert "<dt>cells not run yet</dt><dd>1</dd>" in text
    assert "<dt>combinations of 2</dt><dd>45 ran of 47, 47 planned</dd>" in text
    assert all(f'<th scope="col">{axis}</th>' in text for axis in file.values)
    down, across = sorted(file.values, key=lambda axis: -len(file.values[axis]))[:2]
    head, rows = text.partition(f"{down} (down) ")[2].partition("</table>")[0].split("<tbody>")
    assert re.findall(r'"col">([^<\\]+)</th>', head) == file.values[across]
    assert re.findall(r'"row">(.*?)</th>', rows) == file.values[down]
    assert "<li>moe=triton + kv=fp8 fail together: concurrent requests</li>" in text
    shutil.copy(runs["pass"] / "verdict.json", tmp_path)
    (tmp_path / "matrix").mkdir()
    none = file.model_copy(update={"cells": []}).model_dump_json()
    (tmp_path / "matrix" / "matrix.json").write_text(none)
    assert stored.read(tmp_path).matrix is None


def test_keys_of_a_later_version_are_left_out_and_wrong_ones_are_named(runs):
    raw = json.loads((runs["pass"] / "matrix" / "matrix.json").read_text())
    later = {**raw, "pairs": {}, "cells": [{**cell, "new": 1} for cell in raw["cells"]]}
    assert lenient.validate(MatrixFile, later) == MatrixFile.model_validate(raw)
    with pytest.raises(ValueError, match=r"at cells\.0\.outcome"):
        lenient.validate(MatrixFile, {**raw, "cells": [{**raw["cells"][0], "outcome": "GOOD"}]})


def test_a_bundle_that_nobody_listed_is_a_crash(runs, tmp_path):
    bundle = tmp_path / "crashes" / "7"
    bundle.mkdir(parents=True)
    (bundle / "server.log").write_text("x")
    (found,) = crash_list.read([], tmp_path)
    assert found.bundle == "crashes/7" and found.files == ("crashes/7/server.log",)
    assert found.kind == "unknown" and "bundle.json" in found.summary
    shutil.copy(runs["crash"] / "crashes" / "1-illegal_memory_access" / "bundle.json", bundle)
    (found,) = crash_list.read([], tmp_path)
    assert found.kind == "illegal_memory_access" and found.reproduce and found.remedy
    listed = CrashReport(kind="oom", summary="short", owner="us", bundle="crashes/7")
    (found,) = crash_list.read([listed], tmp_path)
    assert (found.kind, found.summary, len(found.lines)) == ("oom", "short", 2)
    for outside in ("../..", "x" * 5000, "\0"):
        (found,) = crash_list.read([listed.model_copy(update={"bundle": outside})], bundle)
        assert found.files == (), "nothing outside of the report is listed"


@pytest.mark.parametrize("folder", ["leak", "oom-cgroup", "stopped"])
def test_the_sample_bundles_of_the_docs_are_of_this_version(folder):
    text = (ROOT / "docs" / "bundles" / folder / "bundle.json").read_text("utf-8")
    assert crash_bundle.BundleIndex.model_validate_json(text).kind


@from_data
def test_metrics_have_names_for_people(name, words):
    assert metric_names.words(name) == words


def test_a_run_writes_everything(run_pytest, fault_server, tmp_path):
    """The whole way: options, a failure, the files, GitHub's part, the closing lines."""
    server = fault_server()
    step = tmp_path / "step.md"
    step.write_text("before\n")
    status, run = run_pytest(
        *("--arch", "cpu", *server.options), f"{SCENARIOS}::test_pass", f"{SCENARIOS}::test_fail",
        f"{SCENARIOS}::test_skipped", environment={"GITHUB_STEP_SUMMARY": str(step)},
    )  # fmt: skip
    assert status == 1
    for name in ("verdict.json", "summary.md", "junit.xml", "details.json", "report.html"):
        text = (run.report / name).read_text()
        assert text and server.key not in text, name
    assert step.read_text().startswith("before\n# SM121 conformance: FAIL")
    closing = run.output[run.output.index("= sm121 conformance =") :]
    assert len(closing.splitlines()) < 24, "the first failure is read without scrolling"
    for part in ("seen: a secret [redacted]", "run again: python -m pytest", "report.html"):
        assert part in closing
    known = details.read(run.report)
    assert [failure.id for failure in known.failures] == [f"{SCENARIOS}::test_fail"]
    assert known.failures[0].location.startswith(f"{SCENARIOS}:")
    # A report that is made anew from the files says the same.
    before = (run.report / "report.html").read_text()
    assert main(["report", str(run.report)]) == 0
    assert (run.report / "report.html").read_text() == before


def test_the_command_that_runs_one_test_again(run_pytest, fault_server):
    server = fault_server()
    _, run = run_pytest(
        *("--arch", "cpu", *server.options),
        *("-m", "correctness", "-k", "fail or pass", "-q", "--engine=openai"),
        f"{SCENARIOS}::test_fail",
    )
    (failure,) = details.read(run.report).failures
    assert f"pytest {SCENARIOS}::test_fail" in failure.reproduce
    assert failure.reproduce.count(SCENARIOS) == 1
    assert "--base-url" in failure.reproduce and "--report-dir" not in failure.reproduce
    assert "-k" not in failure.reproduce.split() and server.key not in failure.reproduce


@pytest.mark.slow("two runs in new interpreters")
def test_the_command_runs_from_where_the_run_was_started(tmp_path, fault_server):
    """From another checkout, as a shard of a run: the command that is printed runs the test."""
    server = fault_server(key="")
    (tmp_path / "here").mkdir()
    shutil.copy(ROOT / SCENARIOS, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p sm121.plugin\n")

    def run(*command, report):
        return subprocess.run(
            [sys.executable, *command, f"--report-dir={tmp_path / report}"],
            cwd=tmp_path / "here", capture_output=True, text=True,
        )  # fmt: skip

    first = run(
        *("-m", "pytest", "-p", "no:cacheprovider", "../verdicts.py", "-k", "fail", "-vv"),
        *("--arch", "cpu", "--base-url", server.base_url, "--share-machine"),
        *("--shard", "1/1", "--resume"),
        report="first",
    )  # fmt: skip
    assert first.returncode == 1, first.stdout + first.stderr
    (failure,) = details.read(tmp_path / "first").failures
    command = shlex.split(failure.reproduce)
    assert command[:4] == ["python", "-m", "pytest", "../verdicts.py::test_fail"], first.stdout
    assert not {"--shard", "1/1", "--resume", "-vv", "-k"} & set(command)
    again = run(*command[1:], report="again")
    assert "1 failed" in again.stdout, again.stdout + again.stderr


def test_collect_only_says_what_would_run_and_why_the_rest_would_not(run_pytest):
    status, run = run_pytest("--collect-only", "-q", "--arch", "cpu", SCENARIOS)
    assert status == 0 and not (run.report / "verdict.json").exists()
    assert "would run: 9 checks (correctness 9)" in run.output
    assert "because: applies to sm121; the target is cpu" in run.output


def test_collect_only_promises_no_numerics_beside_an_attached_server(run_pytest, fault_server):
    arguments = ("--arch", "sm121", *fault_server().options,
                 "--served-model-name", "canary", "tests/test_kernel.py")  # fmt: skip
    _, run = run_pytest("--collect-only", "-q", *arguments)
    promised = int(re.search(r"would run: (\d+) checks", run.output)[1])
    assert "because: kernels are tested where the engine is installed" in run.output
    _, named = run_pytest("--collect-only", "-q", *arguments, "--kernel-provider", "torch")
    assert int(re.search(r"would run: (\d+) checks", named.output)[1]) > promised + 50


@pytest.mark.slow("two runs that store")
def test_the_history_of_a_run_is_in_its_report(run_pytest, fault_server, tmp_path):
    """Two runs, the second one slower: both are in the series, this one last, and once."""
    server = fault_server()
    runs = []
    for rate in (65.0, 63.5):
        samples = {"tg32@d0": [rate + step / 10 for step in range(6)]}
        runs.append(
            run_pytest(
                *("--arch", "sm121", *server.options),
                *("--served-model-name", "canary", "--benchmark-autosave"),
                f"--benchmark-storage={tmp_path / 'storage'}",
                "meta_tests/scenarios/measurements.py",
                environment={"SM121_META_SAMPLES": json.dumps(samples)},
            )
        )
        assert runs[-1][0] == 0, runs[-1][1].output
    first, second = (details.read(run.report) for _, run in runs)
    assert first.history == {} and first.samples["tg32@d0"].taken == 6
    points = second.history["tg32@d0"].points
    assert [round(point.value, 2) for point in points] == [65.25, 63.75]
    assert points[-1].run == "this run" and points[0].run.startswith("0001_")
    assert "tg32@d0 over 2 runs" in (runs[-1][1].report / "report.html").read_text()


def test_the_test_log_is_the_documents_template_filled_in(runs, tmp_path, capsys):
    feature = ("--feature", "MXFP4 lm_head", "--branch", "feature/x")
    arguments = ["testlog", str(runs["fail"]), *feature]
    assert main([*arguments, "--baseline", str(runs["pass"])]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Test Log: MXFP4 lm\\_head\n\nDate: 2026-01-12\nBranch: feature/x\n")
    for part in table(__name__, "PARTS_OF_THE_TEST_LOG"):
        assert part in text, part
    for _ in range(2):
        assert main([*arguments, "--output", str(tmp_path)]) == 0
    results = (tmp_path / "BENCHMARK_RESULTS.md").read_text()
    assert results.count("MXFP4\\_lm\\_head\\_20260112091403") == 1, "a run is added once"
    assert (tmp_path / "TEST_LOGS" / "FEATURE_MXFP4-lm_head_2026-01-12.md").is_file()
    (tmp_path / "BENCHMARK_RESULTS.md").write_text("something else\n")
    assert main([*arguments, "--output", str(tmp_path)]) == 4, "a file of somebody else stays"
