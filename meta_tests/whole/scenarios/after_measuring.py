"""A test that comes after all levels that measure; started by unit/machine/test_box_of_a_run.py."""

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.applies_to("cpu", "gpu")]


def test_later(server):
    assert server
