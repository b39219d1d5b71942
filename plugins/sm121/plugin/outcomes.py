"""Turns pytest's reports on the phases of a test into its verdict."""

import datetime
import json
import unittest
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from sm121.core import digest, errors, profile_fields
from sm121.core.printable import printable
from sm121.core.unmet import Fact, Unmet, facts_of, facts_text, noted, steady
from sm121.core.verdict import Inapplicable, NotRun, Severity, Undecided, Verdict
from sm121.core.waivers import Waiver, list_cases
from sm121.engines.server_errors import ServerError
from sm121.evidence import failure
from sm121.kernels.under_test import Kernels
from sm121.performance.recorder import Recorded
from sm121.plugin import known_bugs
from sm121.plugin.stash import DEVIATIONS, FINDING, ID, LEVEL, MEASURED, MENDED, SYMPTOMS
from sm121.run.events import Decided
from sm121.run.ledger import stands
from sm121.run.verdict_file import JudgedKernel, TestReport
from sm121.session.crashes import RanOutOfTime
from sm121.session.session import Session
from sm121.stress.checks import UnderLoad

_MESSAGE_LENGTH = 600
#: How many characters of an observed value are stored; a digest represents the rest.
_OBSERVED_LENGTH = 4000
#: The beginning of pytest-timeout's failure message.
_TIMEOUT = "Timeout "
#: Exceptions that end a test without a failed requirement.
_NO_FAILURE = (pytest.skip.Exception, unittest.SkipTest, pytest.xfail.Exception, NotRun)
#: Packages whose frames do not explain a failure.
_CLIENTS = frozenset({"openai", "httpx", "httpcore"})
_EXCUSED = (
    " (an xfail mark or a plugin cannot excuse a failure of this suite; use a waiver, see "
    "--waivers)"
)


def why_not(session: Session, item: pytest.Item) -> str | None:
    """Return why a test of a level is not started.

    Args:
        session: The run.
        item: The test.

    Returns:
        The reason; None if the test is started.
    """
    run = session.run
    if run.servers.aborted is not None:
        return f"the run was ended: {run.servers.aborted[1]}"
    if run.record.halted is not None:
        return run.record.halted
    smoke = profile_fields.LEVELS[0]
    if item.stash[LEVEL] == smoke:
        return None
    for test in run.record.ledger:
        if test.level != smoke or test.excused or test.has_no_test:
            continue
        if test.verdict is Verdict.FAIL:
            return f"the smoke level failed ({test.id}), so other levels do not run"
    return None


def require_able(session: Session, item: pytest.Item, other: str | None) -> None:
    """Require that a test can run.

    Args:
        session: The run.
        item: The test.
        other: A further reason why the test cannot run; None without one.

    Raises:
        NotRun: The test cannot run.
    """
    why = why_not(session, item) or other
    if why is not None:
        raise NotRun(why)


def crash(error: BaseException | None) -> ServerError | UnderLoad | RanOutOfTime | None:
    """Return a test's error, if the server may have caused it.

    Args:
        error: The error of a test; None without one.

    Returns:
        The error; None if it says nothing about the server.
    """
    if isinstance(error, ServerError | UnderLoad):
        return error
    if isinstance(error, pytest.fail.Exception) and str(error).startswith(_TIMEOUT):
        return RanOutOfTime(str(error).splitlines()[0])
    return None


