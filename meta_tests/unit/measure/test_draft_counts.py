"""Speculative decoding: how drafted and sampled tokens are counted, and the canary's drafter.

`speculation_faults.py` has the faults (`make catalogues`)."""

import re

import pytest

from meta_tests.fakes import past_runs
from meta_tests.faults import speculation_faults
from meta_tests.faults.speculation_faults import CLEAN, FAULTS
from meta_tests.folders import IN_VLLM
from sm121.answers import expected_samples
from sm121.core import profile
from sm121.core.level_settings import Regression
from sm121.core.verdict import Verdict
from sm121.measure import gate
from sm121.measure.counters import Drafted
from sm121.performance.checks import PerformanceChecks
from sm121.regression import trend
from sm121.run.stored_run import StoredMetric

SABOTEUR = IN_VLLM / "speculation_saboteur.py"


@pytest.fixture(scope="module")
def sabotaged(canary_bf16, tmp_path_factory):
    """The real vLLM with the canary's drafter, started once for all tests of this module."""
    with speculation_faults.serving(canary_bf16, tmp_path_factory.mktemp("drafts")) as server:
        yield server


@pytest.mark.slow("a minute of measuring")
@pytest.mark.timeout(600)
def test_the_canarys_drafter_is_accepted(sabotaged, run_pytest):
    sabotaged.put(CLEAN)
    status, run = run_pytest(*sabotaged.arguments(("test_accepted_length",)), timeout_s=400.0)
    assert status == 0, run.output
    accepted = run.verdict["metrics"]["accepted_length"]
    assert accepted["value"] >= 2.42 and accepted["verdict"] == "PASS", accepted


def test_the_saboteur_the_catalogue_and_its_table_name_the_same_faults():
    text = SABOTEUR.read_text("utf-8")
    names = re.findall(r'^(?:@patch\(|    )"(.+?)"(?:\)$|, _\w+\)$|: \()', text, re.M)
    assert set(names) == set(FAULTS)
    assert len(FAULTS) >= 20
    text = speculation_faults.PAGE.read_text("utf-8")
    undetected = set(re.findall(r"^\| (.+?) \| \*\*survives\*\* \|", text, re.M))
    assert undetected <= {"after a rejection the rejected token may come again"}, "near its bound"
    detected = len(FAULTS) - len(undetected)
    assert f"{detected} of {len(FAULTS)} are detected." in text
    assert set(re.findall(r"^\| (.+?) \| .* \| .* \|$", text, re.M)) >= set(FAULTS)


def test_drafted_tokens_between_two_readings():
    before = Drafted(10, 20, 12, (8, 4))
    after = Drafted(30, 60, 40, (24, 16))
    assert after.since(before) == Drafted(20, 40, 28, (16, 12))
    assert after.since(before).accepted_length == pytest.approx(2.4)
    assert Drafted(0, 0, 0).accepted_length is None


@pytest.mark.parametrize(
    ("accepted", "verdict"),
    [((55, 27, 13), Verdict.FAIL), ((0, 0, 0), Verdict.FAIL), ((80, 60, 40), Verdict.PASS)],
    ids=["as on a GB10 where the rate was halved", "never", "as expected"],
)
def test_a_drafter_that_is_not_accepted_misses_its_gate(accepted, verdict):
    """A drafter misses its gate if 31 % of its draft tokens are accepted, with drafts of three
    tokens (14 tok/s). 60 to 70 % are expected."""
    gates = profile.load("sm121-gpt-oss-120b").judging("eagle3-short", "0.33.0").performance.gates
    required = next(each for each in gates if each.metric == "accepted_length")
    recorded = []
    drafted = Drafted(100, 300, sum(accepted), accepted)
    PerformanceChecks(None, recorded.append).accepted_length(drafted)
    decision, _ = gate.decide_measurement(recorded[0], required, None, 1)
    assert decision.verdict is verdict, decision.reason


def test_samples_may_be_off_by_chance_and_no_further():
    """Samples may differ by chance, but not more.

    With a chance of one in a million, 400 fair coins may have 56 heads more or less."""
    allowed = expected_samples.allowed(100.0, 1e-6)
    assert 50.0 < allowed < 65.0
    assert allowed > 4.9 * 100.0**0.5, "as far as five standard deviations"


def _stored(value: float, length: float | None) -> StoredMetric:
    samples = (value, value * 1.001, value * 0.999, value * 1.002, value * 0.998)
    return StoredMetric("tg32@d0", "tok/s", True, None, samples, value, length)


@pytest.mark.parametrize(
    ("value", "length", "says"),
    [
        pytest.param(
            91.0,
            2.4,
            "no slower (+13.7% steps a second): the drafts are worse, not the kernels",
            id="91.0, 2.4, no slower (+13.7% steps a second)",
        ),
        (80.0, 2.7, "the steps are slower, too (-11.1% steps a second)"),
        pytest.param(
            80.0,
            3.0,
            "acceptance is as before (3.00, now 3.00 tokens a step)",
            id="80.0, 3.0, acceptance is as before (3.00, now 3.00",
        ),
        (80.0, None, "allowed"),
    ],
)
def test_a_rate_that_fell_says_whether_drafts_or_kernels_did_it(value, length, says):
    stored = past_runs.stored_run("0001", _stored(100.0, 3.0))
    (change,) = trend.compare({"tg32@d0": _stored(value, length)}, [stored], Regression())
    assert says in change.text, change.text
