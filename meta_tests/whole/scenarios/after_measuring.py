"""A test that runs after all levels that measure; unit/machine/test_box_of_a_run.py starts it."""

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.applies_to("cpu", "gpu")]


def test_later(server):
    assert server
