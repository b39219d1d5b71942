"""Failures that a waiver names; meta_tests/unit/run/test_record.py starts them."""

import pytest

from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive, Invalid
from sm121.measure.measurement import Measurement
from sm121.stress.checks import Fault, UnderLoad

pytestmark = [pytest.mark.performance, pytest.mark.applies_to("cpu", "gpu")]


def test_wrong():
    raise AssertionError("expected right, got wrong")


def test_invalid():
    raise Invalid("a dirty cache")


def test_inconclusive():
    raise Inconclusive("noise")


@pytest.mark.never_waived("the kernel path")
def test_path():
    raise AssertionError("expected MARLIN, got TRITON")


def test_cell():
    raise Unmet(Fact("it lives", "CRASH: it died"), never_waived="a crash")


def test_nothing_measured(record_metric):
    raise AssertionError("the server hung up before anything was measured")


def test_rate_without_a_number(record_metric):
    samples = [float("inf")] * 12
    record_metric(Measurement(name="ttft_p99", unit="ms", higher_is_better=False, quantile=0.99,
                              samples=samples))  # fmt: skip
    raise AssertionError("expected a number, got none")


@pytest.fixture
def wrong_teardown():
    yield
    raise AssertionError("the teardown too")


def test_invalid_then_wrong(wrong_teardown):
    raise Invalid("a dirty cache")


def test_crash():
    raise UnderLoad("ten requests", [Fault("connection", "the server is gone")], 10)
