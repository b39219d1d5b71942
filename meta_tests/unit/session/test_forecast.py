"""The forecast of a run counts each start of a server."""

import pytest

from meta_tests.folders import ROOT
from sm121.core import profile
from sm121.core.time_range import TimeRange
from sm121.engines.pool import StartReport
from sm121.run.timings import CheckDurations
from sm121.session import forecast
from sm121.session.forecast import Check
from sm121.session.remaining import Remaining

CPU = profile.load("cpu-tiny-gpt-oss")

STARTED = StartReport(configuration="float32", key="k", startup_s=40.0, log="l")


def checks(level: str, number: int, configuration: str) -> list[Check]:
    """Return checks of a level, each of which needs the server of a configuration."""
    needed = frozenset({configuration})
    return [Check(f"{level}-{configuration}-{n}", level, needed) for n in range(number)]


@pytest.mark.parametrize(
    ("baseline", "under_test", "starts"),
    [
        pytest.param("float32", "float32", 2, id="the-baseline-is-under-test"),
        pytest.param("bfloat16", "float32", 2, id="another-baseline"),
    ],
)
def test_a_server_that_a_check_stops_is_started_again(baseline, under_test, starts):
    """The smoke level stops the baseline, and the next check starts the configuration under test.

    If they are the same, the run starts it twice. Later checks of the baseline only read its
    log."""
    asked = [
        *checks("smoke", 1, baseline),
        Check("stop", "smoke", frozenset({baseline}), stops=True),
        *checks("kernel", 2, under_test),
        *checks("kernel", 1, baseline),
    ]
    file, _, name = forecast.STOP.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")
    own = CPU.model_copy(update={"under_test": under_test, "baseline": baseline})
    known = CheckDurations({"float32": 40.0, "bfloat16": 40.0}, {}, {})
    expected = forecast.forecast_run(own, "merge", asked, known)
    assert sum(len(each.starts) for each in expected.expected) == starts
    assert expected.usual_start_s == {baseline: 40.0, under_test: 40.0}


def test_a_second_start_of_a_configuration_is_still_to_come_after_the_first():
    """The remaining time contains the second start of a configuration until it has ended."""
    asked = [
        Check("stop", "smoke", frozenset({"float32"}), stops=True),
        *checks("kernel", 1, "float32"),
    ]
    known = CheckDurations({"float32": 40.0}, {"stop": 1.0, "kernel-float32-0": 1.0}, {})
    starts: list[StartReport] = []
    remaining = Remaining(forecast.forecast_run(CPU, "merge", asked, known), starts)
    assert remaining.estimate(0.0) == TimeRange.of(82.0)
    remaining.begin("stop", 0.0)
    starts.append(STARTED)
    remaining.end("stop")
    assert remaining.estimate(41.0) == TimeRange.of(41.0)
    remaining.begin("kernel-float32-0", 41.0)
    starts.append(STARTED)
    assert remaining.estimate(81.0) == TimeRange.of(1.0)
