"""The accuracy cost of a server's rounding is measured, and fails above the profile's limit."""

import contextlib
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from meta_tests.fakes.run_events import new_file, stand_in, with_events
from meta_tests.faults.test_rounding_faults import _slow
from meta_tests.unit.answers.price_limits import ALLOWING, KL, LIKELIEST, LIMITS, RIGHT
from sm121.answers import oracle_making, oracle_texts, price
from sm121.answers.oracle_texts import ExamText
from sm121.client.completion_json import Completion, Position, name_of
from sm121.client.completions import Refused
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES, Price
from sm121.core.profile_fields import Gate
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun, Verdict
from sm121.measure import gate
from sm121.measure.measurement import Measurement
from sm121.oracles import scores
from sm121.oracles.formats import EXACT, Rounding
from sm121.plugin import answers
from sm121.regression import trend
from sm121.regression.change import compare_prices, price_change
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.session.settings import Settings
from tools import roundings
from tools.roundings import DENSE

DEPTH = 40


@pytest.fixture(scope="module")
def checkpoint(canary_bf16, tmp_path_factory):
    """The canary with only the tokens of two prompts and of its exam."""
    patch = pytest.MonkeyPatch()
    every = dict(oracle_texts.prompts())
    exam = oracle_texts.exams()["canary"]
    texts = {name: every[name][:90] for name in ("capitals", "tool call", "mixture of 300")}
    tokens = sorted({*range(0, 100_000, 50), *exam.token_ids}.union(*texts.values()))
    prompts = []
    for name, ids in texts.items():
        prompts.append((name, [*map(tokens.index, ids)]))
    few = ExamText(token_ids=map(tokens.index, exam.token_ids), answers=exam.answers)
    patch.setattr(oracle_texts, "prompts", lambda: prompts)
    patch.setattr(oracle_texts, "exams", lambda: {"canary": few})
    patch.setattr(oracle_texts, "GENERATED", 3)
    patch.setattr(oracle_texts, "SMALL_MISTAKES", {})
    long = prompts[0][1] * 4
    patch.setattr(oracle_texts, "long_prompt", lambda tokens=4: ("long", long[:tokens]))
    folder = tmp_path_factory.mktemp("checkpoint") / "canary"
    yield roundings.with_few_tokens(canary_bf16, folder, tokens)
    patch.undo()


@pytest.fixture(scope="module")
def reference(checkpoint):
    return oracle_making.make(checkpoint, depths=[DEPTH])


def listed(ids, values):
    """Return the log-probability of each listed token, by its id, for each position."""
    rows = []
    for row in zip(ids.tolist(), values.tolist(), strict=True):
        rows.append(dict(zip(*row, strict=True)))
    return rows


class Server:
    """A server of a checkpoint with a rounding.

    Its answers are computed by the oracle with that rounding."""

    def __init__(self, checkpoint, way, shift=0.0):
        self.checkpoint = checkpoint
        self.way = way
        self.shift = shift

    def ask(self, request):
        text = scores.Text(request.prompt, rounding=self.way, more=request.tokens)
        (says,) = scores.score(self.checkpoint, [text], dtype=torch.float32)
        following = tuple(min(0.0, value + self.shift) for value in says.following.tolist())
        tops = listed(says.top_ids, says.top)
        positions = []
        for top in listed(says.generated_top_ids, says.generated_top):
            named = {name_of(token): value for token, value in top.items()}
            positions.append(Position(*next(iter(named.items())), named))
        return Completion("", None, None, None, tuple(positions), following, None, None, tops[:-1])

    def need(self, value, name):
        return value

    def positions(self, answer):
        return answer.positions


def means(samples):
    return {name: sum(values) / len(values) for name, values in samples.items()}


@pytest.fixture(scope="module")
def paid(reference, checkpoint, tmp_path_factory):
    """Return the accuracy cost of a server that rounds, or that loads a changed copy of the
    checkpoint."""
    done = {}

    def pay(formats, twin=False):
        if (formats, twin) not in done:
            folder = checkpoint
            way = Rounding.parse(formats).computed_in("bf16")
            if twin:
                folder = tmp_path_factory.mktemp("twin") / "canary"
                roundings.dense_twin(checkpoint, folder)
                way = EXACT.computed_in("bf16")
            samples, _ = price.measure(Server(folder, way), reference, "canary", [DEPTH])
            done[formats, twin] = samples
        return done[formats, twin]

    return pay


