"""What the numerics tests and the kernel benchmarks are given: the provider under test, and the
cases that apply here."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from sm121.core.verdict import NotRun
from sm121.kernels import benchmark_cases, cases, registry
from sm121.plugin import workers
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.run import Run
from sm121.plugin.selection import LEVEL

if TYPE_CHECKING:
    from sm121.kernels.under_test import Kernels


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kernel_cases(group): run with each case of that group of sm121.kernels.cases as `case`",
    )
    config.addinivalue_line(
        "markers",
        "kernel_benchmarks: run with each case of sm121.kernels.benchmark_cases as `case`",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Device memory that the level's tensors had is there for the next server."""
    try:
        return (yield)
    finally:
        following = nextitem.stash.get(LEVEL, None) if nextitem is not None else None
        if item.stash.get(LEVEL, None) == "kernel" and following != "kernel":
            registry.release_device_memory()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("kernel_benchmarks") is not None:
        settings = metafunc.config.stash[SETTINGS]
        chosen = benchmark_cases.of_target(
            settings.arch, settings.profile, full_shapes=settings.full_shapes
        )
        metafunc.parametrize("case", chosen, ids=str)
        return
    marker = metafunc.definition.get_closest_marker("kernel_cases")
    if marker is None:
        return
    (group,) = marker.args
    if group not in cases.GROUPS:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: kernel_cases({group!r}): expected one of "
            + ", ".join(cases.GROUPS)
        )
    full = benchmark_cases.at_full_size(metafunc.config.stash[SETTINGS].full_shapes)
    metafunc.parametrize("case", cases.select(group, full=full), ids=str)


@pytest.fixture(scope="session")
def kernels(conformance: Run) -> Kernels:
    """The provider of ``--kernel-provider``, or the one of the architecture and the engine."""
    settings = conformance.settings
    if (obstacle := _obstacle(settings)) is not None:
        raise NotRun(obstacle)
    from sm121.kernels import under_test

    name = settings.kernel_provider
    if name is None:
        name = registry.default(conformance.target.arch, settings.engine)
    worker = workers.of(conformance.config)
    return under_test.load(name, workers=1 if worker is None else worker.count)


def _obstacle(settings: Settings) -> str | None:
    return registry.obstacle(settings.kernel_provider, attached=settings.base_url is not None)


@pytest.hookimpl(trylast=True)  # what does not apply to the target has been marked
def pytest_collection_finish(session: pytest.Session) -> None:
    """``--collect-only`` promises no numerics that cannot run."""
    items = [item for item in session.items if LEVEL in item.stash and _has_kernels(item)]
    obstacle = _obstacle(session.config.stash[SETTINGS]) if items else None
    for item in items:
        if obstacle is not None and item.get_closest_marker("skip") is None:
            item.add_marker(pytest.mark.skip(reason=f"NOT_RUN: {obstacle}"))


def _has_kernels(item: pytest.Item) -> bool:
    return "kernels" in getattr(item, "fixturenames", ())
