"""Tests for several workers; meta_tests/unit/plugin/test_workers.py starts them."""

import os
import signal

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu", "gpu")]


@pytest.fixture
def kernels():
    """A replacement for a fixture that needs no server."""


def test_passes(conformance):
    pass


def test_fails(conformance):
    raise AssertionError("expected 1, got 2")


def test_is_timed(kernels, benchmark):
    raise AssertionError("must not run beside other workers")


@pytest.mark.applies_to("sm121")
def test_is_not_for_this(kernels):
    raise AssertionError("must not run here")


def test_kills_its_worker(kernels):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("n", range(6))
def test_spread(kernels, n):
    pass


@pytest.mark.parametrize("n", range(6))
def test_in_order(conformance, n):
    pass


def test_kills_among_others(conformance):
    os.kill(os.getpid(), signal.SIGKILL)


def test_runs_all_the_same(conformance):
    pass
