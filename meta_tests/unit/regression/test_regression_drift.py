"""A slow decline in small steps is found, and chance does not count as a trend."""

import json

import numpy as np
import pytest

from meta_tests.folders import ROOT
from meta_tests.unit.regression.trend_runs import LIMITS, metric, run
from sm121.core import level_settings, profile
from sm121.regression import metric_levels
from sm121.regression.change import is_price

EVIDENCE = ROOT / "docs" / "evidence" / "gb10-stand-in-verdict.json"


@pytest.mark.parametrize(
    ("levels", "changed"),
    [
        pytest.param(
            (60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60),
            False,
            id="60 60 60 60 60 60 60 60 60 60 60 60, not changed",
        ),
        # the lower level was accepted, and is the baseline since then
        pytest.param(
            (60, 60, 60, 60, 60, 60, 55, 55, 55, 55),
            True,
            id="60 60 60 60 60 60 55 55 55 55, changed",
        ),
        # the rate declines by 1 % per run
        pytest.param(
            (
                60.0,
                59.4,
                58.806,
                58.2179,
                57.6358,
                57.0594,
                56.4888,
                55.9239,
                55.3647,
                54.811,
                54.2629,
                53.7203,
            ),
            True,
            id="60.0 59.4 58.806 58.2179 57.6358 57.0594 56.4888",
        ),
        # the rate has improved
        pytest.param(
            (55, 55, 55, 55, 55, 60, 60, 60, 60, 60),
            False,
            id="55 55 55 55 55 60 60 60 60 60, not changed",
        ),
        # one day had a low rate
        pytest.param(
            (60, 60, 60, 60, 60, 60, 50, 60, 60, 60, 60, 60),
            False,
            id="60 60 60 60 60 60 50 60 60 60 60 60, not changed",
        ),
        pytest.param((60, 60, 60, 60), False, id="60 60 60 60, not changed"),
    ],
)
def test_a_lasting_drop_of_a_metric_is_found(levels, changed):
    for seed in range(10):
        noise = 1 + 0.004 * np.random.default_rng(seed).standard_normal(len(levels))
        series = [metric("tg32@d0", [v]) for v in np.array(levels) * noise]
        runs = [run(i, m) for i, m in enumerate(series[:-1])]
        steps = metric_levels.find_falls({"tg32@d0": series[-1]}, runs, LIMITS)
        assert bool(steps) == changed, (seed, steps)
    if changed and levels[5] == 60:
        assert "beginning with 0006_x.json" in steps[0].text


@pytest.mark.parametrize(
    ("levels", "starts"),
    [
        ((60, 60, 60, 50, 50, 50), [0, 3]),
        ((60, 60, 60, 60, 60, 60), [0]),
        ((50, 50, 50, 60, 60, 60), [0, 3]),
    ],
)
def test_levels_without_noise_differ_by_any_change(levels, starts):
    limits = level_settings.Regression(starts_differ_by=0.0)
    for higher_is_better in (True, False):
        found = metric_levels.levels_of(levels, higher_is_better=higher_is_better, limits=limits)
        assert [level.start for level in found] == starts


def first_red(name: str, times_as_bad, history=(), **fields) -> int | None:
    runs = [*history]
    for number, factor in enumerate(times_as_bad):
        now = metric(name, [60 / factor if name.startswith("tg") else 60 * factor], **fields)
        if metric_levels.find_falls({name: now}, runs, LIMITS):
            return number
        runs.append(run(len(runs), now))
    return None


METRICS = pytest.mark.parametrize(
    ("name", "fields"),
    [("tg32@d0", {}), ("itl_p99", {"quantile": 0.99}), ("memory_peak_gib", {}), ("startup_s", {})],
)


@METRICS
@pytest.mark.parametrize("before", [0, 3, 20])
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_one_percent_a_merge_is_red_by_the_tenth(name, fields, before, noise):
    """If each merge is 1 % slower, the tenth one is red, for any allowed loss in one run, and after
    any number of good runs."""
    for seed in range(3):
        scatter = 1 + noise * np.random.default_rng(seed).standard_normal(before + 31)
        levels = scatter * [*[1] * before, *(1.01**i for i in range(31))]
        red = first_red(name, levels, **fields)
        assert red is not None and before < red <= before + 10, (seed, red)


@pytest.mark.parametrize("name", ["sm121-gpt-oss-120b", "sm90-tiny-gpt-oss"])
def test_each_metric_of_a_run_is_red_by_the_tenth_merge_of_one_percent(name):
    """If each merge makes a metric 1 % worse, the tenth one is red.

    The metrics are all metrics of the simulated machine's run, and those of a run with speculation
    and chats. A cost of rounding is compared with the best of all runs instead (`test_price.py`).
    """
    metrics = json.loads(EVIDENCE.read_text())["metrics"]
    units = {key: m["unit"] for key, m in metrics.items() if not is_price(key)}
    units |= {"accepted_length": "tokens", "acceptance@1": "%", "tg_chat": "tok/s"}
    runs = []
    red = set()
    limits = profile.load(name).regression
    assert len(units) > 20
    for number in range(11):
        now = {}
        for key, unit in units.items():
            rate = unit in ("tok/s", "tokens", "%")
            tail = 0.99 if "_p99" in key else None
            level = 60 * 1.01 ** (-number if rate else number)
            fields = {"unit": unit, "higher_is_better": rate, "quantile": tail}
            now[key] = metric(key, [level], **fields)
        red |= {change.metric for change in metric_levels.find_falls(now, runs, limits)}
        runs.append(run(number, *now.values()))
    assert red == {*units}


@METRICS
def test_an_anchor_is_the_best_level_and_no_lucky_run(name, fields):
    def red(*levels):
        return first_red(name, levels, **fields)

    assert red(*[1] * 8, 0.7, *[1] * 8) is None, "one lucky run"
    assert red(*[1] * 8, 1.4, *[1] * 8) in (None, 8), "one bad run is bad once"
    assert red(*(0.99**i for i in range(30))) is None, "better and better"
    assert red(*[1] * 8, *[0.9] * 5, *[0.99] * 5) in range(13, 17), "an improvement is kept"
    assert red(*[1] * 12, *[1.04] * 40) is None, "within what is allowed"
    crept = [run(i, metric(name, [60 * 1.01**i], **fields)) for i in range(9)]
    mended = 1.0 if not name.startswith("tg") else 1.01**-8
    assert first_red(name, [mended], crept, **fields) is None, "the run that mends it is green"


@pytest.mark.parametrize(
    ("noise", "fields"),
    [
        pytest.param(0.01, {}, id="0.01"),
        pytest.param(0.02, {}, id="0.02"),
        pytest.param(0.03, {"quantile": 0.99}, id="0.03, quantile 0.99"),
        pytest.param(0.1, {"quantile": 0.99}, id="0.1, quantile 0.99"),
    ],
)
def test_sixty_honest_runs_have_no_trend(noise, fields):
    for seed in range(3):
        scatter = np.exp(noise * np.random.default_rng(seed).standard_normal(60))
        assert first_red("itl" if fields else "tg32@d0", scatter, **fields) is None, seed
