"""A server without metrics; unit/engines/test_capabilities.py starts it."""

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_not_counted(prefix_cache_hits):
    assert prefix_cache_hits() is None
