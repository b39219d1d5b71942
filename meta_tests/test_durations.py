"""Minutes that are true: what was timed here, ranges that ship, and the time a run has left."""

import json
from dataclasses import replace

import pytest

from sm121.core import profile
from sm121.core.time_range import TimeRange
from sm121.engines.pool import StartReport
from sm121.run import timings
from sm121.run.timings import Taken, Target
from sm121.session import forecast
from sm121.session.forecast import Check, Expected, Forecast
from sm121.session.remaining import Remaining

CPU = profile.load("cpu-tiny-gpt-oss")
HERE = Target({"cpu_model": "one"}, "cpu-tiny-gpt-oss", "float32", "quick")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param((2, 6), "a few seconds", id="few"),
        pytest.param((38, 38), "about 40 s", id="seconds"),
        pytest.param((232, 586), "4 to 10 min", id="minutes"),
        pytest.param((1500, 2400), "25 to 40 min", id="tens-of-minutes"),
        pytest.param((1790, 1810), "about 30 min", id="one-number"),
        pytest.param((14_100, 14_700), "about 4 h", id="one-number-of-hours"),
        pytest.param((7800, 18_600), "2 to 5 h", id="hours"),
    ],
)
def test_a_time_reads_as_people_say_it(seconds, text):
    assert str(TimeRange(*seconds)) == text


# ------------------------------------------------------------------------- kept beside .benchmarks


def test_times_are_kept_for_the_next_run(tmp_path):
    first = Taken({"float32": 50.0}, {"a": 1.0, "b": 2.0}, {"rate": 9.0})
    timings.keep(tmp_path / "new" / "folder", HERE, first)
    timings.keep(tmp_path / "new" / "folder", HERE, Taken({}, {"b": 4.0}, {}))
    taken = timings.read(tmp_path / "new" / "folder", HERE)
    assert taken == Taken({"float32": 50.0}, {"a": 1.0, "b": 4.0}, {"rate": 9.0})
    assert taken.of("rate") == 9.0 and taken.of("another") is None


