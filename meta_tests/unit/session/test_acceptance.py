"""The acceptance rate of draft tokens is watched between the rounds of `sm121 run --every`."""

import json
import random
import time
from pathlib import Path

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from sm121.core.server import Endpoint
from sm121.core.verdict import Verdict
from sm121.measure.counters import Counters
from sm121.session import acceptance as watching
from sm121.session.acceptance import Acceptance, AcceptanceReadings, AcceptanceWatch, read_counters
from sm121.session.repeated import MonitorRound, Records, _Player, judged, repeat


def drafting(shares: list[float], per_minute: int = 1000) -> tuple[float | None, str | None]:
    """Return the lowest acceptance rate of a simulated run, and the text of the reported deviation.

    Each item of `shares` is the acceptance rate of one minute of the run.
    """
    acceptance = Acceptance()
    drafted = accepted = 0.0
    acceptance.take(0.0, Counters({"draft_tokens": 0.0, "accepted_tokens": 0.0}))
    for minute, share in enumerate(shares, 1):
        drafted += per_minute
        accepted += share * per_minute
        now = Counters({"draft_tokens": drafted, "accepted_tokens": accepted})
        acceptance.take(60.0 * minute, now)
    found = acceptance.taken()
    return found.lowest, found.deviation


def test_a_minute_of_low_acceptance_is_a_deviation():
    lowest, deviation = drafting([0.86] * 6 + [0.14] + [0.86] * 3)
    assert lowest == pytest.approx(0.14)
    assert deviation is not None
    assert "expected at least 43% (half of the usual 86%), got 14% for a minute" in deviation


@pytest.mark.parametrize(
    "shares",
    [[0.86, 0.8, 0.7, 0.6, 0.75, 0.9, 0.5], [0.1] * 8, [0.86] * 3 + [0.14]],
    ids=["varies", "always low", "too few windows"],
)
def test_usual_acceptance_is_no_deviation(shares):
    lowest, deviation = drafting(shares)
    assert lowest == pytest.approx(min(shares))
    assert deviation is None


def test_few_drafts_are_not_judged():
    assert drafting([0.86] * 6 + [0.0], per_minute=100) == (None, None)


def every_ten_seconds(
    share_at, *, drafts: int = 300, until_s: int = 1500
) -> list[AcceptanceReadings]:
    """Return the findings after each five minutes of readings every ten seconds, with a scripted
    clock."""
    acceptance = Acceptance()
    drafted = accepted = 0.0
    found: list[AcceptanceReadings] = []
    for second in range(0, until_s + 1, 10):
        if second:
            drafted += drafts
            accepted += drafts * share_at(second)
        now = Counters({"draft_tokens": drafted, "accepted_tokens": accepted})
        acceptance.take(float(second), now)
        if second and second % 300 == 0:
            found.append(acceptance.taken())
    return found


def low_between(first_s: int, last_s: int):
    """Return an acceptance rate of 86 %, which is 14 % between two times."""
    return lambda second: 0.14 if first_s < second <= last_s else 0.86


@pytest.mark.parametrize("phase_s", range(0, 60, 10))
def test_a_minute_of_low_acceptance_is_found_at_any_phase(phase_s):
    found = every_ten_seconds(low_between(900 + phase_s, 960 + phase_s))
    assert [taken.deviation is not None for taken in found] == [False, False, False, True, False]
    assert found[3].lowest == pytest.approx(0.14)
    assert "got 14% for a minute" in str(found[3].deviation)


@pytest.mark.parametrize(
    ("first_s", "expected"),
    [(1140, [0.86, 0.14, 0.86]), (1170, [0.86, 0.5, 0.14]), (1150, [0.86, 0.26, 0.14])],
    ids=["told at its end", "told after its first half", "told before its lowest window"],
)
def test_low_acceptance_between_two_rounds_is_reported_with_its_lowest_window(first_s, expected):
    found = every_ten_seconds(low_between(first_s, first_s + 60))
    assert [taken.lowest for taken in found[2:]] == pytest.approx(expected)
    assert [taken.deviation is not None for taken in found[2:]] == [
        share < 0.43 for share in expected
    ]


