"""pytest plugin: tests name the architecture that they need, and are skipped elsewhere.

`plugin` has the hooks. This module imports neither pytest nor them, so that `names` and `detection`
can be imported by a program without pytest, and before pytest starts: PYTEST_DONT_REWRITE.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks."""
    pluginmanager.import_plugin("pytest_gpu_arch.plugin")
