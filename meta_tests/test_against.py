"""``--against RUN``: not worse than a trusted run, and each way of being worse is seen."""

import copy
import json
import random
import shlex
from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest
from documents import altered

from sm121 import cli
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.unmet import Fact, alike
from sm121.core.verdict import Severity, Verdict
from sm121.evidence.kernel_path import KernelPath, RequestReport
from sm121.run import details, verdict_file
from sm121.run.details import Details, Samples
from sm121.run.fingerprint import Fingerprint
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import EngineReport, MetricReport, TestReport, VerdictFile
from sm121.session import against

REGRESSION = profile.load("sm121-gpt-oss-120b").regression
OWN = profile.load("cpu-tiny-gpt-oss").model_copy(update={"regression": REGRESSION})
PATH = KernelPath(attention="CPU_ATTN", moe="CPU", kv_cache_dtype="auto", dtype="bfloat16")
REFUSED = Fact("400 or 422", "500 x", "bad-json", evidence="chatcmpl-0123456789")
ORACLE = Fact(
    "a difference of at most", "at token 14", "prompt capitals",
    kind="difference", value=0.0912, limit=0.058, unit="nats",
)  # fmt: skip


def rates(level: float, seed: int) -> tuple[float, ...]:
    scatter = random.Random(seed)
    return tuple(level * scatter.gauss(1.0, 0.004) for _ in range(20))


def ended(name: str, verdict: str, message: str | Fact, level: str = "correctness") -> TestReport:
    if isinstance(message, Fact):
        return TestReport.of(name, level, message, verdict=Verdict(verdict))
    return TestReport(id=name, level=level, verdict=Verdict(verdict), message=message)


def a_run(
    *tests: tuple[str, str, str | Fact], rate: float = 50.0, seed: int = 1, **fields
) -> VerdictFile:
    middle = sorted(rates(rate, seed))[10]
    metric = MetricReport(value=middle, unit="tok/s", rounds=20, verdict=Verdict.PASS)
    whole = {
        "engine": EngineReport(
            name="vllm", version="0.24.0", managed=True, model="m", startup_s=60.0, path=PATH
        ),
        "metrics": {"tg32@d0": metric},
        "finished": True,
        "arch": "cpu",
        "profile": OWN.name,
        "fingerprint": Fingerprint(model="0123", machine={"cpu_model": "one"}, arguments=["--x"]),
        "started": "2026-11-23T08:00:00+00:00",
        "tests": [ended(*test) for test in tests],
    }
    file = VerdictFile(**(whole | fields))
    file.judge()
    return file


def stored(file: VerdictFile, folder: Path, rate: float = 50.0, seed: int = 1) -> Path:
    folder.mkdir()
    verdict_file.write(file, folder / "verdict.json")
    samples = Samples(unit="tok/s", samples=list(rates(rate, seed)))
    details.write(Details(samples={"tg32@d0": samples}), folder)
    return folder


TESTS = (
    ("tests/a.py::holds", "PASS", ""),
    ("tests/a.py::refuses", "FAIL", REFUSED),
    ("tests/a.py::computes", "FAIL", ORACLE),
)


@pytest.fixture
def trusted(tmp_path) -> against.Trusted:
    return against.load(str(stored(a_run(*TESTS), tmp_path / "trusted")), tmp_path)


def held(run: VerdictFile, trusted: against.Trusted, rate: float = 50.0, seed: int = 2,
         left_out=()) -> tuple[VerdictFile, list[TestReport]]:  # fmt: skip
    for test in run.tests:
        if test.verdict is Verdict.FAIL and trusted.known(test):
            test.tolerated = "known"
    samples = rates(rate, seed)
    now = StoredMetric("tg32@d0", "tok/s", True, None, samples, sorted(samples)[10])
    facts = against.judge(
        run, trusted, OWN, {"tg32@d0": now} if rate else {}, lambda test: test.id not in left_out
    )
    run.tests += facts
    run.judge()
    return run, facts


