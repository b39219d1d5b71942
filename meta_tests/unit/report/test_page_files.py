"""People and CI can read the files of a run, even if parts are missing or hostile."""

import html
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from meta_tests.fakes import report_runs
from meta_tests.folders import DATA, ROOT
from sm121.cli import main
from sm121.core import unmet
from sm121.core.verdict import Verdict
from sm121.evidence import crash_bundle, log_message
from sm121.report import (
    comparison,
    crash_list,
    findings,
    headline,
    junit,
    metric_names,
    page,
    short_names,
    stored,
    summary,
)
from sm121.run import details, verdict_file
from sm121.run.machine_report import CrashReport, MemoryReport

KINDS = ("pass", "fail", "invalid", "inconclusive", "crash", "hostile")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A report directory of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: report_runs.write(kind, folder / kind) for kind in KINDS}


class Tags(HTMLParser):
    """A parser that records all elements, and those that were not closed."""

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


@pytest.mark.parametrize("kind", KINDS)
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
    report = stored.read(runs["pass"])
    first = report.run.tests[0]
    for count in range(3000):
        test = first.model_copy(update={"id": f"tests/test_kernel.py::test_x[{count}]"})
        report.run.tests.append(test)
        if count % 5 == 0:
            test.verdict, test.unmet = Verdict.FAIL, [unmet.Fact("0", f"{count}" + "x" * 500)]
            failure = details.FailureDetail(id=test.id, text="y" * 20_000, reproduce="pytest")
            report.details.failures.append(failure)
    text = page.html(report)
    assert len(text.encode()) <= 2_000_000 and "500 more findings" in text
    assert (
        text.count('<p id="cut">This page would be larger than 2 MB. It shows the first 100') == 1
    )
    count = len(report.run.tests)
    assert f"The first 100 of {count} tests" in text and f"all <strong>{count}</strong>" in text
    assert "FAIL <strong>600</strong>" in text, "counts are those of the whole run"
    small = page.html(stored.read(runs["pass"]))
    assert 'id="cut"' not in small and "The first 100 of" not in small


@pytest.mark.parametrize("part", ["failures", "reasons", "remarks", "metrics", "waived", "record"])
def test_a_page_has_at_most_2_mb_with_any_content(runs, part):
    report = stored.read(runs["fail"])
    text = "y" * 590
    run = report.run
    first = report.run.tests[0]
    if part in ("failures", "reasons", "waived"):
        verdict = Verdict.NOT_RUN if part == "reasons" else Verdict.FAIL
        filler = {"verdict": verdict, "level": "matrix", "waived": part == "waived"}
        run.tests += [
            first.model_copy(
                update={"id": f"{first.id}[{'p' * 400}{n}]", "message": f"{n} {text}", **filler}
            )
            for n in range(2000)
        ]
    sentence = headline.headline_of(run).sentence
    run.remarks += [text] * 5000 * (part == "remarks")
    run.environment["log"] = text * 5000 * (part == "record")
    if part == "metrics":
        run.metrics |= {f"kernel[{n}]": run.metrics["tg32@d0"] for n in range(5000)}
    html_ = page.html(report)
    assert len(html_.encode()) <= 2_000_000
    assert html.escape(sentence).replace("&#x27;", "&#39;") in html_, "it is of the whole run"
    assert '<p id="cut">' in html_ and "test_decode_rate[tg32-d0]" in html_


def test_numbers_that_are_none_are_not_known(runs, tmp_path):
    """Numbers that are NaN or infinite count as unknown.

    Python writes them into JSON, but no other reader of JSON accepts them.
    """
    raw = json.loads((runs["fail"] / "verdict.json").read_text())
    raw["metrics"]["tg32@d0"] |= {"value": float("inf"), "ci_low": float("nan")}
    assert main(["report", str(_written(raw, tmp_path))]) == 0
    assert "decode tg32@d0 is no number; 52 required" in (tmp_path / "report.html").read_text()


