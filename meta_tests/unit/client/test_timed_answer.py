"""Streams are read, tokens are counted, and the counts are checked.

No time is measured in these tests."""

import dataclasses
import itertools
import json
import time

import numpy as np
import psutil
import pytest

from meta_tests.fakes import servers
from meta_tests.texts import text_file
from sm121.client.timed import LagWatch, TimedBatch, completion, steps
from sm121.client.timed_answer import Arrival, Chunk, TimedAnswer, read_answer
from sm121.core.level_settings import Measuring
from sm121.core.server import NO_KEY, Endpoint
from sm121.measure import cells, counters, decoding, rate_checks, timing, validity
from sm121.measure.metrics import pp, tg
from sm121.measure.prompts import Prompts
from sm121.measure.validity import Findings

MEASURING = Measuring()


def event(text="a", ids=None, counted=None, finish=None, **extra) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    whole = {"choices": [choice], **extra}
    if counted is not None:
        whole["usage"] = {"prompt_tokens": 4, "completion_tokens": counted}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def answer(*events: bytes, asked: int = 8, every_ms: float = 10.0) -> TimedAnswer:
    """Return an answer whose events have fixed times. The first event is after 100 ms."""
    made = TimedAnswer(0, status=200, asked_tokens=asked, asked_prompt=4)
    stamps = [int((100 + i * every_ms) * 1e6) for i in range(len(events))]
    read_answer(made, zip(stamps, events, strict=True))
    made.ended_ns = stamps[-1]
    return made


def of_ids(count: int, *, asked: int | None = None, every_ms: float = 10.0) -> TimedAnswer:
    events = [event(ids=[i], counted=i + 1) for i in range(count)]
    return answer(*events, asked=asked or count, every_ms=every_ms)


def test_clocks_in_their_order():
    whole = event(ids=[1])
    made = TimedAnswer(0, status=200)
    read_answer(made, [(5, whole[:10]), (9, whole[10:])])
    assert made.chunks[0].at_ns == 9
    with_ids = answer(event("", ids=[1]), event(ids=[2, 3], counted=3))
    assert with_ids.clock() == "token_ids"
    assert with_ids.tokens("token_ids") == 3
    hidden = answer(event("", ids=[1], counted=1), event(counted=3))
    assert hidden.clock() == "usage", "a text without ids: ids cannot be the clock"
    assert answer(event(), event()).clock() == "chunks"
    assert answer(event("")).clock() is None
    confirmed = answer(event(), event(), event("", counted=2))
    assert timing.clock_of([confirmed]) == "usage"
    assert timing.decode_rate(confirmed, "usage") == pytest.approx(100)
    bundled = answer(event("a b c"), event(), event("", counted=4))
    assert timing.clock_of([bundled]) == "chunks"
    bundled = answer(event(ids=[*range(8)]), *(event(ids=[1]) for _ in range(10)), asked=18)
    assert timing.decode_rate(bundled, "token_ids") == pytest.approx(100)
    assert tg.textbook_rate(bundled, "token_ids") == pytest.approx(170)
    assert tg.first_chunk_tokens(bundled, "token_ids") == 8


def stream_of(chunks: list[tuple[float, int]], *, payload: int = 0) -> list[Arrival]:
    """Return chunks, given as (milliseconds, tokens), with 150 bytes each.

    The first chunk additionally has a payload."""
    totals = itertools.accumulate(tokens for _, tokens in chunks)
    return [
        Arrival(int(at_ms * 1e6), total, 150 + payload * (n == 0))
        for n, ((at_ms, _), total) in enumerate(zip(chunks, totals, strict=True))
    ]


def late(by_ms: float, *, step_ms: float = 10.0, count: int = 128) -> list[tuple[float, int]]:
    """Return tokens in equal steps, of which the first one is late.

    The tokens that were due meanwhile follow it at once."""
    return [(max(100 + i * step_ms, 100 + by_ms + 0.01 * i), 1) for i in range(count)]


@pytest.mark.parametrize("payload", [0, 225_000])
@pytest.mark.parametrize("by_ms", [0.0, 0.5, 3.0, 9.9, 10.1, 25.0, 37.0, 99.0])
def test_a_late_first_chunk_is_not_in_the_rate(by_ms, payload):
    for tokens in (32, 128):
        window = decoding.window(stream_of(late(by_ms), payload=payload), tokens)
        assert window is not None and window.enough
        assert window.rate == pytest.approx(100, rel=0.001), (tokens, window)