def changed(number: int, *values: str | Fact) -> tuple[tuple[str, str, str | Fact], ...]:
    tests = [list(test) for test in TESTS]
    for n, value in enumerate(values, 3 - len(values)):
        tests[number][n] = value
    return tuple(tuple(test) for test in tests)


@pytest.mark.parametrize("seed", range(2, 12))
def test_an_honest_run_is_no_worse(trusted, seed):
    """Ten of them: ids, times, words and what was measured differ."""
    again = replace(REFUSED, evidence=f"chatcmpl-abcdef{seed:04}")
    nearly = replace(ORACLE, value=0.0912 + seed / 1000, required="no more than")
    tests = (TESTS[0], (*TESTS[1][:2], again), (*TESTS[2][:2], nearly))
    run, facts = held(a_run(*tests), trusted, seed=seed)
    assert facts == [] and run.verdict is Verdict.PASS and run.against.no_worse
    assert run.why() == (
        "not worse than the run of 2026-11-23T08:00:00+00:00; 1 check passed; "
        "2 failed and are known"
    )


def test_what_was_mended_is_told(trusted):
    run, facts = held(a_run(*changed(1, "PASS", "")), trusted)
    assert facts == [] and run.against.mended == ["tests/a.py::refuses"] and run.against.no_worse


@pytest.mark.parametrize(
    ("change", "where", "part"),
    [
        pytest.param(
            {"tests": changed(0, "FAIL", Fact("400", "200"))},
            "new",
            "tests/a.py::holds",
            id="a new deviation",
        ),
        pytest.param(
            {"tests": changed(1, "FAIL", replace(REFUSED, observed="404 x"))},
            "changed",
            "refuses",
            id="another status",
        ),
        pytest.param(
            {"tests": changed(1, "FAIL", replace(REFUSED, observed="500 y"))},
            "changed",
            "refuses",
            id="the same status with another text",
        ),
        pytest.param(
            {"tests": changed(1, "FAIL", replace(REFUSED, observed="garbage"))},
            "changed",
            "refuses",
            id="wrong mathematics where it was red for another reason",
        ),
        pytest.param(
            {"tests": changed(2, "FAIL", replace(ORACLE, value=0.912))},
            "changed",
            "computes",
            id="ten times as far off",
        ),
        pytest.param(
            {"tests": changed(2, "FAIL", replace(ORACLE, unit="%"))},
            "changed",
            "computes",
            id="as far off, in another unit",
        ),
        pytest.param(
            {"tests": changed(2, "FAIL", replace(ORACLE, observed="token 15"))},
            "changed",
            "computes",
            id="off at another token",
        ),
        pytest.param(
            {"tests": changed(2, "INVALID", "wrong path")},
            None,
            "wrong path",
            id="a known one that is no longer decided",
        ),
        pytest.param(
            {
                "tests": [
                    ["tests/a.py::refuses", "FAIL", REFUSED],
                    ["tests/a.py::computes", "FAIL", ORACLE],
                ]
            },
            "missing",
            "tests/a.py::holds",
            id="a test that is gone",
        ),
        pytest.param(
            {"tests": changed(0, "NOT_RUN", "no nvcc")},
            "missing",
            "no nvcc",
            id="a test that does not run",
        ),
        pytest.param(
            {"tests": changed(1, "NOT_RUN", "no nvcc")},
            "missing",
            "no nvcc",
            id="a known failure that does not run",
        ),
        pytest.param(
            {"path": {"attention": "TORCH_SDPA"}},
            "path",
            "attention: CPU_ATTN there",
            id="another path",
        ),
        pytest.param(
            {"path": {"moe": None}}, "path", "no evidence of any", id="a path without evidence"
        ),
        pytest.param(
            {"path": {"fallbacks": ["marlin"]}}, "path", "fallbacks: marlin", id="a fallback"
        ),
        pytest.param({"rate": 44.0}, "worse", "tg32@d0", id="a slower engine"),
        pytest.param({"machine": "two"}, "worse", "another machine", id="another machine"),
        pytest.param({"box": "DEGRADED"}, "worse", "DEGRADED", id="a busy box"),
    ],
)
def test_a_change_to_the_worse_is_red_and_named(trusted, change, where, part):
    run = a_run(*change.get("tests", TESTS))
    run.engine.path = PATH.model_copy(update=change.get("path", {}))
    run.fingerprint.machine["cpu_model"] = change.get("machine", "one")
    run.box.state = change.get("box", "QUALIFIED")
    run, _ = held(run, trusted, rate=change.get("rate", 50.0))
    assert run.verdict not in (Verdict.PASS, Verdict.NOT_RUN)
    assert where is None or not run.against.no_worse
    lines = [f"{test.id} {test.message}" for test in run.tests if test.counted is run.verdict]
    assert any(part in line for line in lines), lines
    assert where is None or any(part in line for line in getattr(run.against, where)) or lines


