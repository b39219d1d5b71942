"""Which runs can be trusted, and with what later runs are compared after ``sm121 trust``."""

import json
from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest

from meta_tests.documents import altered
from meta_tests.fakes.against_runs import ORACLE, TESTS, a_run, changed, ended, held, of, stored
from sm121 import cli
from sm121.core.errors import UsageError
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.run import details, machine_report
from sm121.run.details import Details, Samples
from sm121.run.verdict_file import VerdictFile
from sm121.session import trusted_runs


def test_nothing_gets_worse_step_by_step(tmp_path):
    """A loss that adds up over several trusted runs makes a run fail, although each step is
    allowed.

    Each run resembles the one before it, and each rate is within the allowed loss."""
    rate = 50.0
    off = 0.09
    for step in range(4):
        tests = (TESTS[0], (*TESTS[2][:2], replace(ORACLE, value=off)))
        folder = stored(a_run(*tests, rate=rate, seed=step), tmp_path / f"{step}", rate, step)
        if step:
            trusted = trusted_runs.load("trusted", tmp_path)
            run, _ = held(a_run(*tests, rate=rate, seed=step), trusted, rate=rate, seed=step)
            assert (run.verdict is Verdict.PASS) == (step == 1), (step, run.against)
        trusted_runs.trust(folder, tmp_path)
        rate = rate * 0.97
        off = off * 1.8


@pytest.mark.parametrize("how", [{"waived": True}, {"tolerated": "listed"}])
def test_failures_excused_for_another_reason_are_not_known(tmp_path, how):
    file = a_run(*TESTS)
    file.tests[1] = file.tests[1].model_copy(update=how)
    file.judge()
    trusted = trusted_runs.load(str(stored(file, tmp_path / "run")), tmp_path)
    assert trusted.known(a_run(*TESTS).tests[1]) is None
    assert trusted.known(a_run(*TESTS).tests[2]) is not None


@pytest.mark.parametrize("anew", [False, True])
def test_a_verdict_file_names_its_run(tmp_path, anew):
    """If `sm121 trust` gets a verdict.json, it stores the whole run, and `--against trusted` finds
    it."""
    folder = stored(a_run(*TESTS), tmp_path / "run")
    kept, *_ = trusted_runs.trust(folder / "verdict.json", tmp_path, anew=anew)
    for name in ("verdict.json", "details.json"):
        assert (kept / name).read_bytes() == (folder / name).read_bytes()
    assert len(trusted_runs.load("trusted", tmp_path).runs) == 1


def test_a_run_of_the_first_version_is_read(tmp_path):
    """A run of the first version has only the text of a failure.

    The same text is the same failure.
    """
    folder = stored(a_run(*TESTS), tmp_path / "run")
    run = json.loads((folder / "verdict.json").read_text())
    run["schema_version"] = 1
    for test in run["tests"]:
        test["said"] = test["message"]
        del test["unmet"]
    (folder / "verdict.json").write_text(json.dumps(run))
    trusted = trusted_runs.load(str(folder), tmp_path)
    for test in a_run(*TESTS).tests[1:]:
        assert trusted.known(test)
    assert trusted.known(a_run(*changed(2, "FAIL", replace(ORACLE, value=0.095))).tests[2]) is None


@pytest.mark.parametrize(
    ("changes", "text", "why"),
    [
        pytest.param({"finished": False}, None, "has not finished", id="not finished"),
        pytest.param(
            {"tests.0.verdict": "FAIL", "tests.0.message": "x"},
            None,
            "changed after",
            id="a test that was edited to FAIL",
        ),
        pytest.param(
            {"fingerprint": None},
            None,
            "has no record of its settings",
            id="without a fingerprint",
        ),
        pytest.param(
            {"crashes": [{"kind": "oom", "summary": "died", "owner": "us"}]},
            None,
            "crashed in it: died",
            id="it crashed",
        ),
        pytest.param(
            {"tests": "x"},
            None,
            "expected a report directory",
            id="tests that are text",
        ),
        pytest.param(
            {"schema_version": 99},
            None,
            "schema 99 is of a later version",
            id="a later schema",
        ),
        pytest.param({"levels": {}}, None, "changed after", id="levels that were taken out"),
        pytest.param(
            {"metrics.tg32@d0.value": 0.0},
            None,
            "its tg32@d0 contains a 0",
            id="a rate of 0",
        ),
        pytest.param(
            {"metrics.tg32@d0.value": -1.0},
            None,
            "its tg32@d0 contains a 0",
            id="a negative rate",
        ),
        pytest.param(
            {"metrics.tg32@d0.value": float("nan")},
            None,
            "its tg32@d0 has no value",
            id="a rate that is no number",
        ),
        pytest.param(
            None, mul("[", 100000), "expected a report directory", id="a list in a list in a list"
        ),
        (None, "{}", "expected a report directory"),
        (None, "null", "expected a report directory"),
        (None, "", "expected a report directory"),
    ],
)
def test_a_run_unusable_as_trusted_run_is_refused(tmp_path, changes, text, why):
    folder = stored(a_run(("tests/a.py::holds", "PASS", "")), tmp_path / "run")
    file = folder / "verdict.json"
    if text is None:
        text = json.dumps(altered(json.loads(file.read_text()), changes))
    file.write_text(text)
    with pytest.raises(UsageError, match=why):
        trusted_runs.load(str(folder), tmp_path)
    with pytest.raises(UsageError, match=why):
        trusted_runs.trust(folder, tmp_path / "storage")


