"""A against B: an A/A is no regression, ten percent is, a feature's promises are held to."""

import itertools
import json
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from texts import text_file

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Invalid, NotRun, Verdict
from sm121.engines.attached_life import Signs
from sm121.engines.life import Alive, Dead
from sm121.regression import ab, ab_run, hypothesis, trend
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.ab_run import AbRun
from sm121.regression.change import Change
from sm121.regression.hypothesis import Criterion

CPU = profile.load("cpu-tiny-gpt-oss")
SIDES = ab.parse_sides(["", "--x"])


def visits(b_factor: float, *, pairs: int = 3, boot: float = 0.005, drift: float = 0.0, seed: int):
    generator = np.random.default_rng(seed)
    made = []
    for number, side in enumerate(ab.order(pairs)):
        level = 60 * (1 + boot * generator.standard_normal()) * (1 - drift) ** number
        factor = b_factor if side == "B" else 1.0
        metrics = {
            "tg32@d0": MetricOfStart(level * factor, "tok/s", True),
            "ttft_p50": MetricOfStart(27000 / (level * factor), "ms", False),
            "memory_gib": MetricOfStart(80 / factor, "GiB", False),
        }
        made.append(Visit(side, metrics, {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8"}))
    return made


def judged(*args, **kwargs) -> dict[str, Change]:
    all_ = trend.compare_starts(visits(*args, **kwargs), {"memory_gib": 0.5}, default=0.05)
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


def test_a_drifting_machine_favours_nobody():
    outcomes = [judged(1.0, pairs=4, drift=0.01, seed=s)["tg32@d0"] for s in range(50)]
    assert Verdict.FAIL not in [outcome.verdict for outcome in outcomes]
    assert np.mean([outcome.ratio for outcome in outcomes]) == pytest.approx(1.0, abs=0.004)


def test_noisy_starts_are_inconclusive_and_one_pair_decides_nothing():
    noisy = [judged(0.97, boot=0.05, seed=s)["tg32@d0"].verdict for s in range(50)]
    assert noisy.count(Verdict.INCONCLUSIVE) >= 45
    alone = judged(0.5, pairs=1, seed=1)["tg32@d0"]
    assert alone.verdict is Verdict.INCONCLUSIVE and alone.ci_low is None and alone.ci_high is None
    assert "no interval: that needs two pairs" in alone.text and "inf" not in alone.text
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
        pytest.param(
            ("http://a:1", "--x"), "not one of each", id="http://a:1 --x, not one of each"
        ),
        pytest.param(
            ("--engine-python /nowhere/python", ""),
            "there is no file '/nowhere/python'",
            id="--engine-python /nowhere/python, there is no file",
        ),
        pytest.param(("--x 'y", ""), "as a shell reads them", id="--x 'y, as a shell reads them"),
        pytest.param(
            ("http://a:1 --server-log /nowhere.log", "http://a:2"),
            "there is no file '/nowhere.log'",
            id="http://a:1 --server-log /nowhere.log http://a:2, there",
        ),
        pytest.param(
            ("http://a:1 --moe-backend triton", "http://a:2"),
            "nothing but --server-log PATH",
            id="http://a:1 --moe-backend triton http://a:2, nothing but",
        ),
        pytest.param(
            ("http://a:1", "http://a:1/v1"),
            "the URLs of two servers",
            id="http://a:1 http://a:1/v1, the URLs of two servers",
        ),
        pytest.param(
            ("http://localhost:80", "http://127.0.0.1"),
            "the URLs of two servers",
            id="http://localhost:80 http://127.0.0.1, the URLs of two",
        ),
    ],
)
def test_sides_that_are_none(texts, why):
    with pytest.raises(UsageError, match=why):
        ab.parse_sides(texts)


def answer(starts, levels=None, **criterion) -> hypothesis.CriterionResult:
    outcomes = trend.compare_starts(starts, {}, default=0.05)
    (result,) = hypothesis.evaluate([Criterion(**criterion)], outcomes, starts, levels or {}, 1)
    return result


@pytest.mark.parametrize(
    ("factor", "criterion", "verdict"),
    [
        pytest.param(
            1.2,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "PASS",
            id="1.2, metric tg32@d0 change_at_least 0.1, PASS",
        ),
        pytest.param(
            1.0,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "FAIL",
            id="1.0, metric tg32@d0 change_at_least 0.1, FAIL",
        ),
        pytest.param(
            1.1,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "INCONCLUSIVE",
            id="1.1, metric tg32@d0 change_at_least 0.1, INCONCLUSIVE",
        ),
        pytest.param(
            1.0,
            {"metric": "ttft_p50", "change_at_most": 0.03},
            "PASS",
            id="1.0, metric ttft_p50 change_at_most 0.03, PASS",
        ),
        pytest.param(
            0.9,
            {"metric": "ttft_p50", "change_at_most": 0.03},
            "FAIL",
            id="0.9, metric ttft_p50 change_at_most 0.03, FAIL",
        ),
        pytest.param(
            1.0,
            {"metric": "memory_gib", "difference_at_most": 2.0},
            "PASS",
            id="1.0, metric memory_gib difference_at_most 2.0, PASS",
        ),
        pytest.param(
            0.9,
            {"metric": "memory_gib", "difference_at_most": 2.0},
            "FAIL",
            id="0.9, metric memory_gib difference_at_most 2.0, FAIL",
        ),
        pytest.param(
            1.0,
            {"metric": "ttft_p50", "value_at_most": 1000.0},
            "PASS",
            id="1.0, metric ttft_p50 value_at_most 1000.0, PASS",
        ),
        pytest.param(
            0.4,
            {"metric": "ttft_p50", "value_at_most": 1000.0},
            "FAIL",
            id="0.4, metric ttft_p50 value_at_most 1000.0, FAIL",
        ),
        pytest.param(
            1.0,
            {"metric": "pp2048@d0", "value_at_least": 4500.0},
            "NOT_RUN",
            id="1.0, metric pp2048@d0 value_at_least 4500.0, NOT_RUN",
        ),
        pytest.param(1.0, {"no_crash": True}, "PASS", id="1.0, no_crash True, PASS"),
        pytest.param(1.0, {"moe": "CUTLASS"}, "PASS", id="1.0, moe CUTLASS, PASS"),
        pytest.param(1.0, {"moe_not": "MARLIN"}, "PASS", id="1.0, moe_not MARLIN, PASS"),
        pytest.param(1.0, {"moe": "MARLIN"}, "FAIL", id="1.0, moe MARLIN, FAIL"),
    ],
)
def test_each_kind_of_criterion(factor, criterion, verdict):
    assert answer(visits(factor, boot=0.001, pairs=4, seed=2), **criterion).verdict == verdict


def test_a_crash_and_a_level_that_failed_are_seen():
    crashed = [*visits(1.2, seed=1), Visit("B", failure="the engine ended with -9")]
    result = answer(crashed, no_crash=True)
    assert result.verdict is Verdict.FAIL and "-9" in result.note
    runs = visits(1.0, seed=1)
    assert answer(runs, {"correctness": Verdict.FAIL}, level="correctness").verdict is Verdict.FAIL
    assert answer(runs, level="correctness").verdict is Verdict.NOT_RUN


def test_the_phases_and_the_example_are_valid():
    for phase in ("P1", "P2", "P3", "P4", "P5", "P6"):
        assert all(hypothesis.gate_behind(phase))
    example = files("sm121.fixtures") / "hypotheses" / "example.toml"
    assert len(hypothesis.load(Path(str(example))).criteria) == 4


@pytest.fixture
def compared(run_pytest, timed_server, tmp_path):
    text = profile.shipped()["sm121-gpt-oss-120b"].read_text("utf-8")
    for before, after in (
        ("prompt_tokens = 2048", "prompt_tokens = 256"),
        ("generated_tokens = [32, 128]", "generated_tokens = [32, 64]\nmeasuring.rounds = 5"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "short.toml").write_text(text)

    def go(rate_a: float, rate_b: float, *arguments: str):
        urls = [timed_server("--rate", str(rate)).base_url for rate in (rate_a, rate_b)]
        status, run = run_pytest(
            "--profile", str(tmp_path / "short.toml"), "--ab", *urls, "--depths", "0",
            f"--benchmark-storage={tmp_path}/s", "tests/test_regression.py", *arguments,
            timeout_s=240.0,
        )  # fmt: skip
        tests = {test["id"].split("::")[-1]: test for test in run.verdict["tests"]}
        return status, tests, run

    return go


@pytest.fixture
def promise(tmp_path) -> tuple[str, str]:
    (tmp_path / "promise.toml").write_text(text_file("promise.toml"))
    return "--hypothesis", str(tmp_path / "promise.toml")


@pytest.mark.slow("a run more; the slower of two servers is judged below")
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_faster_server_holds_its_promise(compared, promise):
    status, tests, run = compared(500, 575, *promise)
    assert status == 0, run.output
    assert tests["test_b_is_not_worse_than_a"]["verdict"] == "PASS"
    assert tests["test_the_hypothesis_holds"]["verdict"] == "PASS"
    ratio = run.verdict["metrics"]["ab:tg32@d0"]
    assert ratio["starts"] == (ratio["rounds"] if run.verdict["engine"]["managed"] else 1)
    assert ratio["value"] == pytest.approx(1.15, rel=0.01)
    assert ratio["ci_low"] <= ratio["value"] <= ratio["ci_high"] and ratio["rounds"] >= 3
    review = (run.report / "review.md").read_text()
    assert "# Feature: a faster server" in review and "| PASS |" in review


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_slower_server_is_worse(compared, promise):
    status, tests, run = compared(500, 450, *promise)
    assert status == 1, run.output
    failed = {name: test["message"] for name, test in tests.items() if test["verdict"] == "FAIL"}
    worse = "tg32@d0: required: B is not worse than A, seen: it is"
    assert worse in failed["test_b_is_not_worse_than_a"]
    assert "changes by at least +10 %" in failed["test_the_hypothesis_holds"]
    assert "| FAIL |" in (run.report / "review.md").read_text()
    record = json.loads((run.report / "ab.json").read_text())
    assert [visit["side"] for visit in record["visits"][:4]] == ["A", "B", "B", "A"]


def test_the_words_of_a_side_are_its_own(run_pytest):
    """``--enforce-eager`` is no option of pytest's; and a side may say what is one."""
    status, run = run_pytest(
        "--collect-only", "-q", "tests/test_regression.py", "--ab", "", "--enforce-eager"
    )
    assert status == 0 and "test_b_is_not_worse_than_a" in run.output, run.output
    status, run = run_pytest("tests/test_regression.py", "--ab", "--port 1", "--model")
    assert status == 4 and "--port 1" in run.output, run.output


ONE = Signs(frozenset({(7, 1763.2)}), 1763.25)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(ONE, True, id="ONE, same"),
        # behind a proxy: another listener, the same engine
        pytest.param(Signs(started=1763.25), True, id="Signs started 1763.25, same"),
        # a proxy in front of both
        pytest.param(
            Signs(ONE.processes, 1763.26), False, id="Signs ONE.processes 1763.26, not same"
        ),
        pytest.param(Signs(ONE.processes), True, id="Signs ONE.processes, same"),
        pytest.param(
            Signs(frozenset({(8, 1763.2)})), False, id="Signs frozenset tuple 8 1763.2, not same"
        ),
        # its pid was given again
        pytest.param(
            Signs(frozenset({(7, 1800.0)})), False, id="Signs frozenset tuple 7 1800.0, not same"
        ),
        pytest.param(Signs(), None, id="Signs"),
    ],
)
def test_two_addresses_of_one_process_are_told_from_two_servers(other, same):
    assert ONE.is_one_with(other) is same and other.is_one_with(ONE) is same


