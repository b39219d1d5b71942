"""What a run writes down: each way of ending has its verdict, at once; none is green by luck."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from data_rows import from_data, table
from test_against import OWN, a_run, stored
from whole_run import waiver_file, whole

from sm121.core import unmet, waivers
from sm121.plugin import outcomes
from sm121.run import stored_run, verdict_file
from sm121.run.verdict_file import TestReport
from sm121.session import against
from sm121.session.session import Session

ROOT = Path(__file__).parent.parent
SCENARIOS = "meta_tests/scenarios/verdicts.py"


@pytest.fixture
def attached(run_pytest, fault_server):
    """Run scenarios against the fault server; exit status, verdict.json, and the run."""

    def run(*arguments: str):
        server = fault_server()
        status, run = run_pytest("--arch", "cpu", *server.options, *arguments)
        assert server.process.poll() is None, "an attached server is never stopped"
        return status, run.verdict, run

    return run


def one(name: str) -> str:
    return f"{SCENARIOS}::{name}"


@from_data
def test_each_ending_has_its_verdict_and_exit_status(attached, name, verdict, status, count):
    seen, file, run = attached(one(name))
    assert seen == status, run.output
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
    names = ("test_pass", "test_invalid", "test_killed", "test_never_reached")
    status, file, run = attached(*(one(name) for name in names))
    assert status == -signal.SIGKILL
    verdicts = {test["id"].rsplit("::", 1)[1]: test["verdict"] for test in file["tests"]}
    assert verdicts == {
        "test_pass": "PASS",
        "test_invalid": "INVALID",
        "test_killed": "NOT_RUN",
        "test_never_reached": "NOT_RUN",
    }
    assert file["verdict"] == "INVALID" and not file["finished"]
    assert "INVALID" in (run.report / "summary.md").read_text()
    jsonschema.validate(file, verdict_file.json_schema())


def test_the_last_summary_is_written_however_soon_it_follows(tmp_path):
    """It is written each second; what is decided in the last one is in it as well."""
    file = whole(tests=[failed("test_a")], finished=False)
    run = SimpleNamespace(
        file=file, directory=tmp_path, started=0.0, pool=None, sampler=None,
        summarised=(None, 0.0), _judge=file.judge,
    )  # fmt: skip
    Session.save(run)
    file.tests.append(failed("test_b"))
    Session.save(run)
    assert "test_b" not in (tmp_path / "summary.md").read_text("utf-8").replace("\\", "")
    file.finished = True
    Session.save(run)
    assert "test_b" in (tmp_path / "summary.md").read_text("utf-8").replace("\\", "")


def failed(name):
    identity = f"tests/test_x.py::{name}"
    return TestReport(id=identity, level="correctness", verdict="FAIL", message=f"{name} is wrong")


def test_when_smoke_fails_nothing_else_runs(attached):
    status, file, run = attached("meta_tests/scenarios/smoke_fails.py")
    assert status == 1, run.output
    by_level = {test["level"]: test for test in file["tests"]}
    assert by_level["smoke"]["verdict"] == "FAIL"
    assert by_level["correctness"]["skipped"], "smoke comes first, whatever the file's order"
    assert "smoke" in by_level["correctness"]["message"]


def test_an_earlier_report_is_kept(attached, run_pytest, fault_server, tmp_path):
    common = ("--arch", "cpu", *fault_server().options)
    report = ("--report-dir", str(tmp_path / "report"))
    run_pytest(*common, *report, one("test_pass"))
    run_pytest(*common, *report, one("test_invalid"))
    current = json.loads((tmp_path / "report" / "verdict.json").read_text())
    (earlier,) = (tmp_path / "report" / "earlier").glob("*/verdict.json")
    assert current["verdict"] == "INVALID"
    assert json.loads(earlier.read_text())["verdict"] == "PASS"


def test_an_expired_waiver_waives_nothing(attached, tmp_path):
    status, file, _ = attached(
        f"--waivers={waiver_file(tmp_path, one('test_fail'), days=-1)}", one("test_fail")
    )
    assert status == 1
    assert "expired" in file["tests"][0]["message"]


def test_a_stale_waiver_is_reported(attached, tmp_path):
    _, _, run = attached(f"--waivers={waiver_file(tmp_path, one('test_pass'))}", one("test_pass"))
    assert f"waiver without a failure to waive: {one('test_pass')}" in run.output


def test_a_failure_of_no_level_is_not_painted_green(attached):
    status, file, run = attached(one("test_pass"), "meta_tests/scenarios/foreign.py")
    assert file["verdict"] == "PASS", "the levels held"
    assert status == 1, run.output
    assert "def test_of_no_level" in run.output, "the closing lines do not tell of it: pytest does"


@pytest.mark.slow("two runs")
def test_a_run_that_stops_early_is_not_finished(attached):
    names = ("test_pass", "test_fail", "test_invalid", "test_never_reached")
    status, file, _ = attached("-x", *(one(name) for name in names))
    assert status == 1 and not file["finished"]
    status, file, _ = attached(
        "-x", one("test_pass"), "meta_tests/scenarios/foreign.py", one("test_never_reached")
    )
    assert status == 1 or file["verdict"] != "PASS", file


def test_skipped_and_then_failed_has_failed(attached):
    status, file, run = attached("meta_tests/scenarios/teardowns.py", "-k", "skip or passes")
    verdicts = {test["id"].rsplit("::", 1)[1]: test["verdict"] for test in file["tests"]}
    assert status == 1, run.output
    assert verdicts["test_skipped_then_failed"] == verdicts["test_failed_then_skipped"] == "FAIL"
    assert verdicts["test_passes_unexpectedly"] == "FAIL"
    assert verdicts["test_passes"] == "PASS"


def test_a_waiver_tolerates_the_failure_of_one_parameter(attached, tmp_path):
    status, file, run = attached(
        f"--waivers={waiver_file(tmp_path, one('test_parametrised[7]'))}", one("test_parametrised")
    )
    assert status == 0 and file["levels"]["correctness"]["waived"] == 1, run.output
    assert any("https://example.org/1" in test["message"] for test in file["tests"])


CAPITALS = {name: unmet.Fact("the capital", "x", name) for name in ("France", "Germany", "Spain")}
CAPITALS["nowhere"] = unmet.Fact("the capital", "x")
CAPITALS["empty"] = replace(CAPITALS["France"], required="an answer")


@from_data
def test_a_waiver_of_a_case_hides_no_other_one(tmp_path, more, facts, tolerated):
    """`more` are the waivers of the test, a line each; `facts` names some of `CAPITALS`."""
    facts = [CAPITALS[name] for name in facts]
    loaded = [w for each in more for w in waivers.load(waiver_file(tmp_path, "t.py::t", more=each))]
    session = SimpleNamespace(settings=SimpleNamespace(waivers=loaded))
    finding = TestReport.of("t.py::t", "smoke", *facts)
    outcomes._waive(session, finding, None, report := SimpleNamespace())
    assert finding.waived is tolerated and hasattr(report, "wasxfail") is tolerated
    assert tolerated or all(repr(fact.case) in finding.message for fact in facts), finding.message


WAIVED = "meta_tests/scenarios/waivers.py"


def test_no_waiver_tolerates_what_is_no_plain_failure(attached, tmp_path):
    names = re.findall(r"^def (test_\w+)", (ROOT / WAIVED).read_text(), re.MULTILINE)
    file = waiver_file(tmp_path, *(f"{WAIVED}::{name}" for name in names))
    own = tmp_path / "busy.toml"  # others may work beside this, as the tests of the suite do
    shipped = (ROOT / "fixtures" / "profiles" / "cpu-tiny-gpt-oss.toml").read_text()
    own.write_text(re.sub(r"(max_other_load|max_drift|max_spread) = \S+", r"\1 = 1.0", shipped))
    status, found, run = attached("--waivers", str(file), "--profile", str(own), WAIVED)
    said = {test["id"].rsplit("::", 1)[1]: test for test in found["tests"]}
    assert status == 1 and found["verdict"] == "FAIL", run.output
    assert [name for name in names if said[name]["waived"]] == ["test_wrong"], run.output
    for name, why in table(__name__, "NEVER_WAIVED").items():
        assert said[name]["message"].startswith(f"not waived, since {why} never is"), said[name]
    assert said["test_rate_without_a_number"]["message"].startswith("not waived, since ")


def test_levels_were_asked_for_and_there_is_none(run_pytest, tmp_path):
    """Nobody takes the verdict of the run before for this one's."""
    report = tmp_path / "report"
    report.mkdir()
    (report / "verdict.json").write_text('{"certified": true}')
    own = ("--report-dir", str(report), "meta_tests/scenarios/foreign.py")
    for asked in (("--arch", "cpu"), ("-m", "sm121")):
        status, run = run_pytest(*own, *asked)
        assert status == 5, run.output
        seen = json.loads((report / "verdict.json").read_text())
        assert seen["verdict"] == "NOT_RUN" and seen["certified"] is None
    assert len(list((report / "earlier").glob("*/verdict.json"))) == 2


