"""Samples are compared with their own log-probabilities.

A scripted engine with any fault of sampling fails, and one without a fault passes. The power and
the rate of false alarms are as documented."""

import random
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

from meta_tests.fakes import scripted_sampler
from meta_tests.fakes.fault_proxy import SAMPLING as FAULTS
from meta_tests.fakes.scripted_sampler import sampling
from sm121.answers import expected_samples
from sm121.api import client, cuts, sample_source, sampled_chats, speculation
from sm121.api import sampling as sampling_forms
from sm121.api.penalties import Penalties
from sm121.api.sampled import Sampler
from sm121.api.speculation import Speculation
from sm121.client.completion_json import parse
from sm121.client.completions import Asker
from sm121.core.server import Endpoint, Server
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun
from sm121.engines import capabilities

DRAFTED = [{}, {"top_p": 1.0}, {"temperature": 1.0}, {"top_p": 0.8}, {"top_p": 0.4}]
DRAFTED += [{"temperature": 0.9}, {"temperature": 0.4}]
CHECKS = {
    "test_samples_follow_the_temperature": lambda sampler, _: sampler.follows_the_temperature(),
    "test_samples_keep_the_cut": Sampler.keeps_the_cut,
    "test_samples_are_penalised": Sampler.penalises,
    "test_samples_are_allowed_tokens": Sampler.restricts,
    "test_each_form_obeys_temperature_and_top_p": lambda sampler, form: (
        sampling_forms.form_obeys_temperature_and_top_p(sampler.api, form)
    ),
    "test_samples_of_chats_follow_the_temperature": lambda sampler, _: sampler.chats_obey(
        "temperature"
    ),
    "test_samples_of_chats_keep_the_cut": Sampler.chats_obey,
}
TESTS = sorted({fault.caught_by for fault in FAULTS.values()})
TEMPERATURE = "test_samples_follow_the_temperature"
RUNS = 20_000
SEEDS = [0, *(pytest.param(n, marks=pytest.mark.slow("another seed")) for n in (1, 2))]


def hold(test: str, sampler: Sampler) -> None:
    """Run the check of the named test in `tests/test_correctness.py` on a sampler."""
    name, _, parameter = test.rstrip("]").partition("[")
    CHECKS[name](sampler, parameter)


def check(test: str, change, seed: int, engine: str = "vllm") -> None:
    with sampling(change, seed) as endpoint:
        hold(
            test,
            Sampler(client.Api(endpoint, capabilities.capabilities_of(engine, "0.32.0")), seed),
        )


def judge_drafts(change, seed: int) -> None:
    """Judge the samples of a scripted server at the drafted positions."""
    with sampling(change, seed) as endpoint:
        server = Server(endpoint, False, "vllm", None, None, None, None)
        can = capabilities.capabilities_of("vllm", "0.32.0")
        Speculation(server, Asker(server), None, None, "", can).samples_follow_the_target()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("test", TESTS)
def test_right_samples_are_not_called_wrong(test, seed):
    check(test, lambda body: body, seed)


def _slow(cases, is_slow):
    slow = pytest.mark.slow("its neighbours")
    return [pytest.param(case, marks=[slow] * is_slow(case)) for case in cases]


@pytest.mark.parametrize("name", _slow(FAULTS, lambda name: "of chats is" in name))
def test_wrong_samples_are_noticed(name):
    form = "each_form" in FAULTS[name].caught_by
    required = (
        "at temperature 1|mostly the same"
        if form
        else r"samples that follow .*seed 7; 0.001 is the probability of a false alarm"
    )
    with pytest.raises(Unmet, match=f"expected .*{required}"):
        check(FAULTS[name].caught_by, FAULTS[name].request, 7)


@pytest.mark.parametrize("drafted", _slow(DRAFTED, lambda each: 1.0 not in each.values()), ids=repr)
def test_samples_at_drafted_positions_are_judged(drafted):
    def change(body):
        wrong = {name: value for name, value in drafted.items() if body.get(name, 1.0) < 1}
        return body | {"drafted": wrong}

    wrong = pytest.raises(Unmet, match="samples that follow the reported probabilities")
    with wrong if drafted else nullcontext():
        judge_drafts(change, 3)