def test_the_original_costs_about_nothing(paid):
    """The original checkpoint has only the accuracy cost of BF16 arithmetic, in prompts, in answers
    and at a depth."""
    honest = means(paid("checkpoint"))
    assert 0 <= honest[KL] < 1e-3 and honest[LIKELIEST] > 98 and abs(honest[RIGHT]) < 0.05
    assert honest[f"{KL}@d{DEPTH}"] < 2e-3


FAST = {"the twin of a fast server": (DENSE, True), "all dense layers in MXFP4": (DENSE, False)}

FAST |= {name: (name, False) for name in ("kv=fp8", "lm_head=mxfp4-even", "qkv=mxfp4-even")}

IN_NATS = {"unit": "nats", "source": "this test"}


def conformance_of(prices, limits):
    profile = SimpleNamespace(regression=limits, correctness=SimpleNamespace(prices=prices))
    file = new_file()
    recorder = SimpleNamespace(gates={})
    run = with_events(stand_in(remark=Mock(), file=file, profile=profile))
    return SimpleNamespace(recorder=recorder, run=run)


def deciding(monkeypatch, conformance, priced):
    """Return the decision on a measured cost."""
    monkeypatch.setattr(answers, "MetricRecorder", lambda *_: lambda *_, **__: None)
    fixture = answers.price_of_rounding._get_wrapped_function()
    config = SimpleNamespace(stash={answers._PRICED: answers.Priced(*priced)})
    return fixture(config, conformance, None, None, None)


def metric(name, samples):
    unit, higher = PRICES[name]
    return StoredMetric(name, unit, higher, None, tuple(samples), sum(samples) / len(samples))


def decided(name, samples, **limit):
    unit, higher = PRICES[name]
    fields = {"name": name, "unit": unit, "samples": samples, "higher_is_better": higher}
    required = Gate(metric=name, unit=unit, source="this test", **limit)
    return gate.decide_measurement(Measurement(**fields, is_mean=True), required, None, 1)[0]


@pytest.mark.parametrize("name", _slow(FAST, ["the twin of a fast server"]))
def test_the_cost_of_a_fast_servers_rounding_is_a_regression(paid, name):
    """The accuracy cost of a fast server's rounding is far above the original's.

    It is a regression unless allowed, and it fails a gate that the original passes."""
    fast = paid(*FAST[name])
    honest = paid("checkpoint")
    assert means(fast)[KL] > 10 * means(honest)[KL] and means(fast)[RIGHT] < means(honest)[RIGHT]
    history = [StoredRun("before", None, {KL: metric(KL, honest[KL])})]
    for limits, verdict in ((LIMITS, Verdict.FAIL), (ALLOWING, Verdict.PASS)):
        (change,) = trend.compare({KL: metric(KL, fast[KL])}, history, limits)
        assert change.verdict is verdict, change.text
        (same,) = trend.compare({KL: metric(KL, honest[KL])}, history, limits)
        assert same.verdict is Verdict.PASS
    limit = (means(fast)[KL] + means(honest)[KL]) / 2
    assert decided(KL, fast[KL], at_most=limit).verdict is Verdict.FAIL
    assert decided(KL, honest[KL], at_most=limit).verdict is Verdict.PASS
    declared = decided(KL, fast[KL], at_most=1.05 * means(fast)[KL])
    assert declared.verdict is Verdict.PASS
    assert declared.estimate.ci_low < means(fast)[KL] < declared.estimate.ci_high
    if FAST[name][1]:  # computed like a server that rounds
        assert means(fast) == pytest.approx(means(paid(DENSE)), rel=1e-3, abs=1e-6)


