"""Fixtures for the regression tests: the stored runs, and A and B started in turns."""

from __future__ import annotations

import functools

import pytest

from sm121.core.verdict import NotRun
from sm121.engines.attached import attach
from sm121.measure.plan import Plan
from sm121.performance.box import RunBox
from sm121.plugin.benchmarks import HISTORY, history_of
from sm121.regression.ab_run import AbRun
from sm121.regression.measured import MeasuredHistory
from sm121.session.session import Session


@pytest.fixture(scope="session")
def measured_history(conformance: Session, pytestconfig: pytest.Config) -> MeasuredHistory:
    """This run's measurements and the stored ones that they can be compared with."""
    return pytestconfig.stash.setdefault(HISTORY, history_of(pytestconfig, conformance))


@pytest.fixture(scope="session")
def ab_run(conformance: Session, box: RunBox) -> AbRun:
    """A against B, started in turns."""
    assert box is not None  # read before the first start
    settings, profile = conformance.settings, conformance.profile
    if settings.ab is None:
        raise NotRun("nothing to compare: give --ab A B")
    attach_to = functools.partial(
        attach,
        api_key=settings.api_key,
        served_name=settings.served_name,
        default_name=profile.model.served_name,
        log=None,
    )
    return AbRun(
        conformance,
        settings.ab,
        Plan.of(profile, depths=settings.depths, rounds=settings.rounds),
        attach_to,
        pairs=settings.ab_pairs,
        hypothesis=settings.hypothesis,
        obstacle=conformance.target.obstacle,
    )
