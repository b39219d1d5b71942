"""The kernels under test: of each operation the provider that judges it, and where it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core.unmet import Fact, facts_of, of
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels import cases, protocol, serving
from sm121.kernels.child import Child, DeviceFault, Ended

_ROUNDS = (5, 20)
"""Of a timed call, on a CPU and on a GPU."""
_TACTIC_S = 180.0


@dataclass
class Kernels:
    """The kernels under test."""

    choices: Mapping[protocol.Operation, serving.Choice]
    child_of: Callable[[str], Child]
    """Where the provider of a name runs. Raises NotRun: it would be another build's kernels."""
    judged: tuple[protocol.Operation, str] | None = None
    """What the running test judges, and by which provider."""

    def wrong(self, case: cases.Case) -> list[Fact]:
        name, child = self._provider(case.operation)
        return _ask(child, "check", name, case)

    def wrong_replayed(self, case: cases.Case) -> list[Fact]:
        """What is wrong with a CUDA graph of an operation; empty when it holds."""
        name, child = self._provider(case.operation)
        return _ask(child, "replay", name, case)

    def wrong_with_a_tactic(self, case: cases.Case, limit_s: float = _TACTIC_S) -> list[Fact]:
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

    def time(self, case: cases.BenchmarkCase, benchmark: Any) -> None:
        """Time a case, and replay the rounds as pytest-benchmark's, what they were compared with in
        its extra_info. Raises Invalid: the number is of a call that did not do its work."""
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

    def _provider(self, operation: protocol.Operation) -> tuple[str, Child]:
        choice = self.choices[operation]
        if choice.nothing is not None:
            raise Inapplicable(choice.nothing)
        if choice.provider is None:
            raise NotRun(choice.why)
        self.judged = (operation, choice.provider)
        return choice.provider, self.child_of(choice.provider)


def _ask(child: Child, question: str, name: str, case: cases.Case) -> list[Fact]:
    try:
        return _facts(child.ask(question, name, case))
    except (Ended, DeviceFault) as error:
        return of(f"{case}", facts_of(error))


def _facts(answer: list[dict[str, Any]]) -> list[Fact]:
    return [Fact(**fact) for fact in answer]
