"""The decision on each test, by its id: one way to decide, and one way to decide again."""

from collections.abc import Iterator

from sm121.core.verdict import Verdict, worst
from sm121.run.verdict_file import TestReport, VerdictFile


def stands(first: TestReport, second: TestReport) -> TestReport:
    """Which of two decisions on one test stands. A decision on a test that ran stands before one on
    a test that did not run. Else the worse one stands, and of equal ones the first. A waived
    failure is better than one that is not waived."""
    if first.executed != second.executed:
        return first if first.executed else second
    return first if worst((first.counted, second.counted)) is first.counted else second


class Ledger:
    """The decisions of a run: the ``tests`` of its verdict file, in the same order."""

    def __init__(self, file: VerdictFile) -> None:
        self._file = file
        self._places = {test.id: position for position, test in enumerate(file.tests)}
        self._decided: set[str] = set()

    def __contains__(self, test_id: object) -> bool:
        return test_id in self._places

    def __getitem__(self, test_id: str) -> TestReport:
        return self._file.tests[self._places[test_id]]

    def __iter__(self) -> Iterator[TestReport]:
        return iter(self._file.tests)

    @property
    def complete(self) -> bool:
        """Whether every selected test was decided."""
        return self._decided >= self._places.keys()

    def decide(self, decision: TestReport) -> None:
        """Note the decision on a test, or on something beside the tests. The first decision on a
        test replaces "not reached". Of two decisions `stands` chooses one."""
        position = self._places.get(decision.id)
        if position is None:
            self._places[decision.id] = len(self._file.tests)
            self._file.tests.append(decision)
        elif decision.id in self._decided:
            self._file.tests[position] = stands(self._file.tests[position], decision)
        else:
            self._file.tests[position] = decision
        self._decided.add(decision.id)

    def overrule(self, test_id: str, verdict: Verdict, message: str) -> None:
        """Decide again. The new decision replaces any earlier one; the message says why. Raises
        KeyError: the ledger has no such test."""
        test = self[test_id]
        test.verdict, test.message = verdict, message
