"""Skip tests that need a newer release of a package than the oldest one that pyproject.toml allows.

`make oldest` runs the tests with the oldest releases.
"""

import importlib.util
from importlib import metadata

import pytest
from packaging.version import Version


def needs(package: str, oldest: str, why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if an older release of a package is installed.

    Args:
        package: Name of the package, as pip knows it.
        oldest: The first release that the test is about.
        why: How older releases differ.
    """
    installed = metadata.version(package)
    older = Version(installed) < Version(oldest)
    return pytest.mark.skipif(older, reason=f"{package} {installed}: {why}")


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
