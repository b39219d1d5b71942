"""The verdict on each test of a run, by the id of the test."""

from collections.abc import Iterable, Iterator

from sm121.core.verdict import Verdict, worst
from sm121.run.verdict_file import TestReport, VerdictFile


def stands(first: TestReport, second: TestReport) -> TestReport:
    """Return which of two decisions on one test counts. The first rule that applies decides.

    1. If only one of the tests was executed, its decision counts.
    2. The worse decision counts. An excused failure is better than any other failure.
    3. If both are equal, the first one counts.

    Args:
        first: The earlier decision.
        second: The later decision.
    """
    if first.executed and not second.executed:
        return first
    if second.executed and not first.executed:
        return second
    if worst((first.counted, second.counted)) is first.counted:
        return first
    return second


class Ledger:
    """The verdicts of a run's tests: the list ``tests`` of its verdict file, in the same order.

    Args:
        file: The run's verdict file.
    """

    def __init__(self, file: VerdictFile) -> None:
        self._file = file
        self._places = {test.id: position for position, test in enumerate(file.tests)}
        self._decided: set[str] = set()
        #: Tests that will run again although they have a verdict.
        self._reopened: set[str] = set()

    def __contains__(self, test_id: object) -> bool:
        return test_id in self._places

    def __getitem__(self, test_id: str) -> TestReport:
        return self._file.tests[self._places[test_id]]

    def __iter__(self) -> Iterator[TestReport]:
        return iter(self._file.tests)

    def has(self, test_id: str) -> bool:
        """Return whether a test has a verdict and will not run again.

        Args:
            test_id: The id of the test.
        """
        return test_id in self._decided

    @property
    def complete(self) -> bool:
        """Whether every selected test has a verdict."""
        return self._decided >= self._places.keys()

    def decide(self, decision: TestReport) -> None:
        """Add the verdict on a test, or a decision that no test makes.

        The first verdict on a test replaces "not reached". After that, and for a test that runs
        again, `stands` chooses between the old and the new verdict.

        Args:
            decision: The verdict with its reasons.
        """
        position = self._places.get(decision.id)
        if position is None:
            self._places[decision.id] = len(self._file.tests)
            self._file.tests.append(decision)
        elif decision.id in self._decided | self._reopened:
            self._file.tests[position] = stands(self._file.tests[position], decision)
        else:
            self._file.tests[position] = decision
        self._decided.add(decision.id)

    def reopen(self, tests: Iterable[str]) -> None:
        """Let some tests run again. Their present verdicts remain until the new verdicts are known.

        Args:
            tests: The ids of the tests.
        """
        reopened = self._decided.intersection(tests)
        self._reopened |= reopened
        self._decided -= reopened

    def drop_undecided(self) -> None:
        """Remove the tests without a verdict, because another worker runs them."""
        self._file.tests = [test for test in self._file.tests if test.id in self._decided]
        self._places = {test.id: position for position, test in enumerate(self._file.tests)}

    def overrule(self, test_id: str, verdict: Verdict, message: str) -> None:
        """Replace the verdict on a test.

        Args:
            test_id: The id of the test.
            verdict: The new verdict.
            message: The reason.

        Raises:
            KeyError: The run has no test with this id.
        """
        test = self[test_id]
        test.verdict = verdict
        test.message = message
