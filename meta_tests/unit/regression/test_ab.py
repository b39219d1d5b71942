"""The A/B comparison passes for two equal sides, and fails if side B is 10 % slower.

The sides are distinguished.
"""

import sys

import numpy as np
import pytest

from meta_tests.fakes.ab_visits import answer, visits
from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict
from sm121.regression import ab, start_pairs, visit_checks
from sm121.regression.ab import Visit
from sm121.regression.change import Change


def judged(*args, **kwargs) -> dict[str, Change]:
    all_ = start_pairs.compare_starts(visits(*args, **kwargs), {"memory_gib": 0.5}, default=0.05)
    return {outcome.metric: outcome for outcome in all_}


@pytest.mark.parametrize("pairs", [3, 4, 6])
def test_a_against_a_is_no_regression_and_ten_percent_is(pairs):
    again = [judged(1.0, pairs=pairs, seed=s)["tg32@d0"].verdict for s in range(100)]
    assert Verdict.FAIL not in again and again.count(Verdict.PASS) >= 90
    slower = [judged(0.9, pairs=pairs, seed=s) for s in range(100)]
    for name in ("tg32@d0", "ttft_p50"):
        verdicts = [changes[name].verdict for changes in slower]
        assert Verdict.PASS not in verdicts and verdicts.count(Verdict.FAIL) >= 80, name
    assert Verdict.PASS not in [judged(0.93, pairs=pairs, seed=s)["tg32@d0"].verdict
                                for s in range(100)]  # fmt: skip


def test_drift_of_the_machine_favours_no_side():
    outcomes = [judged(1.0, pairs=4, drift=0.01, seed=s)["tg32@d0"] for s in range(50)]
    assert Verdict.FAIL not in [outcome.verdict for outcome in outcomes]
    assert np.mean([outcome.ratio for outcome in outcomes]) == pytest.approx(1.0, abs=0.004)


def test_noisy_starts_are_inconclusive_and_one_pair_decides_nothing():
    noisy = [judged(0.97, boot=0.05, seed=s)["tg32@d0"].verdict for s in range(50)]
    assert noisy.count(Verdict.INCONCLUSIVE) >= 45
    alone = judged(0.5, pairs=1, seed=1)["tg32@d0"]
    assert alone.verdict is Verdict.INCONCLUSIVE and alone.ci_low is None and alone.ci_high is None
    assert "no interval, which needs two pairs" in alone.text and "inf" not in alone.text
    open_one = answer(visits(0.5, pairs=1, seed=1), metric="tg32@d0", change_at_least=0.1)
    assert open_one.verdict is Verdict.INCONCLUSIVE and "two pairs" in open_one.note


def test_the_interval_covers_as_often_as_it_says():
    outcomes = [judged(0.95, pairs=4, seed=seed)["tg32@d0"] for seed in range(600)]
    hits = sum(outcome.ci_low <= 0.95 <= outcome.ci_high for outcome in outcomes)
    assert hits / 600 >= 0.95 - 0.03


def test_sides_as_they_are_given():
    assert ab.order(3) == ["A", "B", "B", "A", "A", "B"]
    a, b = ab.parse_sides(["", "VLLM_X=1 --moe-backend marlin --flag=a=b"])
    assert a == ab.Side("") and b.environment == (("VLLM_X", "1"),)
    assert b.arguments == ("--moe-backend", "marlin", "--flag=a=b")
    one, other = ab.parse_sides([f"--engine-python {sys.executable}", "http://h:1/v1"[:0]])
    assert one.python == sys.executable and other.python is None
    assert ab.parse_sides(["http://a:1/v1", "http://b:2"])[0].url == "http://a:1"
    with_log = ab.parse_sides([f"http://a:1 --server-log {__file__}", "http://a:2"])
    assert with_log[0].url == "http://a:1" and str(with_log[0].log) == __file__
    assert with_log[1].log is None


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        pytest.param(("http://a:1", "--x"), "got one of each", id="a URL and arguments"),
        pytest.param(
            ("--engine-python /nowhere/python", ""),
            "there is no file '/nowhere/python'",
            id="no such Python",
        ),
        pytest.param(("--x 'y", ""), "that a shell can split", id="an open quotation"),
        pytest.param(
            ("http://a:1 --server-log /nowhere.log", "http://a:2"),
            "there is no file '/nowhere.log'",
            id="no such log",
        ),
        pytest.param(
            ("http://a:1 --moe-backend triton", "http://a:2"),
            "only --server-log PATH after it",
            id="a URL with arguments of an engine",
        ),
        pytest.param(
            ("http://a:1", "http://a:1/v1"),
            "the URLs of two servers",
            id="one URL twice",
        ),
        pytest.param(
            ("http://localhost:80", "http://127.0.0.1"),
            "the URLs of two servers",
            id="two names of one address",
        ),
    ],
)
def test_sides_that_are_none(texts, why):
    with pytest.raises(UsageError, match=why):
        ab.parse_sides(texts)


@pytest.mark.parametrize(
    ("second", "b", "same", "silent"),
    [
        pytest.param(
            "--moe-backend marlin",
            {"moe": "MARLIN"},
            True,
            None,
            id="the backend that ran anyway",
        ),
        pytest.param(
            "--moe-backend=auto",
            {"moe": "MARLIN"},
            True,
            None,
            id="auto chose the same backend",
        ),
        pytest.param(
            "--moe-backend triton",
            {"moe": "TRITON"},
            False,
            None,
            id="another backend ran",
        ),
        # The log does not show the attention backend.
        pytest.param(
            '--attention-config \'{"backend": "TRITON_ATTN"}\'',
            {"moe": "MARLIN"},
            False,
            "attention_config.backend",
            id="attention, which no log shows",
        ),
        pytest.param(
            "--max-num-seqs 4",
            {"moe": "MARLIN"},
            False,
            "max_num_seqs",
            id="max_num_seqs, which no log shows",
        ),
        pytest.param(
            "--moe-backend marlin --max-num-seqs 4",
            {"moe": "MARLIN"},
            False,
            "max_num_seqs",
            id="the same backend, and max_num_seqs",
        ),
        pytest.param(
            "--enforce-eager",
            {"moe": "MARLIN", "cuda_graphs": False},
            False,
            "enforce_eager",
            id="enforce_eager is not believed",
        ),
        pytest.param(
            "--engine-python PYTHON",
            {"moe": "MARLIN"},
            False,
            None,
            id="another Python",
        ),
    ],
)
def test_sides_a_and_b_must_differ_in_what_ran(second, b, same, silent):
    sides = ab.parse_sides(["", second.replace("PYTHON", sys.executable)])
    a = {"moe": "MARLIN", "cuda_graphs": False}
    why, unproven = visit_checks.compare_sides(
        sides, "vllm", Visit("A", path=a), Visit("B", path=b)
    )
    assert (why is not None and "B ran the same configuration as A" in why) is same
    assert (unproven is None) if silent is None else silent in unproven