def test_neither_a_payload_nor_a_bunch_is_where_the_clock_starts():
    """The measured time does not begin at a chunk with additional content (a payload), or at
    several tokens that arrive together.

    After a long prompt, eighteen tokens arrived in 3 ms; a longer answer still has enough tokens
    after them."""
    plain = stream_of(late(0.0))
    heavy = stream_of(late(0.0), payload=20_000)
    assert decoding.window(plain, 32).start.tokens == 1
    assert decoding.window(heavy, 32).start.tokens == 2
    plain[-1] = plain[-1]._replace(size=20_000)
    assert decoding.window(plain).end.tokens == 127
    assert not decoding.window(stream_of(late(200.0, count=32)), 32).enough
    assert decoding.window(stream_of(late(200.0)), 128).enough
    window = decoding.window(stream_of(late(180.0)), 32)
    assert window.enough and window.tokens == 31
    assert window.rate == pytest.approx(100, rel=0.001)


def test_chunks_of_several_tokens_are_what_they_are():
    """With speculative decoding, equal steps have different numbers of tokens.

    A server may also send only every tenth token."""
    sizes = [1, 4, 1, 3, 4, 1, 2, 4, 3, 1, 1, 4] * 6
    speculated = decoding.window(stream_of([(100 + 30 * i, n) for i, n in enumerate(sizes)]), 32)
    assert (speculated.start.tokens, speculated.late_ns) == (1, 0)
    tenths = [(100, 1), *((200 + 100 * i, 10) for i in range(12))]
    flushed = [(100 + 40 * i + 0.01 * j, 1) for i in range(32) for j in range(4)]
    for chunks in (tenths, flushed):
        assert decoding.window(stream_of(chunks), 32).rate == pytest.approx(100, rel=0.001)


def test_an_honest_stream_loses_nothing_to_the_search_for_a_late_start():
    generator = np.random.default_rng(3)
    errors = []
    for _ in range(400):
        gaps = 10.0 * (1 + 0.05 * generator.standard_normal(128))
        stream = stream_of([(at, 1) for at in 100 + np.cumsum(gaps)])
        plain = 31e9 / (stream[31].at_ns - stream[0].at_ns)
        errors.append(decoding.window(stream, 32).rate / plain - 1)
    assert abs(np.mean(errors)) < 0.001
    assert np.mean(np.abs(errors) < 1e-9) > 0.95
    # Differences of this size are below a timer's resolution.
    at = np.cumsum([100.0, *([10.25, 10.3, 9.45] * 43)])[:128]
    assert decoding.window(stream_of([(each, 1) for each in at]), 128).start.tokens == 1


def test_streams_decode_together_from_the_last_start_to_the_first_end():
    one = stream_of([(100.0, 1), (300.0, 1), *((500 + 10 * i, 1) for i in range(30))])
    two, later = (stream_of([(first + 10 * i, 1) for i in range(32)]) for first in (500, 2000))
    windows = decoding.common([one, two])
    assert sum(window.rate for window in windows) == pytest.approx(200)
    assert decoding.common([one, later]) is None


def test_a_failed_request_is_an_infinite_time_and_no_rate():
    failed = of_ids(4)
    failed.error = "stalled"
    assert timing.ttft_ms(failed, "token_ids") == timing.NEVER
    assert timing.decode_rate(failed, "token_ids") == pp.prefill_rate(failed, "token_ids") == 0
    assert timing.gaps_ms(failed, "token_ids") == [timing.NEVER]
    refused = answer(event(ids=[1]), b'data: {"error": {"message": "out of memory"}}\n\n')
    assert refused.error is not None and refused.error.startswith("error-event")


