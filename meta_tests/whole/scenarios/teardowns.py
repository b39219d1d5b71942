"""A skipped test whose fixture then fails, a failed test whose fixture is then skipped, and a
strict xfail that passes."""

import pytest

from sm121.core.verdict import NotRun

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


@pytest.fixture
def failing_teardown():
    yield
    raise RuntimeError("the teardown of a fixture fails")


def test_skipped_then_failed(failing_teardown):
    raise NotRun("nothing to see")


def test_passes():
    pass


@pytest.mark.xfail(reason="known", strict=True)
def test_passes_unexpectedly():
    pass


@pytest.fixture
def skipping_teardown():
    yield
    raise NotRun("nothing to take down")


def test_failed_then_skipped(skipping_teardown):
    raise AssertionError("expected 4, got 5")
