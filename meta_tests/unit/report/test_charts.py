"""The charts and tables of a report: which numbers they show, and their labels."""

import html
import itertools
import json
import re
import shutil
from dataclasses import asdict

import pytest

from meta_tests.fakes import report_runs
from sm121.client.timed_answer import Chunk, TimedAnswer
from sm121.core import lenient, numbers
from sm121.core.verdict import Verdict
from sm121.matrix.feature_matrix import MatrixFile
from sm121.report import charts, page, references, short_names, stored, summary, timelines
from sm121.run import details
from sm121.run.verdict_file import ChangeReport
from sm121.stress.memory import MemoryFile


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write a report directory of each kind; return the runs."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = ("pass", "fail", "invalid", "inconclusive")
    return {kind: report_runs.write(kind, folder / kind) for kind in kinds}


@pytest.fixture
def passed(runs):
    return stored.read(runs["pass"])


@pytest.fixture
def failed(runs):
    return stored.read(runs["fail"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.0, "0"),
        (0.0003, "0.0003"),
        (1.234e-05, "0.00001234"),
        (51.96, "51.96"),
        (999.96, "1000"),
        (9999.6, "10000"),
        (17280.4, "17280"),
        (-17280.0, "-17280"),
        (1234567.8, "1234568"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_is_digits_that_can_be_copied(value, shown):
    assert numbers.number(value) == shown
    assert not shown or float(shown) == pytest.approx(value, rel=5e-4)


def test_a_large_rate_has_the_same_digits_everywhere(passed):
    rate = passed.run.metrics["pp2048@d0"]
    rate.value = 17280.4
    rate.ci_low = 17210.0
    rate.ci_high = 17350.0
    for text in (page.html(passed), summary.markdown(passed.run)):
        assert "17280 tok/s" in text and "17210 to 17350" in text
        assert not re.search(r"1[.]7\d*e\+|17[^0-9]280|\\u202f|\u202f", text)
    rates = page._charts(passed)["rates"]
    figures = json.dumps([chart.figure for chart in rates])
    assert "y:.5~r" in figures and '"exponentformat": "none"' in figures
    assert "pp2048 at depth 0: 17280 tok/s (17210 to 17350, 95% confidence), PASS" in figures
    assert all(chart.figure["layout"]["separators"] == "." for chart in rates), "no 17,280"


def _decode(report):
    return next(chart for chart in page._charts(report)["rates"] if chart.id == "decode")


def _notes(report):
    """Return the labels in the chart of decode rates. The keys are their texts."""
    notes = _decode(report).figure["layout"]["annotations"]
    return {note["text"]: note for note in notes}


def _traces(chart):
    return {trace.get("name"): trace for trace in chart.figure["data"]}


def test_axes_hold_data_and_gates_and_a_far_roofline_is_a_label(failed):
    run = failed.run
    assert "roofline (memory)" in _traces(_decode(failed))
    for name, metric in run.metrics.items():
        if name.startswith("tg"):
            metric.roofline = metric.value / 815.0
    far = _decode(failed)
    assert "roofline (memory)" not in _traces(far)
    assert [*_notes(failed)][-1] == "\u2191 memory allows 815 tok/s, off the scale"
    assert "memory allows 815 tok/s, off the scale" in far.text
    low, high = far.figure["layout"]["yaxis"]["range"]
    assert low == 0.0 and 61.0 < high < 75.0, "of the stretch goal, not of the roofline"
    run.metrics = {"tg32@d0": run.metrics["tg32@d0"]}
    run.arch = "sm90"
    one = _decode(failed)
    low, high = one.figure["layout"]["yaxis"]["range"]
    assert 30 < low < 46.5 and 61 < high < 70 and f"begins at {numbers.number(low)}" in one.note


def test_gates_have_their_number_beside_them(passed, failed):
    notes = _notes(failed)
    assert {"52 required", "47", "61 stretch<br>58 target"} <= set(notes), "near ones share a label"
    assert (notes["52 required"]["x"], notes["52 required"]["y"]) == (0, 52.0)
    assert notes["47"]["x"] == 1, "the place of the category: plotly takes its name for a number"
    assert notes["52 required"]["yshift"] > 0, "47.3 is below it"
    assert next(iter(_notes(passed).values()))["yshift"] < 0
    for metric in passed.run.metrics.values():
        metric.value = 5 * metric.value
        metric.ci_low = None
        metric.ci_high = None
    label = next(iter(_notes(passed)))
    assert label == "61 stretch<br>58 target<br>52 required", "of a GPU five times as fast"


def test_points_without_a_decision_are_hollow(runs):
    looks = {}
    for kind in ("pass", "invalid", "inconclusive"):
        decode = _decode(stored.read(runs[kind]))
        points = {name: trace.get("marker") for name, trace in _traces(decode).items()}
        gated = points["tg32, this run"]
        other = points["tg128, this run"]
        looks[kind] = gated["symbol"][0], gated["color"][0] == "var(--card)", other["color"][0]
        legend = [name for name, _, _ in decode.legend]
        assert ("no gate" in legend) is (kind == "pass")
        assert (f"{kind.upper()}: counts neither as PASS nor as FAIL" in legend) is (kind != "pass")
    assert looks["pass"] == ("circle", False, "var(--card)")
    assert looks["invalid"][:2] == looks["inconclusive"][:2] == ("circle-x", True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "fail",
            (
                "This run, 47.3 tok/s, is 11.8 % below the level of the 4 runs before it "
                "(53.6), which is worse"
            ),
            id="fail, This run, 47.3 tok/s, is 11.8 % below the level",
        ),
        pytest.param(
            "pass",
            "is 0.9 % above the level of the 4 runs before it (53.6), which is better",
            id="pass, is 0.9 % above the level of the 4 runs before it",
        ),
    ],
)
def test_a_history_shows_the_distance_of_this_run_from_the_level(runs, kind, words):
    (chart,) = page._charts(stored.read(runs[kind]))["history"]
    assert words in chart.note and "no change" not in chart.note
    axis = chart.figure["layout"]["xaxis"]
    assert (axis["tick0"], axis["dtick"], axis["range"]) == (1, 1, [0.5, 12.5])
    levels = [trace["x"] for trace in chart.figure["data"][1:]]
    assert levels[-1][1] < 12, "this run is not in the level that it is compared with"


