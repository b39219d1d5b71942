"""The options, and the hooks before a run begins. `run` has the hooks of a run."""

from collections.abc import Generator

import pytest

from pytest_llm_server import options, run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options whose names are the plugin's own."""
    options.add(parser)


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost: then others refuse unknown options
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, object, object]:
    """Add ``--base-url`` when every other plugin and conftest.py has added its options."""
    try:
        result = yield
    except ValueError as error:
        line = options.of_a_conftest(error)
        if line is None:
            raise
        raise pytest.UsageError(line) from error
    options.add_base_url(early_config, parser)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Begin the run."""
    run.begin(config)
