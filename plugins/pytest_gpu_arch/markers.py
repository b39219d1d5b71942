"""Read the architecture markers, and skip the tests that do not apply to the target."""

from collections.abc import Iterable

import pytest

from pytest_gpu_arch import names, target
from pytest_gpu_arch.target import Target

_MARKERS = frozenset({*names.NAMES, names.ANY_GPU})
#: The stash key with which another plugin marks a test that it skips itself.
LEFT_ALONE = pytest.StashKey[bool]()


def lines() -> list[str]:
    """Return the markers' descriptions for ``pytest --markers``."""
    gpus = [f"{name}: needs a GPU of {name}; skipped elsewhere" for name in names.GPUS]
    return [
        "cpu: needs a machine without a GPU; skipped elsewhere",
        *gpus,
        "gpu: needs a GPU of any architecture; skipped elsewhere",
    ]


def of(item: pytest.Item) -> frozenset[str]:
    """Return the architecture markers of a test.

    Markers of the test itself override those of its class, which override those of its module.

    Args:
        item: The test.

    Returns:
        Some of `names.NAMES` and `names.ANY_GPU`; empty if the test runs on any machine.
    """
    for node in reversed(item.listchain()):
        found = _MARKERS & {mark.name for mark in node.own_markers}
        if found:
            return found
    return frozenset()


def skip_elsewhere(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip the tests that do not apply to the target.

    The GPU is only detected if a test has a marker.

    Args:
        config: The configuration of the run.
        items: The selected tests.
    """
    for item in items:
        wanted = of(item)
        if not wanted or item.stash.get(LEFT_ALONE, False):
            continue
        reason = why_not(wanted, target.of(config))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not(wanted: frozenset[str], chosen: Target) -> str | None:
    """Return why a test is skipped; None if it runs.

    Args:
        wanted: The architecture markers of the test.
        chosen: The target of the run.
    """
    if not names.has(wanted, chosen.arch):
        return f"needs {names.listed(wanted)}; {chosen.where}"
    # The test could run on this machine, but the user requested another architecture.
    return chosen.obstacle
