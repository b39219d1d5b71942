"""Forecasts in minutes: recorded durations, shipped ranges, and the remaining time of a run."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from sm121.core import profile
from sm121.core.time_range import TimeRange
from sm121.engines.pool import StartReport
from sm121.plugin import progress
from sm121.run import timings
from sm121.run.timings import CheckDurations, TimedTarget
from sm121.session import durations, forecast
from sm121.session.forecast import Check, ExpectedDuration, Forecast
from sm121.session.remaining import Left, Remaining

CPU = profile.load("cpu-tiny-gpt-oss")
HERE = TimedTarget({"cpu_model": "one"}, "cpu-tiny-gpt-oss", "float32", "quick")


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


# ------------------------------------------------------------------------------- Stored durations


def test_times_are_kept_for_the_next_run(tmp_path):
    first = CheckDurations({"float32": 50.0}, {"a": 1.0, "b": 2.0}, {"rate": 9.0})
    timings.store_durations(tmp_path / "new" / "folder", HERE, first)
    timings.store_durations(tmp_path / "new" / "folder", HERE, CheckDurations({}, {"b": 4.0}, {}))
    taken = timings.read_durations(tmp_path / "new" / "folder", HERE)
    assert taken == CheckDurations({"float32": 50.0}, {"a": 1.0, "b": 4.0}, {"rate": 9.0})
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
    timings.store_durations(tmp_path, HERE, CheckDurations({}, {"a": 1.0}, {"rate": 9.0}))
    taken = timings.read_durations(tmp_path, replace(HERE, **change))
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
        timings.read_durations(tmp_path, HERE)
    timings.store_durations(tmp_path, HERE, CheckDurations({}, {"a": 1.0}, {}))
    assert timings.read_durations(tmp_path, HERE).checks == {"a": 1.0}


def test_the_file_is_bounded_and_the_latest_stay(tmp_path):
    for number in range(timings._MOST_TARGETS + 5):
        timings.store_durations(
            tmp_path, replace(HERE, profile=f"p{number}"), CheckDurations({}, {"a": 1.0}, {})
        )
    for number in range(timings._MOST_PLANS + 5):
        timings.store_durations(
            tmp_path, replace(HERE, plan=f"p{number}"), CheckDurations({}, {}, {"r": 1.0})
        )
    many = {f"test_{number}": 1.0 for number in range(timings._MOST_CHECKS + 5)}
    timings.store_durations(tmp_path, HERE, CheckDurations({}, many, {}))
    kept = json.loads((tmp_path / timings.NAME).read_text("utf-8"))["targets"]
    assert len(kept) == timings._MOST_TARGETS
    assert len(kept[-1]["rates"]) == timings._MOST_PLANS
    assert [*kept[-1]["checks"]] == [*many][5:]


# ------------------------------------------------------------------------------------- Forecasts


def checks(level: str, number: int, *configurations: str) -> list[Check]:
    """Return checks of a level, each of which needs the server of these configurations."""
    return [Check(f"{level}-{n}", level, frozenset(configurations)) for n in range(number)]


def test_without_timings_the_shipped_range_of_the_plan_is_used():
    bounds = durations.shipped_durations(CPU)
    levels = bounds.plans["quick"].levels
    asked = []
    for level in levels:
        asked.extend(checks(level, levels[level].checks, "float32"))
    time = forecast.forecast_run(CPU, "quick", asked, CheckDurations()).time
    assert time.low == pytest.approx(
        bounds.start.seconds[0] + sum(x.seconds[0] for x in levels.values())
    )
    assert time.high == pytest.approx(
        bounds.start.seconds[1] + sum(x.seconds[1] for x in levels.values())
    )
    assert time.low < time.high, "never a single number"


def test_a_check_is_expected_to_take_its_last_duration():
    known = CheckDurations({"float32": 40.0}, {"smoke-0": 3.0}, {"performance-0": 20.0})
    asked = [*checks("smoke", 1, "float32"), *checks("performance", 1, "float32")]
    expected = forecast.forecast_run(CPU, "quick", asked, known)
    assert expected.time == TimeRange.of(63.0) and expected.timed == 2
    (more,) = forecast.forecast_run(CPU, "quick", [Check("new", "smoke")], known).expected
    assert not more.timed and more.time.low < more.time.high


def test_a_check_that_cannot_run_takes_no_time_and_a_soak_what_its_option_says():
    unable = Check("smoke-0", "smoke", frozenset({"float32"}), can_run=False)
    soak = Check("soak", "stress", lasts=TimeRange.of(1800.0))
    expected = forecast.forecast_run(CPU, "full", [unable, soak], CheckDurations())
    assert expected.time == TimeRange.of(1800.0) and expected.unable == 1


def test_a_profile_of_which_nothing_ships_has_no_made_up_number():
    own = CPU.model_copy(update={"name": "own"})
    assert forecast.forecast_run(own, "quick", checks("smoke", 1), CheckDurations()).time is None
    extends = own.model_copy(update={"extends": "cpu-tiny-gpt-oss"})
    assert (
        forecast.forecast_run(extends, "quick", checks("smoke", 1), CheckDurations()).time
        is not None
    )
    nightly = forecast.forecast_run(CPU, "nightly", checks("smoke", 1), CheckDurations())
    assert nightly == forecast.forecast_run(CPU, "full", checks("smoke", 1), CheckDurations())


# ------------------------------------------------------------------------------------ Remaining
# time


def start(seconds: float | None, configuration: str = "float32", **more) -> StartReport:
    """Return one start, as the server pool reports it."""
    return StartReport(configuration=configuration, key="k", startup_s=seconds, log="l", **more)


def ranged(number: int, low: float = 10.0, high: float = 20.0) -> Forecast:
    """Return checks with a range of durations each.

    The first one starts a server that usually takes 50 s."""
    expected = []
    for n in range(number):
        expected.append(
            ExpectedDuration(
                Check(f"t{n}", "smoke"),
                TimeRange(low, high),
                timed=False,
                starts={} if n else {"float32": TimeRange(40.0, 80.0)},
            )
        )
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
    before = remaining.estimate(40.0)
    later = remaining.estimate(100.0)
    assert before.high == 200.0 + 60.0 and later.high == 2 * 200.0 + 100.0


def test_durations_measured_here_are_not_scaled():
    known = Forecast(
        [ExpectedDuration(Check("t0", "smoke"), TimeRange.of(30.0), timed=True)], {"x": 10.0}
    )
    starts = [start(100.0, "x")]
    assert Remaining(known, starts).estimate(0.0) == TimeRange.of(30.0)


def test_a_stuck_check_lets_the_time_left_stand():
    remaining = Remaining(ranged(4))
    remaining.begin("t0", 0.0)
    remaining.end("t0")
    remaining.begin("t1", 0.0)
    seen = [remaining.shown(float(second)) for second in range(600)]
    assert seen[0] == Left(TimeRange(30.0, 60.0))
    assert {each.time for each in seen[20:]} == {TimeRange(20.0, 40.0)}


def test_a_run_within_its_forecast_is_not_called_slower():
    remaining = Remaining(ranged(4))
    remaining.begin("t0", 0.0)
    assert remaining.shown(0.0) == Left(TimeRange(80.0, 160.0))
    remaining.end("t0")
    remaining.begin("t1", 80.0)
    assert remaining.shown(115.0) == Left(TimeRange(20.0, 40.0)), "15 s too long, of 160 s"
    assert remaining.shown(137.0).is_slower, "177 s in all: more than 160 s and a tenth"


def test_a_start_that_takes_much_longer_has_a_lower_bound_and_then_a_range():
    """A start that takes much longer than forecast shows a lower bound, and then a range.

    Before, a busy machine showed 0:33 to 3:01 left, 0:35 to 3:15, ... 0:48 to 4:25, a tenth more
    each time, while the start alone took 2 minutes instead of 20 s."""
    starts: list[StartReport] = []
    remaining = Remaining(ranged(4), starts)
    remaining.begin("t0", 0.0)
    shown = [remaining.shown(float(second)) for second in range(0, 200, 8)]
    assert not shown[0].is_slower and shown[-1].is_slower and shown[-1].is_least
    assert shown[-1].time == remaining.estimate(192.0), "no step of a tenth"
    starts.append(start(200.0))
    remaining.end("t0")
    assert remaining.shown(200.0) == Left(TimeRange(120.0, 240.0), is_slower=True)


def test_a_check_that_takes_much_longer_has_a_lower_bound():
    remaining = Remaining(ranged(4))
    remaining.begin("t0", 0.0)
    remaining.shown(0.0)
    remaining.end("t0")
    remaining.begin("t1", 80.0)
    assert remaining.shown(300.0) == Left(TimeRange(20.0, 40.0), is_slower=True, is_least=True)
    remaining.end("t1")
    assert remaining.shown(300.0) == Left(TimeRange(20.0, 40.0), is_slower=True)


def test_without_durations_no_remaining_time_is_shown():
    unknown = Forecast([ExpectedDuration(Check("a", "smoke"), None, timed=False)])
    assert Remaining(unknown).shown(0.0) is None


def test_every_shipped_profile_has_its_durations():
    bounds = {name: durations.shipped_durations(profile.load(name)) for name in profile.shipped()}
    assert [name for name, each in bounds.items() if each is None] == []


# ------------------------------------------------------------------------------ Replayed recorded
# runs

#: A whole run of the simulated machine for the MXFP4 build. It has 277 checks of 0 to 94 s.
_EVIDENCE = ROOT / "docs" / "evidence" / "gb10-stand-in-verdict.json"
RECORDED = json.loads(_EVIDENCE.read_text("utf-8"))


def replayed(
    expected: Forecast, took_s: dict[str, float], start_s: float, every_s: float = 1.0
) -> list[Left]:
    """Return the lines of a run whose first check waits for a start, by default for each second."""
    now = 0.0
    starts = []
    seen = []
    remaining = Remaining(expected, starts)

    def passes(seconds: float) -> None:
        nonlocal now
        ends = now + seconds
        while now < ends:
            seen.append(remaining.shown(now))
            now = min(now + every_s, ends)

    for number, (check, seconds) in enumerate(took_s.items()):
        remaining.begin(check, now)
        if number == 0:
            passes(start_s)
            starts.append(start(start_s, "stock"))
        passes(seconds)
        remaining.end(check)
        seen.append(remaining.shown(now))
    return seen


def rises(seen: list[Left]) -> float:
    """Return the largest factor by which a shown remaining time rose between two readings.

    A lower bound has no upper end, which is not compared."""
    factors = []
    for one, other in itertools.pairwise(seen):
        ends = [(one.time.low, other.time.low)]
        if not (one.is_least or other.is_least):
            ends.append((one.time.high, other.time.high))
        factors += [after / before for before, after in ends if before > 0]
    return max(factors)


@pytest.mark.parametrize("start_s", [100.0, 200.0, 600.0], ids=["short", "usual", "three-times"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0], ids=["faster", "as-recorded", "slower"])
@pytest.mark.parametrize(
    "share_known",
    [
        pytest.param(0, id="untimed"),
        pytest.param(2, id="half-timed", marks=pytest.mark.slow("between the two others")),
        pytest.param(1, id="timed"),
    ],
)
def test_the_time_left_of_a_recorded_run_never_jumps_up(start_s, factor, share_known):
    """The remaining time of a recorded run rises by at most a tenth from one line to the next.

    The checks have different lengths, and the forecast is the shipped range, an earlier run, or
    both."""
    recorded = {test["id"]: test["seconds"] for test in RECORDED["tests"] if test["seconds"]}
    levels = {test["id"]: test["level"] for test in RECORDED["tests"]}
    gb10 = profile.load("sm121-gpt-oss-120b")
    asked = [Check(name, levels[name], frozenset({"stock"})) for name in recorded]
    timed = {name: recorded[name] for name in [*recorded][:: share_known or 1] if share_known}
    expected = forecast.forecast_run(gb10, "full", asked, CheckDurations({}, timed, {}))
    seen = replayed(expected, {name: took * factor for name, took in recorded.items()}, start_s)
    assert len(seen) > 100 and rises(seen) <= 1.1
    assert seen[-1].time.high < 1.0, "nothing is left at the end"
    is_in_time = factor <= 1.0 and start_s <= 200.0
    if is_in_time:
        for each in seen:
            assert not each.is_slower


@pytest.mark.parametrize("every_s", [1.0, 8.0, 30.0], ids=lambda seconds: f"{seconds:g}s")
@pytest.mark.parametrize("start_s", [0.0, 60.0, 130.0, 600.0], ids=lambda seconds: f"{seconds:g}s")
@pytest.mark.parametrize("check_s", [2.0, 15.0, 80.0], ids=["short", "as-forecast", "long"])
def test_the_remaining_time_never_jumps_up_by_more_than_a_tenth(every_s, start_s, check_s):
    """The remaining time rises by at most a tenth, even in a run that is slower than its forecast.

    Such a run shows a lower bound. Before: at least 0:31, and in the next line at least 0:36.
    """
    known = ranged(4)
    took = {each.check.id: check_s for each in known.expected}
    seen = replayed(known, took, start_s, every_s)
    assert rises(seen) <= 1.1


# ---------------------------------------------------------------------------------- Runs of pytest

SLOWLY = ("--arch", "cpu", "--served-model-name", "canary", "meta_tests/whole/scenarios/slowly.py")


def kept(folder: Path) -> list[dict]:
    """Return the durations that a run has recorded."""
    return json.loads((folder / timings.NAME).read_text("utf-8"))["targets"]


def test_a_run_keeps_what_its_checks_took_and_the_next_one_says_so(
    run_pytest, fault_server, tmp_path
):
    """A run stores the durations of its checks, and the next run uses them for its forecast.

    As in CI, the runs have two report directories and one storage."""
    options = (*fault_server().options, f"--benchmark-storage={tmp_path / 's'}", *SLOWLY)
    status, first = run_pytest(*options)
    assert status == 0 and "(0 of 2 have durations from earlier runs here)" in first.output, (
        first.output
    )
    (target,) = kept(tmp_path / "s")
    assert target["profile"] == "cpu-tiny-gpt-oss" and target["configuration"] == "float32"
    assert target["machine"]["attached_to"] == "127.0.0.1"
    seconds = {name.rpartition("::")[2]: took for name, took in target["checks"].items()}
    assert 1.5 <= seconds["test_that_takes_long[a]"] < 10 > seconds["test_that_takes_long[b]"]
    _, second = run_pytest(*options)
    assert second.report != first.report
    assert re.search(
        r"^plan \w+: 2 checks .*\(2 of 2 have durations from earlier runs here\)",
        second.output,
        re.M,
    )


def test_a_check_that_failed_is_no_forecast(run_pytest, fault_server, tmp_path):
    """A failed check does not count in the forecast, because it may have waited for its time
    limit."""
    options = (*fault_server().options, f"--benchmark-storage={tmp_path / 's'}", "--arch", "cpu")
    scenario = ("meta_tests/whole/scenarios/verdicts.py", "-k", "test_pass or test_fail")
    run_pytest(*options, "--served-model-name", "canary", *scenario)
    (target,) = kept(tmp_path / "s")
    names = {name.rpartition("::")[2] for name in target["checks"]}
    assert "test_pass" in names and "test_fail" not in names, names


def test_unreadable_durations_are_reported_and_ignored(run_pytest, fault_server, tmp_path):
    (tmp_path / timings.NAME).write_text("{", "utf-8")
    options = (*fault_server().options, f"--benchmark-storage={tmp_path}", *SLOWLY)
    status, run = run_pytest(*options)
    assert status == 0, run.output
    assert f"{tmp_path / timings.NAME}: expected durations of earlier runs, got" in run.output
    assert len(kept(tmp_path)) == 1


def test_durations_that_cannot_be_kept_are_a_remark(run_pytest, fault_server, tmp_path):
    """If a run cannot store its durations, its report contains a remark.

    The history of a machine may be read-only. Here, a folder is in place of the file."""
    (tmp_path / timings.NAME).mkdir()
    options = (*fault_server().options, f"--benchmark-storage={tmp_path}", *SLOWLY)
    status, run = run_pytest(*options)
    assert status == 0, run.output
    assert any("durations of this run are not kept" in line for line in run.verdict["remarks"])


def test_an_interrupted_run_keeps_the_checks_that_ended(start_pytest, fault_server, tmp_path):
    options = (*fault_server().options, f"--benchmark-storage={tmp_path / 's'}", *SLOWLY)
    ends_itself = ("-p", "interrupting")
    (tmp_path / "interrupting.py").write_text(
        "import os, signal\n"
        "def pytest_runtest_call(item):\n"
        "    if item.name.endswith('[b]'):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n",
        "utf-8",
    )
    run = start_pytest(*ends_itself, *options, environment={"PYTHONPATH": str(tmp_path)})
    assert run.wait(120.0) == 2, run.output
    (target,) = kept(tmp_path / "s")
    assert [name.rpartition("::")[2] for name in target["checks"]] == ["test_that_takes_long[a]"]


def test_nothing_is_silent_where_there_is_no_terminal(run_pytest, fault_server, tmp_path):
    """Without a terminal, a run prints lines while tests are collected and while it ends."""
    (tmp_path / "slow_to_begin.py").write_text(
        "import time\n"
        "from sm121.plugin import progress\n"
        "progress._LINE_EVERY_S = 0.2\n"
        "def pytest_collectstart(collector):\n"
        "    time.sleep(0.3)\n"
        "def pytest_sessionfinish(session):\n"
        "    time.sleep(0.5)\n",
        "utf-8",
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    options = ("-p", "slow_to_begin", *fault_server().options, *SLOWLY)
    status, run = run_pytest(*options, environment=environment)
    assert status == 0, run.output
    for what in ("collecting the tests", "ending the run"):
        assert re.search(rf"^\[..:..:..\] {what} for 0:0\d$", run.output, re.M), run.output


def test_a_run_is_looked_at_so_often_that_ten_seconds_are_not_silent():
    assert progress._LINE_EVERY_S + 1.0 <= 10.0


# -------------------------------------------------------------------------------------- sm121 plan


def test_plan_says_a_range_for_each_plan(tmp_path):
    command = [sys.executable, "-m", "sm121", "plan", "--profile", "sm121-gpt-oss-120b"]
    command += ["--report-dir", str(tmp_path / "none"), f"--benchmark-storage={tmp_path / 's'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "none").exists() and not (tmp_path / "s" / timings.NAME).exists()
    rows = dict(re.findall(r"^\| (\w+) \| \d+ \|.*\| ([^|]+) \|$", done.stdout, re.M))
    assert [*rows] == ["quick", "merge", "full"]
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+ (min|h)", text) for text in rows.values()), rows
    assert "Checks with such a duration: 0 of quick's" in done.stdout