def test_a_request_has_no_more_choices_than_llama_server_has_slots(monkeypatch):
    sizes = []

    def change(body):
        sizes.append(body.get("n", 1))
        return body

    monkeypatch.setattr(speculation, "json_of", lambda _http, _page: {"total_slots": 32})
    judge_drafts(change, 3)
    assert max(sizes) == 32 and len(sizes) == 3 * 6 * 4


def test_an_engine_without_token_ids_is_not_judged_by_them(monkeypatch):
    """An engine that sends no token ids is not judged by them.

    llama-server sends ids only with log-probabilities."""
    server = Server(Endpoint("http://127.0.0.1:9", "key", "m"), False, "llama-cpp", *[None] * 4)
    can = capabilities.capabilities_of("llama-cpp", "b11434")
    speculating = Speculation(server, Asker(server), None, None, "", can)
    answer = parse({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
    monkeypatch.setattr(Speculation, "_post", lambda *_args, **_options: answer)
    with pytest.raises(NotRun, match="generated token ids"):
        speculating._require_ends_by_length("a", (1, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_equally_likely_tokens_are_counted_for_any_draw(monkeypatch, seed):
    """Equally likely tokens are counted correctly, whichever of them is drawn.

    In BF16, many tokens are equally likely, and vLLM lists the drawn one first."""
    monkeypatch.setattr(scripted_sampler, "_STEP", 1.0)
    judge_drafts(lambda body: body, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_equally_likely_tokens_are_no_false_alarm_of_the_temperature(monkeypatch, seed):
    """Equally likely tokens do not make the test of the temperature fail.

    An engine lists the drawn token first, so the order of the list must not decide."""
    monkeypatch.setattr(scripted_sampler, "_STEP", 1.0)
    check(TEMPERATURE, lambda body: body, seed)


def test_a_parameter_unknown_to_the_engine_is_not_run():
    with pytest.raises(NotRun, match="min_p: not in the published API"):
        check("test_samples_keep_the_cut[min_p]", lambda body: body, 1, "openai")
    for parameter in ("bad_words", "allowed_token_ids"):
        with pytest.raises(NotRun, match=f"{parameter}: no such parameter"):
            check(f"test_samples_are_allowed_tokens[{parameter}]", lambda body: body, 1, "sglang")
    with pytest.raises(NotRun, match="divided_bias: logit_bias is added after"):
        check("test_samples_are_penalised[repetition_penalty]", lambda body: body, 1, "sglang")
    with pytest.raises(NotRun, match="log-probabilities with each sample, got 13 of 13 lack"):
        check(TEMPERATURE, lambda body: {**body, "logprobs": None}, 1)


@pytest.mark.parametrize("test", TESTS)
def test_tokens_without_alternatives_are_a_finding(test):
    """Tokens without alternatives are a finding.

    Before, `max()` of an empty list made the suite crash."""
    if "each_form" in test or "seed" in test:
        pytest.skip("nothing of it needs alternatives")
    with pytest.raises(Unmet, match="alternatives listed with each token"):
        check(test, lambda body: body | {"bare": True}, 1)


@pytest.mark.parametrize("test", [test for test in TESTS if "_cut" in test or "the_temp" in test])
def test_too_few_samples_decide_nothing(test, monkeypatch):
    monkeypatch.setattr(sample_source, "MOST", 10)
    monkeypatch.setattr(sampled_chats, "MOST_CHATS", 0)
    with pytest.raises(
        NotRun, match=r"no prompt .* wrong by 10 %|chats are too few to decide whether"
    ):
        check(test, lambda body: body, 1)


@pytest.mark.parametrize(
    "temperature", [0.7, pytest.param(1.4, marks=pytest.mark.slow("another temperature"))]
)
def test_a_temperature_off_by_a_tenth_is_noticed_in_99_runs_of_100(temperature):
    random = np.random.default_rng(5)
    top = {f"{n}": float(value) for n, value in enumerate(np.sort(random.normal(0, 2.6, 20)))}

    def of_token(token: str) -> list[float]:
        factors = expected_samples.OFF
        return [expected_samples.log_ratio(top, token, temperature, factor) for factor in factors]

    ratios = np.array([*map(of_token, top)])

    def decided(actual: float) -> tuple[float, float]:
        """Return the share of runs that fail, and the number of samples of a run."""
        likely = [*expected_samples.shares(top, actual).values()]
        batches = 0
        logarithms = np.zeros((RUNS, 2))
        wrong = 0
        while len(logarithms):
            batches += len(logarithms)
            counts = random.multinomial(2 * sample_source.BATCH, likely, len(logarithms))
            logarithms += counts @ ratios
            most = logarithms.max(1)
            wrong += int((most >= expected_samples.WRONG).sum())
            logarithms = logarithms[
                (most > expected_samples.RIGHT) & (most < expected_samples.WRONG)
            ]
        return wrong / RUNS, 2 * sample_source.BATCH * batches / RUNS

    for factor in expected_samples.OFF:
        assert decided(temperature * factor)[0] >= 1 - expected_samples.MISSED
    wrong, samples = decided(temperature)
    assert wrong < expected_samples.TEMPERATURE_CHANCE
    # If the number of samples were fixed, the same error bounds would need evidence of 27 nats.
    assert samples * expected_samples.evidence(top, temperature) < 12


def test_a_penalty_off_by_a_tenth_is_noticed_in_99_runs_of_100():
    """A penalty that is off by a tenth is detected in 99 of 100 runs.

    The bias compensates for all but 5 % of the penalty, and a wrong penalty reverses the odds."""
    random = np.random.default_rng(6)
    few = sample_source.FEW
    least = min(low for name, (_, low, _) in sample_source.RANGES.items() if "ce_pen" in name)
    share = 1 / (1 + np.exp(-0.05 * least / sample_source.COLD))

    def noticed(actual: float) -> float:
        hits = random.binomial(few, actual, RUNS)
        chances = np.array([expected_samples.chance_of(n, share * few, few) for n in hits])
        return float(np.mean(chances < expected_samples.CHANCE))

    assert noticed(1 - share) >= 0.99
    assert noticed(share) < expected_samples.CHANCE * 10


def test_a_cut_off_by_a_tenth_is_noticed_in_99_runs_of_100():
    """A cut-off (top_p, top_k, min_p) that is off by a tenth is detected in 99 of 100 runs.

    A tighter cut-off omits tokens at the edge, and a looser one includes more, in the given number
    of samples (see `cuts.find_cuts`)."""
    with sampling(lambda body: body, 1) as endpoint:
        sampler = Sampler(client.Api(endpoint, capabilities.capabilities_of("vllm", "0.32.0")), 1)
        cases = []
        for cut in cuts.CUTS:
            for case in sampler.find_cuts(cut).values():
                cases.append((cut, case))
        tops = sampler.source.tops
    for cut, (count, value, text, edge) in cases:
        top = tops[text]
        remaining, dropped = expected_samples.remaining(top, cut, value)
        tight = sum(np.exp([top[t] for t in edge])) / sum(np.exp([top[t] for t in remaining]))
        assert expected_samples.chance_of(0, count * tight, count) < expected_samples.CHANCE
        error = 1 if cut == "top_k" else expected_samples.ERROR * value
        wider = max(
            (expected_samples.remaining(top, cut, value + e)[0] for e in (error, -error)), key=len
        )
        likely = expected_samples.shares({token: top[token] for token in wider})
        assert (1 - sum(likely[token] for token in wider & dropped)) ** count < 0.01


def test_all_comparisons_of_a_run_share_its_chance_of_a_false_alarm():
    parameters = len(cuts.CUTS)
    values = 2
    tallies = (1 + parameters) * values * 4 + parameters * values + 3 * values * 2 + 4
    assert tallies <= expected_samples.COMPARISONS
    whole = (
        expected_samples.COMPARISONS * expected_samples.CHANCE + expected_samples.TEMPERATURE_CHANCE
    )
    assert whole == expected_samples.FALSE_ALARMS


def test_ties_and_roundings_at_the_edge_are_not_judged():
    top = {"a": np.log(0.5), "b": np.log(0.2), "c": np.log(0.2), "d": np.log(0.1)}
    assert expected_samples.remaining(top, "top_k", 2) == ({"a"}, {"d"})
    assert expected_samples.remaining(top, "top_p", 0.6) == ({"a"}, {"d"})
    assert expected_samples.remaining(top, "top_p", 0.95) == ({"a", "b", "c", "d"}, set())
    assert expected_samples.remaining(top, "min_p", 0.4) == ({"a"}, {"d"})
    assert expected_samples.remaining(top, "min_p", 0.3) == ({"a", "b", "c"}, {"d"})


@pytest.mark.parametrize("tallies", ["wrong open", "right open", "right wrong open"])
def test_a_comparison_that_is_not_decided_hides_no_wrong_one(monkeypatch, tallies):
    def subtracted(_self, _name, _value):
        for each in tallies.split():
            if each == "open":
                raise NotRun("cannot be told")
            yield each, expected_samples.Tally(hits=8 * (each == "right"), expected=7.9, samples=8)

    monkeypatch.setattr(Penalties, "compare_subtracted", subtracted)
    api = client.Api(Endpoint("", "", "m"), capabilities.capabilities_of("vllm", "0.32.0"))
    with pytest.raises(Unmet if "wrong" in tallies else NotRun):
        Sampler(api, 1).penalises("presence_penalty")


def counted_requests(hold_all) -> Counter[str]:
    """Return the number of requests of each kind that checks send to a correct server."""
    sent = Counter[str]()

    def count(body):
        kind = "chat" if "messages" in body else "completion"
        sent[f"greedy {kind}" if not body.get("temperature") else f"sampled {kind}"] += 1
        return body

    with sampling(count, 4) as endpoint:
        hold_all(Sampler(client.Api(endpoint, capabilities.capabilities_of("vllm", "0.32.0")), 4))
    return sent


def test_the_checks_of_a_server_share_their_greedy_chats():
    def hold_all(sampler):
        for name in ("temperature", "top_p", "top_k", "min_p"):
            sampler.chats_obey(name)

    assert counted_requests(hold_all)["greedy chat"] == len(sample_source.TEXTS)


@pytest.mark.parametrize("form", ["streamed completion", "streamed chat"])
def test_no_request_is_sent_after_the_decision_on_a_form(form):
    """After a decision, no further request of this form is sent.

    Of 24 requests, the check needs 4 greedy ones, 4 with a cut-off, and as many hot ones as repeat
    the first text."""
    sent = counted_requests(
        lambda sampler: sampling_forms.form_obeys_temperature_and_top_p(sampler.api, form)
    )
    assert sum(number for kind, number in sent.items() if "greedy" in kind) == 4
    assert 4 + 2 <= sum(number for kind, number in sent.items() if "sampled" in kind) <= 4 + 3


@pytest.mark.parametrize("rule", ["mostly_alike", "differing"])
@pytest.mark.parametrize("kinds", [1, 2, 4, 8])
def test_counting_that_ends_early_gives_the_same_decision(rule, kinds):
    generator = random.Random(kinds)
    holds = getattr(sampling_forms, rule)
    for _ in range(500):
        texts = [str(generator.randrange(kinds)) for _ in range(sampling_forms._TIMES)]
        asked = iter(texts)
        counted = sampling_forms.counted_until(holds, lambda asked=asked: next(asked))
        assert holds(counted) == holds(Counter(texts))
