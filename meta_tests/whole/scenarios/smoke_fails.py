"""A smoke level that fails, and tests after it."""

import pytest

pytestmark = pytest.mark.applies_to("cpu", "gpu")


@pytest.mark.correctness
def test_after_the_smoke_level():
    raise AssertionError("must not run when smoke has failed")


@pytest.mark.smoke
def test_smoke():
    raise AssertionError("expected a start, got none")
