"""Warnings of other people's packages: shown, and never errors in a run of the levels. A project's
own ``filterwarnings = error`` is about its own code. What torch or NVML's bindings warn of when
they are imported is no finding about the server that is judged."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest

#: For a test of a level, the later ones winning. An exception in a thread is no warning: what it
#: was to watch is not watched any more. A test that could not measure says why itself.
_IN_TESTS = (
    "default",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore:Benchmark fixture was not used at all:pytest_benchmark.logger.PytestBenchmarkWarning",
)


@contextlib.contextmanager
def only_warn() -> Iterator[None]:
    """No warning is an error in here, whatever the configuration says."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def only_warn_from_now_on(config: pytest.Config) -> None:
    """The same for all hooks, but for those around which pytest sets its filters anew."""
    filters = contextlib.ExitStack()
    filters.enter_context(only_warn())
    config.add_cleanup(filters.close)


def only_warn_in(item: pytest.Item) -> None:
    """The same for a test of a level."""
    for line in _IN_TESTS:
        item.add_marker(pytest.mark.filterwarnings(line))
