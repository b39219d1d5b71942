"""pytest plugin: a test holds samples against a limit and against a stored run, by intervals.

`plugin` has the hooks. This module imports neither pytest nor them: PYTEST_DONT_REWRITE.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks, and pytest-benchmark where pytest does not load it by itself."""
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        pluginmanager.import_plugin("benchmark", consider_entry_points=True)
    pluginmanager.import_plugin("pytest_bench_gate.plugin")
