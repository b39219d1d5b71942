"""pytest plugin: tests get a server of a language model, which is started, watched and stopped.

`plugin` has the options and the hooks, `fixtures` the fixtures. Nothing of `sm121` is imported
before a test uses one of the fixtures.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class ServerFailed(Exception):
    """A server did not start, died, or left something behind. The message has the cause."""


def pytest_addoption(pluginmanager: "pytest.PytestPluginManager") -> None:
    """Load the hooks and the fixtures."""
    pluginmanager.import_plugin("pytest_llm_server.plugin")
    pluginmanager.import_plugin("pytest_llm_server.fixtures")