def update_verdict(
    session: Session, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Update a test's verdict after one phase. After the last phase, record the verdict.

    Args:
        session: The run.
        item: The test.
        call: The phase, with its error.
        report: pytest's report of the phase, which is changed.
    """
    error = error_of(call)
    if isinstance(error, Inapplicable):
        session.selected.inapplicable.add(item.stash[ID])
    if isinstance(error, NotRun):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, str(error))
    is_excused = error is not None and not report.failed and not isinstance(error, _NO_FAILURE)
    if is_excused:  # an xfail mark or another plugin excused it
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    finding = item.stash.setdefault(FINDING, _unfinished(item))
    finding.seconds = round(finding.seconds + report.duration, 3)
    if "kernels" in getattr(item, "fixturenames", ()):
        finding.kernel = _judged_kernel(item, finding.kernel)
    if report.skipped and finding.verdict in (Verdict.NOT_RUN, Verdict.PASS):
        finding.skipped = True
        finding.verdict = Verdict.NOT_RUN
        why = session.run.record.redact(_why_skipped(error, report))
        finding.message = printable(why)[:_MESSAGE_LENGTH]
    elif report.failed:
        failed = _failure(session, item, finding, error, report, is_excused=is_excused)
        if finding.verdict is Verdict.PASS or stands(finding, failed) is failed:
            finding = failed
            item.stash[FINDING] = failed
    elif report.when == "call" and finding.verdict is Verdict.NOT_RUN:
        finding.verdict = Verdict.PASS
        finding.message = ""
        known_bugs.remark_mended(session, item)
    if report.when == "teardown":
        finding.metrics = [one.measurement.name for one in _recorded(session, item)]
        finding.deviations = item.stash.get(DEVIATIONS, None)
        finding.symptoms = item.stash.get(SYMPTOMS, [])
        finding.mended = item.stash.get(MENDED, [])
        session.run.record.emit(Decided(finding))
    report.user_properties.append(("verdict", finding.verdict.value))


def error_of(call: pytest.CallInfo[None]) -> BaseException | None:
    """Return the error of a phase; None without one.

    Args:
        call: The phase.
    """
    if call.excinfo is None:
        return None
    return call.excinfo.value


def _failure(
    session: Session,
    item: pytest.Item,
    finding: TestReport,
    error: BaseException | None,
    report: pytest.TestReport,
    *,
    is_excused: bool,
) -> TestReport:
    """Return the result of a test after one of its phases failed.

    ``is_excused`` means that an xfail mark or another plugin had excused the failure.
    """
    verdict = Verdict.FAIL
    if isinstance(error, Undecided):
        verdict = error.verdict
    facts = _facts(session, error, report)
    message = _message(session, item, facts)
    whole = message.text
    if is_excused:
        whole += _EXCUSED
    failed = finding.model_copy(
        update={
            "skipped": False,  # a skipped test with a failed teardown has failed
            "verdict": verdict,
            "message": whole,
            "unmet": noted(facts, message.note),
            "known_bug": message.known_bug,
            "waived": False,
            "tolerated": None,
        }
    )
    _excuse(session, item, failed, error, report)
    return failed


def _recorded(session: Session, item: pytest.Item) -> Sequence[Recorded]:
    """Return the measurements that a test has recorded so far."""
    return session.recorder.recorded[item.stash.get(MEASURED, 0) :]


def _why_skipped(error: BaseException | None, report: pytest.TestReport) -> str:
    if isinstance(error, NotRun):
        return str(error)
    if isinstance(error, pytest.skip.Exception):
        return error.msg or ""
    reason = getattr(report, "wasxfail", None) or report.longrepr
    if isinstance(reason, tuple):
        _, _, why = reason
        return str(why)
    return str(reason)


def leave_out_libraries(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Remove the frames of HTTP clients from a traceback.

    If a request fails with status 500, these frames are about a hundred lines. None of them
    explains the failure. ``--tb=long``, ``--tb=native`` and ``--full-trace`` show them.

    Args:
        item: The test.
        call: The phase, with its error.
    """
    if item.config.option.tbstyle in ("long", "native"):
        return
    error = error_of(call)
    while error is not None:
        frames = error.__traceback__
        while frames is not None:
            names = frames.tb_frame.f_globals
            if str(names.get("__name__")).partition(".")[0] in _CLIENTS:
                names["__tracebackhide__"] = True  # pytest also reads this from the globals
            frames = frames.tb_next
        error = _shown_before(error)


def _shown_before(error: BaseException) -> BaseException | None:
    """Return the error that a traceback shows before an error; None without one."""
    if error.__cause__ is not None:
        return error.__cause__
    if error.__suppress_context__:
        return None
    return error.__context__


def _unfinished(item: pytest.Item) -> TestReport:
    marker = item.get_closest_marker("ability")
    ability: str | None = None
    if marker is not None:
        ability = str(marker.args[0])
    return TestReport(
        id=item.stash[ID],
        level=item.stash[LEVEL],
        verdict=Verdict.NOT_RUN,
        message="not finished",
        severity=severity_of(item),
        ability=ability,
    )


def severity_of(item: pytest.Item) -> Severity:
    """Return the severity of a test's failure by its marker.

    Args:
        item: The test.
    """
    marker = item.get_closest_marker("severity")
    if marker is not None:
        return Severity(marker.args[0])
    return Severity.BLOCKER


def _judged_kernel(item: pytest.Item, before: JudgedKernel | None) -> JudgedKernel | None:
    used: Kernels | None = getattr(item, "funcargs", {}).get("kernels")
    if used is not None and used.judged is not None:
        operation, provider = used.judged
        used.judged = None
        return JudgedKernel(operation=operation, provider=provider)
    if before is not None or not hasattr(item, "callspec"):
        return before
    case = item.callspec.params.get("case")
    if case is None:
        return None
    return JudgedKernel(operation=case.operation)


def _facts(session: Session, error: BaseException | None, report: pytest.TestReport) -> list[Fact]:
    """Return the facts of a failure. A failure without facts becomes one fact."""
    kind = type(error).__qualname__
    if error is None:  # a test with a strict xfail mark passed
        facts = [Fact("", str(report.longrepr))]
    elif isinstance(error, AssertionError | errors.Sm121Error):
        facts = [_without_reprs(fact) for fact in facts_of(error)]
    elif _is_an_answer(error):
        body = json.dumps(steady(getattr(error, "body", None)), default=str)
        facts = [Fact("", f"{getattr(error, 'status_code', None)} {body}", kind=kind)]
    else:
        facts = [Fact("", str(error), kind=kind)]

    def shown(said: str) -> str:
        whole = printable(session.run.record.redact(said))
        rest = whole[_OBSERVED_LENGTH:]
        if not rest:
            return whole
        return f"{whole[:_OBSERVED_LENGTH]} and {digest.of_value([rest])}"

    return [fact.mapped(shown) for fact in facts]


def _without_reprs(fact: Fact) -> Fact:
    """Move pytest's "where" lines into the evidence, because they contain memory addresses."""
    if fact.required:
        return fact
    observed = []
    evidence = [fact.evidence]
    for line in fact.observed.splitlines():
        if line.startswith(" + "):
            evidence.append(line.strip())
        else:
            observed.append(line)
    return replace(
        fact,
        observed="\n".join(observed),
        evidence="; ".join(part for part in evidence if part),
    )


class _Message(NamedTuple):
    """The message of a failure, with its explanation and a known bug."""

    text: str
    note: str
    known_bug: str | None


def _message(session: Session, item: pytest.Item, facts: list[Fact]) -> _Message:
    lines = [line.strip() for line in facts_text(facts).splitlines() if line.strip()]
    first = lines[0] if lines else "failed without a message"
    notes = []
    explanation = failure.explain(facts[0].observed)
    if explanation is not None:
        first = f"{first[: _MESSAGE_LENGTH // 3]}; {explanation}"
        if explanation:
            notes.append(explanation)
    also = ""
    known_bug = known_bugs.explaining(session, item, facts)
    if known_bug is not None:
        note = f"known bug of {known_bug}"
        notes.append(note)
        also = f"; {note}"
    return _Message(first[: _MESSAGE_LENGTH - len(also)] + also, "; ".join(notes), known_bug)


def _excuse(
    session: Session,
    item: pytest.Item,
    finding: TestReport,
    error: BaseException | None,
    report: pytest.TestReport,
) -> None:
    """Excuse a failure if a waiver or the trusted run allows that (docs/verdicts.md)."""
    never = _never_waived(session, item, finding, error)
    is_assertion = isinstance(error, AssertionError)
    if isinstance(error, Unmet) and error.severity is not None:
        finding.severity = error.severity
    if never or not is_assertion or report.when != "call":
        # The test could not judge anything: no answer, a status 5xx, or an unreadable answer.
        finding.severity = Severity.BLOCKER
    _waive(session, finding, never, report)
    if finding.waived or never:
        return
    if finding.severity not in session.severities_needed:
        finding.tolerated = "listed"
        report.wasxfail = f"does not count (severity {finding.severity}): {finding.message}"
    elif is_assertion or _is_an_answer(error):
        source = _known_by(session, finding)
        if source is not None:
            finding.tolerated = "known"
            report.wasxfail = f"known failure, also in {source}: {finding.message}"
    if finding.tolerated is not None:
        report.outcome = "skipped"


def _known_by(session: Session, finding: TestReport) -> str | None:
    """Return the name of the trusted run if it has the same failure, and no waiver names the test.

    In a certified run, a failure of the trusted run is no excuse.
    """
    settings = session.settings
    if settings.judging.against is None or settings.judging.certify:
        return None
    source = settings.judging.against.known(finding)
    if any(waiver.test == finding.id for waiver in settings.judging.waivers):
        return None
    return source


def _is_an_answer(error: BaseException | None) -> bool:
    """Whether the openai package raised the error because of the status of an answer."""
    module = type(error).__module__.partition(".")[0]
    return module == "openai" and isinstance(getattr(error, "status_code", None), int)


def _waive(
    session: Session, finding: TestReport, never: str | None, report: pytest.TestReport
) -> None:
    """Waive a failure if waivers name all of its facts.

    ``never`` is the kind of this failure if no waiver may excuse that kind; otherwise None.
    """
    today = datetime.date.today()
    facts = finding.facts
    waivers = [each for each in session.settings.judging.waivers if each.test == finding.id]
    if not waivers:
        return
    in_force: dict[Waiver, None] = {}
    reasons = [f"not waived, because {never} is never waived"] if never else []
    for fact in facts:
        naming = [waiver for waiver in waivers if waiver.names(fact, facts)]
        waiver = max(naming, key=lambda each: each.expires, default=None)
        if waiver is None:
            cases = list_cases(facts, waivers)
            reasons.append(f"not waived: its cases are {cases}, and no waiver names each of them")
        elif waiver.expired(today):
            reasons.append(f"waiver expired on {waiver.expires} ({waiver.issue})")
        else:
            in_force[waiver] = None
    if reasons:
        why = "; ".join(dict.fromkeys(reasons))
        finding.message = f"{why}: {finding.message}"
        finding.unmet = noted(finding.unmet, why)
        return
    finding.waived = True
    until = "; ".join(f"waived until {each.expires} ({each.issue})" for each in in_force)
    finding.message = f"{until}: {finding.message}"
    report.outcome = "skipped"
    report.wasxfail = "; ".join(f"waived: {each.reason} ({each.issue})" for each in in_force)


def _never_waived(
    session: Session, item: pytest.Item, finding: TestReport, error: BaseException | None
) -> str | None:
    """Return the kind of a failure that no waiver may excuse; None if one may."""
    if finding.verdict is not Verdict.FAIL:
        return f"a result that is {finding.verdict}"
    if error is not None and crash(error) is not None:
        return "a crash"
    if isinstance(error, Unmet) and error.never_waived:
        return error.never_waived
    marker = item.get_closest_marker("never_waived")
    if marker is not None:
        return str(marker.args[0])
    if "record_metric" in getattr(item, "fixturenames", ()):
        recorded = _recorded(session, item)
        if not recorded:
            return "a measurement without a number"
        for one in recorded:
            metric = session.run.record.file.metrics.get(one.measurement.name)
            if metric is None or metric.value is None:
                return "a measurement without a number"
    return None
