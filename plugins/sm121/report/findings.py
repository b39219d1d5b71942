"""The tests that did not pass, as a report shows them: requirement, observation and evidence."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sm121.core import unmet
from sm121.core.unmet import Fact
from sm121.core.verdict import Severity, Verdict
from sm121.report.stored import StoredReport
from sm121.run.details import FailureDetail
from sm121.run.verdict_file import TestReport, VerdictFile

_Entry = TypeVar("_Entry")
#: Verdicts of a test that did not pass, most severe first.
BAD = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE)
#: Maximum number of characters of pytest's output on one page, over all failures. The complete
#: output is in details.json.
_MOST_TEXT = 400_000
#: Maximum number of characters of a requirement or an observation; verdict.json has the whole text.
_LONGEST = 600
#: Files of a report directory that are evidence of a level, in addition to the servers' logs.
_FILES_OF_LEVEL = {
    "performance": ("records",),
    "stress": ("memory.json", "crashes"),
    "matrix": ("matrix/FEATURE_MATRIX.md", "matrix/matrix.json"),
}


@dataclass(frozen=True)
class FailureGroup:
    """A test that did not pass, or several with the same reason.

    Attributes:
        verdict: The verdict of each test.
        severity: The severity of the first test.
        level: The level of each test.
        ids: The tests.
        title: The name of the first test, without its file.
        requirement: The requirement as text; empty if the test has none.
        facts: The facts of the first test; without their subjects if there are several tests.
        evidence: Files and folders, relative to the report directory.
        detail: Output and logs of the first test.
        is_of_a_gate: Whether the test failed because a metric's gate did not pass.
    """

    verdict: Verdict
    severity: Severity
    level: str
    ids: tuple[str, ...]
    title: str
    requirement: str
    facts: tuple[Fact, ...]
    evidence: tuple[str, ...]
    detail: FailureDetail
    is_of_a_gate: bool

    @property
    def required(self) -> str | None:
        """The requirement of the first fact; None if it has none."""
        first = self.facts[0]
        if not first.required:
            return None
        about = f"{first.about}: " if first.about else ""
        return f"{about}{first.requirement}"[:_LONGEST]

    @property
    def observed(self) -> str:
        """The observation of the first fact, and the other facts."""
        first, *others = self.facts
        parts = [first.observation if first.required else str(first)]
        parts.append(unmet.facts_text(others))
        return "; ".join(filter(None, parts))[:_LONGEST]


def failures(run: VerdictFile) -> list[TestReport]:
    """Return the tests that did not pass and are not excused.

    They are sorted by verdict; within a verdict, gates come first, then by severity.

    Args:
        run: The verdict file.
    """
    bad = [test for test in run.tests if test.verdict in BAD and not test.excused]
    severities = list(Severity)

    def order(test: TestReport) -> tuple[int, bool, int]:
        is_gate = is_of_a_gate(run, test)
        return BAD.index(test.verdict), not is_gate, severities.index(test.severity)

    return sorted(bad, key=order)


def is_of_a_gate(run: VerdictFile, test: TestReport) -> bool:
    """Return whether a test failed because the gate of a metric did not pass.

    Args:
        run: The verdict file.
        test: One of its tests.
    """
    for name in test.metrics:
        metric = run.metrics.get(name)
        if metric is not None and metric.gated and metric.verdict in BAD:
            return True
    return False


def reason_of(test: TestReport) -> str:
    """Return the facts of a test as text, without their subjects, which may share one cause.

    Args:
        test: A test that did not pass.
    """
    return unmet.facts_text(_without_subjects(test.facts))


def _without_subjects(facts: Iterable[Fact]) -> list[Fact]:
    return [replace(fact, about="") for fact in facts]


def same(entries: Iterable[_Entry], key: Callable[[_Entry], object]) -> list[list[_Entry]]:
    """Group entries that have the same key, in the order of each group's first entry.

    Args:
        entries: Any objects.
        key: Returns the key of an entry.
    """
    groups: dict[object, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.values())


def grouped(report: StoredReport) -> list[FailureGroup]:
    """Return the tests that did not pass, in groups.

    Each test with the verdict FAIL has its own group. Other tests with the same reason share one.

    Args:
        report: The stored report.
    """

    def key(test: TestReport) -> tuple[str, ...]:
        reason = test.id if test.verdict is Verdict.FAIL else reason_of(test)
        return test.verdict, test.level, reason

    details = {detail.id: detail for detail in report.details.failures}
    groups = []
    room = _MOST_TEXT
    for tests in same(failures(report.run), key):
        first = tests[0]
        detail = details.get(first.id) or FailureDetail(id=first.id)
        room -= _length(detail)
        if room < 0:  # even if all tests fail, the page must not be too large to open
            detail = without_output(detail)
        facts = first.facts if len(tests) == 1 else _without_subjects(first.facts)
        groups.append(
            FailureGroup(
                verdict=first.verdict,
                severity=first.severity,
                level=first.level,
                ids=tuple(test.id for test in tests),
                title=tests[0].name,
                requirement=report.details.requirements.get(first.id, ""),
                facts=tuple(facts),
                evidence=tuple(_evidence(report, first.level, detail.logs)),
                detail=detail,
                is_of_a_gate=is_of_a_gate(report.run, first),
            )
        )
    return groups


def _length(detail: FailureDetail) -> int:
    return len(detail.text) + sum(len(text) for text in detail.sections.values())


def without_output(detail: FailureDetail) -> FailureDetail:
    """Return the detail of a test without pytest's output.

    Args:
        detail: The test's entry in details.json.
    """
    return detail.model_copy(update={"text": "", "sections": {}})


def _evidence(report: StoredReport, level: str, logs: Sequence[str] | None) -> list[str]:
    """Return the files of a report directory that are evidence of a test."""
    if logs is None:  # written by an older version, which did not store them
        under_test = report.run.engine.configuration
        logs = [start.log for start in report.run.starts if start.configuration == under_test]
    names = [*logs, *_FILES_OF_LEVEL.get(level, ())]
    found = []
    for name in dict.fromkeys(names):
        is_inside = not Path(name).is_absolute()
        if is_inside and (report.directory / name).exists():
            found.append(name)
    return found


def not_run(run: VerdictFile) -> list[list[TestReport]]:
    """Return the tests that did not run and are not excused, grouped by reason.

    Args:
        run: The verdict file.
    """
    tests = []
    for test in run.tests:
        if not test.excused and (test.skipped or test.verdict is Verdict.NOT_RUN):
            tests.append(test)
    return same(tests, lambda test: test.message)