def test_a_server_that_was_replaced_between_visits_counts_for_nothing(monkeypatch, tmp_path):
    starts = iter([1.0, 2.0])
    states = iter([*[Alive()] * 3, Dead("it ended", None, 0.0, None, "its process began at 3.0")])
    monkeypatch.setattr(ab_run, "AttachedLife", lambda _server: SimpleNamespace(
        unwatched=None, signs=Signs(started=next(starts)), state=lambda: next(states)
    ))  # fmt: skip
    sides = ab.parse_sides(["http://a:1", "http://a:2"])
    unproven: dict[str, None] = {}  # a line once
    harness = SimpleNamespace(unproven=unproven.setdefault)
    run = AbRun(harness, sides, None, lambda _side: None)
    server = Server(Endpoint("http://a:1", "x", "m"), False, "x", None, None, None, None)
    for name, side in zip("ABA", (*sides, sides[0]), strict=True):
        run._check(Visit(name), server, side)
    assert len(unproven) == 2, "the path of either is called unproven, once"
    assert "http://a:1 --server-log PATH" in next(iter(unproven))
    with pytest.raises(Invalid, match="another process answers at http://a:2"):
        run._check(Visit("B"), server, sides[1])


def test_a_side_that_forgets_what_a_knew_is_broken(fault_server, timed_server):
    unproven: list[str] = []
    harness = SimpleNamespace(redact=str, profile=CPU, unproven=unproven.append)
    clever, noise = fault_server(), timed_server("--model", "canary", "--rate", "5000").base_url

    def forgotten(run: AbRun, side: str, url: str) -> str | None:
        endpoint = Endpoint(url, clever.key, "canary")
        return run._forgotten(side, Server(endpoint, False, "x", None, None, None, None))

    run, dull = (AbRun(harness, SIDES, None, lambda _side: None) for _ in range(2))
    assert forgotten(run, "A", clever.base_url) is None
    assert forgotten(run, "B", clever.base_url) is None
    reason = forgotten(run, "B", noise)
    assert reason is not None and "'The capital of France is'" in reason and "A knew" in reason
    with pytest.raises(Invalid, match="A answers"):
        forgotten(run, "A", noise)
    assert forgotten(dull, "A", noise) is None and forgotten(dull, "B", noise) is None
    assert any("answers sensibly" in line for line in unproven)


