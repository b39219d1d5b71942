"""Kernel providers by the name that ``--kernel-provider`` takes. A provider is imported only when
it is asked for: the list is there without torch."""

import importlib
import importlib.util
from typing import Any

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun


class _Provider(DataTable):
    #: Of this package, and what of it makes the provider.
    module: str
    maker: str
    #: What its kernels come from: the provider's package, and what that calls in turn.
    packages: tuple[str, ...] = ()


_PROVIDERS = data_file.load_key("kernels/providers.toml", "provider", dict[str, _Provider])
NAMES: tuple[str, ...] = tuple(_PROVIDERS)


def packages(name: str) -> tuple[str, ...]:
    """Whose kernels a provider of the suite calls. Raises KeyError for another provider."""
    return _PROVIDERS[name].packages


def check_name(name: str) -> None:
    """Whether a name can be one of a provider's, before anything is imported. Raises UsageError:
    neither a known name nor MODULE:ATTR of a module that is there."""
    if name in _PROVIDERS:
        return
    module, separator, attribute = name.partition(":")
    if not (
        separator and attribute.isidentifier() and all(p.isidentifier() for p in module.split("."))
    ):
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
            f"--kernel-provider {name}: expected an importable module, there is no {module}"
        )


def load(name: str) -> Any:
    """The provider of that name; of MODULE:ATTR the object itself. Raises UsageError: no such
    provider; NotRun: what it is made of is not installed here."""
    check_name(name)
    if name in _PROVIDERS:
        try:
            row = _PROVIDERS[name]
            return getattr(importlib.import_module(f"sm121.kernels.{row.module}"), row.maker)()
        except ModuleNotFoundError as error:
            raise NotRun(f"provider {name} needs {error.name}, which is not installed") from error
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--kernel-provider {name}: {module} cannot be imported: {error}"
        ) from error
    if not hasattr(loaded, attribute):
        raise UsageError(f"--kernel-provider {name}: expected {attribute} in {module}, not there")
    return getattr(loaded, attribute)
