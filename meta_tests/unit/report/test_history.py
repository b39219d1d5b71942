"""``sm121 history`` on constructed runs: each fault, and the same runs without the fault."""

import itertools
import json
import re
import time
from operator import mul
from pathlib import Path

import numpy as np
import pytest

from meta_tests.fakes import browser, past_runs, planted_runs
from meta_tests.fakes.against_runs import a_run
from meta_tests.fakes.planted_runs import CHECK, DECODE, healthy, plant
from meta_tests.folders import DATA
from meta_tests.texts import text_file
from sm121 import cli
from sm121.report import history
from sm121.run import stored_run
from sm121.run.verdict_file import MetricReport


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return planted_runs.base(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def planted(base, tmp_path_factory):
    return planted_runs.sixty(base, tmp_path_factory.mktemp("planted"))


def test_injected_deviations_are_named(planted, capsys):
    assert cli.main(["history", str(planted)]) == 0
    out = capsys.readouterr().out
    assert "the last 20 of 60 runs" in out and "69 %" in out
    first = "11a2b3c4/0020 (vllm 0.33.0 000000014)"
    assert f"red since {first} in NVIDIA GB10 11a2b3: {DECODE}" in out
    worse = re.escape(f"beginning with {first}, and 5 more")
    assert re.search(rf"worse in NVIDIA GB10 11a2b3: decode tg32: 5.* {worse}", out)
    assert re.search(
        r"different from machines .* 77d8e9, vllm: (4\.\d|5\.\d)% worse in decode tg32", out
    )
    line = f"flaky: {CHECK} is red in 2 of 6 runs of vllm 0.33.0 on NVIDIA GB10 11a2b3"
    assert re.findall("flaky: .*", out) == [line]


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_the_page_and_the_summary_of_what_was_planted(planted, tmp_path, chromium):
    page = tmp_path / "history.html"
    assert cli.main(["history", str(planted), "--html", str(page)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert len(summary["runs"]) == 60 and len(summary["series"]) == 2
    assert {change["run"][-4:] for change in summary["changes"]} == {"0020"}
    assert summary["series"][0]["first_red"] == [f"11a2b3c4/{n:04}" for n in (4, 9, 20)]
    assert page.read_text("utf-8").count("first red<") == 3
    for width in browser.WIDTHS:
        tab = browser.open_report(chromium, page, width)
        assert tab.page.locator(".chart svg.main-svg").count() >= 6
        assert browser.fits(tab.page)
        link = tab.page.locator("#runs tbody a").first
        link.click()
        assert tab.page.inner_text("body") == "the report"
        tab.is_quiet()
        tab.page.close()


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
@pytest.mark.parametrize(
    "width",
    [390, pytest.param(1440, marks=pytest.mark.slow("axe takes ten seconds of 60 runs"))],
)
def test_the_page_of_many_runs_is_accessible(planted, tmp_path, chromium, width):
    page = tmp_path / "history.html"
    assert cli.main(["history", str(planted), "--html", str(page)]) == 0
    tab = browser.open_report(chromium, page, width)
    tab.page.evaluate(browser.UNFOLD)
    assert browser.accessibility(tab.page) == []
    tab.is_quiet()


QUIET = (
    "no run is red, no metric is worse than its best, no check is flaky, "
    "no machine is unlike its kind"
)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        pytest.param({"a1": [healthy(12)], "b2": [healthy(12)]}, None, id="alike"),
        pytest.param(
            {"a1": [[{"red": [CHECK]}, {"red": [CHECK]}], healthy(10)]}, None, id="mended"
        ),
        pytest.param(
            {"a1": [healthy(8), mul([{"slow": 1.07}], 2), healthy(2)]}, None, id="two-slow-starts"
        ),
        pytest.param(
            {"a1": [healthy(8), mul([{"slow": 1.1}], 8), healthy(8)]}, None, id="fixed-again"
        ),
        pytest.param(
            {"a1": [healthy(3)]},
            "not judged, because a change of level needs 6 runs with numbers",
            id="few",
        ),
        pytest.param({"a1": [mul([{"slow": 1.08}], 8), healthy(8)]}, None, id="faster"),
    ],
)
def test_a_healthy_twin_is_not_blamed(base, tmp_path, capsys, runs, words):
    runs = {machine: [*itertools.chain(*parts)] for machine, parts in runs.items()}
    assert cli.main(["history", str(plant(base, tmp_path, runs))]) == 0
    assert capsys.readouterr().out.rpartition("\n\n")[2].startswith(words or QUIET)


@pytest.mark.parametrize("name", ["verdict.json", "night-1.json", "red.verdict.json"])
@pytest.mark.parametrize("verdict", ["FAIL", "PASS"])
def test_a_red_run_is_red_by_any_name(tmp_path, name, verdict):
    run = a_run(("tests/test_smoke.py::a", verdict, "why"))
    (tmp_path / name).write_text(run.model_dump_json(), "utf-8")
    (past,) = history.read_runs([(None, tmp_path)]).runs
    assert past.verdict is run.verdict and past.is_red is (verdict == "FAIL")


def test_two_machines_that_fail_in_one_second_are_two_runs(tmp_path):
    """Two machines that fail in the same second are two runs, even without a metric.

    A copy of a run is the same run."""
    for folder, name in {"one": "a", "other": "b", "copy of one": "a"}.items():
        run = a_run((f"tests/test_smoke.py::{name}", "FAIL", "why"))
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "verdict.json").write_text(run.model_dump_json(), "utf-8")
    past = history.read_runs([(None, tmp_path)])
    assert [run.is_red for run in past.runs] == [True, True]


