"""What pytest loads of an installed suite: nothing, until a project asks for it. A project's
pytest.ini says ``sm121 = true``, or its command line ``-p sm121.plugin``. Everybody else's runs
keep their options, their header and their start-up time. It stands outside of `sm121.plugin`, which
pytest must be the first to import."""

import itertools
from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let pytest.ini ask."""
    parser.addini("sm121", "load the SM121 conformance plugin set", type="bool", default=False)


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the plugin set if it does; the options are parsed after this."""
    _refuse_a_space(early_config, args)
    if early_config.getini("sm121"):
        early_config.pluginmanager.import_plugin("sm121.plugin")


def _refuse_a_space(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Refuse ``--report-dir FOLDER`` where pytest has taken the folder for one of tests: it looks
    for pytest.ini from there on, before it knows the suite's options."""
    folder = config.invocation_params.dir
    settings = folder / "pytest.ini"
    if config.inipath == settings or not settings.is_file():
        return
    from sm121.core import own_options  # only here: see above

    for option, value in itertools.pairwise(arguments):
        if option in own_options.every() and (folder / value).exists():
            raise pytest.UsageError(
                f"{option} {value}: expected {option}={value}, got a space. pytest takes a path "
                "behind a space for one of tests, and does not read pytest.ini here. Write ="
            )