def test_only_a_lower_probability_of_right_answers_fails(reference, checkpoint):
    for shift, verdict in ((-0.1, Verdict.FAIL), (0.1, Verdict.PASS)):
        server = Server(checkpoint, EXACT, shift)
        samples, _ = price.measure(server, reference, "canary", ())
        decision = decided(RIGHT, samples[RIGHT], minimum=-0.05)
        assert decision.verdict is verdict and decision.estimate.value * shift > 0
        assert means(samples)[KL] < 1e-6  # the server does not round
        now = metric(RIGHT, samples[RIGHT])
        before = metric(RIGHT, [0.0] * 6)
        assert compare_prices(now, [before], LIMITS).verdict is verdict
    # Each step is allowed by itself, but not all steps together.
    steps = [metric(KL, [0.001 + 0.00015 * n]) for n in range(4)]
    assert compare_prices(steps[1], steps[:1], LIMITS).verdict is Verdict.PASS
    assert compare_prices(steps[3], steps[:3], LIMITS).verdict is Verdict.FAIL


def test_no_number_is_no_price(reference, checkpoint):
    """Invalid log-probabilities give no accuracy cost.

    The same holds for likely tokens that do not include any of the checkpoint's."""
    (first, *_), top = reference.prompts["capitals"].places, {}
    for value in (math.nan, math.inf, -math.inf, 0.5):
        top = {first.ids[0]: value}
        assert price._divergence((first, top)) == math.inf
    others = {max(first.ids) + n: math.log(0.05) for n in range(1, 20)}
    assert price._divergence((first, others)) > 13 and price._likeliest((first, others)) == 0
    assert decided(KL, [0.0, math.inf], at_most=1.0).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(lambda _: 0.0, id="each token is certain"),
        pytest.param(lambda p: min(0.0, p + 0.4), id="0.4 nats too much"),
        pytest.param(lambda p: p / 20, id="a twentieth of the nats"),
    ],
)
def test_probabilities_whose_sum_exceeds_one_are_refused(reference, checkpoint, served):
    """Probabilities whose sum exceeds one are refused.

    Their sum over a part of the vocabulary would give a cost of zero or below. A correct server
    sends none.
    """
    surest = max(reference.prompts["capitals"].places, key=lambda surest: -surest.values[0])
    honest = dict(zip(surest.ids, surest.values, strict=True))
    assert price._divergence((surest, honest)) < 1e-6
    lies = {token: served(value) for token, value in honest.items()}
    assert price._divergence((surest, lies)) == math.inf
    (text,) = oracle_texts.exams().values()
    scored = reference.unrounded[text.name]
    for above, count in ((0.0, 0), (2.0, len(text.answers))):
        answered = Completion("", None, None, None, None, (above,) * len(scored.following), 1, 1)
        asker = Server(checkpoint, EXACT)
        asker.ask = Mock(return_value=answered)
        assert price._right_answers(asker, text, scored).count(-math.inf) == count


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (0.1, float("nan")),
        (float("inf"), float("inf")),
        (0.1, float("inf")),
        (float("nan"), 0.1),
    ],
)
def test_no_number_is_worse_than_any(before, now):
    for limit in (0.01, math.inf):
        assert price_change(KL, before, now, limit).verdict is Verdict.FAIL
        assert price_change(KL, 0.1, 0.1, limit).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            {"metric": "price_kll", "unit": "nats", "at_most": 1.0},
            id="metric price_kll unit nats at_most 1.0",
        ),
        pytest.param(
            {"metric": "price_kl", "unit": "nats", "minimum": 0.0},
            id="metric price_kl unit nats minimum 0.0",
        ),
        pytest.param(
            {"metric": "price_right_answer", "unit": "%", "minimum": -0.1},
            id="metric price_right_answer unit % minimum -0.1",
        ),
        pytest.param(
            {"metric": "tg32@d0", "unit": "tok/s", "minimum": 1.0},
            id="metric tg32@d0 unit tok/s minimum 1.0",
        ),
    ],
)
def test_a_gate_that_would_never_be_red_is_refused(wrong):
    with pytest.raises(ValueError, match="expected one of price_kl in nats: at_most"):
        Price(rounding="checkpoint", gates=[wrong | {"source": "this test"}])
    Price(rounding="checkpoint", gates=[{"metric": f"{KL}@d8192", "at_most": 1.0, **IN_NATS}])