def test_history_names_a_slow_decline_and_a_failed_check(base, tmp_path, capsys):
    runs = [{"slow": 1.01**n} for n in range(14)]
    runs[-1]["red"] = [CHECK]
    assert cli.main(["history", str(plant(base, tmp_path, {"a1": runs}))]) == 0
    out = capsys.readouterr().out
    assert "red since a1/0013" in out and "worse in" in out and "flaky" not in out


@pytest.mark.parametrize(
    ("slow", "build", "named"),
    [(1.09, 1, True), (1.02, 1, False), (1.09, None, False)],
    ids=["8 % apart", "2 % apart", "of two builds"],
)
def test_history_names_starts_of_one_build_that_differ(base, tmp_path, capsys, slow, build, named):
    """The history reports that starts of one build differ by a constant factor.

    Every second start has the slow set of kernels."""
    runs = [{"build": build or 1 + n % 2, "slow": (1.0, slow)[n % 2]} for n in range(8)]
    assert cli.main(["history", str(plant(base, tmp_path, {"a1": runs}))]) == 0
    lines = re.findall("starts of one build differ: .*", capsys.readouterr().out)
    of_decode = [line for line in lines if "decode tg32 of 8 runs is between 5" in line]
    assert len(of_decode) == named and bool(lines) is named, lines
    for line in lines:
        assert line.endswith("--ab compares pairs of starts")


