"""The oracle's answers of a plan's prompts are computed beside levels that measure nothing."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun
from sm121.plugin import answers, oracle_answers
from sm121.plugin.stash import LEVEL


@pytest.fixture
def run(monkeypatch):
    """A run of plan quick: a smoke test, the test of the prompts, and a performance test."""
    started = Mock()
    monkeypatch.setattr(oracle_answers, "OracleProcess", started)
    monkeypatch.setattr(oracle_answers, "rounding_of", lambda *_: "checkpoint")
    monkeypatch.setattr(oracle_answers.oracle_tolerance, "checkpoint_of", lambda *_: "folder")
    monkeypatch.setattr(oracle_answers.oracle_making, "kept_prompts", lambda *_: None)
    config = pytest.Stash()
    items = []
    for level, fixture in (
        ("smoke", "server"),
        ("correctness", "prompt_reference"),
        ("performance", "performance"),
    ):
        item = SimpleNamespace(
            config=SimpleNamespace(stash=config), stash={LEVEL: level}, fixturenames=(fixture,)
        )
        item.funcargs = {"server": "a server"}
        items.append(item)
    for item in items:
        item.session = SimpleNamespace(items=items)
    settings = Mock(root=Path(), plan="quick", worker=None, judging=SimpleNamespace(certify=False))
    shipped = profile.load("sm121-gpt-oss-120b")
    session = SimpleNamespace(settings=settings, run=SimpleNamespace(profile=shipped))
    return SimpleNamespace(items=items, session=session, started=started, settings=settings)


def test_the_process_runs_from_the_ready_server_to_the_first_measurement(run):
    smoke, correctness, performance = run.items
    smoke.funcargs = {}
    oracle_answers.begin_beside(smoke, run.session)
    assert not run.started.called
    smoke.funcargs = {"server": "a server"}
    for _ in range(2):
        oracle_answers.begin_beside(smoke, run.session)
    assert run.started.call_count == 1
    assert run.started.call_args.args[3] == ("mixture of 300",)
    for item in (smoke, correctness):
        oracle_answers.end_with_its_levels(item)
    assert not run.started.return_value.close.called
    oracle_answers.end_with_its_levels(performance)
    assert run.started.return_value.close.call_count == 1


@pytest.mark.parametrize("why", ["another plan", "deselected", "certificate", "worker", "cannot"])
def test_no_process_starts_without_need(run, why, monkeypatch):
    if why == "another plan":
        run.settings.plan = "merge"
    elif why == "deselected":
        run.items[1].fixturenames = ()
    elif why == "certificate":
        run.settings.judging.certify = True
    elif why == "worker":
        run.settings.worker = "gw0"
    else:
        correctness = run.session.run.profile.correctness
        changed = correctness.model_copy(update={"cannot": {"oracle": "no oracle"}})
        run.session.run.profile = run.session.run.profile.model_copy(
            update={"correctness": changed}
        )
    oracle_answers.begin_beside(run.items[0], run.session)
    assert not run.started.called


def test_a_process_that_failed_is_not_computed_again(run):
    process = run.started.return_value
    process.wait.side_effect = NotRun("the oracle's process: expected an end with status 0")
    oracle_answers.begin_beside(run.items[0], run.session)
    with pytest.raises(NotRun):
        oracle_answers._wait(run.items[1].config, run.session)
    assert process.close.call_count == 1


def test_too_little_memory_is_not_run(run, monkeypatch):
    """The floor of the GB10's profile is 4 GiB, below which the suite ends the run."""
    memory = SimpleNamespace(available=6.5 * 2**30)
    monkeypatch.setattr(oracle_answers.psutil, "virtual_memory", lambda: memory)
    oracle_answers.begin_beside(run.items[0], run.session)
    assert not run.started.called
    with pytest.raises(NotRun, match=r"at least 7 GiB of available memory .*, got 6\.5 GiB"):
        oracle_answers._require_memory(run.session.run.profile)


def test_an_unknown_prompt_in_a_plan_is_refused():
    shipped = profile.load("sm121-gpt-oss-120b")
    row = shipped.plans["quick"].model_copy(update={"oracle_prompts": ("no such",)})
    wrong = shipped.model_copy(update={"plans": {**shipped.plans, "quick": row}})
    with pytest.raises(UsageError, match=r"plans\.quick\.oracle_prompts: expected .*, got no such"):
        answers._refuse_wrong_profile(wrong)
