"""With ``--ab``, a slower B fails, and pairs of starts are added while a criterion is undecided."""

import itertools
import json
from unittest.mock import Mock

import pytest

from meta_tests.fakes.ab_visits import REVIEW
from meta_tests.fakes.run_events import new_file, stand_in, with_events
from meta_tests.texts import text_file
from sm121.core import profile
from sm121.core.verdict import Invalid, NotRun, Verdict
from sm121.engines.signs import Signs
from sm121.measure.measurement import Invalidity, Measurement
from sm121.regression import ab, hypothesis, visit_checks
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.ab_run import AbRun

CPU = profile.load("cpu-tiny-gpt-oss")
SIDES = ab.parse_sides(["", "--x"])


@pytest.fixture
def compared(run_pytest, timed_server, tmp_path):
    text = profile.shipped()["sm121-gpt-oss-120b"].read_text("utf-8")
    for before, after in (
        ("prompt_tokens = 2048", "prompt_tokens = 256"),
        ("generated_tokens = [32, 128]", "generated_tokens = [32, 64]\nmeasuring.rounds = 5"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "short.toml").write_text(text)

    def go(rate_a: float, rate_b: float, *arguments: str):
        urls = [timed_server("--rate", str(rate)).base_url for rate in (rate_a, rate_b)]
        status, run = run_pytest(
            "--profile", str(tmp_path / "short.toml"), "--ab", *urls, "--depths", "0",
            f"--benchmark-storage={tmp_path}/s", "tests/test_regression.py", *arguments,
            timeout_s=240.0,
        )  # fmt: skip
        tests = {test["id"].split("::")[-1]: test for test in run.verdict["tests"]}
        return status, tests, run

    return go


@pytest.fixture
def promise(tmp_path) -> tuple[str, str]:
    (tmp_path / "promise.toml").write_text(text_file("promise.toml"))
    return "--hypothesis", str(tmp_path / "promise.toml")


@pytest.mark.slow("a run more; the slower of two servers is judged below")
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_faster_server_holds_its_promise(compared, promise):
    status, tests, run = compared(500, 575, *promise)
    assert status == 0, run.output
    assert tests["test_b_is_not_worse_than_a"]["verdict"] == "PASS"
    assert tests["test_the_hypothesis_holds"]["verdict"] == "PASS"
    ratio = run.verdict["metrics"]["ab:tg32@d0"]
    assert ratio["starts"] == (ratio["rounds"] if run.verdict["engine"]["managed"] else 1)
    assert ratio["value"] == pytest.approx(1.15, rel=0.01)
    assert ratio["ci_low"] <= ratio["value"] <= ratio["ci_high"] and ratio["rounds"] >= 3
    review = (run.report / "review.md").read_text()
    assert "# Feature: a faster server" in review and "| PASS |" in review


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_slower_server_is_worse(compared, promise):
    status, tests, run = compared(500, 450, *promise)
    assert status == 1, run.output
    failed = {name: test["message"] for name, test in tests.items() if test["verdict"] == "FAIL"}
    worse = "tg32@d0: expected B to be not worse than A, got a worse B"
    assert worse in failed["test_b_is_not_worse_than_a"]
    assert "changes by at least +10 %" in failed["test_the_hypothesis_holds"]
    assert "| FAIL |" in (run.report / "review.md").read_text()
    record = json.loads((run.report / "ab.json").read_text())
    assert [visit["side"] for visit in record["visits"][:4]] == ["A", "B", "B", "A"]


def test_engine_arguments_of_a_side_are_no_pytest_options(run_pytest):
    """Engine arguments of a side, such as ``--enforce-eager``, are no options of pytest.

    A side may say which words are engine arguments."""
    status, run = run_pytest(
        "--collect-only", "-q", "tests/test_regression.py", "--ab", "", "--enforce-eager"
    )
    assert status == 0 and "test_b_is_not_worse_than_a" in run.output, run.output
    status, run = run_pytest("tests/test_regression.py", "--ab", "--port 1", "--model")
    assert status == 4 and "--port 1" in run.output, run.output


ONE = Signs(frozenset({(7, 1763.2)}), 1763.25)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(ONE, True, id="itself"),
        pytest.param(
            Signs(started=1763.25), True, id="behind a proxy: another listener, the same engine"
        ),
        pytest.param(Signs(ONE.processes, 1763.26), False, id="a proxy in front of both"),
        pytest.param(Signs(ONE.processes), True, id="the process alone"),
        pytest.param(Signs(frozenset({(8, 1763.2)})), False, id="another process"),
        pytest.param(Signs(frozenset({(7, 1800.0)})), False, id="its pid was given again"),
        pytest.param(Signs(), None, id="no sign"),
    ],
)
def test_two_addresses_of_one_process_are_one_server(other, same):
    assert ONE.is_same_process(other) is same and other.is_same_process(ONE) is same


