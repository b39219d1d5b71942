"""Reading streams, counting tokens, and the checks on what was counted: without any server."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from sm121.client.timed import LagWatch, TimedBatch, steps
from sm121.client.timed_answer import TimedAnswer, read_answer
from sm121.core.profile import Measuring
from sm121.measure import counters, metrics, validity
from sm121.measure.cells import is_flat
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
    """Events at fixed times, the first after 100 ms."""
    made = TimedAnswer(0, status=200, asked_tokens=asked, asked_prompt=4)
    stamps = [int((100 + i * every_ms) * 1e6) for i in range(len(events))]
    read_answer(made, zip(stamps, events, strict=True))
    made.ended_ns = stamps[-1]
    return made


def of_ids(count: int, *, asked: int | None = None, every_ms: float = 10.0) -> TimedAnswer:
    events = [event(ids=[i], counted=i + 1) for i in range(count)]
    return answer(*events, asked=asked or count, every_ms=every_ms)


def test_a_chunk_has_the_time_of_the_read_that_completed_it():
    whole = event(ids=[1])
    made = TimedAnswer(0, status=200)
    read_answer(made, [(5, whole[:10]), (9, whole[10:])])
    assert made.chunks[0].at_ns == 9


def test_clocks_in_their_order():
    with_ids = answer(event("", ids=[1]), event(ids=[2, 3], counted=3))
    assert with_ids.clock() == "token_ids"
    assert with_ids.tokens("token_ids") == 3
    hidden = answer(event("", ids=[1], counted=1), event(counted=3))
    assert hidden.clock() == "usage", "a text without ids: ids cannot be the clock"
    assert answer(event(), event()).clock() == "chunks"
    assert answer(event("")).clock() is None


def test_final_usage_confirms_that_a_chunk_is_a_token():
    confirmed = answer(event(), event(), event("", counted=2))
    assert metrics.clock_of([confirmed]) == "usage"
    assert metrics.decode_rate(confirmed, "usage") == pytest.approx(100)
    bundled = answer(event("a b c"), event(), event("", counted=4))
    assert metrics.clock_of([bundled]) == "chunks"


def test_first_chunk_is_not_in_the_rate():
    bundled = answer(event(ids=[*range(8)]), *(event(ids=[1]) for _ in range(10)), asked=18)
    assert metrics.decode_rate(bundled, "token_ids") == pytest.approx(100)
    assert metrics.textbook_rate(bundled, "token_ids") == pytest.approx(170)
    assert metrics.first_chunk_tokens(bundled, "token_ids") == 8


def test_a_failed_request_is_an_infinite_time_and_no_rate():
    failed = of_ids(4)
    failed.error = "stalled"
    assert metrics.ttft_ms(failed, "token_ids") == metrics.NEVER
    assert metrics.decode_rate(failed, "token_ids") == 0
    assert metrics.prefill_rate(failed, "token_ids") == 0
    assert metrics.gaps_ms(failed, "token_ids") == [metrics.NEVER]


def test_an_error_event_fails_the_request():
    made = answer(event(ids=[1]), b'data: {"error": {"message": "out of memory"}}\n\n')
    assert made.error is not None and made.error.startswith("error-event")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (of_ids(8), None),
        (of_ids(6, asked=8), "short_answer"),
        (of_ids(9, asked=8), "token_accounting"),
        (answer(event(ids=[1]), event(ids=[2], counted=3)), "token_accounting"),
        (answer(event(), event("", counted=8)), "chunk_clock"),
        (answer(event(""), event("")), "no_tokens"),
    ],
)
def test_account_of_tokens(made, reason):
    findings = Findings()
    validity.check_answers([made], metrics.clock_of([made]), findings)
    assert [item.reason for item in findings.invalid] == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"generated": 8, "prompted": 4, "cache_hits": 0, "preemptions": 0}, None),
        ({"generated": 9}, "other_clients"),
        ({"generated": 7}, "token_counters"),
        ({"generated": 8, "prompted": 40}, "other_clients"),
        ({"generated": 8, "running": 1}, "other_clients"),
        ({"generated": 8, "cache_hits": 2}, "prefix_cache_hit"),
        ({"generated": 8, "preemptions": 1}, "preemption"),
        (None, None),
    ],
)
def test_counters(delta, reason):
    findings = Findings()
    validity.check_counters(delta, [of_ids(8)], "token_ids", findings)
    assert [item.reason for item in findings.invalid] == ([reason] if reason else [])
    if delta is None:
        assert any("prefix-cache" in line for line in findings.unproven)


def test_counters_of_the_engines_are_read():
    text = (
        "# TYPE vllm:generation_tokens counter\n"
        'vllm:generation_tokens_total{engine="0"} 5.0\n'
        'vllm:generation_tokens_total{engine="1"} 7.0\n'
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 2.0\n"
    )
    now = counters.read(text)
    assert now.values == {"generated": 12.0, "running": 2.0}
    assert now.since(counters.Counters({"generated": 2.0, "running": 9.0})) == {
        "generated": 10.0,
        "running": 2.0,
    }


def test_a_clock_that_stood_still_is_noticed():
    """A machine that slept: CLOCK_BOOTTIME went on and the clock in use did not."""
    before = {"used": 0, "wall": 0, "boot": 0, "raw": 0}
    slept = {"used": 10**9, "wall": 3 * 10**9, "boot": 3 * 10**9, "raw": 10**9}
    set_by_hand = {"used": 10**9, "wall": 3601 * 10**9, "boot": 10**9, "raw": 10**9}
    for after, expected in ((slept, ["clock_step"]), (set_by_hand, [])):
        batch = TimedBatch([], 0, 10**9, 0.0, 0, steps(before, after))
        findings = Findings()
        validity.check_client([batch], findings)
        assert [item.reason for item in findings.invalid] == expected


def test_a_delay_of_our_own_is_seen_where_it_matters():
    watch = LagWatch()
    watch.late = [(1_000_000_000, 40_000_000)]
    assert watch.at(999_000_000) == 40_000_000
    assert watch.at(1_100_000_000) == 0
    made = of_ids(128)
    made.lag_ns = (0, 0, 5_000_000)
    assert not validity.disturbed(made, "token_ids", MEASURING), "5 ms of 1.27 s are 0.4 %"
    made.lag_ns = (0, 20_000_000, 0)
    assert validity.disturbed(made, "token_ids", MEASURING)
    findings = Findings()
    validity.check_lag(6, 5, 20_000_000, findings)
    assert findings.invalid[0].reason == "client_lag"


def test_second_clock_finds_a_stream_that_is_not_the_generation():
    """1,812 tok/s by the stream of an engine that generates 60."""
    burst = [answer(*(event(ids=[i]) for i in range(64)), asked=64, every_ms=0.55)] * 3
    long = [TimedAnswer(0, asked_tokens=64, ended_ns=int(1.3e9))] * 3
    short = [TimedAnswer(0, asked_tokens=16, ended_ns=int(0.5e9))] * 3
    second = metrics.second_clock(long, short)
    assert second[0] == pytest.approx(60)
    findings = Findings()
    validity.check_second_clock([metrics.decode_rate(a, "token_ids") for a in burst], second, 0.02,
                                findings)  # fmt: skip
    assert findings.invalid[0].reason == "second_clock"


@pytest.mark.parametrize("noise", [0.001, 0.02, 0.10])
def test_drift_is_found_and_not_imagined(noise):
    generator = np.random.default_rng(5)
    steady = [52 * (1 + noise * generator.standard_normal(12)) for _ in range(1000)]
    assert sum(validity.drift(list(rates)) is not None for rates in steady) <= 1
    slower = 52 * (1 + 0.001 * generator.standard_normal(12))
    slower[5:] *= 0.9
    findings = Findings()
    validity.check_drift(list(slower), 0.05, findings)
    assert findings.invalid and "5 rounds" in findings.invalid[0].evidence


def test_warm_is_flat_and_not_just_lucky():
    assert not is_flat([3.0], 0.1)
    assert not is_flat([9.0, 3.0], 0.1)
    assert is_flat([9.0, 3.0, 3.1], 0.1)
    assert not is_flat([3.0, 9.0, 9.0], 0.1), "slower than it was: not warm, or not alone"


def test_the_client_ends_with_its_parent(timed_server):
    """Killed in the middle of a batch, a run leaves no client behind."""
    server = timed_server("--rate", "1")
    code = (
        "import sys\n"
        "from sm121.client.connection import Patience\n"
        "from sm121.client.timed import completion\n"
        "from sm121.client.timed_process import TimedProcess\n"
        "with TimedProcess(sys.argv[1], 'none') as load:\n"
        "    print(load._process.pid, flush=True)\n"
        "    load.run([completion('gpt-oss-120b', [1], prompt_tokens=1, tokens=99)],\n"
        "             patience=Patience(99, 99))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, server.base_url], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    client = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.0)
    assert client.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([client], timeout=5.0)
    assert not client.is_running() or client.status() == psutil.STATUS_ZOMBIE
