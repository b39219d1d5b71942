"""Kernel providers by their names for ``--kernel-provider``.

A provider's module is imported only when the provider is loaded, so that the list of names does not
need torch.
"""

import importlib
import importlib.util
from typing import Any

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun


class _Provider(DataTable):
    #: A module of this package.
    module: str
    #: The class or function in it that makes the provider.
    maker: str
    #: The packages with the kernels that the provider calls, directly or through another package.
    packages: tuple[str, ...] = ()


_PROVIDERS = data_file.load_key("kernels/providers.toml", "provider", dict[str, _Provider])
#: The names of the suite's own providers.
NAMES: tuple[str, ...] = tuple(_PROVIDERS)


def packages(name: str) -> tuple[str, ...]:
    """Return the packages whose kernels a provider of the suite calls.

    Args:
        name: One of `NAMES`.

    Raises:
        KeyError: The suite has no provider of this name.
    """
    return _PROVIDERS[name].packages


def check_name(name: str) -> None:
    """Check the name of a provider without importing it.

    Args:
        name: One of `NAMES`, or MODULE:ATTR of a module that can be found.

    Raises:
        UsageError: The name is neither.
    """
    if name in _PROVIDERS:
        return
    module, separator, attribute = name.partition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not (separator and attribute.isidentifier() and is_module):
        raise UsageError(
            f"--kernel-provider {name}: expected one of {', '.join(NAMES)}, or MODULE:ATTR"
        )
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        raise UsageError(
            f"--kernel-provider {name}: {module} cannot be imported: {error}"
        ) from error
    if spec is None:
        raise UsageError(
            f"--kernel-provider {name}: expected an importable module, got none named {module}"
        )


def load(name: str) -> Any:
    """Import a provider and return it.

    Args:
        name: One of `NAMES`, or MODULE:ATTR; then the provider is that object itself.

    Raises:
        UsageError: There is no such provider.
        NotRun: A package that the provider needs is not installed here.
    """
    check_name(name)
    if name in _PROVIDERS:
        return _make(name)
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--kernel-provider {name}: {module} cannot be imported: {error}"
        ) from error
    if not hasattr(loaded, attribute):
        raise UsageError(
            f"--kernel-provider {name}: expected {attribute} in {module}, got no such attribute"
        )
    return getattr(loaded, attribute)


def _make(name: str) -> Any:
    """Make one of the suite's own providers."""
    row = _PROVIDERS[name]
    try:
        module = importlib.import_module(f"sm121.kernels.{row.module}")
        return getattr(module, row.maker)()
    except ModuleNotFoundError as error:
        raise NotRun(f"provider {name} needs {error.name}, which is not installed") from error