def test_an_interrupted_comparison_is_not_started_again():
    run = AbRun(stand_in(), SIDES, None, lambda _side: None)
    run._visit = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run.judge()
    with pytest.raises(NotRun, match="interrupted"):
        run.judge()


@pytest.mark.parametrize(
    ("promise", "pairs"),
    [
        # Without a hypothesis, B must only be no worse than A, which is decided at the first look.
        (None, 3),
        pytest.param(
            {"metric": "ttft_p50", "change_at_most": 0.03},
            3,
            id="3 % allowed: clear at once",
        ),
        pytest.param(
            {"metric": "ttft_p50", "change_at_most": 0.004},
            4,
            id="0.4 % allowed: one pair more",
        ),
        pytest.param(
            {"metric": "ttft_p50", "change_at_least": 0.0},
            6,
            id="any gain promised: to the last pair",
        ),
        pytest.param(
            {"metric": "ttft_p50", "difference_at_most": 0.08},
            4,
            id="0.08 ms allowed: one pair more",
        ),
        pytest.param(
            {"metric": "ttft_p50", "value_at_most": 20.0},
            3,
            id="a limit of 20 ms: more starts never narrow a range",
        ),
    ],
)
def test_pairs_are_added_while_a_promise_is_open(tmp_path, monkeypatch, promise, pairs):
    parts = with_events(
        stand_in(
            profile=CPU, unproven=None, directory=tmp_path, pool=None, redact=str, file=new_file()
        )
    )
    words = {"feature": "faster", "hypothesis": "This should improve the rate by much."}
    chosen = promise and hypothesis.Hypothesis(**words, review=REVIEW, criteria=[promise])
    run = AbRun(parts, SIDES, None, lambda _side: None, hypothesis=chosen)
    monkeypatch.setattr(run, "_check_that_they_differ", lambda: None)
    milliseconds = {"A": itertools.repeat(20.0), "B": itertools.cycle([20.0, 20.02, 19.98])}

    def visit(name, _which):
        metrics = {"ttft_p50": MetricOfStart(next(milliseconds[name]), "ms", False)}
        run.visits.append(Visit(name, metrics))

    run._visit = visit
    assert run.outcomes[0].pairs == pairs


NOISY_TTFT = {"metric": "ttft_p50", "change_at_least": 0.0}


@pytest.mark.parametrize(
    ("slower", "promise", "pairs"),
    [
        pytest.param(1.3, None, 3, id="a-FAIL-ends-it"),
        pytest.param(1.3, NOISY_TTFT, 6, id="a-FAIL-beside-an-open-hypothesis-goes-on"),
        pytest.param(1.0, None, 6, id="an-open-metric-alone-goes-on"),
    ],
)
def test_a_metric_that_stays_open_keeps_no_decided_comparison_going(
    tmp_path, monkeypatch, slower, promise, pairs
):
    """A metric that stays undecided does not prolong a comparison that is decided: TTFT stays
    undecided, and the rate is decided after three pairs."""
    parts = with_events(
        stand_in(
            profile=CPU, unproven=None, directory=tmp_path, pool=None, redact=str, file=new_file()
        )
    )
    words = {"feature": "faster", "hypothesis": "This should improve the rate by much."}
    chosen = promise and hypothesis.Hypothesis(**words, review=REVIEW, criteria=[promise])
    run = AbRun(parts, SIDES, None, lambda _side: None, hypothesis=chosen)
    monkeypatch.setattr(run, "_check_that_they_differ", lambda: None)
    noisy = itertools.cycle([20.0, 23.0, 17.0, 24.0])

    def visit(name, _which):
        metrics = {
            "ttft_p50": MetricOfStart(next(noisy), "ms", False),
            "tpot_p50": MetricOfStart(20.0 * (slower if name == "B" else 1.0), "ms", False),
        }
        run.visits.append(Visit(name, metrics))

    run._visit = visit
    verdicts = {outcome.metric: outcome.verdict for outcome in run.outcomes}
    assert verdicts["ttft_p50"] is Verdict.INCONCLUSIVE
    assert run.outcomes[0].pairs == pairs


@pytest.mark.parametrize(
    ("reason", "has_remedy"),
    [("drift", True), ("client_lag", True), ("second_clock", False)],
)
def test_a_rate_that_the_machine_made_invalid_has_a_remedy(reason, has_remedy):
    evidence = "6465 tok/s in the first 5 rounds, 8696 in the 3 after them"
    rate = Measurement(name="pp512@d0", unit="tok/s", samples=[1.0], higher_is_better=True)
    visit_checks.require_valid("B", rate)
    rate.invalid = [Invalidity(reason, evidence)]
    with pytest.raises(Invalid) as caught:
        visit_checks.require_valid("B", rate)
    text = str(caught.value)
    assert text.startswith(f"B: pp512@d0: {reason}: {evidence}")
    assert text.endswith("End other programs on this machine, and run again") is has_remedy