def test_what_was_not_asked_for_is_not_missing(trusted):
    run, facts = held(a_run(*TESTS[1:]), trusted, left_out={"tests/a.py::holds"})
    assert facts == [] and run.against.no_worse
    run = a_run()
    run.tests = [TestReport(id="tests/b.py::b", level="smoke", verdict=Verdict.PASS)]
    run, facts = held(run, trusted, left_out={name for name, *_ in TESTS})
    assert facts == [] and run.against.not_asked == ["correctness"]
    assert "(correctness not compared)" in run.why()


def test_a_path_that_was_asked_for_is_told(trusted):
    """Only where the request speaks of that value, and never the loss of evidence."""
    request = {"field": "kv_cache_dtype", "resolved": "fp8", "state": "resolved", "message": ""}
    requested = [RequestReport(by="--kv-cache-dtype=fp8", **request)]
    run = a_run(*TESTS)
    run.engine.path = PATH.model_copy(update={"kv_cache_dtype": "fp8", "requested": requested})
    run, facts = held(run, trusted)
    assert facts == [] and run.against.path_told == ["kv_cache_dtype: auto there, fp8 here"]
    for change in ({"attention": "TORCH_SDPA"}, {"kv_cache_dtype": None}, {"also": {"moe": ["X"]}}):
        run = a_run(*TESTS)
        run.fingerprint.environment = {"VLLM_LOGGING_LEVEL": "DEBUG"}
        run.engine.path = PATH.model_copy(update={"requested": requested, **change})
        run, facts = held(run, trusted)
        assert len(facts) == 1 and run.against.path, change


def test_nothing_gets_worse_step_by_step(tmp_path):
    """Each is alike the one before, and each rate within what is allowed."""
    rate, off = 50.0, 0.09
    for step in range(4):
        tests = (TESTS[0], (*TESTS[2][:2], replace(ORACLE, value=off)))
        folder = stored(a_run(*tests, rate=rate, seed=step), tmp_path / f"{step}", rate, step)
        if step:
            trusted = against.load("trusted", tmp_path)
            run, _ = held(a_run(*tests, rate=rate, seed=step), trusted, rate=rate, seed=step)
            assert (run.verdict is Verdict.PASS) == (step == 1), (step, run.against)
        against.trust(folder, tmp_path)
        rate, off = rate * 0.97, off * 1.8


def test_a_rate_that_nobody_compares_is_not_green(tmp_path, trusted):
    run = a_run(*TESTS)
    _, (test,) = held(run, trusted, rate=0.0)
    assert test.id == "--against::tg32@d0"
    run = a_run(*TESTS)
    run.metrics["tg32@d0"].verdict = Verdict.NOT_RUN
    _, (test,) = held(run, trusted, rate=0.0)
    assert test.verdict is Verdict.INCONCLUSIVE and "measured on a busy machine" in test.message
    folder = stored(a_run(*TESTS), tmp_path / "run")
    (folder / details.NAME).unlink()
    with pytest.raises(UsageError, match=r"details\.json next to it has no samples of tg32@d0"):
        against.load(str(folder), tmp_path)