def reasons(check, *arguments, **more) -> list[str]:
    """Return the reasons why a number is INVALID."""
    check(*arguments, findings=(findings := Findings()), **more)
    return [item.reason for item in findings.invalid]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        pytest.param(of_ids(8), None, id="of_ids 8"),
        pytest.param(of_ids(6, asked=8), "short_answer", id="of_ids 6 asked 8, short_answer"),
        pytest.param(
            of_ids(9, asked=8), "token_accounting", id="of_ids 9 asked 8, token_accounting"
        ),
        pytest.param(
            answer(event(ids=[1]), event(ids=[2], counted=3)),
            "token_accounting",
            id="answer event ids 1 event ids 2 counted 3",
        ),
        pytest.param(
            answer(event(), event("", counted=8)),
            "chunk_clock",
            id="answer event event counted 8, chunk_clock",
        ),
        pytest.param(answer(event(""), event("")), "no_tokens", id="answer event event, no_tokens"),
    ],
)
def test_token_counts_of_an_answer(made, reason):
    clock = timing.clock_of([made])
    assert reasons(validity.check_answers, [made], clock) == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("delta", "prompt", "reason"),
    [
        pytest.param(
            {"generated": 8, "prompted": 4, "cache_hits": 0, "preemptions": 0},
            None,
            None,
            id="generated 8 prompted 4 cache_hits 0 preemptions 0",
        ),
        pytest.param({"generated": 9}, None, "other_clients", id="generated 9, other_clients"),
        pytest.param({"generated": 7}, None, "token_counters", id="generated 7, token_counters"),
        pytest.param(
            {"generated": 8, "prompted": 40},
            None,
            "other_clients",
            id="generated 8 prompted 40, other_clients",
        ),
        pytest.param(
            {"generated": 8, "running": 1},
            None,
            "other_clients",
            id="generated 8 running 1, other_clients",
        ),
        # SGLang with a cache page of one token
        pytest.param(
            {"generated": 8, "prompted": 4, "cache_hits": 1},
            None,
            None,
            id="generated 8 prompted 4 cache_hits 1",
        ),
        pytest.param(
            {"generated": 8, "prompted": 2048, "cache_hits": 10},
            2048,
            None,
            id="generated 8 prompted 2048 cache_hits 10, 2048",
        ),
        pytest.param(
            {"generated": 8, "prompted": 32768, "cache_hits": 163},
            32768,
            None,
            id="generated 8 prompted 32768 cache_hits 163, 32768",
        ),
        # the cache contains some of the prompt: a page of 16 tokens, a tenth, all tokens but one
        pytest.param(
            {"generated": 8, "prompted": 2048, "cache_hits": 16},
            2048,
            "prefix_cache_hit",
            id="generated 8 prompted 2048 cache_hits 16, 2048",
        ),
        pytest.param(
            {"generated": 8, "prompted": 2048, "cache_hits": 205},
            2048,
            "prefix_cache_hit",
            id="generated 8 prompted 2048 cache_hits 205, 2048",
        ),
        pytest.param(
            {"generated": 8, "prompted": 32768, "cache_hits": 32767},
            32768,
            "prefix_cache_hit",
            id="generated 8 prompted 32768 cache_hits 32767, 32768",
        ),
        pytest.param(
            {"generated": 8, "cache_hits": 2},
            None,
            "prefix_cache_hit",
            id="generated 8 cache_hits 2, prefix_cache_hit",
        ),
        pytest.param(
            {"generated": 8, "preemptions": 1},
            None,
            "preemption",
            id="generated 8 preemptions 1, preemption",
        ),
        (None, None, None),
    ],
)
def test_counters(delta, prompt, reason):
    """A number is INVALID if the server's counters do not fit the one answer after this prompt."""
    findings = Findings()
    answered = dataclasses.replace(of_ids(8), prompt_tokens=prompt or 4, asked_prompt=prompt or 4)
    validity.check_counters(delta, [answered], "token_ids", findings)
    assert [item.reason for item in findings.invalid] == ([reason] if reason else [])
    if delta is None:
        assert any("prefix-cache" in line for line in findings.unproven)


def test_no_two_timed_prompts_begin_alike():
    """No two timed prompts begin alike: a radix cache with pages of one token counted that as a
    hit."""
    prompts = Prompts(Endpoint("http://127.0.0.1:1", NO_KEY, "model"), vocabulary=40)
    assert len({prompts.make(3)[0] for _ in range(40)}) == 40 and len(prompts.make(3)) == 3
    ends = {prompts.make(8)[-1] for prompts.vocabulary in [199_000] * 100}
    assert max(ends) < 94, "behind half of a character, vLLM's answer begins with the prompt's text"


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (0.07, None),
        (0.0675, None),
        (0.09, "server_clock"),
        (0.05, None),
    ],
)
def test_a_stream_is_not_faster_than_its_engine(seconds, reason):
    """A stream faster than its engine is INVALID (eight tokens in 70 ms); a slower one is valid."""
    arguments = ({"decode_seconds": seconds}, [of_ids(8)], "token_ids", 0.02)
    assert reasons(rate_checks.check_server_clock, *arguments) == [reason] * bool(reason)


