"""A test that exceeds its time limit; meta_tests/whole/test_order_of_events.py starts it."""

import time

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.timeout(1)
def test_waits(server):
    time.sleep(600)