def test_a_run_without_tests_is_refused_for_that_reason(tmp_path):
    """`sm121 trust` refuses a run that executed no test, and gives this as the reason.

    The run has no fingerprint, because it was stopped before it had a target."""
    run = a_run(("tests/a.py::a", "NOT_RUN", "no GPU"), fingerprint=None, metrics={})
    folder = stored(run, tmp_path / "run")
    with pytest.raises(UsageError, match="no test of a level was executed in it"):
        trusted_runs.trust(folder, tmp_path / "storage")


def test_the_newest_run_that_was_trusted_is_taken(tmp_path):
    with pytest.raises(UsageError, match="sm121 trust REPORT"):
        trusted_runs.load("trusted", tmp_path)
    for number, message in enumerate(("one", "two"), 1):
        folder = stored(a_run(("tests/a.py::a", "FAIL", message)), tmp_path / f"run-{number}")
        copy_of_run, *_ = trusted_runs.trust(folder, tmp_path)
        assert copy_of_run.name == f"{number:04}"
    newest = trusted_runs.load("trusted", tmp_path).newest
    assert newest.file.tests[0].message == "two" and len(newest.metrics["tg32@d0"].samples) == 20
    by_file = trusted_runs.load(str(tmp_path / "run-1" / "verdict.json"), tmp_path).newest
    assert by_file.file.tests[0].message == "one" and by_file.metrics


def test_trust_lists_metrics_that_need_more_runs(tmp_path, capsys):
    few = Samples(unit="tok/s", samples=[49.0, 50.0, 51.0])
    reports = []
    for count, text in enumerate(("until 2 more runs of", "until 1 more run of", "")):
        reports.append(f"{stored(a_run(*TESTS, seed=count), tmp_path / f'run-{count}')}")
        details.write_details(Details(samples={"tg32@d0": few}), Path(reports[-1]))
        assert cli.main(["trust", "--anew", *reports, f"--benchmark-storage={tmp_path}"]) == 0
        printed = capsys.readouterr().out
        assert text in printed and ("tg32@d0" in printed) == bool(text)


def test_a_run_like_the_newest_one_is_no_worse(tmp_path):
    """A run with the same failure as the newest trusted run is no worse.

    An older trusted run has another failure of the same test."""
    for number, message in enumerate(("expected 1, got 2", "expected 1, got 7"), 1):
        tests = (TESTS[0], ("tests/a.py::a", "FAIL", message))
        trusted_runs.trust(stored(a_run(*tests), tmp_path / f"run-{number}"), tmp_path)
    run, facts = held(a_run(*tests), trusted_runs.load("trusted", tmp_path))
    assert not facts and run.against.no_worse and run.against.known == ["tests/a.py::a"]