@pytest.mark.parametrize("how", [{"waived": True}, {"tolerated": "listed"}])
def test_what_another_reason_excused_is_not_known(tmp_path, how):
    file = a_run(*TESTS)
    file.tests[1] = file.tests[1].model_copy(update=how)
    file.judge()
    trusted = against.load(str(stored(file, tmp_path / "run")), tmp_path)
    assert trusted.known(a_run(*TESTS).tests[1]) is None
    assert trusted.known(a_run(*TESTS).tests[2]) is not None


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param({}, True, id="same"),
        pytest.param({"value": 0.17}, True, id="value 0.17, same"),
        pytest.param({"value": 0.19}, False, id="value 0.19, not same"),
        pytest.param({"value": -0.0912}, False, id="value -0.0912, not same"),
        pytest.param({"value": None}, False, id="value None, not same"),
        pytest.param({"value": float("nan")}, False, id="value nan, not same"),
        pytest.param({"limit": 0.06}, True, id="limit 0.06, same"),
        pytest.param({"limit": 0.58}, False, id="limit 0.58, not same"),
        pytest.param({"unit": "%"}, False, id="unit %, not same"),
        # other words for the same kind
        pytest.param({"required": "no more than"}, True, id="required no more than, same"),
        pytest.param(
            {"required": "no more than", "kind": ""},
            False,
            id="required no more than kind, not same",
        ),
        pytest.param({"kind": "order"}, False, id="kind order, not same"),
        pytest.param(
            {"evidence": "port 4001, /tmp/x/server.log, at 09:10:11"},
            True,
            id="evidence port 4001, /tmp/x/server.log, at 09:10:11, same",
        ),
        pytest.param({"about": "prompt digits"}, False, id="about prompt digits, not same"),
        pytest.param({"observed": "at token 15"}, False, id="observed at token 15, not same"),
    ],
)
def test_failures_are_compared_by_what_does_not_hold(change, same):
    """Never by the words: the value by its size, the unit, the kind, and what was observed."""
    other = replace(ORACLE, **change)
    assert alike([ORACLE], [other]) is same
    assert alike([REFUSED, ORACLE], [REFUSED, other]) is same
    assert not alike([ORACLE], [ORACLE, other]), "a known failure hides no other one"
    assert alike([REFUSED, ORACLE], [other]) is same, "less that does not hold is not worse"


def test_a_run_of_the_first_version_is_read(tmp_path):
    """It has the text of a failure alone: the same text is the same failure."""
    folder = stored(a_run(*TESTS), tmp_path / "run")
    run = json.loads((folder / "verdict.json").read_text())
    run["schema_version"] = 1
    for test in run["tests"]:
        test["said"] = test["message"]
        del test["unmet"]
    (folder / "verdict.json").write_text(json.dumps(run))
    trusted = against.load(str(folder), tmp_path)
    assert all(trusted.known(test) for test in a_run(*TESTS).tests[1:])
    assert trusted.known(a_run(*changed(2, "FAIL", replace(ORACLE, value=0.095))).tests[2]) is None


