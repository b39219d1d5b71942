"""Minutes that are true: what was timed here, ranges that ship, and the time a run has left."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sm121.core import profile
from sm121.core.time_range import TimeRange
from sm121.engines.pool import StartReport
from sm121.run import timings
from sm121.run.timings import Taken, Target
from sm121.session import durations, forecast
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
    bounds = durations.of(CPU)
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


# ------------------------------------------------------------ what docs and CI examples quote

ROOT = Path(__file__).parents[1]
#: A number of minutes or hours, as people write it.
_QUOTED = re.compile(
    r"(?<![\w.:])(?:(?P<clock>\d+:\d\d)|(?P<low>\d+(?:\.\d+)?)(?: to (?P<high>\d+(?:\.\d+)?))?"
    r"|(?P<word>half an|an?|one|two|three))[ -](?P<unit>min(?:utes?)?|h(?:ours?)?)\b"
    r"(?: (?P<rest>\d+) min\b)?"
)
_WORDS = {"half an": 0.5, "a": 1, "an": 1, "one": 1, "two": 2, "three": 3}
#: Made from the parsers and profiles, or written by `sm121 plan`.
_GENERATED = ("commands.md", "options.md", "requirements.md")
_LEAST_ROOM = 1.05


SHIPPED = durations.load()


def quoting_files() -> list[Path]:
    """Everything that quotes a duration to a reader."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in _GENERATED]
    others = [*(ROOT / "docs" / "ci").iterdir(), *(ROOT / ".github").rglob("*.yml")]
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "action.yml")]
    return sorted([*own, *pages, *others])


def blocks(file: Path) -> list[str]:
    """Paragraphs, lines of tables and lines of code."""
    text = file.read_text("utf-8").partition("<!-- Made by")[0]
    whole: list[str] = []
    in_code, begins_anew = file.suffix != ".md", True
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_alone = in_code or line.startswith("|") or not line.strip()
        if is_alone or begins_anew or re.match(r"\s*(-|\d+\.) ", line):
            whole.append(line)
        else:
            whole[-1] += f" {line.strip()}"
        begins_anew = is_alone
    return whole


def minutes_of(match: re.Match[str]) -> tuple[float, float]:
    """The least and the most minutes that a quoted number says."""
    if match["clock"]:
        minutes, seconds = match["clock"].split(":")
        low = high = int(minutes) + int(seconds) / 60
    else:
        low = _WORDS[match["word"]] if match["word"] else float(match["low"])
        high = float(match["high"] or low)
    factor, rest = (60 if match["unit"].startswith("h") else 1), float(match["rest"] or 0)
    return low * factor + rest, high * factor + rest


def minutes_said(row: durations.Quoted) -> tuple[float, float]:
    """The same of a row; what a plan takes is rounded as the suite says it."""
    if row.minutes is not None:
        return row.minutes
    match = _QUOTED.search(str(SHIPPED.time(row)))
    assert match is not None, row.id
    return minutes_of(match)


def wrong_quotes(file: Path) -> list[str]:
    """Each quoted number that is no row's, or that of a row which is about something else."""
    wrong = []
    for block in blocks(file):
        about = [row for row in SHIPPED.quoted if any(word in block for word in row.near)]
        for match in _QUOTED.finditer(block):
            quoted = minutes_of(match)
            if any(quoted == pytest.approx(minutes_said(row), abs=0.1) for row in about):
                continue
            rows = "; ".join(f"{row.id}: {SHIPPED.time(row)}" for row in about) or "no row"
            wrong.append(f"{match[0]!r} in {block.strip()[:120]!r}: {rows}")
    return wrong


@pytest.mark.parametrize("file", quoting_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_quoted_duration_is_that_of_a_row(file):
    assert wrong_quotes(file) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("`--plan quick` takes 4 to 10 min", 0, id="right"),
        pytest.param("`--plan quick` takes 8 min", 1, id="another-number"),
        pytest.param("`--plan merge` takes 4 to 10 minutes", 1, id="another-row"),
        pytest.param("| `--certify` | 4 h 40 min |", 1, id="hours-and-minutes"),
        pytest.param("nothing of it is a duration: 10 minimal, 3 hosts, 2.5", 0, id="no-duration"),
    ],
)
def test_a_wrong_quote_is_found(tmp_path, text, number):
    file = tmp_path / "page.md"
    file.write_text(text, "utf-8")
    assert len(wrong_quotes(file)) == number


def timeouts(file: Path) -> dict[str, int]:
    """Minutes by job, of a workflow of GitHub or a pipeline of GitLab."""
    found, job = {}, ""
    indent = "" if "gitlab" in file.name else "  "
    for line in file.read_text("utf-8").splitlines():
        if match := re.match(indent + r"([\w-]+):$", line):
            job = match[1]
        elif match := re.match(r"\s+timeout-minutes: (\d+)", line):
            found[job] = int(match[1])
        elif match := re.match(r"\s+timeout: (\d+)h", line):
            found[job] = 60 * int(match[1])
    return found


@pytest.mark.parametrize("file", sorted({row.file for row in SHIPPED.timeout}))
def test_the_limit_of_a_job_is_that_of_a_row_and_long_enough(file):
    rows = {row.job: row for row in SHIPPED.timeout if row.file == file}
    assert timeouts(ROOT / file) == {job: row.minutes for job, row in rows.items()}
    high_s = {row.id: SHIPPED.time(row).high for row in SHIPPED.quoted}
    short = [row for row in rows.values() if row.minutes * 60 < _LEAST_ROOM * high_s[row.of]]
    assert short == []


def test_every_shipped_profile_has_its_durations():
    bounds = {name: durations.of(profile.load(name)) for name in profile.shipped()}
    assert [name for name, each in bounds.items() if each is None] == []
