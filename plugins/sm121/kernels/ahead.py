"""Check kernel cases while a server starts. Their tests get the outcomes later."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from sm121.core.unmet import Fact
from sm121.kernels import cases


@dataclass(frozen=True)
class PlannedCase:
    """A case that a test of this run will check.

    Attributes:
        provider: The name of the provider of its operation.
        case: The case.
    """

    provider: str
    case: cases.Case


class Ahead:
    """Checks the cases one after the other in a thread, while the first server of a run starts.

    Args:
        check: Checks a case, and returns the faults.
        planned: The cases.
    """

    def __init__(
        self, check: Callable[[PlannedCase], list[Fact]], planned: Sequence[PlannedCase]
    ) -> None:
        self._check = check
        self._planned = planned
        self._outcomes: dict[PlannedCase, Future[list[Fact]]] = {}
        self._thread = ThreadPoolExecutor(1, "kernels")

    @contextmanager
    def during_a_start(self) -> Iterator[None]:
        """Begin with the cases. When the context ends, the case in progress is the last one."""
        planned, self._planned = self._planned, ()
        for case in planned:
            self._outcomes[case] = self._thread.submit(self._check, case)
        try:
            yield
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Wait until no case is being checked."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, planned: PlannedCase) -> list[Fact] | None:
        """Return the faults of a case, once. The error that ended its check is raised again.

        Args:
            planned: The case, and the provider that its test checks.

        Returns:
            The faults; None if the test must check the case itself.
        """
        outcome = self._outcomes.pop(planned, None)
        if outcome is None or outcome.cancelled():
            return None
        return outcome.result()