def test_noise_of_a_healthy_server_is_no_deviation():
    noise = random.Random(46)
    found = every_ten_seconds(lambda _second: noise.uniform(0.72, 1.0), until_s=30_000)
    assert [taken.deviation for taken in found if taken.deviation] == []
    for taken in found:
        assert taken.lowest is not None and taken.lowest > 0.72


def test_readings_with_few_drafts_are_no_deviation():
    found = every_ten_seconds(low_between(900, 1500), drafts=30)
    assert found == [AcceptanceReadings()] * 5


def test_usual_acceptance_is_of_five_separate_minutes():
    """The usual acceptance rate is that of five separate minutes.

    Here, the server's first minute is its best, and four minutes are too few for a decision."""
    found = every_ten_seconds(low_between(240, 300), until_s=300)
    assert found[0].lowest == pytest.approx(0.14)
    assert found[0].deviation is None


def test_counters_of_a_new_start_begin_anew():
    acceptance = Acceptance()
    acceptance.take(0.0, Counters({"draft_tokens": 5000.0, "accepted_tokens": 4000.0}))
    acceptance.take(60.0, Counters({"draft_tokens": 0.0, "accepted_tokens": 0.0}))
    acceptance.take(120.0, Counters({"draft_tokens": 1000.0, "accepted_tokens": 800.0}))
    assert acceptance.taken().lowest == pytest.approx(0.8)


READING = Counters({"draft_tokens": 1000.0, "accepted_tokens": 800.0})


def test_a_minute_without_acceptance_readings_is_reported():
    acceptance = Acceptance()
    acceptance.take(0.0, READING)
    for second in range(10, 80, 10):
        acceptance.miss(float(second), "ReadTimeout")
    found = acceptance.taken()
    assert (found.missed, found.why_missed, found.blind_s) == (7, "ReadTimeout", 70.0)
    assert found.not_watched is not None and "got no reading for 70 s (ReadTimeout)" in str(
        found.not_watched
    )
    assert acceptance.taken() == AcceptanceReadings(), "each failure is told once"


@pytest.mark.parametrize(
    ("drafted", "missed_s"),
    [(1000.0, [10.0, 20.0]), (0.0, [10.0, 40.0, 90.0])],
    ids=["one reading comes late", "a server that drafts nothing"],
)
def test_enough_acceptance_readings_give_no_finding(drafted, missed_s):
    acceptance = Acceptance()
    acceptance.take(0.0, Counters({"draft_tokens": drafted}))
    for second in missed_s:
        acceptance.miss(second, "ReadTimeout")
    found = acceptance.taken()
    assert found.not_watched is None
    assert found.missed == len(missed_s), "it is in the record all the same"


LOW = "acceptance of draft tokens: expected at least 43%, got 10% for a minute"


@pytest.mark.parametrize(
    ("own", "taken", "expected"),
    [
        (Verdict.PASS, AcceptanceReadings(lowest=0.8), (Verdict.PASS, "PASS: 13 checks")),
        (Verdict.PASS, AcceptanceReadings(deviation=LOW), (Verdict.FAIL, f"FAIL: {LOW}")),
        (
            Verdict.FAIL,
            AcceptanceReadings(deviation=LOW),
            (Verdict.FAIL, f"FAIL: 13 checks; {LOW}"),
        ),
    ],
    ids=["nothing found", "a green round", "a red round"],
)
def test_a_deviation_between_two_rounds_is_named(own, taken, expected):
    assert judged(own, f"{own}: 13 checks", taken) == expected


def test_a_time_without_readings_makes_a_green_round_inconclusive():
    blind = AcceptanceReadings(missed=9, why_missed="ReadTimeout", blind_s=90.0)
    verdict, sentence = judged(Verdict.PASS, "PASS: 13 checks", blind)
    assert verdict is Verdict.INCONCLUSIVE
    assert sentence.startswith("INCONCLUSIVE: acceptance of draft tokens: expected /metrics every")


