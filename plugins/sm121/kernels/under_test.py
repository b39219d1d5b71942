"""The kernels under test: the provider of each operation, and the process in which it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core.unmet import Fact, facts_of, with_subject
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels import cases, protocol, serving
from sm121.kernels.ahead import Ahead, PlannedCase
from sm121.kernels.child import Child, DeviceFault, ProcessEnded
from sm121.measure.measurement import Measurement

#: The numbers of timed rounds on a CPU and on a GPU.
_ROUNDS = (5, 20)
_NO_ROUNDS = (0, 0)
#: The time limit of one tactic, in seconds.
_TACTIC_S = 180.0


@dataclass(frozen=True)
class TimedCase:
    """The time of a kernel.

    Attributes:
        case: The operation and its sizes.
        seconds: The time of each round; empty if no round was timed.
        about: A description of the provider, the timer and the bandwidth.
    """

    case: cases.BenchmarkCase
    seconds: tuple[float, ...]
    about: Mapping[str, Any]

    @property
    def measurement(self) -> Measurement:
        """The time as a metric of verdict.json, with its share of the measured bandwidth."""
        return Measurement(
            name=self.case.metric,
            unit="µs",
            samples=[1e6 * seconds for seconds in self.seconds],
            higher_is_better=False,
            case=self.case.sizes,
            extra={"roofline_share": self.about.get("roofline_share")},
        )


@dataclass
class Kernels:
    """The kernels under test.

    Attributes:
        choices: The provider of each operation.
        child_of: Returns the process of a provider. Raises NotRun if the provider's kernels come
            from another build than the engine's.
        ahead: Has the outcomes of cases that were checked while the server started.
        judged: The operation that the running test checks, and its provider.
    """

    choices: Mapping[protocol.Operation, serving.ProviderChoice]
    child_of: Callable[[str], Child]
    ahead: Ahead | None = None
    judged: tuple[protocol.Operation, str] | None = None

    def faults(self, case: cases.Case) -> list[Fact]:
        """Return the faults of an operation on a case.

        Args:
            case: The case.

        Raises:
            NotRun: The operation has no provider here.
            Inapplicable: The kernel path has no separate kernel for the operation.
        """
        name, child = self._choose_provider(case.operation)
        faults = None if self.ahead is None else self.ahead.take(PlannedCase(name, case))
        return check(child, name, case) if faults is None else faults

    def faults_of_replay(self, case: cases.Case) -> list[Fact]:
        """Return the faults of a CUDA graph of an operation. Raises the same errors as `faults`.

        Args:
            case: The case.
        """
        name, child = self._choose_provider(case.operation)
        return _ask(child, "replay", name, case)

    def faults_of_tactics(self, case: cases.Case, limit_s: float = _TACTIC_S) -> list[Fact]:
        """Return the faults of all autotuning tactics. Raises the same errors as `faults`.

        Each tactic runs in its own process, so that a crash or hang does not affect the next one.

        Args:
            case: The case.
            limit_s: The time limit of a tactic in seconds.
        """
        operation = case.operation
        name, child = self._choose_provider(operation)
        wrong: list[Fact] = []
        for tactic in child.ask("tactics", name, operation):
            child.close()
            try:
                # Load the provider first, because loading must not count for the tactic's time
                # limit.
                child.ask("packages", name)
                facts = _as_facts(child.ask("check", name, case, tactic, within_s=limit_s))
            except (ProcessEnded, DeviceFault) as error:
                facts = facts_of(error)
            wrong += with_subject(f"tactic {tactic}", facts)
        return wrong

    def time(self, case: cases.BenchmarkCase, *, is_timed: bool = True) -> TimedCase:
        """Time a case.

        Args:
            case: The operation and its sizes.
            is_timed: Whether to time rounds. If false, the case is run once, and its output is
                checked.

        Raises:
            Invalid: The output of a call is wrong, or the call was impossibly fast.
        """
        name, child = self._choose_provider(case.operation)
        answer = child.ask("time", name, case, _ROUNDS if is_timed else _NO_ROUNDS)
        return TimedCase(case, tuple(answer["seconds"]), answer["extra"])

    def _choose_provider(self, operation: protocol.Operation) -> tuple[str, Child]:
        choice = self.choices[operation]
        if choice.nothing is not None:
            raise Inapplicable(choice.nothing)
        if choice.provider is None:
            raise NotRun(choice.why)
        self.judged = (operation, choice.provider)
        return choice.provider, self.child_of(choice.provider)


def check(child: Child, name: str, case: cases.Case) -> list[Fact]:
    """Return the faults of a provider's operation on a case.

    Args:
        child: The process of the provider.
        name: The name of the provider.
        case: The case.
    """
    return _ask(child, "check", name, case)


def _ask(child: Child, question: str, name: str, case: cases.Case) -> list[Fact]:
    try:
        return _as_facts(child.ask(question, name, case))
    except (ProcessEnded, DeviceFault) as error:
        return with_subject(f"{case}", facts_of(error))


def _as_facts(answer: list[dict[str, Any]]) -> list[Fact]:
    return [Fact(**fact) for fact in answer]
