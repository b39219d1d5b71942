"""Tests that print the server's key; meta_tests/whole/test_hostile_surroundings.py starts them."""

import logging

import pytest

from sm121.core.verdict import NotRun

pytestmark = [pytest.mark.smoke, pytest.mark.applies_to("cpu", "gpu")]


def test_tells(conformance):
    key = conformance.settings.attached.api_key
    print(f"printed {key}")
    logging.getLogger("theirs").warning("logged %s", key)
    assert key == f"Incorrect API key: {key}", f"got {key}"


def test_skips(conformance):
    raise NotRun(f"refused {conformance.settings.attached.api_key}")
