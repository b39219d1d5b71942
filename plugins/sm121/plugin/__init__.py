"""The pytest plugin.

pytest.ini names it, or a root ``conftest.py`` if another ini is read. `spine` has every hook, in
the order of events. The other modules that are named here have fixtures. The plugin does nothing
unless tests with a level marker are collected.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: The plugin that has --arch and the markers of architectures.
_ARCHITECTURES = "pytest_gpu_arch"
MODULES = (
    "sm121.plugin.spine",
    "sm121.plugin.fixtures",
    "sm121.plugin.answers",
    "sm121.plugin.kernels",
    "sm121.plugin.benchmarks",
    "sm121.plugin.performance",
    "sm121.plugin.matrix",
)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the modules: pytest would look up ``pytest_plugins`` in the metadata of all packages.

    Args:
        pluginmanager: pytest's.

    Raises:
        pytest.UsageError: The command line leaves out the plugin that has ``--arch``.
    """
    if pluginmanager.is_blocked(_ARCHITECTURES):
        raise pytest.UsageError(
            f"-p no:{_ARCHITECTURES}: the suite needs this plugin for --arch. Leave it in, or "
            "leave out the suite, too"
        )
    pluginmanager.import_plugin(_ARCHITECTURES)
    with _kept_for_good():
        for name in MODULES:
            pluginmanager.import_plugin(name)


@contextmanager
def _kept_for_good() -> Iterator[None]:
    """Leave what is imported out of every collection of garbage: half a second of each run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