@pytest.mark.parametrize(
    ("changes", "text", "why"),
    [
        pytest.param(
            {"finished": False}, None, "has not finished", id="finished False, has not finished"
        ),
        pytest.param(
            {"tests.0.verdict": "FAIL", "tests.0.message": "x"},
            None,
            "changed after",
            id="tests.0.verdict FAIL tests.0.message x, changed after",
        ),
        pytest.param(
            {"fingerprint": None},
            None,
            "does not say what was asked",
            id="fingerprint None, does not say what was asked",
        ),
        pytest.param(
            {"crashes": [{"kind": "oom", "summary": "died", "owner": "us"}]},
            None,
            "crashed in it: died",
            id="crashes kind oom summary died owner us, crashed in it",
        ),
        pytest.param(
            {"tests": "x"},
            None,
            "expected a report directory",
            id="tests x, expected a report directory",
        ),
        pytest.param(
            {"schema_version": 99},
            None,
            "schema 99 is of a later version",
            id="schema_version 99, schema 99 is of a later version",
        ),
        pytest.param({"levels": {}}, None, "changed after", id="levels, changed after"),
        pytest.param(
            {"metrics.tg32@d0.value": 0.0},
            None,
            "its tg32@d0 holds a 0",
            id="metrics.tg32@d0.value 0.0, its tg32@d0 holds a 0",
        ),
        pytest.param(
            {"metrics.tg32@d0.value": -1.0},
            None,
            "its tg32@d0 holds a 0",
            id="metrics.tg32@d0.value -1.0, its tg32@d0 holds a 0",
        ),
        pytest.param(
            {"metrics.tg32@d0.value": float("nan")},
            None,
            "its tg32@d0 has no value",
            id="metrics.tg32@d0.value nan, its tg32@d0 has no value",
        ),
        pytest.param(
            None, mul("[", 100000), "expected a report directory", id="a list in a list in a list"
        ),
        (None, "{}", "expected a report directory"),
        (None, "null", "expected a report directory"),
        (None, "", "expected a report directory"),
    ],
)
def test_a_run_that_nothing_can_be_held_against_is_refused(tmp_path, changes, text, why):
    folder = stored(a_run(("tests/a.py::holds", "PASS", "")), tmp_path / "run")
    file = folder / "verdict.json"
    if text is None:
        text = json.dumps(altered(json.loads(file.read_text()), changes))
    file.write_text(text)
    with pytest.raises(UsageError, match=why):
        against.load(str(folder), tmp_path)
    with pytest.raises(UsageError, match=why):
        against.trust(folder, tmp_path / "storage")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"arch": "sm121"}, id="arch sm121"),
        pytest.param({"profile": "another"}, id="profile another"),
        pytest.param(
            {"fingerprint": Fingerprint(model="other")}, id="fingerprint Fingerprint model other"
        ),
    ],
)
def test_a_run_of_something_else_is_refused(trusted, change):
    run = a_run(*TESTS).model_copy(update=change)
    with pytest.raises(UsageError, match="is of another"):
        against.refuse(trusted, run)


def test_the_newest_run_that_was_trusted_is_taken(tmp_path):
    with pytest.raises(UsageError, match="sm121 trust REPORT"):
        against.load("trusted", tmp_path)
    for number, message in enumerate(("one", "two"), 1):
        folder = stored(a_run(("tests/a.py::a", "FAIL", message)), tmp_path / f"run-{number}")
        copy_of_run, *_ = against.trust(folder, tmp_path)
        assert copy_of_run.name == f"{number:04}"
    newest = against.load("trusted", tmp_path).newest
    assert newest.file.tests[0].message == "two" and len(newest.metrics["tg32@d0"].samples) == 20
    by_file = against.load(str(tmp_path / "run-1" / "verdict.json"), tmp_path).newest
    assert by_file.file.tests[0].message == "one" and by_file.metrics


def test_trust_says_what_cannot_be_judged_yet(tmp_path, capsys):
    few, reports = Samples(unit="tok/s", samples=[49.0, 50.0, 51.0]), []
    for count, text in enumerate(("until 2 more runs of", "until 1 more run of", "")):
        reports.append(f"{stored(a_run(*TESTS, seed=count), tmp_path / f'run-{count}')}")
        details.write(Details(samples={"tg32@d0": few}), Path(reports[-1]))
        assert cli.main(["trust", "--anew", *reports, f"--benchmark-storage={tmp_path}"]) == 0
        printed = capsys.readouterr().out
        assert text in printed and ("tg32@d0" in printed) == bool(text)


def test_a_failure_that_the_profile_does_not_need_is_listed():
    file = a_run(("tests/a.py::holds", "PASS", ""), ("tests/a.py::form", "FAIL", "no error object"))
    file.tests[1].severity = Severity.COURTESY
    file.tests[1].tolerated = "listed"
    file.judge()
    assert file.verdict is Verdict.PASS and file.levels["correctness"].listed == 1
    assert file.why() == "1 check passed; 1 failed and is listed"


