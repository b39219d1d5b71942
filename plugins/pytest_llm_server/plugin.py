"""The options, and the hooks before a run begins. The hooks during a run are in `run`."""

from collections.abc import Generator

import pytest

from pytest_llm_server import options, run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and settings. Report in one line that another plugin has such an option."""
    try:
        options.add(parser)
    except ValueError as error:
        line = options.conflict(error)
        if line is None:
            raise
        raise pytest.UsageError(line) from error


@pytest.hookimpl(wrapper=True, trylast=True)  # before pytest rejects unknown options
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, object, object]:
    """Add ``--base-url`` after all other plugins and conftest.py files have added their options."""
    try:
        result = yield
    except ValueError as error:
        line = options.conflict(error)
        if line is None:
            raise
        raise pytest.UsageError(line) from error
    options.add_base_url(early_config, parser)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Register the hooks of the run."""
    run.begin(config)