def test_an_unmeasured_price_has_its_reason(reference, checkpoint):
    """If the context is shorter than the exam, only the metric of the exam has no value, and its
    reason is given."""
    server = Server(checkpoint, EXACT)
    exam = oracle_texts.exams()["canary"]
    samples, reasons = price.measure(server, reference, "another", [DEPTH, 8192])
    assert f"{KL}@d{DEPTH}" in samples and not reasons.keys() & samples.keys()
    assert "no correct answers to exam another" in reasons[RIGHT]
    assert "sm121 golden --depth 8192" in reasons[f"{KL}@d8192"]
    honest = StoredRun("before", None, {KL: metric(KL, [0.001])})
    assert "was measured in before" in str(trend.missing({}, honest)[0])
    ask = server.ask

    def short(request):
        if request.prompt == exam.token_ids:
            raise NotRun("its context is 200 tokens")
        return ask(request)

    server.ask = short
    samples, reasons = price.measure(server, reference, "canary", ())
    assert {*samples} == {KL, LIKELIEST} and reasons[RIGHT] == "its context is 200 tokens"


def test_a_reference_that_rounds_has_the_checkpoint_beside(reference, checkpoint):
    """A file of an earlier release that does not contain the checkpoint's answers is refused."""
    rounded = oracle_making.make(checkpoint, Rounding.parse("lm_head=mxfp4-even"))
    price.refuse_rounded(rounded, "FILE")
    for name, scored in rounded.unrounded.items():
        assert scored.following == pytest.approx(reference.unrounded[name].following, abs=1e-6)
    before = rounded.model_copy(update={"exact": {}})
    with pytest.raises(UsageError, match="FILE contains answers rounded to lm_head=mxfp4-even"):
        price.refuse_rounded(before, "FILE")


def test_gates_of_a_price_belong_to_a_list_of_formats():
    required = Gate(metric=KL, unit="nats", at_most=0.1, source="this test")
    prices = [Price(rounding="kv=fp8,lm_head=mxfp4-ceil", gates=[required])]
    assert price.gates(prices, Rounding.parse("lm_head=mxfp4-ceil,kv=fp8")) == {KL: required}
    for other in (None, EXACT, Rounding.parse("kv=fp8"), Rounding.parse("kv=fp8,o=mxfp4-ceil")):
        assert price.gates(prices, other) == {}


@pytest.mark.parametrize(
    ("formats", "limits", "is_red"),
    [
        pytest.param("kv=fp8", ALLOWING, True, id="kv=fp8, ALLOWING, is_red"),
        pytest.param("kv=fp8", LIMITS, False, id="kv=fp8, LIMITS, not is_red"),
        pytest.param(
            "kv=fp8,o=mxfp4-even", ALLOWING, True, id="kv=fp8,o=mxfp4-even, ALLOWING, is_red"
        ),
        pytest.param(None, ALLOWING, True, id="ALLOWING, is_red"),
        pytest.param("checkpoint", ALLOWING, False, id="checkpoint, ALLOWING, not is_red"),
    ],
)
def test_each_allowed_rounding_has_a_gate(monkeypatch, formats, limits, is_red):
    """Each allowed rounding has gates, because a cost without a gate cannot fail.

    Each has a gate on `KL`."""
    way = formats and Rounding.parse(formats)
    gates = [{"metric": KL, "at_most": 1.0, **IN_NATS}]
    conformance = conformance_of(
        [Price(rounding=row, gates=gates) for row in ("kv=fp8", "checkpoint")], limits
    )
    decide = deciding(monkeypatch, conformance, (way, {KL: [0.1], RIGHT: [-5.0]}, {}))
    if formats in ("kv=fp8", "checkpoint"):
        decide(KL)
    with pytest.raises(Unmet, match=RIGHT) if is_red else contextlib.nullcontext():
        decide(RIGHT)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        pytest.param(
            400,
            "Requested prompt logprobs of 20, which is greater than max allowed: 5",
            NotRun,
            id="400, Requested prompt logprobs of 20, which is greater",
        ),
        pytest.param(
            400,
            "prompt_logprobs: a bad request",
            Refused,
            id="400, prompt_logprobs: a bad request, Refused",
        ),
        pytest.param(
            500, "greater than max allowed", Refused, id="500, greater than max allowed, Refused"
        ),
    ],
)
def test_a_server_with_too_few_log_probabilities_has_no_price(monkeypatch, status, body, error):
    """A server with a smaller --max-logprobs has no accuracy cost, which is no fault.

    Any other refusal is a fault."""
    refuse = Mock(side_effect=Refused(status, body))
    monkeypatch.setattr(answers, "Asker", lambda *_, **__: EXACT)
    for name in ("rounding_of", "oracle_of"):
        monkeypatch.setattr(answers.oracle_answers, name, lambda *_, **__: EXACT)
    monkeypatch.setattr(answers.price, "measure", refuse)
    settings = Settings()
    profile = SimpleNamespace(correctness=SimpleNamespace(exam="canary"))
    with pytest.raises(error):
        answers._priced(
            None, SimpleNamespace(settings=settings, run=SimpleNamespace(profile=profile)), None, ()
        )