def of(test: TestReport, **fields) -> TestReport:
    return test.model_copy(update=fields)


def test_a_deviation_that_the_trusted_run_did_not_show_is_red(trusted):
    """It is known of this release, and so excused; but the build that is trusted did it right."""
    served = ["empty-messages: served"]

    def judged(before: list[str] | None) -> tuple[VerdictFile, list[TestReport]]:
        trusted.newest.file.tests[0] = of(trusted.newest.file.tests[0], deviations=before)
        run = a_run(*TESTS)
        run.tests[0] = of(run.tests[0], deviations=served)
        return held(run, trusted)

    run, (fact,) = judged([])
    assert run.verdict is Verdict.FAIL and run.against.changed == ["tests/a.py::holds"]
    assert served[0] in fact.message
    # In both: it is as it was. Of a suite that did not note it: nobody knows.
    for before in (served, None):
        run, facts = judged(before)
        assert not facts and run.against.no_worse


def test_a_run_like_the_newest_one_is_no_worse(tmp_path):
    """What was accepted since counts: another failure of the same test was trusted later."""
    for number, message in enumerate(("required 1, seen 2", "required 1, seen 7"), 1):
        tests = (TESTS[0], ("tests/a.py::a", "FAIL", message))
        against.trust(stored(a_run(*tests), tmp_path / f"run-{number}"), tmp_path)
    run, facts = held(a_run(*tests), against.load("trusted", tmp_path))
    assert not facts and run.against.no_worse and run.against.known == ["tests/a.py::a"]


def test_what_is_worse_can_be_accepted(tmp_path):
    for n in range(3):
        against.trust(stored(a_run(*TESTS, seed=n), tmp_path / f"{n}", seed=n), tmp_path)
    folder = stored(a_run(*TESTS, rate=45.0), tmp_path / "slower", 45.0)
    against.trust(folder, tmp_path)
    with pytest.raises(UsageError, match=r"not kept yet, it is .*0004"):
        against.trust(folder, tmp_path)
    run, _ = held(a_run(*TESTS, rate=45.0), against.load("trusted", tmp_path), rate=45.0)
    assert run.verdict is not Verdict.PASS, "by itself no trusted run makes slower ones good"
    copy_of_run, *_ = against.trust(folder, tmp_path, anew=True)
    trusted = against.load("trusted", tmp_path)
    assert len(trusted.runs) == 1 and copy_of_run.stat().st_mode & 0o755 == 0o755
    run, facts = held(a_run(*TESTS, rate=45.0), trusted, rate=45.0)
    assert not facts and run.verdict is Verdict.PASS


def test_a_metric_is_missed_where_its_own_test_was_asked(tmp_path):
    file = a_run(("tests/p.py::one", "PASS", ""), ("tests/p.py::two", "PASS", ""))
    file.tests = [
        of(test, level="performance", metrics=[name])
        for test, name in zip(file.tests, ("startup_s", "tg32@d0"), strict=True)
    ]
    file.levels = {}
    file.judge()
    trusted = against.load(str(stored(file, tmp_path / "run")), tmp_path)
    run = a_run()
    run.tests = [of(file.tests[0])]
    _, facts = held(run, trusted, rate=0.0, left_out={"tests/p.py::two"})
    assert not facts, "its test was not asked"
    run = a_run()
    run.tests = [of(file.tests[0]), of(file.tests[1], metrics=[])]
    _, facts = held(run, trusted, rate=0.0)
    assert [test.id for test in facts] == ["--against::tg32@d0"], "it ran, and measured nothing"


@pytest.mark.parametrize("change", [{"unit": "s"}, {"higher_is_better": False}], ids=str)
def test_a_metric_that_is_another_quantity_is_no_comparison(trusted, change):
    samples = rates(50.0, 2)
    now = StoredMetric("tg32@d0", "tok/s", True, None, samples, sorted(samples)[10])
    now = replace(now, **change)
    facts = against.judge(a_run(*TESTS), trusted, OWN, {"tg32@d0": now}, lambda _test: True)
    assert [(test.id, test.verdict) for test in facts] == [("--against::tg32@d0", Verdict.INVALID)]


