"""A test that exists only if SM121_META_OLD is set, and others that always exist."""

import os

import pytest


@pytest.mark.smoke
@pytest.mark.applies_to("cpu")
def test_stays():
    pass


@pytest.mark.correctness
@pytest.mark.applies_to("cpu")
def test_stays_too():
    pass


if os.environ.get("SM121_META_OLD"):

    @pytest.mark.correctness
    @pytest.mark.applies_to("cpu")
    def test_old():
        pass