@pytest.mark.parametrize(
    ("change", "checks", "rates"),
    [
        pytest.param({}, {"a"}, {"rate"}, id="the-same"),
        pytest.param({"machine": {"cpu_model": "other"}}, set(), set(), id="another-machine"),
        pytest.param({"profile": "own"}, set(), set(), id="another-profile"),
        pytest.param({"configuration": "bfloat16"}, set(), set(), id="another-configuration"),
        pytest.param({"plan": "full"}, {"a"}, set(), id="another-plan"),
    ],
)
def test_only_the_same_target_says_how_long_a_check_takes(tmp_path, change, checks, rates):
    timings.keep(tmp_path, HERE, Taken({}, {"a": 1.0}, {"rate": 9.0}))
    taken = timings.read(tmp_path, replace(HERE, **change))
    assert ({*taken.checks}, {*taken.rates}) == (checks, rates)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe no text", id="no-text"),
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param(b'{"schema_version": 2, "targets": []}', id="a-later-version"),
        pytest.param(b'{"targets": [{"profile": 1}]}', id="other-fields"),
        pytest.param(b" " * (timings._MOST_BYTES + 1), id="too-large"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_once_and_then_written_anew(tmp_path, content):
    (tmp_path / timings.NAME).write_bytes(content)
    with pytest.raises(ValueError):
        timings.read(tmp_path, HERE)
    timings.keep(tmp_path, HERE, Taken({}, {"a": 1.0}, {}))
    assert timings.read(tmp_path, HERE).checks == {"a": 1.0}


def test_the_file_is_bounded_and_the_latest_stay(tmp_path):
    for number in range(timings._MOST_TARGETS + 5):
        timings.keep(tmp_path, replace(HERE, profile=f"p{number}"), Taken({}, {"a": 1.0}, {}))
    for number in range(timings._MOST_PLANS + 5):
        timings.keep(tmp_path, replace(HERE, plan=f"p{number}"), Taken({}, {}, {"r": 1.0}))
    many = {f"test_{number}": 1.0 for number in range(timings._MOST_CHECKS + 5)}
    timings.keep(tmp_path, HERE, Taken({}, many, {}))
    kept = json.loads((tmp_path / timings.NAME).read_text("utf-8"))["targets"]
    assert len(kept) == timings._MOST_TARGETS
    assert len(kept[-1]["rates"]) == timings._MOST_PLANS
    assert [*kept[-1]["checks"]] == [*many][5:]


# ------------------------------------------------------------------------------------- forecasts


def checks(level: str, number: int, *configurations: str) -> list[Check]:
    """Checks of a level, each of which needs the server of these configurations."""
    return [Check(f"{level}-{n}", level, frozenset(configurations)) for n in range(number)]


def test_where_nothing_was_timed_the_range_of_the_plan_ships():
    bounds = forecast.shipped(CPU)
    levels = bounds.plans["quick"].levels
    asked = [check for level in levels for check in checks(level, levels[level].checks, "float32")]
    time = forecast.of(CPU, "quick", asked, Taken()).time
    assert time.low == pytest.approx(
        bounds.start.seconds[0] + sum(x.seconds[0] for x in levels.values())
    )
    assert time.high == pytest.approx(
        bounds.start.seconds[1] + sum(x.seconds[1] for x in levels.values())
    )
    assert time.low < time.high, "never a single number"


def test_what_was_timed_here_takes_as_long_again():
    known = Taken({"float32": 40.0}, {"smoke-0": 3.0}, {"performance-0": 20.0})
    asked = [*checks("smoke", 1, "float32"), *checks("performance", 1, "float32")]
    expected = forecast.of(CPU, "quick", asked, known)
    assert expected.time == TimeRange.of(63.0) and expected.timed == 2
    (more,) = forecast.of(CPU, "quick", [Check("new", "smoke")], known).expected
    assert not more.timed and more.time.low < more.time.high


def test_a_check_that_cannot_run_takes_no_time_and_a_soak_what_its_option_says():
    unable = Check("smoke-0", "smoke", frozenset({"float32"}), can_run=False)
    soak = Check("soak", "stress", lasts=TimeRange.of(1800.0))
    expected = forecast.of(CPU, "full", [unable, soak], Taken())
    assert expected.time == TimeRange.of(1800.0) and expected.unable == 1


def test_a_profile_of_which_nothing_ships_has_no_made_up_number():
    own = CPU.model_copy(update={"name": "own"})
    assert forecast.of(own, "quick", checks("smoke", 1), Taken()).time is None
    extends = own.model_copy(update={"extends": "cpu-tiny-gpt-oss"})
    assert forecast.of(extends, "quick", checks("smoke", 1), Taken()).time is not None
    nightly = forecast.of(CPU, "nightly", checks("smoke", 1), Taken())
    assert nightly == forecast.of(CPU, "full", checks("smoke", 1), Taken())


# ------------------------------------------------------------------------------------ time left


def start(seconds: float | None, configuration: str = "float32", **more) -> StartReport:
    """One start, as the pool reports it."""
    return StartReport(configuration=configuration, key="k", startup_s=seconds, log="l", **more)


def ranged(number: int, low: float = 10.0, high: float = 20.0) -> Forecast:
    """Checks of a range each; the first one starts a server that usually takes 50 s."""
    expected = [
        Expected(
            Check(f"t{n}", "smoke"),
            TimeRange(low, high),
            timed=False,
            starts={} if n else {"float32": TimeRange(40.0, 80.0)},
        )
        for n in range(number)
    ]
    return Forecast(expected, {"float32": 50.0})


@pytest.mark.parametrize(
    ("took_s", "compiled", "factor"),
    [
        pytest.param(100.0, [], 2.0, id="twice-as-long"),
        pytest.param(50.0, [], 1.0, id="as-usual"),
        pytest.param(40.0, [], 0.8, id="shorter"),
        pytest.param(600.0, ["a kernel"], 1.0, id="a-cold-start-says-nothing"),
    ],
)
def test_the_first_start_scales_both_ends(took_s, compiled, factor):
    starts: list[StartReport] = []
    remaining = Remaining(ranged(11), starts)
    remaining.begin("t0", 0.0)
    starts.append(start(took_s, compiled=compiled))
    remaining.end("t0")
    assert remaining.estimate(took_s) == TimeRange(100.0, 200.0) * factor
    starts.append(start(500.0, "bfloat16"))
    assert remaining.estimate(took_s) == TimeRange(100.0, 200.0) * factor, "only the first one"


def test_a_long_start_shows_before_it_has_ended():
    remaining = Remaining(ranged(11))
    remaining.begin("t0", 0.0)
    before, later = remaining.estimate(40.0), remaining.estimate(100.0)
    assert before.high == 200.0 + 60.0 and later.high == 2 * 200.0 + 100.0


def test_what_was_timed_here_is_not_scaled():
    known = Forecast([Expected(Check("t0", "smoke"), TimeRange.of(30.0), timed=True)], {"x": 10.0})
    starts = [start(100.0, "x")]
    assert Remaining(known, starts).estimate(0.0) == TimeRange.of(30.0)


def test_a_stuck_check_lets_the_time_left_stand():
    remaining = Remaining(ranged(4))
    remaining.begin("t0", 0.0)
    remaining.end("t0")
    remaining.begin("t1", 0.0)
    seen = [remaining.shown(float(second)) for second in range(600)]
    assert seen[0] == TimeRange(30.0, 60.0)
    assert {*seen[20:]} == {TimeRange(20.0, 40.0)}


def test_nothing_known_says_nothing():
    assert Remaining(forecast.counted([("a", "smoke")])).shown(0.0) is None