@pytest.mark.parametrize(
    ("second", "b", "same", "silent"),
    [
        pytest.param(
            "--moe-backend marlin",
            {"moe": "MARLIN"},
            True,
            None,
            id="--moe-backend marlin, moe MARLIN, same",
        ),
        pytest.param(
            "--moe-backend=auto",
            {"moe": "MARLIN"},
            True,
            None,
            id="--moe-backend=auto, moe MARLIN, same",
        ),
        pytest.param(
            "--moe-backend triton",
            {"moe": "TRITON"},
            False,
            None,
            id="--moe-backend triton, moe TRITON, not same",
        ),
        # No log shows the attention.
        pytest.param(
            '--attention-config \'{"backend": "TRITON_ATTN"}\'',
            {"moe": "MARLIN"},
            False,
            "attention_config.backend",
            id='--attention-config \'{"backend": "TRITON_ATTN"}\', moe',
        ),
        pytest.param(
            "--max-num-seqs 4",
            {"moe": "MARLIN"},
            False,
            "max_num_seqs",
            id="--max-num-seqs 4, moe MARLIN, not same, max_num_seqs",
        ),
        pytest.param(
            "--moe-backend marlin --max-num-seqs 4",
            {"moe": "MARLIN"},
            False,
            "max_num_seqs",
            id="--moe-backend marlin --max-num-seqs 4, moe MARLIN, not",
        ),
        pytest.param(
            "--enforce-eager",
            {"moe": "MARLIN", "cuda_graphs": False},
            False,
            "enforce_eager",
            id="--enforce-eager, moe MARLIN cuda_graphs False, not",
        ),
        pytest.param(
            "--engine-python PYTHON",
            {"moe": "MARLIN"},
            False,
            None,
            id="--engine-python PYTHON, moe MARLIN, not same",
        ),
    ],
)
def test_b_is_told_from_a_by_what_ran(second, b, same, silent):
    sides = ab.parse_sides(["", second.replace("PYTHON", sys.executable)])
    a = {"moe": "MARLIN", "cuda_graphs": False}
    why, unproven = ab.the_same(sides, "vllm", Visit("A", path=a), Visit("B", path=b))
    assert (why is not None and "B ran what A ran" in why) is same
    assert (unproven is None) if silent is None else silent in unproven


