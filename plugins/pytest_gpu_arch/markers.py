"""The markers, and which tests they skip."""

from collections.abc import Iterable

import pytest

from pytest_gpu_arch import names, target
from pytest_gpu_arch.target import Target

_MARKERS = frozenset({*names.NAMES, names.ANY_GPU})
#: Set by another plugin on a test that it skips itself.
LEFT_ALONE = pytest.StashKey[bool]()


def lines() -> list[str]:
    """Return the markers as pytest shows them."""
    gpus = [f"{name}: needs a GPU of {name}; skipped elsewhere" for name in names.GPUS]
    return [
        "cpu: needs a machine without a GPU; skipped elsewhere",
        *gpus,
        "gpu: needs a GPU of any architecture; skipped elsewhere",
    ]


def of(item: pytest.Item) -> frozenset[str]:
    """Return the architecture markers of a test.

    Those of the test itself count, else those of its class, else those of its module: the closest
    ones win.

    Args:
        item: The test.

    Returns:
        Some of `names.NAMES` and `names.ANY_GPU`; empty: the test runs anywhere.
    """
    for node in reversed(item.listchain()):
        found = _MARKERS & {mark.name for mark in node.own_markers}
        if found:
            return found
    return frozenset()


def skip_elsewhere(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip the tests that do not apply to the target. Only a marked test looks for a GPU.

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
    """Return why a test is skipped; None: it runs.

    Args:
        wanted: The architecture markers of the test.
        chosen: The target of the run.
    """
    if not names.has(wanted, chosen.arch):
        return f"needs {names.listed(wanted)}; {chosen.where}"
    # It could run, but not on what the user asked for.
    return chosen.obstacle
