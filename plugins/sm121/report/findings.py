"""What did not hold, said for people: requirement, observation, evidence, how to run it again."""

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
BAD = (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE)
#: Characters of pytest's own output on one page, all failures together; details.json has them all.
_MOST_TEXT = 400_000
#: Characters of what was required, or seen, in one finding; verdict.json has all.
_LONGEST = 600


@dataclass(frozen=True)
class FailureGroup:
    """A test that did not hold, or several for the same reason."""

    verdict: Verdict
    severity: Severity
    level: str
    ids: tuple[str, ...]
    requirement: str
    facts: tuple[Fact, ...]
    """Of the first test; without what they are about where others say the same of another."""
    evidence: tuple[str, ...]
    """Files of the report directory, relative to it."""
    detail: FailureDetail
    """What is known of the first test."""
    is_of_a_gate: bool
    """The gate of a metric did not pass."""

    @property
    def required(self) -> str | None:
        """What the first fact requires; None where nobody says it."""
        first = self.facts[0]
        about = f"{first.about}: " if first.about else ""
        return f"{about}{first.requirement}"[:_LONGEST] if first.required else None

    @property
    def observed(self) -> str:
        """What there was instead, and what else does not hold."""
        first, *others = self.facts
        observation = first.observation if first.required else str(first)
        return "; ".join(filter(None, (observation, unmet.text(others))))[:_LONGEST]

    @property
    def title(self) -> str:
        """The first test's name without its file."""
        return self.ids[0].rpartition("::")[2] or self.ids[0]


def failures(run: VerdictFile) -> list[TestReport]:
    """Return the tests that failed and are not excused: by verdict, then those of gates, then by
    severity."""
    bad = [test for test in run.tests if test.verdict in BAD and not test.excused]

    def gravity(test: TestReport) -> tuple[int, bool, int]:
        severity = [*Severity].index(test.severity)
        return BAD.index(test.verdict), not is_of_a_gate(run, test), severity

    return sorted(bad, key=gravity)


def is_of_a_gate(run: VerdictFile, test: TestReport) -> bool:
    """Whether a test failed because the gate of a metric did not pass."""
    measured = (run.metrics.get(name) for name in test.metrics)
    return any(metric is not None and metric.gated and metric.verdict in BAD for metric in measured)


def reason_of(test: TestReport) -> str:
    """What does not hold, without what it is about: several may have one and the same cause."""
    return unmet.text(replace(fact, about="") for fact in test.facts)


def same(entries: Iterable[_Entry], key: Callable[[_Entry], object]) -> list[list[_Entry]]:
    """The entries in groups with one key."""
    groups: dict[object, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return [*groups.values()]


def grouped(report: StoredReport) -> list[FailureGroup]:
    """What did not hold; tests that say the same stand together, but for those that fail."""

    def key(test: TestReport) -> tuple[str, ...]:
        reason = test.id if test.verdict is Verdict.FAIL else reason_of(test)
        return test.verdict, test.level, reason

    details = {detail.id: detail for detail in report.details.failures}
    merged, room = [], _MOST_TEXT
    for tests in same(failures(report.run), key):
        detail = details.get(tests[0].id) or FailureDetail(id=tests[0].id)
        room -= len(detail.text) + sum(map(len, detail.sections.values()))
        if room < 0:  # everything that fails at once must still be a page that opens
            detail = without_output(detail)
        first = tests[0]
        facts = [replace(f, about="") for f in first.facts] if tests[1:] else first.facts
        requirement = report.details.requirements.get(first.id, "")
        evidence = tuple(_evidence(report, first.level, detail.logs))
        merged.append(
            FailureGroup(
                verdict=first.verdict,
                severity=first.severity,
                level=first.level,
                ids=tuple(test.id for test in tests),
                requirement=requirement,
                facts=tuple(facts),
                evidence=evidence,
                detail=detail,
                is_of_a_gate=is_of_a_gate(report.run, first),
            )
        )
    return merged


def without_output(detail: FailureDetail) -> FailureDetail:
    """What is known of a test but what pytest showed of it."""
    return detail.model_copy(update={"text": "", "sections": {}})


def _evidence(report: StoredReport, level: str, logs: Sequence[str] | None) -> Iterable[str]:
    if logs is None:  # written by a version that did not note them
        under_test = report.run.engine.configuration
        logs = [start.log for start in report.run.starts if start.configuration == under_test]
    names = list(logs)
    if level == "performance":
        names.append("records")
    if level == "stress":
        names += ["memory.json", "crashes"]
    if level == "matrix":
        names += ["matrix/FEATURE_MATRIX.md", "matrix/matrix.json"]
    for name in dict.fromkeys(names):
        path = report.directory / name
        if not Path(name).is_absolute() and path.exists():
            yield name


def not_run(run: VerdictFile) -> list[list[TestReport]]:
    """The tests that did not run, those with one reason together."""
    tests = [test for test in run.tests if test.skipped or test.verdict is Verdict.NOT_RUN]
    return same((test for test in tests if not test.excused), lambda test: test.message)