def test_two_runs_do_not_share_a_report_directory(start_pytest, run_pytest, fault_server, tmp_path):
    common = ("--arch", "cpu", *fault_server().options)
    shared = ("--report-dir", str(tmp_path / "shared"))
    waits = "meta_tests/scenarios/endings.py::test_waits"
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
def test_what_waits_for_an_option_is_left_out(attached):
    _, _, run = attached("meta_tests/scenarios/left_out.py")
    assert "1 slow tests are left out; --slow runs them" in run.output
    _, file, _ = attached("--slow", "meta_tests/scenarios/left_out.py")
    assert [test["verdict"] for test in file["tests"]] == ["PASS", "NOT_RUN", "NOT_RUN", "FAIL"]


@pytest.mark.parametrize("level", ["smoke", "stress"])
def test_a_peak_of_memory_is_compared_where_the_same_was_asked_before(level, tmp_path):
    """After the stress level a server held 6.77 GiB, without it 4.82."""
    trusted = against.load(
        str(stored(a_run(("a", "PASS", "", "smoke")), tmp_path / "run")), tmp_path
    )
    peak = stored_run.StoredMetric("memory_peak_gib", "GiB", False, None, (4.82,), 4.82)
    trusted.newest.metrics[peak.name] = peak
    now = {**trusted.newest.metrics, peak.name: replace(peak, samples=(9.77,), value=9.77)}
    run = a_run(("a", "PASS", "", level))
    found = [test.id for test in against.judge(run, trusted, OWN, now, lambda _test: True)]
    assert (f"--against::{peak.name}" in found) is (level == "smoke"), found
    assert run.against.unjudged == [peak.name] * (level == "stress")
