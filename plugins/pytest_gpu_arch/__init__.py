"""pytest plugin: markers for the GPU architecture that a test needs. Elsewhere it is skipped.

The hooks are in `plugin`. This module imports neither pytest nor the hooks, so that a program can
import `names` and `detection` without pytest, or before pytest starts. The marker
PYTEST_DONT_REWRITE disables pytest's assertion rewriting for this module.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks."""
    pluginmanager.import_plugin("pytest_gpu_arch.plugin")
