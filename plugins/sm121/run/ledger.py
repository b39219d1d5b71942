"""What was decided of each test, by its id; one way to decide, and one way to decide again."""

from __future__ import annotations

from collections.abc import Iterator

from sm121.core.verdict import Verdict, worst
from sm121.run.verdict_file import TestReport, VerdictFile


def stands(first: TestReport, second: TestReport) -> TestReport:
    """Which of two decisions on one test stands: one of a test that ran before one of a test that
    did not, then the worse, then the first."""
    if first.executed != second.executed:
        return first if first.executed else second
    return first if worst((first.verdict, second.verdict)) is first.verdict else second


class Ledger:
    """The decisions of a run. They are the ``tests`` of its verdict file, in its order."""

    def __init__(self, file: VerdictFile) -> None:
        self._file = file
        self._places = {test.id: place for place, test in enumerate(file.tests)}
        self._decided: set[str] = set()

    def __contains__(self, test_id: object) -> bool:
        return test_id in self._places

    def __getitem__(self, test_id: str) -> TestReport:
        return self._file.tests[self._places[test_id]]

    def __iter__(self) -> Iterator[TestReport]:
        return iter(self._file.tests)

    @property
    def complete(self) -> bool:
        """Whether everything in it was decided: each selected test had its turn."""
        return self._decided >= self._places.keys()

    def decide(self, decision: TestReport) -> None:
        """Note what became of a test, or of something beside the tests.

        The first decision on a test stands in the place of "not reached"; of two decisions one
        stands as `stands` says.
        """
        place = self._places.get(decision.id)
        if place is None:
            self._places[decision.id] = len(self._file.tests)
            self._file.tests.append(decision)
        elif decision.id in self._decided:
            self._file.tests[place] = stands(self._file.tests[place], decision)
        else:
            self._file.tests[place] = decision
        self._decided.add(decision.id)

    def overrule(self, test_id: str, verdict: Verdict, message: str) -> None:
        """Decide again: what was decided does not count, whatever it was, and the message says why.

        Raises:
            KeyError: nothing of that name is in the ledger.
        """
        test = self[test_id]
        test.verdict, test.message = verdict, message
