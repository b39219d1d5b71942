"""The kernels under test: what the kernel level asks of a provider.

Once an operation has broken the device, nothing more can be said of the kernels in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sm121.core.verdict import NotRun
from sm121.kernels import benchmarks, checks, clocks, problems, registry, tactics
from sm121.kernels.benchmark_cases import BenchmarkCase
from sm121.kernels.cases import Case
from sm121.kernels.protocol import declaration

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
        return self._checked(str(case), lambda: checks.check(self.provider, problems.build(case)))

    def wrong_replayed(self, case: Case) -> str:
        """What is wrong with a CUDA graph of an operation; empty when it holds."""
        problem = problems.build(case)
        return self._checked(
            f"replay of {case}", lambda: checks.check_replay(self.provider, problem)
        )

    def wrong_with_a_tactic(self, case: Case) -> str:
        """What is wrong with any autotune tactic; empty when all of them hold."""
        return self._checked(
            f"tactics on {case}", lambda: tactics.check(self.name, self.provider, case)
        )

    def time(self, case: BenchmarkCase, benchmark: Any) -> None:
        """Time a case through pytest-benchmark, what it was held against in its extra_info.

        Raises:
            Invalid: the number is of a call that did not do its work.
        """
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


def load(name: str, *, workers: int = 1) -> Kernels:
    """The kernels of the provider of that name, for one of so many processes on this machine.

    Raises what `registry.load` raises.
    """
    provider = registry.load(name)
    if workers > 1:
        # Threads of several workers on one core wait for each other more than they compute.
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    return Kernels(name, provider)