def test_the_untimed_twin_holds_usage_against_ids():
    right = answer(*(event(ids=[i], counted=i + 1) for i in range(8)))
    lying = answer(*(event(ids=[i], counted=i + 1 + i // 4) for i in range(8)))
    without = answer(*(event(counted=i + 1) for i in range(8)))
    for twin, why, unproven in ((right, [], 0), (lying, ["token_accounting"], 0), (without, [], 1)):
        validity.check_twin(twin, findings := Findings())
        assert [item.reason for item in findings.invalid] == why
        assert len(findings.unproven) == unproven


def test_timed_requests_have_no_option_that_enlarges_chunks():
    body = json.loads(completion("m", [1, 2], prompt_tokens=2, tokens=8).body)
    heavy = "return_token_ids logprobs prompt_logprobs echo return_tokens_as_token_ids"
    assert not {*heavy.split()} & set(body)
    assert body["stream_options"]["continuous_usage_stats"]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, None), (1.0, 1.0)])
def test_a_sampled_request_does_not_use_the_top_p_of_the_server(temperature, top_p):
    request = completion("m", [1, 2], prompt_tokens=2, tokens=8, temperature=temperature)
    body = json.loads(request.body)
    assert (body["temperature"], body.get("top_p")) == (temperature, top_p)


def test_counters_of_the_engines_are_read():
    before = counters.Counters({"generated": 2.0, "running": 9.0})
    now = counters.parse_counters(text_file("counters.txt"))
    assert now.values == {"generated": 12.0, "running": 2.0}
    assert now.since(before) == {"generated": 10.0, "running": 2.0}


def test_a_clock_that_stood_still_is_noticed():
    """A client's clock that stood still is detected: on a machine that slept, CLOCK_BOOTTIME
    advanced."""
    before = dict.fromkeys(("used", "boot", "raw"), 0)
    slept = {"used": 10**9, "boot": 3 * 10**9, "raw": 10**9}
    steady = {"used": 10**9, "boot": 10**9, "raw": 10**9}
    for after, expected in ((slept, ["clock_step"]), (steady, [])):
        batch = TimedBatch([], 1.0, 0.0, 0, steps(before, after))
        assert reasons(validity.check_client, [batch]) == expected


def test_delays_of_the_client_count_only_at_used_timestamps():
    watch = LagWatch()
    watch.late = [(1_000_000_000, 40_000_000)]
    assert watch.at(999_000_000) == 40_000_000
    assert watch.at(1_100_000_000) == 0
    made = of_ids(128)
    made.lag_ns = (0, 0, 5_000_000)
    assert not validity.disturbed(made, "token_ids", MEASURING), "5 ms of 1.27 s are 0.4 %"
    made.lag_ns = (0, 20_000_000, 0)
    assert validity.disturbed(made, "token_ids", MEASURING)
    assert reasons(validity.check_lag, 6, 5, 20_000_000) == ["client_lag"]


def second_clock_reasons(pairs, **more) -> list[str]:
    return reasons(rate_checks.check_second_clock, pairs, 0.02, **more)


def test_second_clock_finds_a_stream_that_is_not_the_generation():
    """The difference between long and short requests shows a stream that does not follow the
    generation.

    In one case, the stream has 1,812 tok/s and the engine generates 60. In the other, each second
    answer has 54 tok/s by its stream, and 49 by its duration."""
    burst = of_ids(64, every_ms=0.55)
    burst.ended_ns = int(1.3e9)
    short = TimedAnswer(0, asked_tokens=16, ended_ns=int(0.5e9))
    second = tg.second_clock([burst] * 3, [short] * 3, "token_ids", 64)
    assert second[0] == pytest.approx((1818, 60), rel=1e-3)
    assert second_clock_reasons(second) == ["second_clock"]
    wrong = [(54.0, 49.0 + n * 0.01) for n in range(5)]
    right = [(49.0, 49.0 - n * 0.01) for n in range(5)]
    assert second_clock_reasons(wrong + right) == ["second_clock"]


@pytest.mark.parametrize("neighbours", [False, True])
def test_more_rounds_say_more_of_two_clocks(neighbours):
    """More rounds show a difference between two rates that the noise of a few rounds hides, because
    the error of a median becomes smaller."""
    pairs = [(200.0, 182.0 + 9.0 * (n % 3 - 1)) for n in range(24)]
    assert second_clock_reasons(pairs, neighbours=neighbours) == ["second_clock"] * neighbours


