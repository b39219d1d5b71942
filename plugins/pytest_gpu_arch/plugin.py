"""The hooks of the plugin, in pytest's order."""

from collections.abc import Generator

import pytest

from pytest_gpu_arch import markers, options, status, target


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--arch``. Report in one line that another plugin has an option of the same name."""
    try:
        options.add_options(parser.getgroup("gpu_arch", "architecture").addoption)
    except ValueError as error:
        line = options.conflict(error)
        if line is None:
            raise
        raise pytest.UsageError(line) from error


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests() -> Generator[None, object, object]:
    """Report in one line that a conftest.py, or its plugin, has an option of the same name."""
    try:
        return (yield)
    except ValueError as error:
        line = options.conflict(error)
        if line is None:
            raise
        raise pytest.UsageError(line) from error


def pytest_exception_interact(
    node: pytest.Collector | pytest.Item,
    call: pytest.CallInfo[object],
    report: pytest.CollectReport | pytest.TestReport,
) -> None:
    """Report in one line that a conftest.py in a subfolder has an option of the same name."""
    if not isinstance(report, pytest.CollectReport) or call.excinfo is None:
        return
    line = options.conflict(call.excinfo.value)
    if line is None:
        return
    if hasattr(node.config, "workerinput"):  # xdist shows only errors of reports
        report.longrepr = line
        return
    raise pytest.UsageError(line) from call.excinfo.value


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers. Reject an invalid ``--arch``."""
    for line in markers.lines():
        config.addinivalue_line("markers", line)
    target.named(config)
    status.watch(config)


@pytest.hookimpl(trylast=True)  # after -m and -k, because deselected tests need no GPU detection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that do not apply to the target."""
    markers.skip_elsewhere(config, items)
