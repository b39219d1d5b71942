"""Tests that note when they ran, two of them measuring; started by meta_tests/test_turns.py."""

import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.applies_to("cpu", "gpu")


@pytest.fixture
def noted(request):
    begin = time.monotonic()
    yield
    with Path(os.environ["TURNS"]).open("a") as file:
        file.write(f"{begin} {time.monotonic()} {request.node.name}\n")


@pytest.mark.correctness
@pytest.mark.parametrize("number", range(8))
def test_shares(noted, number):
    time.sleep(float(os.environ.get("SHARES_S", "0.25")))


@pytest.mark.stress
@pytest.mark.parametrize("number", range(2))
def test_measures(noted, number):
    time.sleep(0.5)


@pytest.mark.performance
def test_measures_too(noted):
    time.sleep(0.5)