#: tg32 of the canary on an H100. Each row is an answer: the time to the first token, and the time
#: between tokens, in ms.
H100_LONG = ((17.6, 2.49), (19.6, 2.66), (44.2, 1.84), (15.2, 1.78), (15.7, 1.85))
H100_SHORT = (30.1, 30.8, 32.8)


def test_second_clock_accepts_rates_that_differ_between_answers():
    """Rates that differ between answers are accepted.

    They are those of a GPU whose clock was still rising: 402, 376, 543, 562, 540 tok/s, with short
    answers between them."""
    long = []
    for first_ms, every_ms in H100_LONG:
        made = of_ids(32, every_ms=every_ms)
        made.sent_ns = int((100 - first_ms) * 1e6)
        long.append(made)
    short = [TimedAnswer(0, asked_tokens=8, ended_ns=int(ms * 1e6)) for ms in H100_SHORT]
    assert second_clock_reasons(tg.second_clock(long, short, "token_ids", 32)) == []


@pytest.mark.parametrize("noise", [0.001, 0.02, 0.10])
def test_drift_is_found_and_noise_is_not(noise):
    generator = np.random.default_rng(5)
    steady = [52 * (1 + noise * generator.standard_normal(12)) for _ in range(1000)]
    assert sum(rate_checks.drift(list(rates)) is not None for rates in steady) <= 1
    slower = 52 * (1 + 0.001 * generator.standard_normal(12))
    slower[5:] *= 0.9
    rate_checks.check_drift(list(slower), 0.05, findings := Findings())
    assert findings.invalid and "5 rounds" in findings.invalid[0].evidence


def test_a_warm_up_ends_after_two_equal_times():
    assert not cells.is_flat([3.0], 0.1)
    assert not cells.is_flat([9.0, 3.0], 0.1)
    assert cells.is_flat([9.0, 3.0, 3.1], 0.1)
    assert not cells.is_flat([3.0, 9.0, 9.0], 0.1), "slower than it was: not warm, or not alone"


def test_the_client_ends_with_its_parent(timed_server):
    server = timed_server("--rate", "1")
    with servers.program("client-in-a-batch.txt", server.base_url) as parent:
        client = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.0)
        assert client.is_running()
    psutil.wait_procs([client], timeout=5.0)
    assert not client.is_running() or client.status() == psutil.STATUS_ZOMBIE


def test_a_short_answer_does_not_say_how_late_its_first_chunk_was():
    """A short answer does not show how late its first chunk was.

    On an H100 at a depth of 32768, the first chunk was 70 ms late, and 7 of 8 tokens arrived at
    once."""

    def answered(*stamps: int) -> TimedAnswer:
        made = TimedAnswer(0, status=200)
        made.chunks = [Chunk(at, None, n, True, True, None, 300) for n, at in enumerate(stamps, 1)]
        return made

    gap = 5_000_000
    long = answered(*(max(n, 16) * gap if n < 17 else n * gap for n in range(1, 129)))
    short = answered(*(16 * gap + n * 300_000 for n in range(1, 9)))
    seconds = (127 * 5 + 7 * 4) * gap / 1e9
    arguments = ({"decode_seconds": seconds}, [long] * 5 + [short] * 4, "usage", 0.02)
    assert reasons(rate_checks.check_server_clock, *arguments) == []


@pytest.mark.slow("a whole run; the streams themselves are judged above")
def test_a_run_says_which_streams_waited_and_stays_green(timed_server, run_pytest, tmp_path):
    server = timed_server("--model", "canary", "--rate", "200", "--slots", "2")
    profile = tmp_path / "two.toml"
    profile.write_text(text_file("two-places.toml"), "utf-8")
    status, run = run_pytest(
        "--arch", "cpu", "--base-url", server.base_url, "--profile", str(profile),
        "tests/test_performance.py", "-k", "concurrent_rate or of_several",
    )  # fmt: skip
    verdicts = {test["id"].partition("::")[2]: test["verdict"] for test in run.verdict["tests"]}
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    assert [name for name, verdict in verdicts.items() if verdict != "PASS"] == [
        "test_prefill_of_several[c5]"
    ], verdicts
    assert {"tg32_c2@d0", "tg32_q5@d0", "ttft_q5_p50"} <= {*run.verdict["metrics"]}
    assert any("5 requests, 2 at once" in line for line in run.verdict["remarks"])
