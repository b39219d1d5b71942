"""What pytest loads of an installed suite: nothing, until a project asks for it.

A project's pytest.ini says ``sm121 = true``, or its command line ``-p sm121.plugin``. Everybody
else's runs keep their options, their header and their start-up time.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("sm121", "load the SM121 conformance plugin set", type="bool", default=False)


@pytest.hookimpl(tryfirst=True)  # before conftest.py files, which may use what it provides
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.getini("sm121"):
        early_config.pluginmanager.import_plugin("sm121.plugin")
