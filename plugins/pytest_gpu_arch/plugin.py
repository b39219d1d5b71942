"""The hooks of the plugin, in pytest's order."""

from collections.abc import Generator

import pytest

from pytest_gpu_arch import markers, options, status, target


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--arch``."""
    options.add_options(parser.getgroup("gpu_arch", "architecture").addoption)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests() -> Generator[None, object, object]:
    """Say in one line that a conftest.py has an option of the same name."""
    try:
        return (yield)
    except ValueError as error:  # of argparse
        if "'--arch'" not in str(error):
            raise
        raise pytest.UsageError(
            "--arch: a conftest.py adds an option of this name, too. -p no:pytest_gpu_arch leaves "
            "out the plugin that has it"
        ) from error


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers. A wrong ``--arch`` is refused here."""
    for line in markers.lines():
        config.addinivalue_line("markers", line)
    target.named(config)
    status.watch(config)


@pytest.hookimpl(trylast=True)  # after -m and -k: a test that they remove looks for no GPU
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that do not apply to the target."""
    markers.skip_elsewhere(config, items)
