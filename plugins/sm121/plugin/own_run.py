"""Finds out whether `sm121 run` started pytest."""

import pytest

from sm121.core import own_tests


def is_own_run(config: pytest.Config) -> bool:
    """Whether ``sm121 run`` started pytest.

    Args:
        config: The configuration of pytest.
    """
    return config.inipath == own_tests.settings()
