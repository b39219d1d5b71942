"""Decisions that no test makes: on a server's end, kernel path, logged errors and leftovers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sm121.core.printable import printable
from sm121.core.server import Server
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.engines.endings import StopReport
from sm121.engines.life import Dead
from sm121.evidence.failure import Cause
from sm121.evidence.requirement import Contradiction
from sm121.evidence.silent_errors import ErrorReader, SilentError
from sm121.run.events import Decided, Measured, Overruled
from sm121.run.record import RunRecord
from sm121.run.verdict_file import BESIDE, TestReport, VerdictFile

#: The reason of a metric that is INVALID because another process replaced the attached server.
REPLACED = "another_process"
#: How many errors of one kind a decision quotes.
_SHOWN = 5
#: How many characters of the contradictions a decision quotes.
_MOST_CONTRADICTIONS = 400
#: How many characters of an error's line are compared to tell errors of one kind apart.
_MOST_OF_A_LINE = 60


def died_between_tests(name: str, dead: Dead, cause: Cause, phase: tuple[str, str]) -> TestReport:
    """Return the decision on a server whose process ended before the suite stopped it.

    Args:
        name: The name of the server.
        dead: The event of its end.
        cause: The cause of the end.
        phase: The level, and the point of the run in words.
    """
    level, where = phase
    evidence = "the crash bundle is in crashes/"
    if dead.detail:
        evidence = f"{dead.detail}; {evidence}"
    fact = Fact(
        "the server to live until it is stopped",
        f"{where}: {dead.what} ({cause.kind})",
        evidence=evidence,
    )
    return TestReport.of(f"{BESIDE}life of {name}", level, fact)


def invalidate_measurements(file: VerdictFile, why: str) -> list[Measured | Overruled]:
    """Return the events that make all measurements INVALID after a second server has answered.

    Args:
        file: The run's verdict file.
        why: The evidence that another server answered.
    """
    withdrawn: list[Measured | Overruled] = []
    for name, metric in file.metrics.items():
        update = {"verdict": Verdict.INVALID, "grade": None}
        withdrawn.append(Measured(name, metric.model_copy(update=update)))
    for test in file.tests:
        if test.metrics and test.executed:
            withdrawn.append(Overruled(test.id, Verdict.INVALID, f"{REPLACED}: {why}"))
    return withdrawn


def path_changed(
    name: str, wrong: Sequence[Contradiction], log: Path | None, where: str
) -> TestReport:
    """Return the decision on a server whose kernel path changed after it was judged.

    Args:
        name: The name of its configuration.
        wrong: The contradictions to the profile that are new.
        log: The log.
        where: The point of the run in words.
    """
    contradictions = "; ".join(str(contradiction) for contradiction in wrong)
    fact = Fact(
        "the server to use the kernel path of the profile until it is stopped",
        f"{where}: {contradictions[:_MOST_CONTRADICTIONS]}",
        evidence=f"{log}",
    )
    return TestReport.of(f"{BESIDE}kernel path of {name}", "kernel", fact)


def logged_errors(
    errors: Iterable[SilentError], source: str, phase: tuple[str, str], redact: Callable[[str], str]
) -> Iterator[TestReport]:
    """Yield a decision for each kind of logged error that killed no process.

    Args:
        errors: The errors of a server's log, or of the kernel's.
        source: The log in words, such as "log of server-1".
        phase: The level, and the point of the run in words.
        redact: Removes secrets from a line.

    Yields:
        FAIL for a known failure, INCONCLUSIVE for an unknown one.
    """
    level, where = phase
    kinds: dict[tuple[bool, str], list[Fact]] = {}
    for error in errors:
        shown = replace(error, line=printable(redact(error.line)))
        fact = Fact(
            "no error in the log while the server serves",
            f"{shown.kind}: {shown.subject[:_MOST_OF_A_LINE]}",
            evidence=f"{source}, {where}: {shown.line}; remedy: {shown.remedy}",
        )
        kinds.setdefault((error.certain, error.kind), []).append(fact)
    for (certain, kind), facts in kinds.items():
        verdict = Verdict.FAIL if certain else Verdict.INCONCLUSIVE
        identity = f"{BESIDE}{kind} in the {source}"
        yield TestReport.of(identity, level, *facts[:_SHOWN], verdict=verdict)


def decide_logged_errors(record: RunRecord, errors: Iterable[SilentError], source: str) -> None:
    """Decide on errors that killed no process (`logged_errors`).

    Args:
        record: The record of the run.
        errors: The errors of a server's log, or of the kernel's.
        source: The log in words, such as "log of server-1".
    """
    for decision in logged_errors(errors, source, record.phase, record.redact):
        record.emit(Decided(decision))


def error_reader(server: Server, log: Path) -> ErrorReader:
    """Return a reader of the errors in a server's log.

    Args:
        server: The server.
        log: The log. For an attached server, the reader starts at the current end of the log.
    """
    engine = server.reader or ""
    if server.configuration is not None:
        engine = server.configuration.engine
    return ErrorReader(engine, 0 if server.managed else log.stat().st_size)


def unclean(name: str, report: StopReport) -> TestReport:
    """Return the decision on a stopped server that left processes, memory or files behind.

    Args:
        name: The name of the server.
        report: The report of its stop.
    """
    survivors = "; ".join(str(survivor) for survivor in report.survivors) or "no process"
    died = f"it died of {report.crash}; " if report.crash else ""
    fact = Fact(
        "the stopped server to end in order and to leave nothing behind",
        f"{died}left: {survivors}; port free: {report.port_free}; "
        f"memory missing: {report.memory.missing_bytes / 2**30:.1f} GiB",
        evidence=f"{report.log}",
    )
    return TestReport.of(f"{BESIDE}{name}", "smoke", fact)


def unproven_memory(name: str, report: StopReport) -> TestReport:
    """Return the decision on a stopped server whose memory is not proven to be free again.

    Args:
        name: The name of the server's configuration.
        report: The report of its stop.
    """
    fact = Fact(
        "the memory of the stopped server to be free again",
        f"{report.memory}",
        evidence=(
            "end the other processes that take memory, and run again; for a GPU's memory, run "
            "where all processes are visible (docker run --pid=host)"
        ),
    )
    identity = f"{BESIDE}memory after {name}"
    return TestReport.of(identity, "smoke", fact, verdict=Verdict.INCONCLUSIVE)


def memory_is_usual(report: StopReport, earlier: Sequence[StopReport]) -> bool:
    """Return whether a healthy stop can also leave this much memory that is not proven free.

    This is accepted for one stop only. If the previous stop also left memory that is not proven
    free, the result is False.

    Args:
        report: The report of the stop.
        earlier: The reports of the stops before it.
    """
    again = bool(earlier) and earlier[-1].memory.unproven_bytes > 0
    return report.memory.usual and not again