def test_a_directory_with_nothing_but_the_verdict(runs, tmp_path):
    shutil.copy(runs["fail"] / "verdict.json", tmp_path)
    text = page.html(stored.read(tmp_path))
    assert "required" in text
    # The absent checks are on one line, and have no card each.
    (absent,) = re.findall(r'<p[^>]*id="absent">(.*?)</p>', text)
    for part in ("latency distributions (details.json has no", "memory over the run", "matrix"):
        assert part in absent, part
    assert 'id="latency"' not in text and 'href="#latency"' not in text
    report = stored.read(runs["crash"])
    del report.run.levels["matrix"]
    assert (
        'id="absent">Not in this run: rates, latency distributions, paths of requests (performance '
        "did not run); matrix (matrix was not selected); history (regression did not run).<"
    ) in page.html(report)


def test_unreadable_files_are_not_shown(runs, tmp_path):
    shutil.copy(runs["pass"] / "verdict.json", tmp_path)
    (tmp_path / "matrix").mkdir()
    for name in ("details.json", "memory.json", "matrix/matrix.json"):
        (tmp_path / name).write_text("{]")
    report = stored.read(tmp_path)
    assert report.memory is None and report.matrix is None and report.details == details.Details()
    for name, line in zip(("memory", "matrix/matrix"), report.run.remarks[-2:], strict=True):
        assert line.startswith(f"{name}.json cannot be read:")
    assert "Not in this run: " in page.html(report)


def test_a_run_of_the_first_version_is_read_by_all(tmp_path, capsys):
    shutil.copy(DATA / "verdict-first-version.json", tmp_path / "verdict.json")
    assert main(["report", str(tmp_path)]) == 0
    assert "31.6" in (tmp_path / "report.html").read_text()
    assert main(["testlog", str(tmp_path), "--feature", "old"]) == 0
    assert "NEEDS FIXES" in capsys.readouterr().out
    assert comparison.read_results(tmp_path).row("tg32@d0").report.value == 31.6


def _written(raw, directory):
    """Write verdict.json into a directory."""
    directory.mkdir(exist_ok=True)
    (directory / "verdict.json").write_text(json.dumps(raw))
    return directory


def test_a_run_of_a_later_version_is_read_without_what_is_new(runs, tmp_path):
    raw = json.loads((runs["pass"] / "verdict.json").read_text())
    raw["schema_version"] = verdict_file.SCHEMA_VERSION + 1
    for part in (raw, raw["engine"], raw["engine"]["path"], raw["tests"][0]):
        part["new"] = {"a": 1}
    raw["metrics"]["tg32@d0"]["new"] = 4
    run = stored.read(_written(raw, tmp_path)).run
    assert run.verdict is Verdict.PASS
    assert run.schema_version == verdict_file.SCHEMA_VERSION + 1


def _shard(raw, index, of=2, **changes):
    """Return a constructed run as one of the shards of a run, with a key of a later version."""
    whole = [{"id": test["id"], "level": test["level"]} for test in raw["tests"]]
    raw |= {"shard": {"index": index, "of": of, "tests": whole, "new": 1}, "new": 1, **changes}
    raw["engine"]["new"] = 1
    return raw


def _copied_shard(directory, source, index, **changes):
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("matrix"))
    raw = json.loads((directory / "verdict.json").read_text())
    return _written(_shard(raw, index, **changes), directory)


def test_merged_shards_have_everything_that_a_run_has(runs, tmp_path, capsys):
    """A merged run contains the crash, the failures and the memory of the second shard.

    A later version of the suite wrote this shard."""
    one = _copied_shard(tmp_path / "one", runs["pass"], 1, memory=None, starts=[])
    memory = {"file": "memory.json", "device_memory": "x", "samples": 180}
    two = _copied_shard(
        tmp_path / "two", runs["crash"], 2, memory=memory, environment={"only": "here"}
    )
    output = tmp_path / "merged"
    for _ in range(2):  # the second merge replaces the first one
        assert main(["merge", str(one), str(two), "--output", str(output)]) == 1
    for name in ("verdict.json", "summary.md", "details.json", "junit.xml", "report.html"):
        assert (output / name).is_file(), name
    report = stored.read(output)
    assert report.run.verdict is Verdict.FAIL and report.run.shard is None
    (crash,) = report.crashes
    assert crash.bundle.startswith("shards/2/crashes/") and crash.files, crash
    assert (output / crash.bundle / "bundle.json").is_file()
    assert report.memory is not None, "its file is where verdict.json says"
    assert all((output / start.log).is_file() for start in report.run.starts) and report.run.starts
    assert report.details.failures == details.read_details(two).failures != []
    assert report.details.samples and report.details.requirements
    assert report.run.environment["other_shards"]["2"]["only"] == "here"
    assert crash.kind in (output / "report.html").read_text()
    capsys.readouterr()
    assert main(["merge", str(one), str(two), "--output", str(two)]) == 4
    assert "a folder other than that of a shard" in capsys.readouterr().err