def test_a_worse_run_can_be_trusted_with_anew(tmp_path):
    for n in range(3):
        trusted_runs.trust(stored(a_run(*TESTS, seed=n), tmp_path / f"{n}", seed=n), tmp_path)
    with pytest.raises(UsageError, match=r"not stored yet, got one that is stored as .*0003"):
        trusted_runs.trust(tmp_path / "2", tmp_path)
    folder = stored(a_run(*TESTS, rate=30.0), tmp_path / "slower", 30.0)
    with pytest.raises(UsageError, match=r"got tg32@d0.* worse.*sm121 trust --anew .*slower"):
        trusted_runs.trust(folder, tmp_path)
    run, _ = held(a_run(*TESTS, rate=30.0), trusted_runs.load("trusted", tmp_path), rate=30.0)
    assert run.verdict is not Verdict.PASS, "by itself no trusted run makes slower ones good"
    copy_of_run, *_ = trusted_runs.trust(folder, tmp_path, anew=True)
    trusted = trusted_runs.load("trusted", tmp_path)
    assert len(trusted.runs) == 1 and copy_of_run.stat().st_mode & 0o755 == 0o755
    run, facts = held(a_run(*TESTS, rate=30.0), trusted, rate=30.0)
    assert not facts and run.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("stored_rates", "rate", "reason"),
    [
        pytest.param((50.0,), 47.0, "this one start", id="a loss that one slow start may cause"),
        pytest.param((50.0, 50.1, 50.2), 48.0, "", id="a loss within the limit"),
        pytest.param((50.0, 47.5, 45.0, 48.0), 45.0, "", id="a loss within the scatter"),
    ],
)
def test_trust_refuses_an_undecided_loss_but_no_jitter(tmp_path, stored_rates, rate, reason):
    of_a_spark = {"profile": "sm121-gpt-oss-120b"}  # this profile allows a loss of 5 %
    (tmp_path / "trusted").mkdir()
    for number, each in enumerate(stored_rates, 1):
        run = a_run(*TESTS, rate=each, seed=number, **of_a_spark)
        stored(run, tmp_path / "trusted" / f"{number:04}", each, number)
    run = a_run(*TESTS, rate=rate, seed=9, **of_a_spark)
    folder = stored(run, tmp_path / "new", rate, 9)
    if reason:
        with pytest.raises(UsageError, match=f"got tg32@d0.* worse.*{reason}.*sm121 trust --anew"):
            trusted_runs.trust(folder, tmp_path)
    else:
        trusted_runs.trust(folder, tmp_path)


def test_trust_refuses_a_newly_failed_gate(tmp_path):
    """`sm121 trust` refuses a run with a failed gate, unless the trusted run failed it, too."""
    red = a_run(*TESTS)
    red.metrics["tg32@d0"].verdict = Verdict.FAIL
    red.judge()
    trusted_runs.trust(stored(a_run(*TESTS, seed=2), tmp_path / "good", seed=2), tmp_path)
    folder = stored(red, tmp_path / "red")
    with pytest.raises(UsageError, match="got tg32@d0, which failed its gate"):
        trusted_runs.trust(folder, tmp_path)
    trusted_runs.trust(folder, tmp_path, anew=True)
    again = red.model_copy(update={"started": "2026-11-24T08:00:00+00:00"})
    trusted_runs.trust(stored(again, tmp_path / "again"), tmp_path)
    assert len(trusted_runs.load("trusted", tmp_path).runs) == 2


def test_trust_refuses_a_check_that_passed_in_the_trusted_run(tmp_path):
    """`sm121 trust` refuses a run in which a check fails that passed in the trusted run.

    A failed check that the trusted run did not have, or that failed in it, is no loss."""
    trusted_runs.trust(stored(a_run(*TESTS, seed=2), tmp_path / "good", seed=2), tmp_path)
    red = stored(a_run(*changed(0, "FAIL", Fact("400", "200"))), tmp_path / "red")
    with pytest.raises(UsageError, match=r"got tests/a\.py::holds, which passed there"):
        trusted_runs.trust(red, tmp_path)
    further = ("tests/b.py::added", "FAIL", "x")
    trusted_runs.trust(stored(a_run(*TESTS, further), tmp_path / "more"), tmp_path)
    trusted_runs.trust(red, tmp_path, anew=True)


def test_trust_refuses_a_check_that_measures_and_fails_another_requirement(tmp_path):
    """If a check fails its gate, `sm121 trust` names the gate, and otherwise the check."""
    trusted_runs.trust(stored(a_run(*TESTS, seed=2), tmp_path / "good", seed=2), tmp_path)
    red = a_run(*changed(0, "FAIL", Fact("400", "200")))
    red.tests[0] = of(red.tests[0], metrics=["tg32@d0"])
    with pytest.raises(UsageError, match=r"got tests/a\.py::holds, which passed there\. "):
        trusted_runs.trust(stored(red, tmp_path / "red"), tmp_path)
    red.metrics["tg32@d0"].verdict = Verdict.FAIL
    red.judge()
    with pytest.raises(UsageError, match=r"got tg32@d0, which failed its gate\. "):
        trusted_runs.trust(stored(red, tmp_path / "slow"), tmp_path)


