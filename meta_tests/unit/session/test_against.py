"""``--against RUN`` passes a run that is no worse than the trusted run, and finds each loss."""

import copy
import shlex
from dataclasses import replace

import pytest

from meta_tests.fakes.against_runs import (
    ORACLE,
    PATH,
    REFUSED,
    TESTS,
    a_run,
    changed,
    compared,
    held,
    of,
    rates,
    stored,
)
from sm121.core.errors import UsageError
from sm121.core.server import UNRECOGNISED
from sm121.core.unmet import Fact, alike
from sm121.core.verdict import Severity, Verdict
from sm121.evidence.kernel_path import RequestReport
from sm121.run import details, merge
from sm121.run.fingerprint import Fingerprint
from sm121.run.shard_report import ShardReport
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import TestReport, VerdictFile
from sm121.session import against, trusted_runs


@pytest.fixture
def trusted(tmp_path) -> trusted_runs.Trusted:
    return trusted_runs.load(str(stored(a_run(*TESTS), tmp_path / "trusted")), tmp_path)


@pytest.mark.parametrize(
    ("compared_with", "lines"),
    [
        pytest.param("answers.json", 0, id="the-file-that-the-trusted-run-recorded"),
        pytest.param("others.json", 2, id="another-file"),
    ],
)
def test_the_golden_file_of_the_trusted_run_is_no_different_option(tmp_path, compared_with, lines):
    """The golden file of the trusted run does not make the two runs different.

    As in docs/another-model.md, the first run has --record-golden, and the second one --golden."""
    before = Fingerprint(options={"--record-golden": "answers.json"})
    recorded = stored(a_run(*TESTS, fingerprint=before), tmp_path / "trusted")
    trusted = trusted_runs.load(str(recorded), tmp_path)
    now = Fingerprint(options={"--golden": compared_with})
    run, _ = held(a_run(*TESTS, fingerprint=now), trusted)
    assert len(run.against.differs) == lines, run.against.differs


@pytest.mark.parametrize("seed", range(2, 12))
def test_an_honest_run_is_no_worse(trusted, seed):
    """Ten runs without a loss are not called worse, although ids, times, texts and measurements
    differ."""
    again = replace(REFUSED, evidence=f"chatcmpl-abcdef{seed:04}")
    nearly = replace(ORACLE, value=0.0912 + seed / 1000, required="no more than")
    tests = (TESTS[0], (*TESTS[1][:2], again), (*TESTS[2][:2], nearly))
    run, facts = held(a_run(*tests), trusted, seed=seed)
    assert facts == [] and run.verdict is Verdict.PASS and run.against.no_worse
    assert run.why() == (
        "not worse than the run of 2026-11-23T08:00:00+00:00; 1 check passed; "
        "2 failed and are known"
    )