def test_what_is_not_judged_is_said(trusted):
    """A percentile nearly twice as long: one run decides nothing, and nobody calls it fine."""
    rate = trusted.newest.metrics["tg32@d0"]
    of_a_tail = {"unit": "ms", "higher_is_better": False, "quantile": 0.99}
    tail = replace(rate, name="itl_p99", samples=(90.0, 91.0), value=90.0, **of_a_tail)
    trusted.newest.metrics["itl_p99"] = tail
    run = a_run(*TESTS)
    for test in run.tests[1:]:
        test.tolerated = "known"
    now = {"tg32@d0": rate, "itl_p99": replace(tail, samples=(80.0, 170.0), value=170.0)}
    run.tests += against.judge(run, trusted, OWN, now, lambda _test: True)
    run.judge()
    assert run.verdict is Verdict.PASS and run.against.unjudged == ["itl_p99"]
    assert "(itl_p99 not judged)" in run.why()


def test_a_failure_that_counts_is_not_called_known(trusted):
    """Alike in words, but nothing excused it: a crash, or a waiver that has expired."""
    run = a_run(*TESTS)
    facts = against.judge(run, trusted, OWN, {**trusted.newest.metrics}, lambda _test: True)
    run.judge()
    assert not facts and run.verdict is Verdict.FAIL and not run.against.no_worse
    assert not run.against.known and len(run.against.changed) == 2


def test_a_new_courtesy_is_listed(trusted):
    run = a_run(*TESTS, ("tests/a.py::form", "FAIL", "no error object"))
    run.tests[-1] = of(run.tests[-1], severity=Severity.COURTESY, tolerated="listed")
    run, facts = held(run, trusted)
    assert not facts and run.against.no_worse and run.against.listed == ["tests/a.py::form"]


def test_a_run_whose_smoke_level_failed_is_no_measure(tmp_path):
    file = a_run(("tests/s.py::s", "FAIL", "x"), TESTS[0])
    smoke, test = file.tests
    not_run = {"verdict": Verdict.NOT_RUN, "message": "smoke failed"}
    file.tests = [of(smoke, level="smoke"), of(test, **not_run)]
    file.judge()
    with pytest.raises(UsageError, match="its smoke level failed"):
        against.load(str(stored(file, tmp_path / "run")), tmp_path)


def test_a_kept_run_that_cannot_be_read_is_named_and_replaced(tmp_path):
    copy_of_run, *_ = against.trust(stored(a_run(*TESTS), tmp_path / "one"), tmp_path)
    (copy_of_run / "verdict.json").write_text("{")
    with pytest.raises(UsageError, match=str(copy_of_run)):
        against.load("trusted", tmp_path)
    _, _, narrower = against.trust(stored(a_run(*TESTS), tmp_path / "two"), tmp_path, anew=True)
    assert "not known" in narrower[0]
    assert against.load("trusted", tmp_path).newest.file.tests[0].id == TESTS[0][0]


def test_copies_are_of_the_file(trusted):
    """What is compared with a run does not change that run."""
    before = copy.deepcopy(trusted.newest.file)
    held(a_run(*TESTS), trusted)
    assert trusted.newest.file == before


@pytest.mark.slow("eight runs")
def test_what_vanished_is_missed_where_it_would_have_been_selected(fault_server, run_pytest):
    """By -k, -m and the plan, as if it were still there."""
    attached = ("--arch", "cpu", *fault_server().options)
    file = "meta_tests/scenarios/vanishing.py"
    status, old = run_pytest(*attached, file, environment={"SM121_META_OLD": "1"})
    assert status == 0, old.output
    missed = ("", "-k 'old or stays'", "-m correctness", "-m 'smoke or never_waived'")
    for options in (*missed, "-k stays", "-m smoke", "--plan quick"):
        words = ("--against", str(old.report), *shlex.split(options))
        _status, run = run_pytest(*attached, file, *words)
        missing = [f"{file}::test_old"] * (options in missed)
        assert run.verdict["against"]["missing"] == missing, (options, run.output)
        assert (run.verdict["verdict"] == "FAIL") is bool(missing), (options, run.output)


