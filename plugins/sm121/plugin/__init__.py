"""The pytest plugin.

The suite's pytest.ini loads the plugin; a project with another ini file loads it in its root
``conftest.py``. The module `spine` contains every hook, in the order of events. The other modules
that are loaded here contain fixtures. The plugin does nothing unless pytest collects tests with a
level marker.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: The plugin with the option --arch and the markers of architectures.
_ARCHITECTURES = "pytest_gpu_arch"
MODULES = (
    "sm121.plugin.spine",
    "sm121.plugin.fixtures",
    "sm121.plugin.answers",
    "sm121.plugin.golden_answers",
    "sm121.plugin.oracle_answers",
    "sm121.plugin.kernels",
    "sm121.plugin.benchmarks",
    "sm121.plugin.performance",
    "sm121.plugin.matrix",
)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the modules directly; for ``pytest_plugins``, pytest would search all packages.

    Args:
        pluginmanager: The plugin manager of pytest.

    Raises:
        pytest.UsageError: The command line disables the plugin that adds ``--arch``.
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
    """Exclude the imported modules from garbage collection, which saves half a second per run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
