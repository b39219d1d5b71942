"""The kernels under test: of each operation the provider that judges it, and where it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from sm121.core.unmet import Fact, facts_of, of
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels.benchmark_cases import BenchmarkCase
from sm121.kernels.cases import Case
from sm121.kernels.child import Child, DeviceFault, Ended
from sm121.kernels.protocol import Operation
from sm121.kernels.serving import Choice

_ROUNDS = (5, 20)
"""Of a timed call, on a CPU and on a GPU."""
_TACTIC_S = 180.0
_MEANWHILE_S = 30.0
"""Of a case in the background; on a busy CPU the first one takes a few seconds."""


@dataclass
class Kernels:
    """The kernels under test."""

    choices: Mapping[Operation, Choice]
    child_of: Callable[[str], Child]
    """Where the provider of a name runs. Raises NotRun: it would be another build's kernels."""
    judged: tuple[Operation, str] | None = None
    """What the running test judges, and by which provider."""
    _begun: dict[Case, Future[list[Fact] | None]] = field(default_factory=dict, repr=False)

    def begin(self, cases: Iterable[Case], worker: Executor) -> None:
        """Have cases judged in the background, as `wrong` does, which waits for its own. After the
        first one that ends its process or takes long they are left to `wrong`, and its limits."""
        given_up: list[str] = []

        def ask(child: Child, name: str, case: Case) -> list[Fact] | None:
            if given_up:
                return None
            try:
                return _facts(child.ask("check", name, case, within_s=_MEANWHILE_S))
            except (Ended, DeviceFault) as error:
                given_up.append(f"{case}: {error}")
                return None

        for case in cases:
            name = self.choices[case.operation].provider
            if name is not None:
                with contextlib.suppress(NotRun):  # `wrong` says so
                    child = self.child_of(name)
                    self._begun[case] = worker.submit(ask, child, name, case)

    def wrong(self, case: Case) -> list[Fact]:
        """What is wrong with an operation on a case; empty when it holds."""
        begun = self._begun.get(case)
        if begun is not None and not begun.cancelled() and begun.result() is not None:
            self._choose(case.operation)
            return begun.result() or []
        name, child = self._provider(case.operation)
        return _ask(child, "check", name, case)

    def wrong_replayed(self, case: Case) -> list[Fact]:
        """What is wrong with a CUDA graph of an operation; empty when it holds."""
        name, child = self._provider(case.operation)
        return _ask(child, "replay", name, case)

    def wrong_with_a_tactic(self, case: Case, limit_s: float = _TACTIC_S) -> list[Fact]:
        """What is wrong with any autotune tactic; empty when all of them hold. Each has a process
        of its own, so that one that crashes or hangs takes nothing else along."""
        operation = case.operation
        name, child = self._provider(operation)
        wrong: list[Fact] = []
        for tactic in child.ask("tactics", name, operation):
            child.close()
            try:
                child.ask("packages", name)  # loads the provider, which the limit is not about
                facts = _facts(child.ask("check", name, case, tactic, within_s=limit_s))
            except (Ended, DeviceFault) as error:
                facts = facts_of(error)
            wrong += of(f"tactic {tactic}", facts)
        return wrong

    def time(self, case: BenchmarkCase, benchmark: Any) -> None:
        """Time a case, and replay the rounds as pytest-benchmark's, what they were held against in
        its extra_info.

        Raises:
            Invalid: the number is of a call that did not do its work.
        """
        name, child = self._provider(case.operation)
        answer = child.ask("time", name, case, (0, 0) if benchmark.disabled else _ROUNDS)
        rounds = answer["seconds"] or [0.0]  # not timed: called once, and judged
        clock, coming = [0.0], iter(rounds)

        def stand() -> None:
            clock[0] = 0.0

        def advance() -> None:
            clock[0] = next(coming)

        benchmark._timer = lambda: clock[0]
        benchmark.group = case.operation
        benchmark.extra_info |= answer["extra"]
        benchmark.pedantic(advance, setup=stand, rounds=len(rounds))

    def _provider(self, operation: Operation) -> tuple[str, Child]:
        """What judges an operation. A process answers one question at a time: nothing is asked in
        the background any more."""
        name = self._choose(operation)
        wait([future for future in self._begun.values() if not future.cancelled()])
        return name, self.child_of(name)

    def _choose(self, operation: Operation) -> str:
        choice = self.choices[operation]
        if choice.nothing is not None:
            raise Inapplicable(choice.nothing)
        if choice.provider is None:
            raise NotRun(choice.why)
        self.judged = (operation, choice.provider)
        return choice.provider


def _ask(child: Child, question: str, name: str, case: Case) -> list[Fact]:
    try:
        return _facts(child.ask(question, name, case))
    except (Ended, DeviceFault) as error:
        return of(f"{case}", facts_of(error))


def _facts(answer: list[dict[str, Any]]) -> list[Fact]:
    return [Fact(**fact) for fact in answer]
