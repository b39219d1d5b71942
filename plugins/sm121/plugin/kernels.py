"""What the numerics tests and the kernel benchmarks are given: the provider under test, and the
cases that apply here."""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from sm121.core import architecture
from sm121.core import profile as profiles
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun
from sm121.kernels import benchmark_cases, cases, registry
from sm121.kernels.benchmark_cases import BenchmarkCase
from sm121.kernels.cases import Case
from sm121.plugin import workers
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.run import Run
from sm121.plugin.selection import LEVEL

if TYPE_CHECKING:
    from sm121.kernels.problems import Problem


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
            _release_device_memory()


def _release_device_memory() -> None:
    torch = sys.modules.get("torch")  # not imported for this: it may be absent, and takes seconds
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("kernel_benchmarks") is not None:
        settings = metafunc.config.stash[SETTINGS]
        chosen = benchmark_cases.select(_depths(settings), full=_full(settings))
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
    full = _full(metafunc.config.stash[SETTINGS])
    metafunc.parametrize("case", cases.select(group, full=full), ids=str)


def _full(settings: Settings) -> bool:
    return settings.full_shapes or _detected() not in ("cpu", None)


def _depths(settings: Settings) -> tuple[int, ...]:
    """The depth table of the profile; the standard one where there is no profile."""
    try:
        name = profiles.for_architecture(settings.arch or _detected() or "")
        profile = settings.profile or profiles.load(name)
    except UsageError:
        return benchmark_cases.DEPTHS
    return profile.performance.depths


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name


_ROUNDS = 5
_ROUNDS_ON_GPU = 20


@dataclass(frozen=True)
class Kernels:
    """The kernels under test."""

    name: str
    provider: Any
    _faults: list[str] = field(default_factory=list)
    """What broke the device, once something has."""

    def wrong(self, case: Case) -> str:
        """What is wrong with an operation on a case; empty when it holds."""
        from sm121.kernels import checks

        return self._checked(str(case), lambda: checks.check_case(self.provider, case))

    def wrong_with(self, problem: Problem) -> str:
        """What is wrong with an operation on a problem of one's own; empty when it holds."""
        from sm121.kernels import checks

        return self._checked(problem.operation, lambda: checks.check(self.provider, problem))

    def wrong_replayed(self, case: Case) -> str:
        """What is wrong with a CUDA graph of an operation; empty when it holds."""
        from sm121.kernels import checks, graphs, problems

        problem = problems.build(case)
        return self._checked(
            f"replay of {case}", lambda: checks.check_replay(self.provider, problem, graphs.record)
        )

    def wrong_with_a_tactic(self, case: Case) -> str:
        """What is wrong with any autotune tactic; empty when all of them hold."""
        from sm121.kernels import tactics

        return self._checked(
            f"tactics on {case}", lambda: tactics.check(self.name, self.provider, case)
        )

    def time(self, case: BenchmarkCase, benchmark: Any) -> None:
        """Time a case through pytest-benchmark, what it was held against in its extra_info.

        Raises:
            Invalid: the number is of a call that did not do its work.
        """
        from sm121.kernels import benchmarks, checks, clocks
        from sm121.kernels.protocol import declaration

        self._refuse_after_a_fault()
        device = declaration(self.provider).device
        clock, peak = clocks.clock_of(device), benchmarks.bandwidth(device)
        try:
            timed = benchmarks.build(self.provider, case)
            benchmark._timer = clock.now
            benchmark.group = case.operation

            def before() -> None:
                timed.renew()
                clock.before()

            output = benchmark.pedantic(
                timed.call,
                setup=before,
                rounds=_ROUNDS if device == "cpu" else _ROUNDS_ON_GPU,
                warmup_rounds=1,
            )
        except RuntimeError as error:
            if checks.is_device_fault(error) and not checks.computes(device):
                self._faults.append(f"{case}: {str(error).splitlines()[0]}")
            raise
        benchmark.extra_info |= {
            "provider": self.name,
            "device": device,
            "clock": clock.how,
            "bytes": timed.bytes_moved,
            "bandwidth_gb_s": round(peak.best_gb_s, 1),
            "bandwidth_method": peak.method,
        }
        if benchmark.stats is None:  # --benchmark-disable: called once, not timed
            benchmarks.check_output(case, timed, output)
            return
        seconds = benchmark.stats.stats.median
        share = benchmarks.check(case, seconds, timed, output, peak)
        benchmark.extra_info["roofline_share"] = round(share, 4)

    def _checked(self, what: str, check: Callable[[], list[str]]) -> str:
        from sm121.kernels import checks
        from sm121.kernels.protocol import declaration

        self._refuse_after_a_fault()
        try:
            return "; ".join(check())
        except checks.DeviceFault as fault:
            if checks.computes(declaration(self.provider).device):
                return str(fault)
            self._faults.append(f"{what}: {fault}")
            return f"{fault}; what is left of the numerics is NOT_RUN"

    def _refuse_after_a_fault(self) -> None:
        if self._faults:
            raise NotRun(
                f"the device has been unusable since {self._faults[0]}. Run this test in a process "
                "of its own to see it judged"
            )


@pytest.fixture(scope="session")
def kernels(conformance: Run) -> Kernels:
    """The provider of ``--kernel-provider``, or the one of the architecture and the engine."""
    settings = conformance.settings
    if (obstacle := _obstacle(settings)) is not None:
        raise NotRun(obstacle)
    name = settings.kernel_provider
    if name is None:
        name = registry.default(conformance.target.arch, settings.engine)
    provider = registry.load(name)
    if (worker := workers.of(conformance.config)) is not None:
        _share_the_cores(worker)
    return Kernels(name, provider)


def _share_the_cores(worker: workers.Worker) -> None:
    """Threads of several workers on one core wait for each other more than they compute."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // worker.count))


def _obstacle(settings: Settings) -> str | None:
    """Why no kernels can be tested, as far as that is known before any are loaded."""
    if importlib.util.find_spec("torch") is None:
        return "the numerics need torch, which is not installed in this environment"
    if settings.kernel_provider is None and settings.base_url is not None:
        return (
            "kernels are tested where the engine is installed, this run is attached by URL; "
            "give --kernel-provider to test some here"
        )
    return None


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