@pytest.mark.parametrize(
    ("gated", "samples", "error"),
    [
        pytest.param("price_kl", {"price_kl": [0.1]}, None, id="price_kl, price_kl 0.1"),
        pytest.param(
            "price_kl",
            {"price_kl": [0.1], "price_kl@d8192": [float("inf")]},
            Unmet,
            id="price_kl, price_kl 0.1 price_kl@d8192 inf, Unmet",
        ),
        pytest.param(
            "price_likeliest", {"price_kl": [0.1]}, None, id="price_likeliest, price_kl 0.1"
        ),
        pytest.param(
            "price_likeliest",
            {"price_kl": [float("inf"), 0.1]},
            Unmet,
            id="price_likeliest, price_kl inf 0.1, Unmet",
        ),
        pytest.param(
            "price_kl@d8192",
            {"price_kl": [0.1], "price_kl@d8192": [0.1]},
            None,
            id="price_kl@d8192, price_kl 0.1 price_kl@d8192 0.1",
        ),
        pytest.param(
            "price_kl@d8192", {"price_kl": [0.1]}, NotRun, id="price_kl@d8192, price_kl 0.1, NotRun"
        ),
        pytest.param(
            "price_kl@d4096", {"price_kl": [0.1]}, NotRun, id="price_kl@d4096, price_kl 0.1, NotRun"
        ),
    ],
)
def test_a_gate_without_a_number_is_not_green(monkeypatch, gated, samples, error):
    """A gate at a depth that the reference lacks is not green.

    Neither is a cost that is not a number, with or without a gate."""
    unit, higher = PRICES[gated.partition("@")[0]]
    required = {"minimum" if higher else "at_most": 1.0, "unit": unit, "source": "this test"}
    prices = [Price(rounding="checkpoint", gates=[{"metric": gated, **required}])]
    conformance = conformance_of(prices, LIMITS)
    reasons = {f"{KL}@d8192": "the reference has no depth 8192"}
    reasons = {name: why for name, why in reasons.items() if name not in samples}
    decide = deciding(monkeypatch, conformance, (EXACT, samples, reasons))
    with pytest.raises(error) if error else contextlib.nullcontext():
        decide(KL)


@pytest.mark.parametrize(
    ("rows", "rounding", "error"),
    [
        pytest.param(("kv=fp8",), "kv=fp8", None, id="kv=fp8, kv=fp8"),
        pytest.param(("kv=fp8",), "checkpoint", NotRun, id="kv=fp8, checkpoint, NotRun"),
        pytest.param(
            ("checkpoint",), "qkv=mxfp4-even", NotRun, id="checkpoint, qkv=mxfp4-even, NotRun"
        ),
        pytest.param(("checkpoint",), None, NotRun, id="checkpoint, NotRun"),
        # a profile without a gate on a cost
        pytest.param((), "checkpoint", None, id="checkpoint"),
    ],
)
def test_a_rounding_that_no_row_has_is_not_green(monkeypatch, rows, rounding, error):
    limit = {"metric": KL, "at_most": 1.0, **IN_NATS}
    prices = [Price(rounding=row, gates=[limit]) for row in rows]
    served = rounding and Rounding.parse(rounding)
    decide = deciding(monkeypatch, conformance_of(prices, LIMITS), (served, {KL: [0.1]}, {}))
    with pytest.raises(error, match="has no row") if error else contextlib.nullcontext():
        decide(KL)