def test_a_history_that_begins_at_zero_has_no_percentage():
    points = [details.SeriesPoint(run=f"{n}", value=v) for n, v in enumerate((0.0, 5.0))]
    series = details.Series(unit="ms", higher_is_better=False, points=points)
    (chart,) = charts.histories(details.Details(history={"e2e_p50": series}), [])
    assert "after 0 ms" in chart.note


@pytest.mark.slow("two runs that store")
def test_the_history_of_a_run_is_in_its_report(run_pytest, fault_server, tmp_path):
    """The report of a run contains the history of its metrics.

    The second of two runs is slower. Both are in its history, the second one last and only once.
    """
    attached = ("--arch", "sm121", *fault_server().options, "--served-model-name", "canary")
    storing = ("--benchmark-autosave", f"--benchmark-storage={tmp_path / 'storage'}")
    runs = []
    for rate in (65.0, 63.5):
        samples = json.dumps({"tg32@d0": [rate + step / 10 for step in range(6)]})
        words = (*attached, *storing, "meta_tests/whole/scenarios/measurements.py")
        status, run = run_pytest(*words, environment={"SM121_META_SAMPLES": samples})
        assert status == 0, run.output
        runs.append(run)
    first, second = (details.read_details(run.report) for run in runs)
    assert first.history == {} and first.samples["tg32@d0"].taken == 6
    points = second.history["tg32@d0"].points
    assert [round(point.value, 2) for point in points] == [65.25, 63.75]
    assert points[-1].run == "this run" and points[0].run.startswith("0001_")
    assert "tg32@d0 over 2 runs" in (runs[-1].report / "report.html").read_text()


