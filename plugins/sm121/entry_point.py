"""The entry point of pytest: it loads the plugin set only for a project that enables it.

A project enables it by ``sm121 = true`` in its pytest.ini, or by ``-p sm121.plugin``. Runs of other
projects keep their options, their header and their start-up time. This module is outside of
`sm121.plugin`, because pytest must be the first to import that package.
"""

import itertools
from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting of pytest.ini that enables the plugin set."""
    parser.addini("sm121", "load the SM121 conformance plugin set", type="bool", default=False)


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the plugin set if pytest.ini enables it, before the options are parsed."""
    _refuse_a_space(early_config, args)
    if early_config.getini("sm121"):
        early_config.pluginmanager.import_plugin("sm121.plugin")


def _refuse_a_space(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Refuse ``--report-dir FOLDER`` if pytest takes the folder for a path of tests.

    pytest looks for pytest.ini in that folder, before the suite's options are known.
    """
    folder = config.invocation_params.dir
    settings = folder / "pytest.ini"
    if config.inipath == settings or not settings.is_file():
        return
    from sm121.core import own_tests  # other runs do not import the suite
    from sm121.session import own_options

    if config.inipath == own_tests.settings():  # `sm121 run` names the file
        return
    for name, value in itertools.pairwise(arguments):
        option = own_options.every().get(name)
        if option is not None and option.nargs != 0 and (folder / value).exists():
            raise pytest.UsageError(
                f"{name} {value}: expected {name}={value}, got a space. pytest takes a path after "
                "a space for a path of tests, and then does not read pytest.ini here. Write ="
            )
