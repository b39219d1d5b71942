"""The accuracy cost of rounding is shown beside the gained speed, in one run and compared with
other runs."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.against_runs import OWN, a_run
from meta_tests.fakes.run_events import stand_in
from meta_tests.unit.answers.price_limits import ALLOWING, KL, LIKELIEST, LIMITS, RIGHT
from sm121.answers.options import AnswerOptions
from sm121.client.completions import Refused
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import NotRun, Verdict
from sm121.plugin import answers
from sm121.regression import start_pairs
from sm121.regression.ab import AbFile, MetricOfStart, Visit
from sm121.report import comparison, headline, summary
from sm121.report.ab_section import AbSection
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import AGAINST, MetricReport
from sm121.session import against, trusted_runs
from sm121.session.settings import Settings

HONEST = {"tg32@d0": 30.0, KL: 0.0001, LIKELIEST: 99.9, RIGHT: -0.001}

PAID = {"tg32@d0": 48.0, KL: 0.012, LIKELIEST: 97.2, RIGHT: -0.02}


def run_of(values, **engine):
    metrics = {
        name: MetricReport(
            value=value, unit=PRICES.get(name, ("tok/s",))[0], rounds=20, verdict=Verdict.PASS,
            ci_low=0.9 * value, ci_high=1.1 * value,
        )
        for name, value in values.items()
    }  # fmt: skip
    run = a_run(("tests/test_smoke.py::a", "PASS", ""), metrics=metrics)
    return run.model_copy(update={"engine": run.engine.model_copy(update=engine)})


def stored_metrics(values):
    return {
        name: StoredMetric(name, *PRICES.get(name, ("tok/s", True)), None, (value,) * 9, value)
        for name, value in values.items()
    }


# `but` contains the values that differ from those of `now`.
@pytest.mark.parametrize(
    ("now", "but", "limits", "worse"),
    [
        pytest.param(
            PAID,
            None,
            LIMITS,
            ("price_kl", "price_likeliest"),
            id="PAID, LIMITS, price_kl price_likeliest",
        ),
        pytest.param(PAID, None, ALLOWING, (), id="PAID, ALLOWING"),
        pytest.param(HONEST, None, LIMITS, (), id="HONEST, LIMITS"),
        pytest.param(HONEST, {"tg32@d0": 48.0}, LIMITS, (), id="HONEST, tg32@d0 48.0, LIMITS"),
        pytest.param(
            HONEST,
            {"price_kl": 0.0006},
            LIMITS,
            ("price_kl",),
            id="HONEST, price_kl 0.0006, LIMITS, price_kl",
        ),
        pytest.param(
            {},
            {"tg32@d0": 48.0},
            ALLOWING,
            ("price_kl", "price_likeliest", "price_right_answer"),
            id="tg32@d0 48.0, ALLOWING, price_kl price_likeliest",
        ),
    ],
)
def test_speed_for_quality_beside_a_trusted_run(now, but, limits, worse):
    """A higher cost fails with both numbers, and passes if the profile allows it.

    A cost that is no longer measured always fails."""
    values = now | (but or {})
    before = run_of(HONEST)
    run = run_of(values)
    trusted = trusted_runs.Trusted((StoredRun("trusted", before, stored_metrics(HONEST)),), "0")
    profile = OWN.model_copy(update={"regression": limits})
    judged = against.compare_with_trusted(
        run, trusted, profile, stored_metrics(values), lambda _: True
    )
    assert [test.id.removeprefix(AGAINST) for test in judged.worse] == [*worse]
    assert judged.report.no_worse == (not worse)
    if now is PAID:
        assert "1.6 times as fast (tg32@d0 30 → 48 tok/s)" in str(judged.report)
        assert f"{KL} 0.0001 → 0.012 nats, {LIKELIEST} 99.9 → 97.2 %" in str(judged.report)


@pytest.mark.parametrize(
    ("before", "now", "is_named"),
    [
        pytest.param({"tg32@d0": 30.0}, PAID, True, id="tg32@d0 30.0, PAID, is_named"),
        pytest.param(HONEST, HONEST, False, id="HONEST, HONEST, not is_named"),
        pytest.param(
            {"tg32@d0": 30.0},
            {"tg32@d0": 30.0},
            False,
            id="tg32@d0 30.0, tg32@d0 30.0, not is_named",
        ),
    ],
)
def test_a_trusted_run_without_a_price_is_named(before, now, is_named):
    """A trusted run of an earlier release without a cost does not make the run fail, and the cost
    is not called compared."""
    run = run_of(now)
    runs = (StoredRun("old", run_of(before), stored_metrics(before)),)
    trusted = trusted_runs.Trusted(runs, "0")
    judged = against.compare_with_trusted(run, trusted, OWN, stored_metrics(now), lambda _: True)
    remark = "cost of rounding: not compared, because old did not measure it"
    assert judged.worse == [] and judged.report.differs == [remark] * is_named


def test_speed_for_quality_in_compare():
    for engine, word in (({}, f"FAIL ({KL}, {LIKELIEST})"), ({"price_allowed": True}, "PASS")):
        runs = {"honest": run_of(HONEST), "fast": run_of(PAID, **engine)}
        sources = [comparison._of_run(name, run) for name, run in runs.items()]
        text = comparison.markdown(sources)
        assert "fast compared with honest: 1.6 times as fast (tg32@d0 30 → 48 tok/s)" in text
        assert text.split("## Speed and its price")[1].split("\n")[2].endswith(f": {word}")
    without = [comparison._of_run(name, run_of({"tg32@d0": 30.0})) for name in "ab"]
    assert "price" not in comparison.markdown(without)


def test_speed_for_quality_in_ab():
    visits = []
    for side, of in (("A", HONEST), ("B", PAID), ("B", PAID), ("A", HONEST)):
        metrics = {n: MetricOfStart(v, *PRICES.get(n, ("tok/s", True))) for n, v in of.items()}
        visits.append(Visit(side, metrics))
    for limits, verdict in ((LIMITS, Verdict.FAIL), (ALLOWING, Verdict.PASS)):
        allowed = {name: limits.of_price(name) for name in PRICES}
        changes = start_pairs.compare_starts(visits, allowed, default=0.05)
        by_name = {change.metric: change for change in changes}
        assert by_name[KL].verdict is verdict and by_name[KL].fact.unit == "nats"
        section = AbSection(AbFile(sides=("", "x"), outcomes=changes)).headline
        assert "B is 1.6 times as fast" in section


@pytest.mark.parametrize(
    ("error", "is_red"),
    [
        pytest.param(
            Unmet(Fact("12 tokens", "11 ids")),
            True,
            id="Unmet sm121.core.unmet.Fact 12 tokens 11 ids, is_red",
        ),
        pytest.param(
            Unmet(Fact("prompt_logprobs with every answer")),
            True,
            id="Unmet sm121.core.unmet.Fact prompt_logprobs with every",
        ),
        pytest.param(Refused(500, "CUDA error"), True, id="Refused 500 CUDA error, is_red"),
        pytest.param(
            Refused(400, "Requested prompt logprobs of 20, which is greater than max allowed: 5"),
            False,
            id="Refused 400 Requested prompt logprobs of 20, which is",
        ),
        pytest.param(
            NotRun("the engine sends none"), False, id="NotRun the engine sends none, not is_red"
        ),
        pytest.param(UsageError("FILE rounds"), False, id="UsageError FILE rounds, not is_red"),
    ],
)
def test_a_side_whose_answers_are_broken_has_no_green_price(monkeypatch, error, is_red):
    """If the cost of one side of an A/B comparison is missing, this is a remark.

    A wrong cost fails."""
    monkeypatch.setattr(answers, "_priced", Mock(side_effect=error))
    settings = Settings(answers=AnswerOptions(named_reference=Path("FILE")))
    side = SimpleNamespace(settings=settings, run=stand_in(remark=Mock()))
    with pytest.raises(type(error)) if is_red else contextlib.nullcontext():
        assert answers.price_of(None, side, None) == {}
    assert side.run.record.remark.call_count == (not is_red)


@pytest.mark.parametrize(
    ("rounding", "words"),
    [
        pytest.param(
            "qkv=mxfp4-even,o=mxfp4-even,lm_head=mxfp4-even,kv=fp8",
            "qkv, o, lm_head to MXFP4, KV cache to FP8",
            id="qkv=mxfp4-even,o=mxfp4-even,lm_head=mxfp4-even,kv=fp8",
        ),
        ("experts=mxfp8-identity", "experts' inputs to MXFP8"),
        ("checkpoint", "nothing"),
        (None, "unknown"),
        ("experts=a-format-of-another-release", "unknown"),
    ],
)
def test_the_first_lines_say_what_is_rounded(rounding, words):
    run = run_of(PAID, rounding=rounding)
    line = f"Rounded beyond the checkpoint: {words}; mean KL 0.012 [0.0108, 0.0132] nats, likeliest"
    assert str(headline.headline_of(run).price).startswith(line)
    assert line in summary.markdown(run).replace("\\", "")
    assert headline.headline_of(run_of({"tg32@d0": 30.0}, rounding=rounding)).price == ""
