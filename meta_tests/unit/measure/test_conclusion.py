"""The result of a gate's decision if the machine, the samples or the timestamps do not allow a
decision."""

import pytest

from sm121.core.profile_fields import Gate
from sm121.core.verdict import Verdict
from sm121.measure import conclusion, gate
from sm121.measure.measurement import Invalidity, Measurement

GATE = Gate(metric="tg32@d0", unit="tok/s", minimum=52.0, source="a test")
COUNTED = Gate(metric="acceptance@1", unit="%", minimum=52.0, source="a test")
BUSY = "other processes take 90 % of a core"
DRIFT = Invalidity(reason="drift", evidence="2107 tok/s in the first 2 rounds, 3660 after them")
LIE = Invalidity(reason="token_accounting", evidence="64 tokens by ids, usage reports 32")
BOTH = frozenset({Verdict.PASS, Verdict.FAIL})


def conclude(
    rate: float,
    required: Gate | None,
    *,
    invalid: tuple[Invalidity, ...] = (),
    refuted: frozenset[Verdict] = frozenset(),
    clock: str | None = None,
) -> tuple[Verdict, str]:
    """Return the verdict on twenty rounds of a rate, and the reason."""
    name = "tg32@d0" if required is None else required.metric
    unit = "tok/s" if required is None else required.unit
    samples = [rate + 0.01 * (number % 3) for number in range(20)]
    measurement = Measurement(
        name=name, unit=unit, samples=samples, higher_is_better=True, clock=clock,
        invalid=list(invalid),
    )  # fmt: skip
    decision = None
    if required is not None and not invalid:
        decision, _ = gate.decide_measurement(measurement, required, None, len(samples))
    verdict, fact = conclusion.conclude(
        measurement, decision, gated=required is not None, box=BUSY if refuted else None,
        against=[str(item) for item in invalid], refuted=refuted,
    )  # fmt: skip
    return verdict, str(fact)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(57.0, Verdict.PASS), (47.0, Verdict.FAIL)], ids=["fast", "slow"]
)
def test_a_qualified_box_does_not_change_the_decision(rate, verdict):
    assert conclude(rate, GATE)[0] is verdict


@pytest.mark.parametrize("rate", [57.0, 47.0], ids=["fast", "slow"])
def test_a_degraded_box_decides_no_gate_on_a_rate(rate):
    verdict, reason = conclude(rate, GATE, refuted=BOTH)
    assert verdict is Verdict.INCONCLUSIVE and f"the machine is DEGRADED: {BUSY}" in reason


def test_a_degraded_box_refutes_only_the_verdicts_that_it_explains():
    only_slow = frozenset({Verdict.FAIL})
    assert conclude(57.0, GATE, refuted=only_slow)[0] is Verdict.PASS
    assert conclude(47.0, GATE, refuted=only_slow)[0] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("rate", "verdict"), [(57.0, Verdict.PASS), (47.0, Verdict.FAIL)], ids=["enough", "too few"]
)
def test_verdicts_on_counts_stand_on_a_degraded_box(rate, verdict):
    assert conclude(rate, COUNTED, refuted=BOTH)[0] is verdict


def test_a_rate_without_a_gate_is_no_verdict_of_a_degraded_box():
    verdict, reason = conclude(57.0, None, refuted=BOTH)
    assert verdict is Verdict.NOT_RUN and BUSY in reason
    assert conclude(57.0, None)[0] is Verdict.PASS


@pytest.mark.parametrize(
    ("invalid", "required", "verdict"),
    [
        pytest.param((DRIFT,), GATE, Verdict.INVALID, id="drift, with a gate"),
        pytest.param((DRIFT,), None, Verdict.NOT_RUN, id="drift, without a gate"),
        pytest.param((LIE,), None, Verdict.INVALID, id="a lie, without a gate"),
        pytest.param((DRIFT, LIE), None, Verdict.INVALID, id="both, without a gate"),
    ],
)
def test_an_unsteady_machine_decides_what_has_a_gate_alone(invalid, required, verdict):
    assert conclude(57.0, required, invalid=invalid)[0] is verdict


def test_no_gate_decides_on_chunks():
    verdict, reason = conclude(57.0, GATE, clock="chunks")
    assert verdict is Verdict.INCONCLUSIVE and "chunks were counted instead of tokens" in reason
    assert conclude(57.0, GATE, clock="usage")[0] is Verdict.PASS