def test_fixed_failures_are_listed(trusted):
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
            "attention: CPU_ATTN in the trusted run",
            id="another path",
        ),
        pytest.param(
            {"path": {"moe": None}}, "path", "not shown in this run", id="a path without evidence"
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


@pytest.mark.parametrize(
    ("name", "is_worse"), [(UNRECOGNISED, False), ("sglang", True)], ids=["unrecognised", "another"]
)
def test_an_engine_that_a_worker_did_not_recognise_is_no_other_engine(trusted, name, is_worse):
    """If a worker did not recognise the engine, the run does not count as one of another engine.

    A worker whose tests use no server sends no request that shows the engine's name."""
    run = a_run(*TESTS)
    run.engine.name = name
    run, _ = held(run, trusted)
    assert [test.id for test in run.tests if test.id.endswith("::engine")] == (
        ["--against::engine"] if is_worse else []
    )


def test_unselected_tests_are_not_missing(trusted):
    run, facts = held(a_run(*TESTS[1:]), trusted, left_out={"tests/a.py::holds"})
    assert facts == [] and run.against.no_worse
    run = a_run()
    run.tests = [TestReport(id="tests/b.py::b", level="smoke", verdict=Verdict.PASS)]
    run, facts = held(run, trusted, left_out={name for name, *_ in TESTS})
    assert facts == [] and run.against.not_asked == ["correctness"]
    assert "(correctness not compared)" in run.why()


def test_a_run_that_has_nothing_in_common_with_the_trusted_run_is_inconclusive(trusted):
    """A run that has nothing in common with the trusted run is INCONCLUSIVE.

    Another shard may have something to compare. If no shard does, the merged run reports it.
    """
    tests = [TestReport(id="tests/b.py::b", level="smoke", verdict=Verdict.PASS)]
    trusted = replace(trusted, runs=(replace(trusted.newest, metrics={}),))
    left_out = {name for name, *_ in TESTS}
    whole = a_run().model_copy(update={"tests": [*tests]})
    run, (fact,) = held(whole, trusted, 0.0, 1, left_out)
    assert run.verdict is Verdict.INCONCLUSIVE and not run.against.no_worse
    assert "got none of 1" in fact.message
    parts = {}
    for index in (1, 2):
        shard = ShardReport(index=index, of=2, tests=[])
        whole = a_run().model_copy(update={"tests": [*tests], "shard": shard})
        run, facts = held(whole, trusted, 0.0, 1, left_out)
        assert not facts and run.verdict is Verdict.PASS
        parts[f"shards/{index}"] = run
    merged = merge.merge_shards(parts)
    assert merged.verdict is Verdict.INCONCLUSIVE and not merged.against.no_worse
    assert "got none of 1" in merged.reason
    parts["shards/2"], _ = held(a_run(*TESTS, shard=shard), trusted, 0.0, 1, left_out)
    assert merge.merge_shards(parts).verdict is Verdict.PASS


def test_rates_of_which_the_trusted_run_has_none_are_named(trusted):
    newest = replace(trusted.newest, metrics={})
    run, facts = held(a_run(*TESTS), replace(trusted, runs=(newest,)))
    assert facts == [] and "(rates not judged: the run of 2026-11-23" in run.why()


def test_a_requested_change_of_the_path_is_only_reported(trusted):
    """A change of the kernel path is only reported if the request names the new value.

    Missing evidence is always a failure."""
    request = {"field": "kv_cache_dtype", "resolved": "fp8", "state": "resolved", "message": ""}
    requested = [RequestReport(by="--kv-cache-dtype=fp8", **request)]
    run = a_run(*TESTS)
    run.engine.path = PATH.model_copy(update={"kv_cache_dtype": "fp8", "requested": requested})
    run, facts = held(run, trusted)
    assert facts == [] and run.against.path_told == [
        "kv_cache_dtype: auto in the trusted run, fp8 in this run"
    ]
    for change in ({"attention": "TORCH_SDPA"}, {"kv_cache_dtype": None}, {"also": {"moe": ["X"]}}):
        run = a_run(*TESTS)
        run.fingerprint.environment = {"VLLM_LOGGING_LEVEL": "DEBUG"}
        run.engine.path = PATH.model_copy(update={"requested": requested, **change})
        run, facts = held(run, trusted)
        assert len(facts) == 1 and run.against.path, change


def test_a_rate_that_cannot_be_compared_does_not_pass(tmp_path, trusted):
    run = a_run(*TESTS)
    _, (test,) = held(run, trusted, rate=0.0)
    assert test.id == "--against::tg32@d0"
    run = a_run(*TESTS)
    run.metrics["tg32@d0"].verdict = Verdict.NOT_RUN
    why = "tg32@d0: measured on a busy machine: drift: the first rounds had 60 tok/s"
    _, (test,) = held(run, trusted, rate=0.0, reasons={"tg32@d0": why})
    assert test.verdict is Verdict.INCONCLUSIVE and why in test.message
    folder = stored(a_run(*TESTS), tmp_path / "run")
    (folder / details.NAME).unlink()
    with pytest.raises(UsageError, match=r"details\.json next to it has no samples of tg32@d0"):
        trusted_runs.load(str(folder), tmp_path)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param({}, True, id="the same"),
        pytest.param({"value": 0.17}, True, id="less than twice as far off"),
        pytest.param({"value": 0.19}, False, id="more than twice as far off"),
        pytest.param({"value": -0.0912}, False, id="the other direction"),
        pytest.param({"value": None}, False, id="no value"),
        pytest.param({"value": float("nan")}, False, id="a value that is no number"),
        pytest.param({"limit": 0.06}, True, id="another limit of the same size"),
        pytest.param({"limit": 0.58}, False, id="a limit ten times as large"),
        pytest.param({"unit": "%"}, False, id="another unit"),
        pytest.param({"required": "no more than"}, True, id="other words for the same kind"),
        pytest.param(
            {"required": "no more than", "kind": ""},
            False,
            id="other words, and no kind",
        ),
        pytest.param({"kind": "order"}, False, id="another kind"),
        pytest.param(
            {"evidence": "port 4001, /tmp/x/server.log, at 09:10:11"},
            True,
            id="other evidence",
        ),
        pytest.param({"about": "prompt digits"}, False, id="about another prompt"),
        pytest.param({"observed": "at token 15"}, False, id="another observation"),
    ],
)
def test_failures_are_compared_by_what_does_not_hold(change, same):
    """Two failures are the same if their value, unit, kind and observation are equal, not their
    texts."""
    other = replace(ORACLE, **change)
    assert alike([ORACLE], [other]) is same
    assert alike([REFUSED, ORACLE], [REFUSED, other]) is same
    assert not alike([ORACLE], [ORACLE, other]), "a known failure hides no other one"
    assert alike([REFUSED, ORACLE], [other]) is same, "less that does not hold is not worse"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"arch": "sm121"}, id="another architecture"),
        pytest.param({"profile": "another"}, id="another profile"),
        pytest.param({"fingerprint": Fingerprint(model="other")}, id="another model"),
    ],
)
def test_a_run_of_something_else_is_refused(trusted, change):
    run = a_run(*TESTS).model_copy(update=change)
    with pytest.raises(UsageError, match="has another"):
        against.refuse(trusted, run)


