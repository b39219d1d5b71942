"""Warnings of other packages: shown, and never errors in a run of the levels.

A project's own ``filterwarnings = error`` is about its own code. A warning of torch or of NVML's
bindings at their import is no finding about the server that is judged.
"""

import contextlib
import warnings
from collections.abc import Iterator

import pytest

#: The filters of a test of a level; later ones win. An exception in a thread is no warning: the
#: thread no longer watches. A test that could not measure has a reason of its own.
_IN_TESTS = (
    "default",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore:Benchmark fixture was not used at all:pytest_benchmark.logger.PytestBenchmarkWarning",
)


@contextlib.contextmanager
def only_warn() -> Iterator[None]:
    """Let no warning be an error while the block lasts, whatever the configuration says."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def only_warn_from_now_on(config: pytest.Config) -> None:
    """Do the same for all hooks, except those around which pytest sets its filters anew.

    Args:
        config: pytest's. The filters are put back at its end.
    """
    filters = contextlib.ExitStack()
    filters.enter_context(only_warn())
    config.add_cleanup(filters.close)


def only_warn_in(item: pytest.Item) -> None:
    """Do the same for a test of a level.

    Args:
        item: The test, which is marked.
    """
    for line in _IN_TESTS:
        item.add_marker(pytest.mark.filterwarnings(line))