def test_a_status_that_the_client_made_an_error_of_may_be_known(fault_server, run_pytest):
    """And an error of anything else may not: it says nothing of the server."""
    file = "meta_tests/scenarios/refused.py"
    common = ("--arch", "cpu", *fault_server().options, file)
    for broken, status, key, name in (
        ({}, 0, "known", "test_is_refused"),
        ({"SM121_META_BROKEN": "1"}, 1, "changed", "test_holds"),
    ):
        red, first = run_pytest(*common, environment=broken)
        assert red == 1, first.output
        ended, again = run_pytest(*common, "--against", str(first.report), environment=broken)
        assert ended == status, again.output
        assert again.verdict["against"][key] == [f"{file}::{name}"]
        assert broken or first.verdict["levels"]["correctness"]["failed"] == 1


def of_a_sick_box(**fields) -> VerdictFile:
    """A run whose answers are known and whose rates are not: the box was DEGRADED."""
    box = verdict_file.BoxReport(state="DEGRADED", reason="others are on the GPU: processes [7]")
    file = a_run(*TESTS, box=box, **fields)
    file.metrics["tg32@d0"].verdict = Verdict.INCONCLUSIVE
    file.tests.append(ended("end of the run::box", "INCONCLUSIVE", "DEGRADED", "performance"))
    file.judge()
    return file


def test_of_a_run_on_a_degraded_box_the_answers_are_trusted(tmp_path, capsys):
    """And its rates are judged by nobody, which trust and the run both say."""
    folder = stored(of_a_sick_box(), tmp_path / "sick")
    assert cli.main(["trust", str(folder), f"--benchmark-storage={tmp_path}"]) == 0
    assert "its rates and times are not judged, its answers are" in capsys.readouterr().out
    trusted = against.load("trusted", tmp_path)
    run, facts = held(a_run(*TESTS), trusted)
    assert not facts and run.verdict is Verdict.PASS and run.against.no_worse
    assert "(rates not judged: the box of the run of" in run.why(), run.why()
    assert run.against.measured == {} and run.against.metrics == []
    slower, facts = held(a_run(*TESTS, rate=20.0), trusted, rate=20.0)
    assert not facts and "rates not judged" in slower.why()
    worse, _ = held(a_run(*changed(0, "FAIL", "wrong")), trusted)
    assert worse.verdict is Verdict.FAIL and worse.against.new == ["tests/a.py::holds"]


@pytest.mark.parametrize(("rate", "verdict"), [(50.0, "PASS"), (30.0, "FAIL")])
def test_rates_are_held_against_the_newest_trusted_run_on_a_fit_box(tmp_path, rate, verdict):
    """A run on a sick box that is trusted later hides no slower build."""
    against.trust(stored(a_run(*TESTS), tmp_path / "fit"), tmp_path)
    sick = of_a_sick_box(rate=30.0, started="2026-11-24T08:00:00+00:00")
    _, _, narrower = against.trust(stored(sick, tmp_path / "sick", 30.0), tmp_path)
    assert not narrower
    trusted = against.load("trusted", tmp_path)
    run, _ = held(a_run(*TESTS, rate=rate), trusted, rate=rate)
    assert run.verdict.value == verdict and run.against.rates_not_judged is None
    assert "compared with the run of 2026-11-23" in run.against.differs[-1]
    assert run.against.measured["tg32@d0"].value == pytest.approx(50.0, rel=0.01)
    run, (test,) = held(a_run(*TESTS), trusted, rate=0.0)
    assert test.id == "--against::tg32@d0" and run.verdict is Verdict.FAIL
