"""pytest plugin: provide tests with an LLM server, which is started, monitored and stopped.

`plugin` has the options and hooks, `fixtures` has the fixtures. No module of `sm121` is imported
before a test uses one of the fixtures.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class ServerFailed(Exception):
    """A server did not start, died, or did not stop cleanly. The message has the cause."""


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks and the fixtures."""
    pluginmanager.import_plugin("pytest_llm_server.plugin")
    pluginmanager.import_plugin("pytest_llm_server.fixtures")