def test_an_old_run_is_merged_and_read_by_its_name(tmp_path, capsys):
    raw = _shard(json.loads((DATA / "verdict-first-version.json").read_text()), 1, of=1)
    old = _written(raw, tmp_path / "old")
    assert verdict_file.read(old / "verdict.json").verdict.value == raw["verdict"]
    status = main(["merge", str(old), "--output", str(tmp_path / "new")])
    merged = verdict_file.read(tmp_path / "new" / "verdict.json")
    assert (status, merged.verdict.value) == (raw["exit_status"], raw["verdict"])
    assert comparison.read_results(tmp_path / "new").row("tg32@d0").report.value == 31.6


@pytest.mark.parametrize("kind", ["fail", "invalid", "hostile"])
def test_junit_has_levels_as_suites_and_verdicts_as_properties(runs, kind):
    report = stored.read(runs[kind])
    root = ElementTree.fromstring(junit.xml(report))
    levels = dict.fromkeys(test.level for test in report.run.tests)
    assert [suite.get("name") for suite in root] == [*levels]
    assert int(root.get("tests")) == len(report.run.tests)
    for suite in root:
        level = report.run.levels[suite.get("name")]
        properties = {p.get("name"): p.get("value") for p in suite.find("properties")}
        assert properties["verdict"] == level.verdict.value
        assert int(suite.get("failures")) == level.failed
        assert int(suite.get("errors")) == level.invalid + level.inconclusive
        for case in suite.iter("testcase"):
            assert case.find("properties/property[@name='verdict']") is not None


@pytest.mark.parametrize("verdict", [Verdict.NOT_RUN, Verdict.INVALID])
def test_junit_is_not_green_when_the_run_is_not(runs, verdict):
    """The file junit.xml has a failure if the run does not pass, although every test passed.

    A certificate was refused, and readers of junit.xml see only test cases.
    """
    report = stored.read(runs["pass"])
    names = [suite.get("name") for suite in ElementTree.fromstring(junit.xml(report))]
    report.run.settle(verdict)
    report.run.reason = "not certified: 3 of regression skipped"
    root = ElementTree.fromstring(junit.xml(report))
    assert [suite.get("name") for suite in root] == [*names, "run"] and "run" not in names
    error = root[-1].find("testcase/error")
    assert root.get("errors") == root[-1].get("errors") == "1"
    assert error.get("message") == report.run.reason and error.get("type") == verdict.value
    assert int(root.get("tests")) == len(report.run.tests) + 1


def test_a_pass_lists_skipped_checks_and_metrics_without_gates(runs):
    report = stored.read(runs["pass"])
    run = report.run
    rate = report.run.metrics["tg32@d0"]
    run.tests[0].skipped = True
    run.tests[0].verdict = Verdict.NOT_RUN
    assert run.why() == f"{len(run.tests) - 1} checks passed; 1 did not run"
    rate.minimum = rate.target = rate.stretch = None
    others = {name: m for name, m in run.metrics.items() if not name.startswith("tg")}
    run.metrics = {"tg32@d0": rate, **others}
    text = page.html(report)
    assert "Levels lists the skipped checks." in text
    assert "no gate · <strong>measured</strong>" in text


@pytest.mark.parametrize("kind", ["pass", "fail", "hostile"])
def test_the_summary_is_short(runs, kind):
    text = summary.markdown(stored.read(runs[kind]).run)
    assert len(text) < 6000 and len(text.splitlines()) < 60
    assert "<script" not in text and "\x1b" not in text


def test_a_models_text_mentions_no_user_in_a_pull_request():
    assert "@torvalds" not in summary.plain("hello @torvalds")
    assert summary.plain("tg32@d0") == "tg32@d0"


def test_a_test_has_the_same_link_in_every_run():
    ids = ["tests/test_performance.py::test_decode_rate[tg32-d0]", "\u202e<b>", "a", "A"]
    links = ["test-performance-test-decode-rate-tg32-d0", "test-b", "test-a", "test-a--2"]
    assert short_names.anchors(ids) == dict(zip(ids, links, strict=True))
    assert short_names.anchors(ids[:1]) == {ids[0]: links[0]}


