"""Calls of the fixture `gate`: its decisions, and wrong calls, each of which gives one line."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from pytest_bench_gate import closing
from pytest_bench_gate.gates import Gate
from pytest_bench_gate.history import KEY
from pytest_bench_gate.run import GateRun
from sm121.core.unmet import Unmet
from sm121.core.verdict import Inconclusive, Verdict

STEADY = [60.0 + 0.01 * (number % 5) for number in range(40)]
#: The times of 20,000 rounds of a function that takes some microseconds.
MANY = [1e-5 + 1e-9 * (number % 7) for number in range(20_000)]


class Session:
    """A session that records what is stored."""

    def __init__(self) -> None:
        self.benchmarks: list = []


@pytest.fixture
def run(pytestconfig, monkeypatch) -> GateRun:
    monkeypatch.setattr(pytestconfig, "_benchmarksession", Session(), raising=False)
    return GateRun(pytestconfig, None)


@pytest.fixture
def gate(run):
    return Gate(
        run, "test_x.py::test_x", SimpleNamespace(stats=None, extra_info={}, has_error=False)
    )


def timed(run: GateRun, rounds: list[float], has_error: bool = False) -> Gate:
    stats = SimpleNamespace(stats=SimpleNamespace(data=rounds))
    benchmark = SimpleNamespace(stats=stats, extra_info={}, has_error=has_error)
    return Gate(run, "test_x.py::test_x", benchmark)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({"samples": [], "minimum": 1}, "at least one sample, got none", id="none"),
        pytest.param({"samples": [1.0, math.nan], "minimum": 1}, "got nan", id="not-a-number"),
        pytest.param({"samples": [-1.0], "minimum": 1}, "0 or more, got -1.0", id="negative"),
        pytest.param({"samples": ["x"], "minimum": 1}, "numbers as samples", id="a-text"),
        pytest.param({"samples": "5555", "minimum": 1}, "got '5555'", id="digits"),
        pytest.param({"samples": b"5555", "minimum": 1}, "got b'5555'", id="bytes"),
        pytest.param({"samples": {1.0, 2.0}, "minimum": 1}, "order of measuring", id="a-set"),
        pytest.param({"samples": {1.0: 2.0}, "minimum": 1}, "got a dict", id="a-dict"),
        pytest.param({"samples": [10**400], "minimum": 1}, "numbers as samples", id="too-large"),
        pytest.param(
            {"samples": [60.0, math.inf], "minimum": 1}, "finite samples", id="infinite-rate"
        ),
        pytest.param({"samples": [0.0] * 40, "maximum": 1}, "got only 0", id="no-time-at-all"),
        pytest.param({"samples": 5.0, "minimum": 1}, "numbers as samples", id="not-a-series"),
        pytest.param(
            {"samples": STEADY, "minimum": 70, "maximum": 50}, "got both, 70 and 50", id="both"
        ),
        pytest.param({"samples": STEADY}, "minimum, maximum, or better=", id="no-limit"),
        pytest.param({"samples": STEADY, "better": "more"}, "got 'more'", id="no-direction"),
        pytest.param({"samples": STEADY, "minimum": 0}, "a positive number", id="zero"),
        pytest.param({"samples": STEADY, "minimum": "52"}, "got '52'", id="a-limit-in-quotes"),
        pytest.param({"samples": STEADY, "maximum": math.inf}, "got inf", id="infinite"),
        pytest.param({"samples": STEADY, "maximum": 10**400}, "a positive number", id="huge"),
        pytest.param({"samples": STEADY, "minimum": True}, "got True", id="a-truth-value"),
        pytest.param({"samples": STEADY, "minimum": 1, "unit": 5}, "a unit of", id="unit-number"),
        pytest.param(
            {"samples": STEADY, "minimum": 1, "unit": ["s"]}, "a unit of", id="unit-in-a-list"
        ),
        pytest.param(
            {"samples": STEADY, "minimum": 1, "unit": "tok\n/s"}, "a unit of", id="unit-lines"
        ),
        pytest.param(
            {"samples": STEADY, "minimum": 1, "better": "lower"}, "got 'lower'", id="contradiction"
        ),
        pytest.param({"samples": STEADY, "minimum": 1, "worse_by": 5}, "0.05 is 5 %", id="margin"),
        pytest.param({"maximum": 1}, "or a call of benchmark before it", id="not-timed"),
        pytest.param({"maximum": 1, "unit": "tok/s"}, "as the unit of a time", id="unit"),
        pytest.param({"minimum": 1}, "or per_round for a rate", id="a-time-of-at-least"),
        pytest.param({"maximum": 1, "per_round": 32}, "a minimum for a rate", id="rate-at-most"),
        pytest.param({"minimum": 1, "per_round": 0}, "a positive number as per", id="does-nothing"),
        pytest.param(
            {"samples": STEADY, "minimum": 1, "per_round": 32}, "got both", id="samples-and-rounds"
        ),
    ],
)
def test_a_wrong_call_is_one_line(gate, run, arguments, expected):
    with pytest.raises(pytest.fail.Exception) as failed:
        gate("metric", **arguments)
    assert expected in failed.value.msg and "\n" not in failed.value.msg
    assert not failed.value.pytrace and not run.judged
    assert failed.value.__context__ is None, "pytest would show it, too"


@pytest.mark.parametrize("name", ["", " ", "two\nlines", 5])
def test_a_name_that_cannot_be_shown_is_refused(gate, name):
    with pytest.raises(pytest.fail.Exception, match="a name of printable characters"):
        gate(name, STEADY, minimum=52)


def test_a_name_is_given_once(gate):
    gate("metric", STEADY, minimum=52)
    with pytest.raises(pytest.fail.Exception, match=r"got the name that test_x.py::test_x uses"):
        gate("metric", STEADY, minimum=52)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param({"minimum": 52}, None, id="rate-above"),
        pytest.param({"minimum": 70}, Unmet, id="rate-below"),
        pytest.param({"minimum": 60.02}, Inconclusive, id="rate-at-its-limit"),
        pytest.param({"maximum": 70}, None, id="time-below"),
        pytest.param({"maximum": 50}, Unmet, id="time-above"),
        pytest.param({"better": "higher"}, None, id="only-measured"),
    ],
)
def test_the_interval_decides_and_the_metric_is_stored_all_the_same(gate, run, arguments, error):
    if error is None:
        gate("metric", STEADY, **arguments)
    else:
        with pytest.raises(error):
            gate("metric", STEADY, **arguments)
    (stored,) = run.config._benchmarksession.benchmarks
    entry = stored.as_dict()["extra_info"][KEY]
    assert (entry["value"], entry["rounds"], entry["test"]) == (60.02, 40, "test_x.py::test_x")
    assert not entry["passed"], "before the run has ended"
    run.end(failed=False)
    assert entry["passed"] is (error is None), "its test may have caught the error"


@pytest.mark.parametrize("arguments", [{"minimum": 52}, {"maximum": 70}, {"better": "higher"}])
def test_fewer_rounds_than_the_first_look_are_undecided(gate, arguments):
    with pytest.raises(Inconclusive):
        gate("metric", [60.0] * 4, **arguments)


def test_a_run_in_which_another_test_failed_is_no_baseline(gate, run):
    gate("metric", STEADY, minimum=52)
    run.end(failed=True)
    assert [entry["passed"] for entry in run.entries] == [False]


def test_a_limit_may_be_a_number_of_numpy(gate):
    gate(
        "metric",
        np.asarray(STEADY, dtype=np.float32),
        minimum=np.int64(52),
        worse_by=Fraction(1, 9),
    )


def test_a_limit_may_be_a_fraction_and_is_shown(gate, run):
    gate("metric", STEADY, minimum=Fraction(52))
    assert run.judged["metric"].row.required == "at least 52"


def test_failed_requests_pass_nothing(gate, run):
    with pytest.raises(Unmet):
        gate("time", [math.inf] * 40, maximum=70)
    with pytest.raises(Unmet):
        gate("rate", [0.0] * 40, minimum=52)
    for stored in run.config._benchmarksession.benchmarks:
        assert stored.has_error


def test_the_rounds_of_a_benchmark_are_judged_in_its_unit(run):
    timed(run, [0.01] * 40)("ms", maximum=20, unit="ms")
    assert run.judged["ms"].estimate.value == pytest.approx(10.0)
    with pytest.raises(Unmet, match=r"at most 0.005 s, got 0.01 s"):
        timed(run, [0.01] * 40)("s", maximum=0.005)
    with pytest.raises(pytest.fail.Exception, match="rounds that take time"):
        timed(run, [0.0] * 40)("no_time", minimum=52, per_round=32)
    with pytest.raises(pytest.fail.Exception, match="or a call of benchmark before it"):
        timed(run, [0.01] * 40, has_error=True)("broken", maximum=1)
    with pytest.raises(pytest.fail.Exception, match="rounds that take time, got 0 s"):
        timed(run, [0.0] * 40)("standing clock", maximum=1)
    again = timed(run, [0.01] * 40)
    again("first", maximum=1)
    with pytest.raises(pytest.fail.Exception, match="one gate on the rounds"):
        again("second", maximum=1)


def test_six_rows_are_shown_and_what_did_not_hold_is_among_them(gate, run):
    for number in range(8):
        gate(f"good_{number}", STEADY, minimum=52)
    with pytest.raises(Unmet):
        gate("bad", STEADY, minimum=70)
    _, *rows, last = closing.lines(run)
    assert [row.split()[0] for row in rows] == [*(f"good_{number}" for number in range(5)), "bad"]
    assert rows[-1].endswith("at least 70  FAIL") and last == "and 3 more: PASS"


def test_a_rate_is_what_a_round_does_over_its_time(run):
    timed(run, [0.5] * 40)("tg32@d0", minimum=52, per_round=32, unit="tok/s")
    assert run.judged["tg32@d0"].estimate.value == pytest.approx(64.0)
    with pytest.raises(Unmet, match="at least 70 tok/s, got 64 tok/s"):
        timed(run, [0.5] * 40)("slow", minimum=70, per_round=32, unit="tok/s")
    one_in_five_is_slow = [2.5, 0.5, 0.5, 0.5, 0.5] * 400
    with pytest.raises(Unmet, match=r"35\.56 tok/s over the whole time"):
        timed(run, one_in_five_is_slow)("many", minimum=52, per_round=32, unit="tok/s")


def test_thousands_of_rounds_are_blocks_so_that_one_spike_at_the_end_decides_nothing(run):
    spike = [*MANY, 1e-3, 1e-3]
    timed(run, spike)("spike", maximum=11, unit="us")
    assert run.judged["spike"].estimate.rounds == 104
    slower_at_last = [*MANY[:-5000], *(2 * each for each in MANY[-5000:])]
    with pytest.raises(Inconclusive, match="the last round is on the other side"):
        timed(run, slower_at_last)("slower", maximum=11, unit="us")
    assert run.judged["slower"].verdict is Verdict.INCONCLUSIVE
