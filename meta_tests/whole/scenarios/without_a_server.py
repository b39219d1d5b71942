"""Tests of the correctness level that need no server and take one second each."""

import time

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.parametrize("number", range(8))
def test_lasts_a_second(number):
    time.sleep(1.0)
