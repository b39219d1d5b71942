"""The experts' backends that `sm121 profile` requires, if the profile has no ``path.moe``."""

import itertools
from collections.abc import Mapping, Sequence

from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import Configuration
from sm121.core.profile import Profile
from sm121.engines import requested
from sm121.evidence import kernel_names
from sm121.evidence.kernel_path import KernelPath


def named(chosen: Profile, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the experts' backends that a start requests by name and whose kernels are known.

    Args:
        chosen: The profile, for its engine.
        arguments: The arguments of the start.
        environment: The environment variables of the start.
    """
    found = requested.values_of_start(chosen.engine.name, "moe", arguments, environment)
    return [value for value in found if _has_kernels(value)]


def of_any_release(configuration: Configuration) -> list[str]:
    """Return the experts' backends that a configuration requires of its releases and builds.

    Args:
        configuration: The configuration, with its settings for releases.

    Returns:
        The backends; empty if it requires the same ones of all releases.
    """
    required = [row.path.moe for row in configuration.settings if row.path.moe is not None]
    if len(set(required)) < 2:
        return []
    return list(dict.fromkeys(itertools.chain(*required)))


def logged(configuration: ServerConfiguration, path: KernelPath) -> list[str]:
    """Return the experts' backend in the log if each request accepts it and its kernels are known.

    If no argument requests a backend, the engine chooses one, and any backend satisfies that.

    Args:
        configuration: The configuration of the server.
        path: The kernel path in its log.
    """
    if path.moe is None or not _has_kernels(path.moe):
        return []
    patterns = requested.patterns(configuration).get("moe", [])
    satisfied = all(pattern.fullmatch(path.moe) for pattern in patterns)
    return [path.moe] if satisfied else []


def _has_kernels(backend: str) -> bool:
    """Return whether the suite knows kernels that only this backend runs."""
    return any(entry.belongs_to(backend) for entry in kernel_names.load_names().name)
