"""What is decided beside the tests: of a server's life, its path, its errors, and what it left."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sm121.core.printable import printable
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.engines.endings import StopReport
from sm121.engines.life import Dead
from sm121.evidence.failure import Cause
from sm121.evidence.requirement import Contradiction
from sm121.evidence.silent_errors import SilentError
from sm121.run.record import Ledger
from sm121.run.verdict_file import BESIDE, TestReport, VerdictFile

#: Why a number is INVALID that was measured while the attached server was replaced.
REPLACED = "another_process"
#: So many errors of a kind are shown at a time.
_SHOWN = 5


def unasked(name: str, dead: Dead, cause: Cause, phase: tuple[str, str]) -> TestReport:
    """A server ended though nobody asked it to."""
    level, where = phase
    fact = Fact(
        "the server lives until it is stopped",
        f"{where}: {dead.what} ({cause.kind})",
        evidence="; ".join(filter(None, (dead.detail, "what it left is under crashes"))),
    )
    return TestReport.of(f"{BESIDE}life of {name}", level, fact)


def void(file: VerdictFile, ledger: Ledger, why: str) -> None:
    """All that was measured in a run is of more than one server, and counts neither way."""
    for metric in file.metrics.values():
        metric.verdict, metric.grade = Verdict.INVALID, None
    for test in ledger:
        if test.metrics and test.executed:
            ledger.overrule(test.id, Verdict.INVALID, f"{REPLACED}: {why}")


def left_the_path(
    name: str, wrong: Sequence[Contradiction], log: Path | None, where: str
) -> TestReport:
    """A server's log shows another path than it was judged on."""
    fact = Fact(
        "the server stays on the path of the profile until it is closed",
        f"{where}: {'; '.join(map(str, wrong))[:400]}",
        evidence=f"{log}",
    )
    return TestReport.of(f"{BESIDE}kernel path of {name}", "kernel", fact)


def silent(
    errors: Iterable[SilentError], source: str, phase: tuple[str, str], redact: Callable[[str], str]
) -> Iterator[TestReport]:
    """What a server's log, or the kernel, reports though nothing died of it, by kind: a failure is
    FAIL, what nobody knows is INCONCLUSIVE. `source`: where it is written, as "log of server-1"."""
    level, where = phase
    kinds: dict[tuple[bool, str], list[Fact]] = {}
    for error in errors:
        line = printable(redact(error.line))
        fact = Fact(
            "no error is reported while the server serves",
            f"{error.kind}: {line.partition(':')[0][:60]}",
            evidence=f"{source}, {where}: {line}; remedy: {error.remedy}",
        )
        kinds.setdefault((error.certain, error.kind), []).append(fact)
    for (certain, kind), facts in kinds.items():
        verdict = Verdict.FAIL if certain else Verdict.INCONCLUSIVE
        identity = f"{BESIDE}{kind} in the {source}"
        yield TestReport.of(identity, level, *facts[:_SHOWN], verdict=verdict)


def unclean(name: str, report: StopReport) -> TestReport:
    """A stopped server left something."""
    survivors = "; ".join(str(survivor) for survivor in report.survivors) or "no process"
    fact = Fact(
        "the server ends in order when it is stopped, and nothing is left",
        f"{f'it died of {report.crash}; ' if report.crash else ''}"
        f"{survivors}; port free: {report.port_free}; "
        f"memory missing: {report.memory.missing_bytes / 2**30:.1f} GiB",
        evidence=f"{report.log}",
    )
    return TestReport.of(f"{BESIDE}{name}", "smoke", fact)


def unproven_memory(name: str, report: StopReport) -> TestReport:
    """Return the decision on memory of a stopped server that is not proven to be free again."""
    fact = Fact(
        "the memory that a stopped server held is free again",
        f"{report.memory}",
        evidence="end what else takes memory and run again; of a GPU's memory, run where all "
        "processes are seen (docker run --pid=host)",
    )
    identity = f"{BESIDE}memory after {name}"
    return TestReport.of(identity, "smoke", fact, verdict=Verdict.INCONCLUSIVE)