def _row(text, name, end="</tr>"):
    """Return the part of a page from a name to the end of its row."""
    return text.partition(name)[2].partition(end)[0]


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (None, ""),
        (1, ", of one start"),
        (6, ", of 6 starts"),
    ],
)
def test_each_place_with_a_verdict_of_a_metric_says_how_sure_it_is(passed, starts, words):
    metric = passed.run.metrics["ttft_p99"]
    metric.ci_low = None
    metric.ci_high = None
    metric.confidence = 0.077
    metric.starts = starts
    text = page.html(passed)
    assert f"8% confidence{words}<" in _row(text, "<code>ttft_p99</code>", "</tr>")
    cells = [*itertools.chain.from_iterable(_decode(passed).rows)]
    assert any("95% confidence" in cell for cell in cells)
    passed.run.metrics = {"ttft_p99": metric}
    tile = _row(page.html(passed), "time to first token, p99", "</li>")
    assert "8% confidence<" in tile and "8% confidence |" in summary.markdown(passed.run)


def test_a_metric_without_a_gate_is_shown_as_measured(passed):
    text = page.html(passed)
    row = _row(text, "<code>tg128@d0</code>")
    assert ">measured<" in row and ">PASS<" not in row
    assert ">PASS<" in _row(text, "<code>tg32@d0</code>")


def test_the_table_of_rates_has_the_verdict_of_each(passed):
    """A rate without a gate has the verdict "measured", and a rate that became slower is no
    PASS."""
    run = passed.run
    run.changes.append(
        ChangeReport(
            metric="tg32@d0", unit="tok/s", here=46.8, before=52.0, worse=0.1, allowed=0.05,
            beside="5 stored runs", verdict=Verdict.FAIL,
        )
    )  # fmt: skip
    words = {(row[1], row[0]): row[-1] for row in _decode(passed).rows}
    assert words["tg32", "0"] == "FAIL" and words["tg128", "0"] == "measured", words


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("mxfp8_quantize_kernel", "mxfp8_quantize_kernel"),
        pytest.param(
            (
                "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, "
                "int, int>, cutlass::gemm::collective::Mma<(anonymous "
                "namespace)::X>>>(Params)"
            ),
            "cutlass::device_kernel",
            id="void",
        ),
        pytest.param(
            (
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
            ),
            "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…",
            id="xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        ),
        pytest.param(
            (
                "a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a::a"
                "::a::a::a::a::deep::kernel(int)"
            ),
            "a::a::a::a::a::a::a::a::a::a::a::a::a::a::deep::kernel",
            id="a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:a:",
        ),
    ],
)
def test_a_long_name_of_a_kernel_is_folded(passed, name, short):
    assert short_names.kernel(name) == short
    passed.run.engine.kernels.kernels[0].name = name
    text = html.unescape(page.html(passed))
    assert f"<code>{short}</code></summary>" in text or name == short
    assert name in text, "the whole of it is there"


def _record(sent, chunks, ended, **more):
    answer = TimedAnswer(sent, ended, asked_tokens=4, asked_prompt=612, **more)
    answer.chunks = [Chunk(at, 1, None, True, True, None) for at in chunks]
    return json.dumps({"kind": "long", **asdict(answer), "later": 1}) + "\n"


def test_the_path_of_the_median_and_the_slowest_request(tmp_path):
    folder = tmp_path / "records"
    ms = 10**6
    folder.mkdir()
    (folder / "d100-c2.jsonl").write_text(
        _record(5 * ms, [15 * ms, 17 * ms, 29 * ms, 31 * ms, 34 * ms, 36 * ms], 40 * ms)
        + _record(5 * ms, [15 * ms, 16 * ms, 17 * ms], 20 * ms)
        + _record(5 * ms, [], 9 * ms, error="reset")
        + json.dumps({"kind": "short"}) + "\n"
    )  # fmt: skip
    paths = timelines.read_cells(tmp_path)
    (cell,) = paths.cells
    assert cell.name == "pp512 tg4 at depth 100, 2 streams" and cell.requests == 3
    median, slowest = cell.paths
    assert (median.which, median.first_ms, median.end_ms, median.tokens) == ("median", 10, 35, 6)
    assert median.chunks_ms == (10, 12, 24, 26, 29, 31) and median.gap_ms == 2
    gaps = [(gap.begins_ms, gap.ms, gap.after) for gap in median.gaps]
    assert gaps == [(10, 2, 1), (12, 12, 2), (26, 3, 4)]
    text = page.environment().get_template("requests.html.j2").render(paths=paths)
    assert "The slowest request: no chunk, 0 chunks, failed after 4 ms." in text
    assert slowest.error == "reset", "a failed request is infinitely slow"
    assert 'd="M285.7 0V24M342.9 0V24' in text and 'd="M1000.0 0V24"' in text


