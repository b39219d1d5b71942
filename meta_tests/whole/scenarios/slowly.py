"""A test that takes as long as a compilation, and a second test after it."""

import time

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.parametrize("case", ["a", "b"])
def test_that_takes_long(case):
    time.sleep(1.5 if case == "a" else 0)
