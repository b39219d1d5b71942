"""The kernels under test: of each operation the provider that judges it, and where it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core.unmet import Fact, facts_of, of
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels import cases, protocol, serving
from sm121.kernels.child import Child, DeviceFault, Ended
from sm121.measure.measurement import Measurement

_ROUNDS = (5, 20)
"""Of a timed call, on a CPU and on a GPU."""
_TACTIC_S = 180.0


@dataclass(frozen=True)
class TimedCase:
    """What a kernel took."""

    case: cases.BenchmarkCase
    seconds: tuple[float, ...]
    """Of each round; empty where none was timed."""
    about: Mapping[str, Any]
    """By which provider and clock, and what it was compared with."""

    @property
    def measurement(self) -> Measurement:
        """Its time as a metric of the verdict. No gate holds it: it is compared with other runs."""
        return Measurement(
            name=self.case.metric,
            unit="µs",
            samples=[1e6 * seconds for seconds in self.seconds],
            higher_is_better=False,
            case=self.case.sizes,
        )


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

    def time(self, case: cases.BenchmarkCase, *, is_timed: bool = True) -> "TimedCase":
        """Time a case.

        Args:
            case: The operation and its sizes.
            is_timed: Whether rounds are timed; else the case is called once, and judged.

        Raises:
            Invalid: The number is of a call that did not do its work.
        """
        name, child = self._provider(case.operation)
        answer = child.ask("time", name, case, _ROUNDS if is_timed else (0, 0))
        return TimedCase(case, tuple(answer["seconds"]), answer["extra"])

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