def test_a_failure_that_the_profile_does_not_need_is_listed():
    file = a_run(("tests/a.py::holds", "PASS", ""), ("tests/a.py::form", "FAIL", "no error object"))
    file.tests[1].severity = Severity.COURTESY
    file.tests[1].tolerated = "listed"
    file.judge()
    assert file.verdict is Verdict.PASS and file.levels["correctness"].listed == 1
    assert file.why() == "1 check passed; 1 failed and is listed"


def test_a_deviation_that_the_trusted_run_did_not_show_is_red(trusted):
    """A known deviation of the release makes a run fail if the trusted run did not have it."""
    served = ["empty-messages: served"]

    def judged(before: list[str] | None) -> tuple[VerdictFile, list[TestReport]]:
        trusted.newest.file.tests[0] = of(trusted.newest.file.tests[0], deviations=before)
        run = a_run(*TESTS)
        run.tests[0] = of(run.tests[0], deviations=served)
        return held(run, trusted)

    run, (fact,) = judged([])
    assert run.verdict is Verdict.FAIL and run.against.changed == ["tests/a.py::holds"]
    assert served[0] in fact.message
    # If both runs have the line, nothing changed. If the trusted run is of an older suite that did
    # not record it, a change is unknown.
    for before in (served, None):
        run, facts = judged(before)
        assert not facts and run.against.no_worse


def test_a_metric_is_missed_where_its_own_test_was_asked(tmp_path):
    file = a_run(("tests/p.py::one", "PASS", ""), ("tests/p.py::two", "PASS", ""))
    file.tests = [
        of(test, level="performance", metrics=[name])
        for test, name in zip(file.tests, ("startup_s", "tg32@d0"), strict=True)
    ]
    file.levels = {}
    file.judge()
    trusted = trusted_runs.load(str(stored(file, tmp_path / "run")), tmp_path)
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
    facts = compared(a_run(*TESTS), trusted, {"tg32@d0": now})
    assert [(test.id, test.verdict) for test in facts] == [("--against::tg32@d0", Verdict.INVALID)]


def test_unjudged_metrics_are_named(trusted):
    """A run with a metric that one run cannot decide passes, and the metric is named as not judged.

    Here, a percentile is nearly twice as long.
    """
    rate = trusted.newest.metrics["tg32@d0"]
    of_a_tail = {"unit": "ms", "higher_is_better": False, "quantile": 0.99}
    tail = replace(rate, name="itl_p99", samples=(90.0, 91.0), value=90.0, **of_a_tail)
    trusted.newest.metrics["itl_p99"] = tail
    run = a_run(*TESTS)
    for test in run.tests[1:]:
        test.tolerated = "known"
    now = {"tg32@d0": rate, "itl_p99": replace(tail, samples=(80.0, 170.0), value=170.0)}
    compared(run, trusted, now)
    assert run.verdict is Verdict.PASS and run.against.unjudged == ["itl_p99"]
    assert "(itl_p99 not judged)" in run.why()


def test_a_failure_that_counts_is_not_called_known(trusted):
    """A crash, or a failure whose waiver has expired, does not count as known.

    The texts are similar to those of a failure of the trusted run."""
    run = a_run(*TESTS)
    facts = compared(run, trusted, {**trusted.newest.metrics})
    assert not facts and run.verdict is Verdict.FAIL and not run.against.no_worse
    assert not run.against.known and len(run.against.changed) == 2


def test_a_new_courtesy_is_listed(trusted):
    run = a_run(*TESTS, ("tests/a.py::form", "FAIL", "no error object"))
    run.tests[-1] = of(run.tests[-1], severity=Severity.COURTESY, tolerated="listed")
    run, facts = held(run, trusted)
    assert not facts and run.against.no_worse and run.against.listed == ["tests/a.py::form"]


def test_copies_are_of_the_file(trusted):
    """A comparison with a stored run does not change this run."""
    before = copy.deepcopy(trusted.newest.file)
    held(a_run(*TESTS), trusted)
    assert trusted.newest.file == before


@pytest.mark.slow("eight runs")
def test_a_removed_test_is_missing_if_it_would_have_been_selected(fault_server, run_pytest):
    """A removed test is missing if -k, -m and the plan would have selected it."""
    attached = ("--arch", "cpu", *fault_server().options)
    file = "meta_tests/whole/scenarios/vanishing.py"
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
    """A failure because of a response status is known if the trusted run had the same status.

    Any other error of the client says nothing about the server.
    """
    file = "meta_tests/whole/scenarios/refused.py"
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
