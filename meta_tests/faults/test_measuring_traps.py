"""The suite detects every trap: a server whose timing makes a popular client give a wrong result.

`make test` runs a sample of the traps, and ``--slow`` (`make catalogues`) runs all of them."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import httpx
import pytest

from meta_tests.fakes.run_events import stand_in
from meta_tests.fakes.timed_server import TRAPS
from sm121.core.level_settings import Measuring
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Inapplicable, NotRun
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import metrics
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.metrics.pp import PrefillRate
from sm121.measure.metrics.streams import StreamsRate, dips
from sm121.measure.metrics.tg import DecodeRate
from sm121.measure.plan import Plan
from sm121.regression.ab_run import AbRun
from sm121.run.stored_run import StoredMetric

pytestmark = pytest.mark.alone
#: Half of the real lengths and a fast server, so that `make test` has time for a sample of the
#: traps.
RATE = 200.0
#: The delays of these traps are in ms. With these options, they are the intended fraction of an
#: answer, although answers have half of the real length.
OPTIONS = dict.fromkeys(("late-and-leaking", "later-than-half"), ("--rate", "100"))
OPTIONS["drift"] = ("--drift-after-s", "1.5")
MEASURING = Measuring(rounds=5, short_rounds=2, silent_within_s=2.0, request_within_s=20.0)
PLAN = Plan(512, (16, 64), (0,), MEASURING)


@dataclass(frozen=True)
class Expected:
    """The requirement of a row of ``data/traps.toml``: the reasons against the number, or the right
    number."""

    pace: dict[str, object]
    invalid: tuple[str, ...] = ()
    clock: str | None = "usage"
    unproven: tuple[str, ...] = ()
    rounds: int = 5
    #: Another reason of invalidity, which the measurement may also give.
    perhaps: str | None = None
    sample: bool = False
    peers: bool = False


def opened(url: str, directory: Path, plan: Plan = PLAN) -> AbstractContextManager[MeasuredServer]:
    return MeasuredServer.open(Endpoint(url, "none", "gpt-oss-120b"), plan, directory)


def measure(url: str, directory: Path, *, rounds: int = 5, streams: int = 1, slots=None):
    """Measure a cell with the given number of rounds."""
    with opened(url, directory) as server:
        server.slots = slots
        return MeasuredCell(server, 0, concurrency=streams).gather(rounds)


def assert_rates(measurement, expected: float, tolerated: float) -> None:
    for rate in measurement.samples:
        assert rate == pytest.approx(expected, rel=tolerated), measurement.samples


def _cases() -> list:
    slow = pytest.mark.slow("the rest of the catalogue")
    parameters = []
    for name, row in TRAPS.items():
        if row.get("sample"):
            parameters.append(name)
        else:
            parameters.append(pytest.param(name, marks=slow))
    return parameters


@pytest.mark.parametrize("name", _cases())
def test_trap(timed_server, tmp_path, name):
    expected = Expected(**TRAPS[name])
    server = timed_server("--rate", str(RATE), "--trap", name, *OPTIONS.get(name, ()))
    with opened(server.base_url, tmp_path) as measured:
        cell = MeasuredCell(measured, 0).gather(expected.rounds)
        measurement = DecodeRate(PLAN.longest).settle(cell)
    reasons = {item.reason for item in measurement.invalid} - {expected.perhaps}
    assert reasons == {*expected.invalid}, [str(item) for item in measurement.invalid]
    assert measurement.clock == expected.clock
    for text in expected.unproven:
        assert any(line.startswith(text) for line in measurement.unproven), measurement.unproven
    if not expected.invalid:
        assert len(measurement.samples) >= expected.rounds
        assert_rates(measurement, RATE, 0.02)


def test_the_first_token_is_what_ttft_waits_for(timed_server, tmp_path):
    """An early event without a token does not count as the first token."""
    server = timed_server("--rate", "400", "--trap", "early-role", "--fixed-ms", "150")
    cell = measure(server.base_url, tmp_path)
    (first, *_) = metrics.find("ttft", quantile=0.5).of(cell).samples
    assert 201 <= first <= 210, "150 ms and 512 tokens at 10,000 a second are 201.2 ms"


def test_failed_requests_are_infinite_times(timed_server, tmp_path):
    """If one of five requests fails, it counts in the percentile, and the rate of the others is
    INVALID."""
    server = timed_server("--rate", "200", "--fail-every", "5")
    times = metrics.find("e2e", quantile=0.99).of(measure(server.base_url, tmp_path))
    assert times.valid and float("inf") in times.samples


@pytest.mark.slow("long answers to three texts")
def test_speculation_is_read_from_the_counters(timed_server, tmp_path):
    server = timed_server("--rate", "400", "--trap", "speculative")
    cell = measure(server.base_url, tmp_path)
    rate = DecodeRate(64)
    assert rate.of(cell).extra["texts"] == ["code", "dialogue", "prose"]
    for each in (rate, *rate.parts(cell)):
        extra = each.of(cell).extra
        assert extra["mean_accepted_length"] == pytest.approx(3.0, rel=0.05), each.name(cell)
        assert extra["acceptance_rate"] == pytest.approx(0.5, rel=0.05)
    on_texts = StoredMetric("tg64@d0", "tok/s", True, None, (400.0,), 400.0, texts=("code",))
    assert on_texts.kind != replace(on_texts, texts=()).kind, "nor is it compared with random ones"


@pytest.mark.parametrize("prompts", ["either", pytest.param("turns", marks=pytest.mark.slow)])
def test_streams_are_measured_while_all_of_them_decode(timed_server, tmp_path, prompts):
    """Four streams of 100 tok/s run at the same time.

    The prefill of their prompts does not count, because it has its own metric."""
    options = ("--prompts", prompts, "--prefill-rate", "4000", "--fixed-ms", "50", "--seed", "1")
    server = timed_server("--rate", "100", *options)
    cell = measure(server.base_url, tmp_path, rounds=4, streams=4)
    decode = StreamsRate().of(cell)
    prefill = PrefillRate().of(cell)
    assert decode.valid, decode.invalid
    assert decode.name == "tg16_c4@d0" and len(decode.samples) == 4
    assert_rates(decode, 4 * 100, 0.01)
    assert prefill.name == "pp512_c4@d0"
    assert_rates(prefill, 4 * 512 / 0.562, 0.03)  # 4 x 512 tokens in 50 ms and 4 x 128 ms


def test_streams_that_never_decode_together_have_no_rate(timed_server, tmp_path):
    """A server that runs one request at a time has no rate of concurrent streams.

    The message says why, and how to get such a rate."""
    server = timed_server("--rate", "400", "--slots", "1")
    cell = measure(server.base_url, tmp_path, rounds=4, streams=2)
    with pytest.raises(NotRun, match=r"tg16_c2@d0: in 4 of 4 rounds .*--max-num-seqs"):
        StreamsRate().of(cell)


@pytest.mark.slow("six streams at two places")
def test_streams_that_wait_for_a_place_are_measured_as_what_they_are(timed_server, tmp_path):
    """If six streams run on a server that runs two at a time, their rate is valid, but is called
    tg16_q6 instead of tg16_c6."""
    server = timed_server("--rate", "100", "--slots", "2")
    cell = measure(server.base_url, tmp_path, rounds=4, streams=6, slots=2)
    decode = StreamsRate().of(cell)
    waited = metrics.find("ttft", quantile=0.5).of(cell)
    assert decode.valid and decode.name == "tg16_q6@d0"
    assert "6 requests, 2 at once" in decode.remarks[0]
    for rate in decode.samples:  # three groups of two requests, with gaps between the groups
        assert 100 < rate <= 205, decode.samples
    assert waited.valid and waited.name == "ttft_q6_p50"
    with pytest.raises(Inapplicable, match="run 2 at once"):
        PrefillRate().of(cell)


def test_a_dip_between_captured_sizes_is_a_remark_and_a_slope_is_not():
    """A rate that dips between two captured batch sizes is a remark, and a steady decrease is not.

    Steps take 20 ms plus 1 ms per stream. If batches are padded, five streams take as long as
    eight.
    """

    def rate(streams: int, as_of: int) -> float:
        return streams / (0.020 + 0.001 * as_of)

    sound = {n: rate(n, n) for n in (2, 5, 8)}
    assert dips(sound) == [] and dips({5: 1.0, 8: 2.0}) == []
    (line,) = dips({**sound, 5: rate(5, 8)})
    assert "5 streams decode 35.7 tok/s each, 40.0 expected from the next " in line
    assert "11 %" in line
    assert dips({**sound, 5: 0.97 * sound[5]}) == [], "noise is no dip"


def test_a_pause_after_the_first_token_stays_in_the_rate(timed_server, tmp_path):
    server = timed_server("--rate", "100", "--pause-ms", "200")
    rate = DecodeRate(16).of(measure(server.base_url, tmp_path, rounds=3))
    assert_rates(rate, 15 / 0.35, 0.03)


def test_a_connection_that_was_ended_costs_its_time_and_shows(timed_server, tmp_path):
    """If an idle connection is closed 30 ms after the request, the time to the first token includes
    these 30 ms."""
    server = timed_server("--rate", "200", "--drop-every", "5", "--drop-after-ms", "30")
    cell = measure(server.base_url, tmp_path)
    ttft = metrics.find("ttft", quantile=0.5).of(cell)
    again = [answer.retries for answer in [*cell.timed.answers, *cell.timed.short]].count(1)
    assert again and ttft.extra["retries"] >= again
    assert any("sent twice" in line for line in ttft.remarks)
    assert sum(time > 71.2 + 30 for time in ttft.samples) == again, "512 tokens take 71.2 ms"


def test_records_of_one_shape_have_files_of_their_own(timed_server, tmp_path):
    """The last measurement of a cell does not overwrite the records of its first decision."""
    server = timed_server("--rate", "400")
    with opened(server.base_url, tmp_path) as measured:
        first = MeasuredCell(measured, 0).gather(2)
        again = MeasuredCell(measured, 0, short_rounds=0, warm=True).gather(1)
        # Simulates a delay of the client during this round.
        first.timed.left_out += again.timed.answers
        first.gather(3)
    names = [DecodeRate(16).of(cell).records.name for cell in (first, again)]
    assert names == ["d0-c1.jsonl", "d0-c1-2.jsonl"]
    lines = [len((tmp_path / name).read_text("utf-8").splitlines()) for name in names]
    kept = [cell.timed for cell in (first, again)]
    counts = [len(one.answers) + len(one.short) + len(one.left_out) for one in kept]
    assert lines == counts and counts[0] >= 5 and len(again.timed.answers) == 1


@pytest.mark.slow("five depths")
@pytest.mark.parametrize("echo", ["asked", "always", "apart", "never"])
@pytest.mark.parametrize("rate", [52, 250])
def test_a_payload_in_proportion_to_the_prompt(timed_server, tmp_path, rate, echo):
    """The first chunk is 0 to 40 ms late, and several tokens follow it at once, as on a GPU.

    At every depth, the rate is right within 0.1 %, or INVALID with this cause. If the late chunk
    has no additional content, the delay is found from the gaps alone, within 0.3 %."""
    options = ("--late-ms-per-1k", "1.15", "--echo", echo, "--prefill-rate", "40000")
    server = timed_server("--rate", str(rate), *options)
    plan = Plan(2048, (32, 128), (0,), Measuring(rounds=7, short_rounds=3))
    bound = 0.003 if echo == "never" else 0.001
    with opened(server.base_url, tmp_path, plan) as measured:
        for depth in (0, 4096, 8192, 16384, 32768):
            cell = MeasuredCell(measured, depth).gather(7)
            for tokens in plan.generated_tokens:
                decode = DecodeRate(tokens).of(cell)
                reasons = {item.reason for item in decode.invalid}
                assert reasons <= {"bunched_start", "rates_contradict", "server_clock"}, reasons
                middle = pytest.approx(rate, rel=bound)
                assert reasons or median(decode.samples) == middle, (decode.name, decode.samples)


def test_other_work_at_the_beginning_is_no_contradiction(timed_server, tmp_path, monkeypatch):
    """If other work delayed only the first short answers, the measurement becomes valid again.

    The other work ends before the next rounds. A start of --ab can be measured again, too.
    """
    server = timed_server("--rate", "200", "--one-slow-in", "1", "--slow-extra-ms", "60")
    plan = Plan(512, (32,), (0,), Measuring(rounds=4, short_rounds=3, drift_bound=0.5))
    with opened(server.base_url, tmp_path, plan) as measured:
        cell = MeasuredCell(measured, 0).gather(0)
        httpx.post(f"{server.base_url}/admin", json={"one_slow_in": 0})
        assert [each.reason for each in DecodeRate(32).of(cell.gather(4)).invalid] == [
            "second_clock"
        ]
        measurement = DecodeRate(32).settle(cell)
        assert not measurement.invalid and "second_clock" in measurement.remarks[0]
        httpx.post(f"{server.base_url}/admin", json={"early_token": True, "content_free": 1})
        measurement = DecodeRate(32).settle(cell.gather(4 * len(cell.timed.long)))
        assert "second_clock" in {each.reason for each in measurement.invalid}, "a lie after it"
        httpx.post(f"{server.base_url}/admin", json={"early_token": False, "content_free": 0})
    more = lambda metric, cell: metric.of(cell.gather(len(cell.timed.long) + 1))  # noqa: E731
    monkeypatch.setattr(DecodeRate, "settle", more)
    run = stand_in(directory=tmp_path, follow_log=lambda *_: None, of=lambda _: KernelPath())
    comparison = SimpleNamespace(run=run, plan=plan, visits=[])
    attached = Server(measured.endpoint, False, "vllm", None, None, None, None)
    assert "tg32@d0" in AbRun._measure(comparison, "a", attached)


def test_a_bunch_longer_than_a_short_answer_needs_longer_short_answers(timed_server, tmp_path):
    """If more tokens arrive together than a short answer has, the suite requests longer answers.

    The first 12 tokens arrive together, and a short answer has only 8 tokens.
    """
    options = ("--late-ms", "60", "--echo", "never", "--trap", "no-metrics")
    server = timed_server("--rate", "200", *options)
    plan = Plan(2048, (32,), (0,), Measuring(rounds=5, short_rounds=3))
    with opened(server.base_url, tmp_path, plan) as measured:
        cell = MeasuredCell(measured, 0).gather(5)
        rate = DecodeRate(32).of(cell)
    assert not rate.invalid and not [line for line in rate.unproven if "second" in line]
    assert rate.extra["second_clock_tok_s"] == pytest.approx(200, rel=0.02)
    assert min(answer.asked_tokens for answer in cell.timed.short) == 8