def simulated(seed: int, machines: int, runs: int, slow: float = 0.0) -> history.History:
    """Return healthy runs of machines that differ by 1 %.

    All metrics have noise of 0.5 %. One has slow days, and in one, a start in four is 7 % slow.
    ``slow`` is how much slower the first machine is."""
    random = np.random.default_rng(seed)
    boxes = np.random.default_rng(seed + 1)
    past = []
    for machine in range(machines):
        noise = random.normal(0, 0.005, (3, runs))
        for day in range(1, runs):
            noise[1, day] += 0.5 * noise[1, day - 1]
        noise[2] -= 0.07 * (random.random(runs) < 0.25)
        noise += -slow if slow and machine == 0 else boxes.normal(0, 0.01)
        for n in range(runs):
            names = ("tg32@d0", "tg128@d0", "pp2048@d0")
            rates = dict(zip(names, 57 * np.exp(noise[:, n]), strict=True))
            metrics = [
                stored_run.StoredMetric(name, "tok/s", True, None, (), float(rate))
                for name, rate in rates.items()
            ]
            one = past_runs.stored_run(f"{machine}-{n}", *metrics, started=f"{n:04}")
            one.file.metrics = {m.name: MetricReport(value=m.value, unit="tok/s") for m in metrics}
            past.append(history.PastRun(Path(f"{machine}/{n}"), one, ("GB10", f"{machine}")))
    return history.History(tuple(sorted(past, key=lambda each: each.when)))


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow("more runs")) for seed in range(1, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_blamed_in_a_thousand_healthy_runs(seed):
    """In 1,000 healthy runs, in series of 50 with 3 metrics each, no machine, level or loss is
    reported."""
    many = simulated(seed, machines=4, runs=50)
    assert not many.apart and not many.steps
    for line in many.lines:
        assert not line.fallen, line.fallen[0].text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_box_of_twenty_is_named_within_ten_runs(seed):
    """If one of twenty machines is slow, the history names it within ten runs.

    It names no other machine. Without a slow machine, it names none in 1,000 runs."""
    apart = simulated(seed, machines=20, runs=10, slow=0.05).apart
    assert [line.partition(", ")[0] for line in apart if "worse" in line] == ["GB10 0"], apart
    assert not [line for line in simulated(seed, machines=20, runs=50).apart if "worse" in line]


@pytest.mark.slow("a thousand reports")
def test_a_thousand_runs_take_ten_seconds(base, tmp_path):
    """The history of 1,000 runs with 400 tests each takes at most ten seconds."""
    run = base.model_copy(deep=True)
    tests = []
    for n in range(400 // len(run.tests) + 1):
        tests += [test.model_copy(update={"id": f"{test.id}-{n}"}) for test in run.tests]
    run.tests = tests
    run.judge()
    one = plant(run, tmp_path / "one", {"a1": healthy(1)}) / "a1" / "0000"
    text = (one / "verdict.json").read_text("utf-8")
    for number in range(1000):
        folder = tmp_path / "runs" / f"{number:04}"
        folder.mkdir(parents=True)
        started = f"{2020 + number // 336}-{1 + number // 28 % 12:02}-{1 + number % 28:02}"
        (folder / "verdict.json").write_text(text.replace("2026-01-01", started), "utf-8")
        (folder / "details.json").write_bytes((one / "details.json").read_bytes())
    begun = time.process_time()
    assert cli.main(["history", str(tmp_path / "runs"), "--html", str(tmp_path / "h.html")]) == 0
    assert time.process_time() - begun < 10.0


def test_results_of_others_are_rows(base, tmp_path, capsys):
    """The history shows results of other tools as rows.

    It reads llama-benchy's JSON and CSV, and sparkrun's YAML (spark-arena/sparkrun 0041b8f)."""
    plant(base, tmp_path, {"a1": healthy(1)})
    benchy = DATA / "llama-benchy-0.4.0.json"
    (tmp_path / "benchy.json").write_bytes(benchy.read_bytes())
    for name in ("arena.csv", "arena.yaml"):
        (tmp_path / name).write_text(text_file(name))
    (tmp_path / "other.json").write_text("{}")
    assert cli.main(["history", f"spark-1={tmp_path}", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = {row["run"]: row for row in summary["runs"]}
    assert [*rows] == ["arena.csv", "a1/0000", "benchy.json", "arena.yaml"]
    assert rows["benchy.json"]["started"] == "2026-11-20 14:27:38Z"
    assert {row["machine"] for row in rows.values()} == {"spark-1"}
    assert rows["arena.yaml"]["engine"] == "vllm img:mxfp4"
    assert rows["arena.yaml"]["metrics"]["tg32@d0"]["value"] == 58.82
    values = {name: metric["value"] for name, metric in rows["arena.csv"]["metrics"].items()}
    rates = {"pp2048@d0": 4600.5, "tg32@d0": 57.1, "tg32_c2@d4096": 90.5}
    assert values == {**rates, "ttft_p50": 445.0}
    assert len(summary["left_out"]) == 1 and "other.json" in summary["left_out"][0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", None),
        ("missing", None),
        ("verdict.json", '{"schema_version": 99}'),
        ("verdict.json", "not json"),
        pytest.param("verdict.json", '{"schema_version": 1, "tests": 5}', id="tests-no-list"),
        ("a.json", '{"benchmarks": 3, "max_concurrency": 1}'),
        ("a.json", "NESTED"),
        ("a.json", '[{"avg_ts": 1, "n_prompt": 1e999, "n_gen": 0}]'),
        pytest.param(
            "verdict.json",
            '{"schema_version": 2, "environment": {"git_shas": "main"}}',
            id='verdict.json, {"schema_version": 2, "environment"',
        ),
        pytest.param(
            "verdict.json",
            '{"schema_version": 2, "environment": {"gpus": [1]}}',
            id='verdict.json, {"schema_version": 2, "environment" (2)',
        ),
        pytest.param("a.csv", "model,test_name,\n", id="a.csv, model,test_name,"),
        ("a.yaml", "sparkrun_benchmark: 3"),
        ("a.yaml", "sparkrun_benchmark: [}"),
        ("h.html/verdict.json", None),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, name, content):
    file = tmp_path / name
    if content is not None:
        file.write_text(content.replace("NESTED", "[" * 100_000))
    elif name == "empty":
        file.mkdir()
    assert cli.main(["history", str(file)]) == 4
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and file.stem in err


def test_runs_without_a_rate_are_rows(tmp_path, capsys):
    run = a_run(("tests/test_smoke.py::a", "PASS", ""), metrics={})
    (tmp_path / "verdict.json").write_text(run.model_dump_json(), "utf-8")
    assert cli.main(["history", str(tmp_path), "--html", str(tmp_path / "h.html")]) == 0
    assert cli.main(["history", str(tmp_path)]) == 0
    assert "PASS" in capsys.readouterr().out


def test_a_page_has_a_folder(base, tmp_path, capsys):
    plant(base, tmp_path, {"a1": healthy(1)})
    assert cli.main(["history", str(tmp_path), "--html", str(tmp_path)]) == 4
    assert "expected a file, got a folder. Name a file in it: " in capsys.readouterr().err


def test_two_runs_are_one_page(base, tmp_path, capsys):
    """The page of two runs shows the first failed run and its check."""
    plant(base, tmp_path / "runs", {"a1": [{}, {"slow": 1.12, "red": [DECODE]}]})
    target = tmp_path / "history.html"
    assert cli.main(["history", str(tmp_path / "runs"), "--html", str(target)]) == 0
    text = target.read_text("utf-8")
    assert "2 runs" in text and text.count("first red<") == 1 and DECODE in text


@pytest.mark.parametrize(
    ("count", "words"), [(5, "Too few runs to judge"), (6, "No metric is worse")]
)
def test_the_page_says_whether_there_are_enough_runs(base, tmp_path, count, words):
    plant(base, tmp_path / "runs", {"a1": healthy(count)})
    target = tmp_path / "history.html"
    assert cli.main(["history", str(tmp_path / "runs"), "--html", str(target)]) == 0
    assert f">{words}</h1>" in target.read_text("utf-8")
