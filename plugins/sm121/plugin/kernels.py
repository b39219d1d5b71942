"""What the numerics tests are given: the provider under test, and the cases that apply here."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from sm121 import architecture
from sm121.kernels import cases, registry
from sm121.kernels.cases import Case
from sm121.plugin.options import SETTINGS
from sm121.plugin.run import Run
from sm121.verdict import NotRun

if TYPE_CHECKING:
    from sm121.kernels.problems import Problem


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kernel_cases(group): run with each case of that group of sm121.kernels.cases as `case`",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("kernel_cases")
    if marker is None:
        return
    (group,) = marker.args
    if group not in cases.GROUPS:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: kernel_cases({group!r}): expected one of "
            + ", ".join(cases.GROUPS)
        )
    settings = metafunc.config.stash[SETTINGS]
    full = settings.full_shapes or _detected() not in ("cpu", None)
    metafunc.parametrize("case", cases.select(group, full=full), ids=str)


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name


@dataclass(frozen=True)
class Kernels:
    """The kernels under test."""

    provider: Any

    def wrong(self, case: Case) -> str:
        """What is wrong with an operation on a case; empty when it holds."""
        from sm121.kernels import checks

        return "; ".join(checks.check_case(self.provider, case))

    def wrong_with(self, problem: Problem) -> str:
        """What is wrong with an operation on a problem of one's own; empty when it holds."""
        from sm121.kernels import checks

        return "; ".join(checks.check(self.provider, problem))


@pytest.fixture(scope="session")
def kernels(conformance: Run) -> Kernels:
    """The provider of ``--kernel-provider``, or the architecture's."""
    if importlib.util.find_spec("torch") is None:
        raise NotRun("the numerics need torch, which is not installed in this environment")
    name = conformance.settings.kernel_provider
    if name is None:
        if conformance.attached is not None:
            raise NotRun(
                "kernels are tested where the engine is installed, this run is attached by URL; "
                "give --kernel-provider to test some here"
            )
        name = registry.default(conformance.target.arch)
    return Kernels(registry.load(name))
