"""``--ab A B``: the fixture that starts both sides in turns, for the regression level to judge."""

from __future__ import annotations

import functools

import pytest

from sm121.core.verdict import NotRun
from sm121.engines.attached import attach
from sm121.measure.plan import Plan
from sm121.performance.box import RunBox
from sm121.plugin.options import SETTINGS
from sm121.plugin.run import Run
from sm121.regression.ab_run import AbRun


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ab_run: is there only with --ab A B")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --ab there is no such comparison: its tests are no gap in a certificate."""
    if config.stash[SETTINGS].ab is None:
        items[:] = [item for item in items if item.get_closest_marker("ab_run") is None]


@pytest.fixture(scope="session")
def ab_run(conformance: Run, box: RunBox) -> AbRun:
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
