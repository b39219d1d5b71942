"""A server that does not tell its metrics; started by unit/engines/test_capabilities.py."""

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_not_counted(prefix_cache_hits):
    assert prefix_cache_hits() is None
