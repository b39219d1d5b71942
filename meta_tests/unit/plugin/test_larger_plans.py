"""The gates of a named configuration that a plan leaves out, and the command that measures them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import stand_in
from sm121.core import profile
from sm121.plugin import larger_plans, selection
from sm121.plugin.stash import ID, LEVEL, SETTINGS

GB10 = profile.load("sm121-gpt-oss-120b")


def item(level: str, name: str) -> SimpleNamespace:
    stash = pytest.Stash()
    stash[LEVEL] = level
    stash[ID] = f"tests/test_{level}.py::{name}"
    return SimpleNamespace(stash=stash)


LEFT = [item("performance", "test_acceptance[1]"), item("kernel", "test_kernel_speed")]


def left_out(folder: Path, configuration: str | None, *words: str, items=LEFT, **values: float):
    """Return the line that names the gates of a configuration for which a run has no number.

    The run has the plan quick. `words` are its arguments, `items` are the tests that its plan
    leaves out, and `values` are the metrics that it measured.
    """
    stash = pytest.Stash()
    stash[selection.NOT_IN_PLAN] = items
    stash[SETTINGS] = SimpleNamespace(plan="quick")
    config = SimpleNamespace(
        stash=stash,
        invocation_params=SimpleNamespace(args=words, dir=folder),
        option=SimpleNamespace(file_or_dir=[]),
        inipath=None,
        rootpath=folder,
    )
    metrics = {}
    for name, value in values.items():
        metrics[name.replace("_d", "@d")] = SimpleNamespace(value=value)
    run = stand_in(redact=lambda text: text, file=SimpleNamespace(metrics=metrics))
    run.target = SimpleNamespace(profile=GB10.judging(configuration, "0.33.0"))
    return larger_plans.gates_left_out(config, SimpleNamespace(run=run))


@pytest.mark.parametrize("plan", [("--plan", "quick"), ("--plan=quick",), ()])
def test_the_gates_of_a_drafter_without_a_number_are_named(tmp_path, plan):
    words = ("-m", "sm121", *plan, "--configuration", "eagle3-short", "--rounds=3")
    line = left_out(tmp_path, "eagle3-short", *words, tg32_d0=50.0, tpot_p50=None)
    assert line == (
        "gates of configuration eagle3-short without a number in plan quick: tg128@d0, tpot_p50, "
        "accepted_length. Measure them: python -m pytest tests/test_performance.py -m sm121 "
        "--configuration eagle3-short --rounds=3 --plan full"
    )


def test_a_run_with_every_gate_has_no_line(tmp_path):
    gates = {"tg32_d0": 50.0, "tg128_d0": 60.0, "tpot_p50": 20.0, "accepted_length": 2.8}
    assert left_out(tmp_path, "eagle3-short", **gates) is None


def test_a_run_whose_plan_left_out_no_measurement_has_no_line(tmp_path):
    assert left_out(tmp_path, "eagle3-short", items=LEFT[1:], tg32_d0=50.0) is None


def test_a_run_that_measured_nothing_has_no_line(tmp_path):
    assert left_out(tmp_path, "eagle3-short") is None


def test_a_run_without_a_named_configuration_has_no_line(tmp_path):
    assert left_out(tmp_path, None, tg32_d0=50.0) is None


@pytest.mark.parametrize(
    ("option", "line"),
    [
        pytest.param(None, "2 tests are left out; they need --golden, --record-golden", id="none"),
        pytest.param(
            "--record-golden", "1 tests are left out; they need --golden", id="record-golden"
        ),
    ],
)
def test_a_line_names_the_options_of_the_tests_left_out(run_pytest, tmp_path, option, line):
    given = [f"{option}={tmp_path / 'golden.json'}"] if option else []
    _, run = run_pytest(
        "tests/test_correctness.py", "--collect-only", "-q", "-k", "golden_file", *given
    )
    assert line in run.output.splitlines()
