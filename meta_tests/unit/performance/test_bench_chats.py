"""Chats show if a server reaches 52 tok/s only in greedy completions of 128 random tokens."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.fakes.run_events import stand_in
from sm121.answers import exam
from sm121.client import timed_process
from sm121.core import level_settings, profile, unmet
from sm121.core.profile_fields import Gate
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Severity
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import counters
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.checks import PerformanceChecks

RATE = 400
CPU = profile.load("cpu-tiny-gpt-oss")
PLAN = Plan(512, (32, 128), (0,), level_settings.Measuring(rounds=2, silent_within_s=2))
SLOWER = [pytest.param(n, marks=pytest.mark.slow) for n in (None, RATE / 2 - 20)]
CHATS = level_settings.TimedChats(questions=("Why?", "How?"), share=0.9, source="test")
#: Chats whose answers take a quarter of the time.
SHORT_CHATS = CHATS.model_copy(update={"at_least": 128})


@pytest.fixture
def time_chats(timed_server, tmp_path):
    """Measure the chats of a server with these options, and return the measurement."""

    def time_them(*options, chats=CHATS, gate=None):
        recorded = []

        def record(measurement):
            recorded.append(measurement)
            if measurement.invalid:
                raise Invalid(*map(str, measurement.invalid))

        url = timed_server("--rate", str(RATE), *options).base_url
        with MeasuredServer.open(Endpoint(url, "none", "gpt-oss-120b"), PLAN, tmp_path) as server:
            PerformanceChecks(Bench(server, PLAN), record).chat_rate(chats, gate)
        return recorded[0]

    return time_them


# Servers that are as fast for chats of at least 512 tokens as for other requests.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="honest"),
        pytest.param(("--content-free", "3"), id="control tokens first", marks=pytest.mark.slow),
        pytest.param(
            ("--jitter", "0.02", "--interval-jitter", "0.1"), id="jitter", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--tokens-per-chunk", "3"), id="several tokens a chunk", marks=pytest.mark.slow
        ),
        pytest.param(("--chat-tokens", "1000"), id="a longer answer", marks=pytest.mark.slow),
        pytest.param(("--trap", "no-metrics"), id="no counters", marks=pytest.mark.slow),
    ],
)
def test_a_chat_as_fast_as_decoding_passes(time_chats, options):
    measurement = time_chats(*options)
    assert measurement.valid and measurement.name == "tg_chat"
    assert measurement.samples == pytest.approx([RATE] * 4, rel=0.08)
    assert bool(measurement.unproven) == ("no-metrics" in options)


# Servers that are slower in chats.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--chat-slower", "1.2"), id="chats alone", marks=pytest.mark.slow),
        pytest.param(
            ("--later-slower", "1.3"), id="tokens after the 128th", marks=pytest.mark.slow
        ),
        pytest.param(("--sampled-slower", "1.2"), id="sampled requests", marks=pytest.mark.slow),
        pytest.param(("--whole-slower", "1.2"), id="answers at once"),
        pytest.param(
            ("--whole-slower", "3"), id="answers at once, far slower", marks=pytest.mark.slow
        ),
    ],
)
def test_a_slow_chat_fails_although_completions_are_fast(time_chats, options):
    with pytest.raises(unmet.Unmet) as caught:
        time_chats(*options)
    (fact,) = caught.value.facts
    assert fact.limit == pytest.approx(0.9 * RATE, rel=0.05) and fact.value < 0.95 * fact.limit
    assert "tg128@d0 is" in fact.evidence and fact.unit == "tok/s"
    assert caught.value.severity is Severity.BLOCKER, "no certificate is had by a waiver of it"


@pytest.mark.parametrize("minimum", [*SLOWER, RATE / 2 + 40])
def test_a_server_that_drafts_has_its_gate_in_chats(time_chats, minimum):
    """A server with drafts is judged by its rate in chats.

    One server decoded 106.9 tok/s on random ids, with 90 % accepted drafts, and 44.4 tok/s in
    chats."""
    drafts = ("--trap", "speculative", "--chat-slower", "2", "--chat-tokens", "160")
    gate = minimum and Gate(metric="tg32@d0", unit="tok/s", minimum=minimum, source="test")
    if minimum is not None and minimum > RATE / 2:
        with pytest.raises(unmet.Unmet, match="chats with speculation, at least as fast"):
            time_chats(*drafts, chats=SHORT_CHATS, gate=gate)
    else:
        measurement = time_chats(*drafts, chats=SHORT_CHATS, gate=gate)
        assert measurement.samples == pytest.approx([RATE / 2] * 4, rel=0.08)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param(
            ("--chat-counts", "1.2"),
            "token_accounting: usage reports that a chat has 624 tokens",
            id="--chat-counts 1.2, token_accounting: usage reports that a",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--chat-counts", "0.8"),
            "other_clients: usage reports that a chat has 416 tokens",
            id="--chat-counts 0.8, other_clients: usage reports that a",
        ),
        pytest.param(
            ("--trap", "stalled"),
            "request_failed: .*stalled",
            id="--trap stalled, request_failed: .*stalled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_number_of_tokens_that_is_not_what_was_generated_is_invalid(time_chats, options, reason):
    with pytest.raises(Invalid, match=reason):
        time_chats(*options)


@pytest.mark.slow("a dozen chats")
def test_too_short_chats_are_inconclusive(time_chats):
    with pytest.raises(Inconclusive, match="0 of 8 chats ended with 512 tokens or more"):
        time_chats("--chat-tokens", "100")


def test_a_profile_without_chats_times_none():
    """For a profile without chats, nothing is sent. In this test there is no server."""
    bench: Any = SimpleNamespace(plan=PLAN)
    with pytest.raises(NotRun, match=r"has no \[performance.chats\]"):
        PerformanceChecks(bench, pytest.fail).chat_rate(None, None)


@pytest.mark.slow("a whole run")
def test_a_run_is_red_where_chats_alone_are_slow(timed_server, run_pytest):
    status, run = run_pytest(
        "tests/test_performance.py", "-k", "chat_rate", "--arch", "sm121", "--depths", "0",
        "--base-url", timed_server("--rate", "400", "--chat-slower", "2").base_url,
    )  # fmt: skip
    assert status == 1, run.output
    (test,) = [test for test in run.verdict["tests"] if "chat_rate" in test["id"]]
    assert (test["verdict"], test["severity"]) == ("FAIL", "blocker"), run.output
    assert run.verdict["metrics"]["tg_chat"]["value"] == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize(
    ("later", "status"),
    [
        pytest.param("Paris", 200, id="knows"),
        pytest.param(" noise", 200, id="noise"),
        pytest.param("", 200, id="nothing"),
        pytest.param("no", 500, id="fails"),
    ],
)
def test_known_answers_are_asked_again_at_the_end(monkeypatch, tmp_path, later, status):
    begins = {fact.prompt: fact.begins for fact in exam.load(CPU.correctness.exam).completions}
    answered = []

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            prompt = self.asked()["prompt"]
            answered.append(prompt)
            is_late = len(answered) > len(begins)
            text = begins[prompt] if later == "Paris" or not is_late else later
            body = self.completion(text, 5, 1, id="c", created=1, model="m")
            self.say(body, status if is_late else 200)

    opened = SimpleNamespace(prompts=SimpleNamespace(natural=False))
    monkeypatch.setattr(MeasuredServer, "open", lambda *_, **__: nullcontext(opened))
    with serving(Handler) as url:
        server = Server(Endpoint(url, "k", "m"), False, "vllm", "0.32.0", None, None, None)
        run = stand_in(
            server=lambda: server, profile=CPU, directory=tmp_path, say=print,
            of=lambda _server: KernelPath(), follow_log=lambda: None,
        )  # fmt: skip
        with Bench.open(run, PLAN) as bench:
            bench.recorded["tg"] = (None, None)
            opened.cell = lambda _depth: None
            recorder = SimpleNamespace(run=run, recorded=[])
            wrong = pytest.raises(unmet.Unmet, match="the known answers, as before the measurement")
            with nullcontext() if later == "Paris" else wrong:
                bench.last_look(recorder)


@pytest.mark.parametrize(("method", "natural"), [("none", False), (None, True), ("mtp", True)])
def test_counters_of_drafts_prove_none_where_the_log_does(monkeypatch, tmp_path, method, natural):
    """Counters of drafts do not prove drafts if the log shows none. llama-server always has such
    counters."""
    monkeypatch.setattr(counters, "fetch", lambda _endpoint: SimpleNamespace(values={"drafts": 0}))
    monkeypatch.setattr(timed_process, "TimedProcess", lambda *_: nullcontext())
    texts = []

    def end(measured: MeasuredServer) -> None:
        texts.extend(measured.prompts.texts)
        raise NotRun("only the choice of the texts is tested")

    monkeypatch.setattr(MeasuredServer, "_probe", end)
    endpoint = Endpoint("http://127.0.0.1:9", "k", "m")
    server = Server(endpoint, False, "llama-cpp", "b11549", None, None, None)
    run = stand_in(
        server=lambda: server, profile=CPU, directory=tmp_path, say=print,
        of=lambda _server: KernelPath(speculative=method), follow_log=lambda: None,
    )  # fmt: skip
    with pytest.raises(NotRun, match="only the choice"), Bench.open(run, PLAN):
        pass
    assert (len(texts) > 1) == natural


@pytest.fixture
def sample(timed_server, tmp_path):
    """Measure sampled answers of 32 tokens, and return the measurement."""

    def sample_them(*options):
        recorded = []
        url = timed_server("--rate", str(RATE), *options).base_url
        with MeasuredServer.open(Endpoint(url, "none", "gpt-oss-120b"), PLAN, tmp_path) as server:
            PerformanceChecks(Bench(server, PLAN), recorded.append).sampled_rate(32)
        return recorded[0]

    return sample_them


@pytest.mark.slow("the slow sampler has both rates, too")
def test_sampled_answers_stand_beside_greedy_ones(sample):
    measurement = sample()
    assert measurement.valid and measurement.name == "tg32_sampled@d0"
    assert measurement.samples == pytest.approx([RATE] * 4, rel=0.08)
    assert measurement.extra["beside"] == pytest.approx([RATE] * 4, rel=0.08)


def test_sampled_answers_that_fail_are_no_number(sample, tmp_path):
    assert not sample("--fail-every", "7").valid
    (record,) = tmp_path.glob("sampled-tg32-d0.jsonl")
    rows = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    assert rows[0]["kind"] == "left_out" and rows[0]["content"]
    assert {row["kind"] for row in rows[1:]} == {"sampled"}


def test_a_wrong_usage_of_sampled_answers_is_not_called_a_count_by_usage(sample):
    measurement = sample("--trap", "no-ids-no-continuous", "--sampled-more", "1")
    (item,) = measurement.invalid
    assert str(item).startswith("chunk_clock: 32 chunks with text, usage reports 33 tokens")


@pytest.mark.slow("a rate without a verdict")
def test_a_slow_sampler_has_its_rate_beside_the_greedy_one(sample):
    measurement = sample("--trap", "speculative", "--sampled-slower", "2")
    assert measurement.samples == pytest.approx([RATE / 2] * 4, rel=0.08)
    assert measurement.extra["beside"] == pytest.approx([RATE] * 4, rel=0.08)