class Drafting(JsonHandler):
    """A server with drafts whose /metrics is broken, or whose acceptance rate is low, if
    requested."""

    began = 0.0
    fault = ""
    low_s = (0.0, 0.0)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.counters()
        elif self.path == "/v1/models":
            self.say({"object": "list", "data": [{"id": "canary", "object": "model"}]})
        elif self.path == "/health":
            self.say("")
        else:
            self.say({"error": "not found"}, 404)

    def do_POST(self) -> None:
        self.asked()
        self.say(self.completion(" Paris", 5, 1, id="cmpl-1", created=0, model="canary"))

    def counters(self) -> None:
        """Return counters of 2,000 draft tokens per second, of which 80 % are accepted, or 10 % for
        some time."""
        seconds = time.monotonic() - self.began
        low = min(max(seconds - self.low_s[0], 0.0), self.low_s[1] - self.low_s[0])
        accepted = 2000.0 * (0.8 * (seconds - low) + 0.1 * low)
        text = (
            f"vllm:spec_decode_num_draft_tokens_total {2000.0 * seconds}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        )
        if self.fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(2 * len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
            self.close_connection = True
        elif self.fault == "undecodable":  # httpx raises an error here that is not an HTTP error
            self.say(text, kind="text/plain; charset=zlib")
        elif self.fault == "gone":
            self.say(text, 404)
        else:
            self.say(text, kind="text/plain")


@pytest.fixture
def drafting_server():
    handler = type("Drafting", (Drafting,), {"began": time.monotonic()})
    with serving(handler) as url:
        yield handler, url


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("cut", "RemoteProtocolError"),
        ("undecodable", "AssertionError"),
        ("gone", "expected status 200, got 404"),
    ],
)
def test_a_broken_metrics_page_is_reported_and_read_again(fault, why, drafting_server, monkeypatch):
    """If /metrics is broken for some time, the suite reports this, and reads it again later.

    The watching thread continues after each kind of fault."""
    handler, url = drafting_server
    # On a busy machine, a reading may take this long.
    monkeypatch.setattr(watching, "SAMPLE_EVERY_S", 0.2)
    monkeypatch.setattr(watching, "WINDOW_S", 0.4)
    watch = AcceptanceWatch(lambda: read_counters(Endpoint(url, "none", "canary")))
    with watch.running():
        wait_for(lambda: watch.taken().lowest is not None)
        handler.fault = fault
        seen = []

        def named() -> bool:
            seen.append(watch.taken())
            return why in str(seen[-1].why_missed) and seen[-1].not_watched is not None

        wait_for(named)
        assert seen[-1].missed > 0
        handler.fault = ""
        wait_for(lambda: watch.taken().lowest is not None)


def test_a_minute_of_low_acceptance_between_two_rounds_is_named(
    drafting_server, tmp_path, monkeypatch
):
    """The acceptance rate falls from 0.8 to 0.1 after round 2.

    Round 3 reports this, and round 4 passes."""
    handler, url = drafting_server
    # On a busy machine, a reading may take this long.
    monkeypatch.setattr(watching, "SAMPLE_EVERY_S", 0.2)
    monkeypatch.setattr(watching, "WINDOW_S", 0.6)
    monkeypatch.setattr(_Player, "_run", lambda _player: (Verdict.PASS, "PASS: 13 checks"))
    endpoint = Endpoint(url, "none", "canary")
    watch = AcceptanceWatch(lambda: read_counters(endpoint))
    player = _Player([], tmp_path, endpoint, watch)

    def play(number: int) -> tuple[MonitorRound, Path]:
        played = player.play(number)
        if number == 2:
            now = time.monotonic() - handler.began
            handler.low_s = (now + 0.3, now + 2.0)
        if number == 4:
            player.stopped.set()
        return played

    lines: list[str] = []
    with watch.running():
        status = repeat(3.0, play, Records(tmp_path), lines.append, stopped=player.stopped)
    assert [line.startswith("RED ") for line in lines[:4]] == [False, False, True, False], lines
    assert "acceptance of draft tokens: expected at least 40%" in lines[2]
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert rounds[2]["acceptance"] < 0.2
    assert status == 1


def wait_for(holds, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
