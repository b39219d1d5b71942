"""pytest plugin: judge a benchmark's median, with its interval, by a limit and by a stored run.

The hooks are in `plugin`. This module imports neither pytest nor the hooks. The marker
PYTEST_DONT_REWRITE disables pytest's assertion rewriting for this module.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks, and pytest-benchmark if pytest does not autoload plugins."""
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        pluginmanager.import_plugin("benchmark", consider_entry_points=True)
    pluginmanager.import_plugin("pytest_bench_gate.plugin")