def test_a_comparison_that_was_broken_off_is_not_begun_again():
    run = AbRun(SimpleNamespace(), SIDES, None, lambda _side: None)
    run._visit = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run.judge()
    with pytest.raises(NotRun, match="broken off"):
        run.judge()


@pytest.mark.parametrize(
    ("promise", "pairs"),
    [
        # B is no worse, which is clear at once
        (None, 3),
        pytest.param(
            {"metric": "ttft_p50", "change_at_most": 0.03},
            3,
            id="metric ttft_p50 change_at_most 0.03, 3",
        ),
        pytest.param(
            {"metric": "ttft_p50", "change_at_most": 0.004},
            4,
            id="metric ttft_p50 change_at_most 0.004, 4",
        ),
        pytest.param(
            {"metric": "ttft_p50", "change_at_least": 0.0},
            6,
            id="metric ttft_p50 change_at_least 0.0, 6",
        ),
        pytest.param(
            {"metric": "ttft_p50", "difference_at_most": 0.08},
            4,
            id="metric ttft_p50 difference_at_most 0.08, 4",
        ),
        # more starts never narrow a range
        pytest.param(
            {"metric": "ttft_p50", "value_at_most": 20.0},
            3,
            id="metric ttft_p50 value_at_most 20.0, 3",
        ),
    ],
)
def test_pairs_are_added_while_a_promise_is_open(tmp_path, monkeypatch, promise, pairs):
    harness = SimpleNamespace(
        profile=CPU, unproven=None, directory=tmp_path, pool=None, redact=str, save=lambda: None,
        file=SimpleNamespace(metrics={}, changes=[]),
    )  # fmt: skip
    words = {"feature": "faster", "hypothesis": "This should improve much."}
    chosen = promise and hypothesis.Hypothesis(**words, criteria=[promise])
    run = AbRun(harness, SIDES, None, lambda _side: None, hypothesis=chosen)
    monkeypatch.setattr(run, "_check_that_they_differ", lambda: None)
    milliseconds = {"A": itertools.repeat(20.0), "B": itertools.cycle([20.0, 20.02, 19.98])}

    def visit(name, _which):
        metrics = {"ttft_p50": MetricOfStart(next(milliseconds[name]), "ms", False)}
        run.visits.append(Visit(name, metrics))

    run._visit = visit
    assert run.outcomes[0].pairs == pairs