def test_unreadable_or_too_many_records_are_reported(tmp_path, monkeypatch):
    folder = tmp_path / "records"
    folder.mkdir()
    texts = {"d0-c1": "{]\n", "d0-c2": '{"kind": "long"}\n[]\n', "d0-c4": "", "other": "{]"}
    texts["d2-c1"] = _record(0, [10**6, 2 * 10**6], 3 * 10**6)
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "d1-c1.jsonl").symlink_to("/dev/zero")
    paths = timelines.read_cells(tmp_path)
    names = [line.partition(" ")[0] for line in paths.left_out]
    assert names == ["records/d0-c1.jsonl", "records/d0-c2.jsonl"]
    (cell,) = paths.cells
    assert [path.which for path in cell.paths] == ["only"] and cell.paths[0].gaps == ()
    monkeypatch.setattr(timelines, "_MOST_BYTES", 20)
    assert (
        timelines.read_cells(tmp_path).left_out[-1]
        == "records/d2-c1.jsonl is not shown: the page's limit of cells or bytes is reached"
    )
    assert timelines.read_cells(tmp_path / "none") == ([], [])


def test_references_are_drawn_only_beside_what_they_are_of(passed):
    published = references.load()
    by_name = {item.name: item.values for item in published.reference}
    assert by_name["llama.cpp"]["tg32@d0"] == 57.85 and by_name["SGLang"]["tg32@d0"] == 52.37
    assert published.comparable(passed.run) is None and "llama.cpp (tg32)" in page.html(passed)
    passed.run.arch = "cpu"
    assert (
        published.comparable(passed.run)
        == "the documented numbers are of sm121, this run is of cpu"
    )


def test_memory_is_shown_as_it_was_sampled(runs):
    file = MemoryFile.model_validate_json((runs["pass"] / "memory.json").read_text())
    chart = charts.memory(file)
    assert [row[0] for row in chart.rows][:2] == ["server's processes", "host memory available"]
    pss, *_, cache = chart.figure["data"]
    assert pss["x"][0] == 0.0 and len(pss["x"]) == len(file.samples)
    assert pss["y"][-1] == round(file.samples[-1].pss_bytes / 2**30, 4)
    assert max(share for share in cache["y"] if share is not None) <= 100
    many = file.model_copy(update={"samples": file.samples * 50})
    assert len(charts.memory(many).figure["data"][0]["x"]) <= 1800, "a chart of a soak stays small"
    assert charts.memory(file.model_copy(update={"samples": []})) is None


def test_a_matrix_is_shown_with_every_declared_value(runs, passed, tmp_path):
    file = MatrixFile.model_validate_json((runs["pass"] / "matrix" / "matrix.json").read_text())
    text = page.html(passed)
    row = _row(text, f'<span class="thin small">{file.cells[1].id}</span>')
    figures = ["took 61 s", "tg32@d0 53.1 (100% of the baseline)"]
    assert re.findall(r'<span class="muted">(.*?)</span>', row) == figures
    assert "<dt>cells not run yet</dt><dd>1</dd>" in text
    assert "<dt>combinations of 2</dt><dd>45 ran of 47, 47 planned</dd>" in text
    assert all(f'<th scope="col">{axis}</th>' in text for axis in file.values)
    down, across = sorted(file.values, key=lambda axis: -len(file.values[axis]))[:2]
    head, rows = _row(text, f"{down} (down) ", "</table>").split("<tbody>")
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