@pytest.mark.parametrize("around", range(0, 1400, 53))
def test_evidence_is_cut_between_words(around):
    line = ", ".join(f"some_option{n}=value.{n}" for n in range(60))
    evidence = log_message.cut(line, 200, around=around)
    assert len(evidence) <= 200 and line[around] in evidence
    part = evidence.strip("\u2026")
    start = line.index(part)
    assert (start == 0) is not evidence.startswith("\u2026")
    words, whole = ({*re.findall(r"[\w.]+", text)} for text in (part, line))
    assert words <= whole, "no part of a word"
    assert start <= around < start + len(part)
    assert log_message.cut("x" * 900, 400) == "x" * 399 + "\u2026"


def test_tests_that_say_the_same_stand_together_with_what_their_own_server_shows(runs, tmp_path):
    (three,) = findings.grouped(stored.read(runs["inconclusive"]))
    assert len(three.ids) == 3
    shutil.copytree(runs["fail"], tmp_path / "run")
    for name in ("server-other.log", "server-other.status.json", "server-cutlass.status.json"):
        (tmp_path / "run" / name).write_text("x")
    report = stored.read(tmp_path / "run")
    other = {"configuration": "other", "log": "server-other.log"}
    report.run.starts.append(report.run.starts[0].model_copy(update=other))
    first = findings.grouped(report)[0]
    assert first.required == "tg32@d0: at least 52 tok/s"
    assert first.observed.startswith("47.3 tok/s")
    assert first.requirement and first.detail.reproduce
    assert first.evidence == ("server-cutlass.log", "records")
    detail = next(d for d in report.details.failures if d.id == findings.failures(report.run)[0].id)
    for logs in (["server-other.log"], []):
        detail.logs = logs
        assert findings.grouped(report)[0].evidence == (*logs, "records")


@pytest.mark.slow("a run of the matrix")
def test_a_failure_notes_the_logs_of_its_server(run_matrix):
    """The failure of a matrix cell names the log of the cell's own server, which uses a
    fallback."""
    status, run, _ = run_matrix("--matrix", "1", faults="fallback:triton")
    assert status == 1 and len(run.verdict["starts"]) > 2
    cells = [each.logs for each in details.read_details(run.report).failures if each.logs]
    assert cells and all(len(logs) < len(run.verdict["starts"]) for logs in cells)
    for log in itertools.chain.from_iterable(cells):
        assert (run.report / log).is_file(), log


def test_the_memory_of_a_worker_is_found_where_verdict_json_says(runs, tmp_path):
    memory = runs["pass"] / "memory.json"
    run = verdict_file.read(runs["pass"] / "verdict.json")

    def read(file):
        run.memory = MemoryReport(file=file, device_memory="x", samples=1)
        verdict_file.write(run, tmp_path / "verdict.json")
        return stored.read(tmp_path)

    (tmp_path / "workers" / "gw0").mkdir(parents=True)
    shutil.copy(memory, tmp_path / "workers" / "gw0")
    assert read("workers/gw0/memory.json").memory is not None
    outside = read(str(memory))
    assert outside.memory is None and "not in the report directory" in outside.run.remarks[-1]


def test_an_unlisted_crash_bundle_counts_as_a_crash(runs, tmp_path):
    bundle = tmp_path / "crashes" / "7"
    bundle.mkdir(parents=True)
    (bundle / "server.log").write_text("x")
    (crash,) = crash_list.read_crashes([], tmp_path)
    assert crash.bundle == "crashes/7" and crash.files == ("crashes/7/server.log",)
    assert crash.kind == "unknown" and "bundle.json" in crash.summary
    shutil.copy(runs["crash"] / "crashes" / "1-illegal_memory_access" / "bundle.json", bundle)
    (crash,) = crash_list.read_crashes([], tmp_path)
    assert crash.kind == "illegal_memory_access" and crash.reproduce and crash.remedy
    listed = CrashReport(kind="oom", summary="short", owner="us", bundle="crashes/7")
    (crash,) = crash_list.read_crashes([listed], tmp_path)
    assert (crash.kind, crash.summary, len(crash.lines)) == ("oom", "short", 2)
    for outside in ("../..", "x" * 5000, "\0"):
        (crash,) = crash_list.read_crashes([listed.model_copy(update={"bundle": outside})], bundle)
        assert crash.files == (), "nothing outside of the report is listed"


