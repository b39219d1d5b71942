"""Tests that a certificate does not need; meta_tests/unit/run/test_record.py starts them."""

import pytest

from sm121.core.verdict import Inapplicable

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_pass(server):
    pass


@pytest.mark.applies_to("sm121")
def test_of_another_architecture():
    raise AssertionError("must not run here")


def test_of_what_is_not_claimed():
    raise Inapplicable("the provider does not declare it")


@pytest.mark.slow("a meta test")
def test_slow():
    raise AssertionError("must not run without --slow")
