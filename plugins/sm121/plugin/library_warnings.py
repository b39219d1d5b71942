"""Keeps warnings of other packages from failing tests of the levels. They are still shown.

A project sets ``filterwarnings = error`` for its own code. A warning from the import of torch or of
the NVML bindings says nothing about the server.
"""

import contextlib
import warnings
from collections.abc import Iterator

import pytest

#: The warning filters of a test of a level; later filters win. An exception in a thread remains an
#: error, because that thread no longer watches the server. A test that could not measure reports
#: its own reason, so pytest-benchmark's warning is not needed.
_IN_TESTS = (
    "default",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore:Benchmark fixture was not used at all:pytest_benchmark.logger.PytestBenchmarkWarning",
)


@contextlib.contextmanager
def only_warn() -> Iterator[None]:
    """Treat no warning as an error within the block, regardless of the configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def only_warn_from_now_on(config: pytest.Config) -> None:
    """Treat no warning as an error in any hook, except where pytest sets its own filters.

    Args:
        config: The configuration of pytest. The old filters are restored when pytest ends.
    """
    filters = contextlib.ExitStack()
    filters.enter_context(only_warn())
    config.add_cleanup(filters.close)


def only_warn_in(item: pytest.Item) -> None:
    """Treat no warning as an error in a test of a level, except for those in `_IN_TESTS`.

    Args:
        item: The test. It gets marks.
    """
    for line in _IN_TESTS:
        item.add_marker(pytest.mark.filterwarnings(line))