NOISY_TTFT = {"metric": "ttft_p50", "change_at_least": 0.0}


@pytest.mark.parametrize(
    ("slower", "promise", "pairs"),
    [
        pytest.param(1.3, None, 3, id="a-FAIL-ends-it"),
        pytest.param(1.3, NOISY_TTFT, 6, id="a-FAIL-beside-an-open-hypothesis-goes-on"),
        pytest.param(1.0, None, 6, id="an-open-metric-alone-goes-on"),
    ],
)
def test_a_metric_that_stays_open_keeps_no_decided_comparison_going(
    tmp_path, monkeypatch, slower, promise, pairs
):
    """TTFT stays open; the rate is decided after three pairs."""
    harness = SimpleNamespace(
        profile=CPU, unproven=None, directory=tmp_path, pool=None, redact=str, save=lambda: None,
        file=SimpleNamespace(metrics={}, changes=[]),
    )  # fmt: skip
    words = {"feature": "faster", "hypothesis": "This should improve much."}
    chosen = promise and hypothesis.Hypothesis(**words, criteria=[promise])
    run = AbRun(harness, SIDES, None, lambda _side: None, hypothesis=chosen)
    monkeypatch.setattr(run, "_check_that_they_differ", lambda: None)
    noisy = itertools.cycle([20.0, 23.0, 17.0, 24.0])

    def visit(name, _which):
        metrics = {
            "ttft_p50": MetricOfStart(next(noisy), "ms", False),
            "tpot_p50": MetricOfStart(20.0 * (slower if name == "B" else 1.0), "ms", False),
        }
        run.visits.append(Visit(name, metrics))

    run._visit = visit
    verdicts = {outcome.metric: outcome.verdict for outcome in run.outcomes}
    assert verdicts["ttft_p50"] is Verdict.INCONCLUSIVE
    assert run.outcomes[0].pairs == pairs
