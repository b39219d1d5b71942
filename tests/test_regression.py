"""Regression: no metric is worse than in stored runs of the same machine, profile, plan and path.

--benchmark-autosave adds this run to the history, which is pytest-benchmark's storage.
--benchmark-compare=NUM names the stored run. This level measures nothing itself: it compares the
metrics that the other levels measured in this run.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.regression, pytest.mark.applies_to("cpu", "gpu")]


def test_no_metric_is_missing(measured_history):
    """Each metric of the stored runs is measured in this run."""
    missing = measured_history.missing
    assert not missing, "; ".join(missing)


def test_no_metric_is_worse(measured_history):
    """No metric is worse than in the last runs by more than its threshold and the noise."""
    measured_history.compared()


def test_no_level_came_down(measured_history):
    """No metric got worse over the history, not even in small steps."""
    measured_history.levels_held()


@pytest.mark.ab_run
@pytest.mark.timeout(0)  # runs as many starts as a decision needs, each with its own time limit
def test_b_is_not_worse_than_a(ab_run):
    """With --ab A B, no metric of B is worse than A's by more than its threshold. The servers of A
    and B are started alternately."""
    ab_run.judge()


@pytest.mark.ab_run
@pytest.mark.timeout(0)
def test_the_hypothesis_holds(ab_run):
    """With --hypothesis FILE, B improves on A as the file predicts. The suite writes a table of the
    predictions and results to review.md."""
    ab_run.review()