def test_a_run_whose_smoke_level_failed_is_no_measure(tmp_path):
    file = a_run(("tests/s.py::s", "FAIL", "x"), TESTS[0])
    smoke, test = file.tests
    not_run = {"verdict": Verdict.NOT_RUN, "message": "smoke failed"}
    file.tests = [of(smoke, level="smoke"), of(test, **not_run)]
    file.judge()
    with pytest.raises(UsageError, match="its smoke level failed"):
        trusted_runs.load(str(stored(file, tmp_path / "run")), tmp_path)


def test_a_kept_run_that_cannot_be_read_is_named_and_replaced(tmp_path):
    copy_of_run, *_ = trusted_runs.trust(stored(a_run(*TESTS), tmp_path / "one"), tmp_path)
    (copy_of_run / "verdict.json").write_text("{")
    with pytest.raises(UsageError, match=str(copy_of_run)):
        trusted_runs.load("trusted", tmp_path)
    _, _, narrower = trusted_runs.trust(
        stored(a_run(*TESTS), tmp_path / "two"), tmp_path, anew=True
    )
    assert "unreadable" in narrower[0]
    assert trusted_runs.load("trusted", tmp_path).newest.file.tests[0].id == TESTS[0][0]


def of_a_sick_box(**fields) -> VerdictFile:
    """Return a run on a DEGRADED machine, whose answers count and whose rates do not."""
    box = machine_report.BoxReport(state="DEGRADED", reason="other processes use the GPU: [7]")
    file = a_run(*TESTS, box=box, **fields)
    file.metrics["tg32@d0"].verdict = Verdict.INCONCLUSIVE
    file.tests.append(ended("end of the run::box", "INCONCLUSIVE", "DEGRADED", "performance"))
    file.judge()
    return file


def test_a_trusted_run_on_a_degraded_box_counts_only_for_answers(tmp_path, capsys):
    """If the box of a trusted run was DEGRADED, its rates are not compared.

    Both `sm121 trust` and the later run say so."""
    folder = stored(of_a_sick_box(), tmp_path / "sick")
    assert cli.main(["trust", str(folder), f"--benchmark-storage={tmp_path}"]) == 0
    assert "its answers are compared, but not its rates and times" in capsys.readouterr().out
    trusted = trusted_runs.load("trusted", tmp_path)
    run, facts = held(a_run(*TESTS), trusted)
    assert not facts and run.verdict is Verdict.PASS and run.against.no_worse
    assert "(rates not judged: the machine of the run of" in run.why(), run.why()
    assert run.against.measured == {} and run.against.metrics == []
    slower, facts = held(a_run(*TESTS, rate=20.0), trusted, rate=20.0)
    assert not facts and "rates not judged" in slower.why()
    worse, _ = held(a_run(*changed(0, "FAIL", "wrong")), trusted)
    assert worse.verdict is Verdict.FAIL and worse.against.new == ["tests/a.py::holds"]


@pytest.mark.parametrize(("rate", "verdict"), [(50.0, "PASS"), (30.0, "FAIL")])
def test_rates_are_held_against_the_newest_trusted_run_on_a_fit_box(tmp_path, rate, verdict):
    """Rates are compared with the newest trusted run on a healthy machine.

    A later trusted run on a DEGRADED machine hides no slower build."""
    trusted_runs.trust(stored(a_run(*TESTS), tmp_path / "fit"), tmp_path)
    sick = of_a_sick_box(rate=30.0, started="2026-11-24T08:00:00+00:00")
    _, _, narrower = trusted_runs.trust(stored(sick, tmp_path / "sick", 30.0), tmp_path)
    assert not narrower
    trusted = trusted_runs.load("trusted", tmp_path)
    run, _ = held(a_run(*TESTS, rate=rate), trusted, rate=rate)
    assert run.verdict.value == verdict and run.against.rates_not_judged is None
    assert "compared with the run of 2026-11-23" in run.against.differs[-1]
    assert run.against.measured["tg32@d0"].value == pytest.approx(50.0, rel=0.01)
    run, (test,) = held(a_run(*TESTS), trusted, rate=0.0)
    assert test.id == "--against::tg32@d0" and run.verdict is Verdict.FAIL
