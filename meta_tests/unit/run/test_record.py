"""The record of a run has the right verdict after every kind of end, and no run passes by
accident."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from meta_tests.fakes.against_runs import a_run, compared, stored
from meta_tests.fakes.whole_run import waiver_file
from meta_tests.folders import ROOT
from meta_tests.texts import text_file
from sm121.core import unmet, waivers
from sm121.core.json_text import json_text
from sm121.core.verdict import Verdict
from sm121.plugin import outcomes
from sm121.report import summary
from sm121.run import stored_run, verdict_file
from sm121.run.verdict_file import TestReport
from sm121.session import trusted_runs, unused_waivers
from sm121.session.given_judging import GivenJudging
from sm121.session.settings import Settings

SCENARIOS = "meta_tests/whole/scenarios/verdicts.py"


@pytest.fixture
def attached(run_pytest, fault_server):
    """Run scenarios against the fault server. Return the exit status, verdict.json, and the run."""

    def run(*arguments: str):
        server = fault_server()
        status, run = run_pytest("--arch", "cpu", *server.options, *arguments)
        assert server.process.poll() is None, "an attached server is never stopped"
        file = run.report / "verdict.json"
        return status, run.verdict if file.is_file() else {}, run

    return run


def one(name: str) -> str:
    return f"{SCENARIOS}::{name}"


def by_name(file: dict) -> dict[str, dict]:
    """Return the tests of verdict.json. The keys are the names of their functions."""
    return {test["id"].rsplit("::", 1)[1]: test for test in file["tests"]}


def verdicts_of(file: dict) -> dict[str, str]:
    return {name: test["verdict"] for name, test in by_name(file).items()}


@pytest.mark.parametrize(
    ("name", "verdict", "status", "count"),
    [
        ("test_pass", "PASS", 0, "passed"),
        ("test_fail", "FAIL", 1, "failed"),
        ("test_invalid", "INVALID", 1, "invalid"),
        ("test_inconclusive", "INCONCLUSIVE", 1, "inconclusive"),
        ("test_not_run", "NOT_RUN", 5, "skipped"),
        pytest.param("test_skipped", "NOT_RUN", 5, "skipped", marks=pytest.mark.slow),
        pytest.param("test_for_sm121_only", "NOT_RUN", 5, "skipped", marks=pytest.mark.slow),
    ],
)
def test_each_ending_has_its_verdict_and_exit_status(attached, name, verdict, status, count):
    ended, file, run = attached(one(name))
    assert ended == status, run.output
    assert file["verdict"] == verdict and file["exit_status"] == status
    level = file["levels"]["correctness"]
    assert level["verdict"] == verdict and level[count] == 1, level
    assert file["tests"][0]["verdict"] == verdict
    assert file["finished"]
    assert re.search(rf"^{verdict}( \(.*\))?: ", run.output, re.M), "the last line says it"
    published = json.loads((ROOT / "docs" / "verdict.schema.json").read_text())
    jsonschema.validate(file, published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**file, "verdict": "GREEN"}, published)
    for path in filter(Path.is_file, run.report.rglob("*")):
        assert "meta-key" not in path.read_text("utf-8", "replace"), "a secret"


def test_a_plain_run_reports_skips_and_stays_green_on_what_ran(attached):
    status, file, _ = attached(one("test_pass"), one("test_skipped"))
    assert status == 0 and file["verdict"] == "PASS"
    assert file["levels"]["correctness"]["skipped"] == 1


def test_after_sigkill_the_files_hold_what_was_decided(attached):
    verdicts = {"test_pass": "PASS", "test_invalid": "INVALID"}
    verdicts |= dict.fromkeys(("test_killed", "test_never_reached"), "NOT_RUN")
    status, begun, run = attached(*map(one, verdicts))
    assert status == -signal.SIGKILL
    assert begun["verdict"] == "NOT_RUN" and not begun["finished"], "verdict.json is never green"
    file = json.loads(json_text(stored_run.file_of(run.report)))
    assert verdicts_of(file) == verdicts
    assert file["verdict"] == "INVALID" and not file["finished"]
    assert "INVALID" in summary.markdown(stored_run.file_of(run.report))
    jsonschema.validate(file, verdict_file.json_schema())


def test_no_other_level_runs_after_a_failed_smoke_level(attached):
    """After a failed smoke level, no test of another level runs.

    The smoke level runs first, in any order of the files."""
    status, file, run = attached("meta_tests/whole/scenarios/smoke_fails.py")
    levels = {test["level"]: test for test in file["tests"]}
    assert status == 1 and levels["smoke"]["verdict"] == "FAIL", run.output
    assert levels["correctness"]["skipped"] and "smoke" in levels["correctness"]["message"]


def test_an_earlier_report_is_kept(attached, tmp_path):
    report = tmp_path / "report"
    for name in ("test_pass", "test_invalid"):
        attached("--report-dir", str(report), one(name))
    (earlier,) = (report / "earlier").glob("*/verdict.json")
    files = (report / "verdict.json", earlier)
    assert [json.loads(each.read_text())["verdict"] for each in files] == ["INVALID", "PASS"]


@pytest.mark.parametrize(
    ("name", "chosen", "days", "status", "waived", "says"),
    [
        pytest.param("test_fail", "test_fail", -1, 1, 0, "expired", id="expired"),
        pytest.param(
            "test_pass",
            "test_pass",
            1,
            0,
            0,
            "waiver that matched no failure: meta_tests/whole/scenarios/verdicts.py::test_pass",
            id="stale",
        ),
        pytest.param(
            "test_parametrised[7]",
            "test_parametrised",
            1,
            0,
            1,
            "https://example.org/1",
            id="of a parameter",
        ),
    ],
)
def test_a_waiver_of_one_test(attached, tmp_path, name, chosen, days, status, waived, says):
    """A waiver tolerates the failure of one parameter until it expires.

    An unused waiver is reported."""
    file = waiver_file(tmp_path, one(name), days=days)
    ended, verdict, run = attached(f"--waivers={file}", one(chosen))
    assert ended == status, run.output
    assert verdict["levels"]["correctness"]["waived"] == waived
    messages = [test["message"] for test in verdict["tests"]]
    assert any(says in text for text in (*messages, run.output))
    remarks = [line for line in verdict["remarks"] if line.startswith("waiver")]
    assert remarks == ([says] if "matched no failure" in says else [])


def test_a_failure_of_no_level_is_not_painted_green(attached):
    status, file, run = attached(one("test_pass"), "meta_tests/whole/scenarios/foreign.py")
    assert file["verdict"] == "PASS", "the levels held"
    assert status == 1, run.output
    assert "def test_of_no_level" in run.output, "the closing lines do not tell of it: pytest does"


def test_a_run_that_stops_early_is_not_finished(attached):
    names = ("test_pass", "test_fail", "test_invalid", "test_never_reached")
    status, file, _ = attached("-x", *map(one, names))
    assert status == 1 and not file["finished"]


@pytest.mark.slow("a run more that stops early")
def test_a_run_that_a_test_of_no_level_stops_is_not_green(attached):
    foreign = "meta_tests/whole/scenarios/foreign.py"
    status, file, _ = attached("-x", one("test_pass"), foreign, one("test_never_reached"))
    assert status == 1 or file["verdict"] != "PASS", file


def test_skipped_and_then_failed_has_failed(attached):
    status, file, run = attached("meta_tests/whole/scenarios/teardowns.py", "-k", "skip or passes")
    failed = ("skipped_then_failed", "failed_then_skipped", "passes_unexpectedly")
    expected = {"test_passes": "PASS", **{f"test_{name}": "FAIL" for name in failed}}
    assert status == 1 and verdicts_of(file) == expected, run.output


CAPITALS = {name: unmet.Fact("the capital", "x", name) for name in ("France", "Germany", "Spain")}
CAPITALS["nowhere"] = unmet.Fact("the capital", "x")
CAPITALS["empty"] = replace(CAPITALS["France"], required="an answer")


@pytest.mark.parametrize(
    ("more", "facts", "tolerated"),
    [
        pytest.param(("",), ("France",), True, id="France, tolerated"),
        pytest.param(("",), ("France", "France"), True, id="France France, tolerated"),
        pytest.param(("",), ("France", "Germany"), False, id="France Germany, not tolerated"),
        pytest.param(
            ('case = "France"',), ("France",), True, id='case = "France", France, tolerated'
        ),
        pytest.param(
            ('case = "France"',), ("empty",), True, id='case = "France", empty, tolerated'
        ),
        pytest.param(
            ('case = "France"',), ("Germany",), False, id='case = "France", Germany, not tolerated'
        ),
        pytest.param(
            ('case = "France"',),
            ("France", "Germany"),
            False,
            id='case = "France", France Germany, not tolerated',
        ),
        pytest.param(
            ('case = "France"\nkind = "the capital"',),
            ("France",),
            True,
            id='case = "France" kind = "the capital", France, tolerated',
        ),
        pytest.param(
            ('case = "France"\nkind = "the capital"',),
            ("empty",),
            False,
            id='case = "France" kind = "the capital", empty, not',
        ),
        pytest.param(
            ('case = "France"\nkind = "the capital"',),
            ("France", "empty"),
            False,
            id='case = "France" kind = "the capital", France empty, not',
        ),
        pytest.param(
            ('kind = "the capital"',),
            ("France", "Germany"),
            False,
            id='kind = "the capital", France Germany, not tolerated',
        ),
        pytest.param(
            ('case = "the capital"',),
            ("nowhere",),
            True,
            id='case = "the capital", nowhere, tolerated',
        ),
        pytest.param(
            ('case = "France"', 'case = "Germany"'),
            ("France", "Germany"),
            True,
            id='case = "France" case = "Germany", France Germany',
        ),
        pytest.param(
            ('case = "France"', 'case = "Germany"'),
            ("France", "Germany", "Spain"),
            False,
            id='case = "France" case = "Germany", France Germany Spain',
        ),
    ],
)
def test_a_waiver_of_a_case_hides_no_other_one(tmp_path, more, facts, tolerated):
    """A waiver of one case of a test excuses no other case.

    `more` are the waivers of the test, one per line; `facts` names some of `CAPITALS`."""
    facts = [CAPITALS[name] for name in facts]
    loaded = []
    for each in more:
        loaded.extend(waivers.load(waiver_file(tmp_path, "t.py::t", more=each)))
    session = SimpleNamespace(settings=Settings(judging=GivenJudging(waivers=loaded)))
    finding = TestReport.of("t.py::t", "smoke", *facts)
    outcomes._waive(session, finding, None, report := SimpleNamespace())
    assert finding.waived is tolerated and hasattr(report, "wasxfail") is tolerated
    assert tolerated or all(repr(fact.case) in finding.message for fact in facts), finding.message
    if any("kind" in each for each in more) and not tolerated:
        assert all(repr(fact.required) in finding.message for fact in facts), finding.message


BOTH = ("France", "Germany")


@pytest.mark.parametrize(
    ("more", "facts", "verdict", "unused"),
    [
        pytest.param('case = "France"', ("France",), "FAIL", "", id="matched"),
        pytest.param('case = "France"', BOTH, "FAIL", "", id="one of two matched, not waived"),
        pytest.param('case = "France"', BOTH, "PASS", "t.py::t, case 'France'", id="passed"),
        pytest.param('case = "France"', BOTH, "NOT_RUN", "", id="not run"),
        pytest.param('case = "Paris"', BOTH, "FAIL", "t.py::t, case 'Paris'", id="other case"),
        pytest.param('kind = "a word"', ("France",), "FAIL", "t.py::t, kind 'a word'", id="kind"),
    ],
)
def test_the_report_lists_each_waiver_that_matched_no_failure_of_its_test(
    tmp_path, more, facts, verdict, unused
):
    """The report does not list waivers of tests that did not run."""
    loaded = waivers.load(waiver_file(tmp_path, "t.py::t", more=more))
    failed = [CAPITALS[name] for name in facts]
    test = TestReport.of("t.py::t", "smoke", *failed, verdict=Verdict(verdict))
    expected = [f"waiver that matched no failure: {unused}"] if unused else []
    assert unused_waivers.remarks(loaded, [test]) == expected
    assert unused_waivers.unused(loaded, []) == [*loaded]


WAIVED = "meta_tests/whole/scenarios/waivers.py"


def test_no_waiver_tolerates_what_is_no_plain_failure(attached, tmp_path):
    names = re.findall(r"^def (test_\w+)", (ROOT / WAIVED).read_text(), re.MULTILINE)
    file = waiver_file(tmp_path, *(f"{WAIVED}::{name}" for name in names))
    # The machine may be busy, because other tests of the suite may run at the same time.
    busy = tmp_path / "busy.toml"
    shipped = (ROOT / "fixtures" / "profiles" / "cpu-tiny-gpt-oss.toml").read_text()
    busy.write_text(re.sub(r"(max_other_load|max_drift|max_spread) = \S+", r"\1 = 1.0", shipped))
    status, verdict, run = attached("--waivers", str(file), "--profile", str(busy), WAIVED)
    tests = by_name(verdict)
    assert status == 1 and verdict["verdict"] == "FAIL", run.output
    assert [name for name in names if tests[name]["waived"]] == ["test_wrong"], run.output
    for name, why in {
        "test_invalid": "a result that is INVALID",
        "test_inconclusive": "a result that is INCONCLUSIVE",
        "test_path": "the kernel path",
        "test_cell": "a crash",
        "test_crash": "a crash",
        "test_nothing_measured": "a measurement without a number",
        "test_invalid_then_wrong": "a result that is INVALID",
    }.items():
        assert tests[name]["message"].startswith(f"not waived, because {why} is never waived"), (
            tests[name]
        )
    assert tests["test_rate_without_a_number"]["message"].startswith("not waived, because ")


def test_levels_were_asked_for_and_there_is_none(run_pytest, tmp_path):
    """If no test of a requested level exists, the run does not keep the verdict of an earlier
    run."""
    report = tmp_path / "report"
    report.mkdir()
    (report / "verdict.json").write_text('{"certified": true}')
    foreign = ("--report-dir", str(report), "meta_tests/whole/scenarios/foreign.py")
    for levels in (("--arch", "cpu"), ("-m", "sm121")):
        status, run = run_pytest(*foreign, *levels)
        assert status == 5, run.output
        file = json.loads((report / "verdict.json").read_text())
        assert file["verdict"] == "NOT_RUN" and file["certified"] is None
    assert len(list((report / "earlier").glob("*/verdict.json"))) == 2


def test_two_runs_do_not_share_a_report_directory(start_pytest, run_pytest, fault_server, tmp_path):
    common = ("--arch", "cpu", *fault_server().options)
    shared = ("--report-dir", str(tmp_path / "shared"))
    waits = "meta_tests/whole/scenarios/endings.py::test_waits"
    first = start_pytest(*common, *shared, waits)
    first.wait_for("] correctness: 1 check", 60.0)
    status, second = run_pytest(*common, *shared, one("test_pass"))
    assert status == 4 and "another run is using it" in second.output, second.output
    assert (tmp_path / "shared" / "verdict.json").is_file(), "the first one's is untouched"


def test_secrets_of_the_command_line_are_not_shown(run_pytest):
    _, run = run_pytest(
        "--engine-env", "MY_TOKEN=supersecretvalue99",
        "--engine-arg=--hf-token=hf_abcdefghijklmnop", "-m", "sm121", "tests/test_smoke.py",
    )  # fmt: skip
    assert "supersecretvalue99" not in run.output and "hf_abcdefghijklmnop" not in run.output


@pytest.mark.slow("two runs")
def test_tests_that_need_an_option_are_left_out(attached):
    scenario = "meta_tests/whole/scenarios/left_out.py"
    assert "1 slow tests are left out; --slow runs them" in attached(scenario)[2].output
    _, file, _ = attached("--slow", scenario)
    assert [test["verdict"] for test in file["tests"]] == ["PASS", "NOT_RUN", "NOT_RUN", "FAIL"]


@pytest.mark.parametrize("level", ["smoke", "stress"])
def test_a_peak_of_memory_is_compared_where_the_same_was_asked_before(level, tmp_path):
    """A peak of memory is not compared with a trusted run that had other levels.

    After the stress level a server held 6.77 GiB, without it 4.82 GiB."""
    trusted = trusted_runs.load(
        str(stored(a_run(("a", "PASS", "", "smoke")), tmp_path / "run")), tmp_path
    )
    peak = stored_run.StoredMetric("memory_peak_gib", "GiB", False, None, (4.82,), 4.82)
    trusted.newest.metrics[peak.name] = peak
    now = {**trusted.newest.metrics, peak.name: replace(peak, samples=(9.77,), value=9.77)}
    run = a_run(("a", "PASS", "", level))
    judged = [test.id for test in compared(run, trusted, now)]
    assert (f"--against::{peak.name}" in judged) is (level == "smoke"), judged
    assert run.against.unjudged == [peak.name] * (level == "stress")


# Warnings of other packages do not end a run of the levels


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="as shipped", marks=pytest.mark.slow),
        pytest.param(("-o", "filterwarnings=error"), id="in a project with errors of its own"),
    ],
)
def test_a_package_that_warns_ends_no_run(run_pytest, fault_server, tmp_path, arguments):
    (tmp_path / "pynvml.py").write_text(text_file("pynvml-that-warns.txt"))
    folders = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    status, run = run_pytest(
        "tests/test_smoke.py::test_health", *fault_server().options, *arguments,
        environment={"PYTHONPATH": os.pathsep.join(folders)}, warm=False,
    )  # fmt: skip
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    assert "The pynvml package is deprecated" in run.output


@pytest.mark.slow("a run that measures")
def test_a_metric_that_is_not_run_gives_no_benchmark_warning(run_pytest, fault_server):
    why = "a draft has 2 places"
    _, run = run_pytest(
        "meta_tests/whole/scenarios/measurements.py", *fault_server().options,
        environment={"SM121_META_SAMPLES": json.dumps({"acceptance@3": {"not_run": why}})},
    )  # fmt: skip
    assert why in run.output and "Benchmark fixture" not in run.output, run.output


def test_our_own_tests_take_a_warning_for_an_error(pytestconfig):
    assert "error" in pytestconfig.getini("filterwarnings")
    shipped = (ROOT / "pytest.ini").read_text()
    assert "filterwarnings" not in shipped