@pytest.mark.parametrize("folder", ["leak", "oom-cgroup", "stopped"])
def test_the_sample_bundles_of_the_docs_are_of_this_version(folder):
    text = (ROOT / "docs" / "bundles" / folder / "bundle.json").read_text("utf-8")
    assert crash_bundle.BundleIndex.model_validate_json(text).kind


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tg32@d4096", "decode tg32 at depth 4096"),
        ("pp2048@d0", "prefill pp2048"),
        ("tg32_c4@d0", "decode tg32, 4 streams"),
        ("tg32_q10@d0", "decode tg32, 10 streams in turns"),
        ("ttft_q10_p50", "time to first token, p50, 10 streams in turns"),
        ("ttft_p99", "time to first token, p99"),
        ("ttft_visible_p50", "time to first visible text, p50"),
        ("ttft_c2_p50", "time to first token, p50, 2 streams"),
        ("health_p50", "health, p50"),
        ("prompt_p2048", "prompt_p2048"),
        ("startup_s", "start of the server"),
        ("something", "something"),
    ],
)
def test_metrics_have_names_for_people(name, words):
    assert metric_names.words(name) == words


def test_the_test_log_is_the_documents_template_filled_in(runs, tmp_path, capsys):
    feature = ("--feature", "MXFP4 lm_head", "--branch", "feature/x")
    arguments = ["testlog", str(runs["fail"]), *feature]
    assert main([*arguments, "--baseline", str(runs["pass"])]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Test Log: MXFP4 lm\\_head\n\nDate: 2026-01-12\n")
    assert "\nRun: MXFP4\\_lm\\_head\\_20260112091403\nBranch: feature/x\n" in text
    for part in (
        "## Level 1: Smoke Test",
        "## Level 1.5: Kernel Path Validation",
        "- Observed kernels:",
        "## Level 3: Stress Test",
        "| Metric | Baseline | This Feature | Delta |",
        "Baseline: ",
        r"| tg32@d0 | 54.1 \(53.29 to 54.64\) | 47.3 \(46.59 to 47.77\) | -12.6% |",
        "## Level 6: Combinatorial Test",
        "- **NEEDS FIXES**",
    ):
        assert part in text, part
    for _ in range(2):
        assert main([*arguments, "--output", str(tmp_path)]) == 0
    results = (tmp_path / "BENCHMARK_RESULTS.md").read_text()
    assert results.count("MXFP4\\_lm\\_head\\_20260112091403") == 1, "a run is added once"
    assert (tmp_path / "TEST_LOGS" / "FEATURE_MXFP4-lm_head_2026-01-12.md").is_file()
    features = (tmp_path / "FEATURE_MATRIX.md").read_text()
    cells = json.loads((runs["fail"] / "matrix" / "matrix.json").read_text())["cells"]
    tested = [cell for cell in cells if not cell["isolating"]]
    added = features.count("| MXFP4\\_lm\\_head\\_20260112091403")
    assert added == 1 + len(tested), "the configuration and the cells, once"
    for words in ("| Test | Kernel | Activation | Sinks | Spec | Graphs |", "| FAIL | [metadata]("):
        assert words in features, words
    log = tmp_path / "TEST_LOGS" / "FEATURE_MXFP4-lm_head_2026-01-12.md"
    assert "[log](TEST_LOGS/FEATURE_MXFP4-lm_head_2026-01-12.md)" in results
    assert "[BENCHMARK_RESULTS.md](../BENCHMARK_RESULTS.md)" in log.read_text()
    for written in (tmp_path / "BENCHMARK_RESULTS.md", tmp_path / "FEATURE_MATRIX.md", log):
        for target in re.findall(r"\]\(([^)]+)\)", written.read_text()):
            assert (written.parent / target).is_file(), target
    for name in ("FEATURE_MATRIX.md", "BENCHMARK_RESULTS.md"):
        (tmp_path / name).write_text("something else\n")
        assert main([*arguments, "--output", str(tmp_path)]) == 4, "a file of somebody else stays"
