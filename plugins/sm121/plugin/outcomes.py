"""Turns pytest's reports on the phases of a test into its verdict."""

import datetime
import json
import re
import unittest
from dataclasses import replace

import pytest

from sm121.core import digest, errors, profile_fields
from sm121.core.printable import printable
from sm121.core.unmet import Fact, Unmet, facts_of, noted, steady, text
from sm121.core.verdict import Inapplicable, NotRun, Severity, Undecided, Verdict
from sm121.core.waivers import Waiver
from sm121.engines import capabilities
from sm121.engines.server_errors import ServerError
from sm121.evidence import failure
from sm121.kernels.under_test import Kernels
from sm121.plugin.stash import DEVIATIONS, FINDING, ID, LEVEL, MEASURED, SYMPTOMS
from sm121.run.ledger import stands
from sm121.run.verdict_file import JudgedKernel, TestReport
from sm121.session.crashes import RanOutOfTime
from sm121.session.session import Session
from sm121.stress.checks import UnderLoad

_MESSAGE_LENGTH = 600
#: Characters of what was observed; of the rest a digest is compared.
_OBSERVED_LENGTH = 4000
#: How the failure message of pytest-timeout begins.
_TIMEOUT = "Timeout "
#: What ends a test without saying that something it requires does not hold.
_NO_FAILURE = (pytest.skip.Exception, unittest.SkipTest, pytest.xfail.Exception, NotRun)
#: Packages whose frames say nothing of a failure.
_CLIENTS = frozenset({"openai", "httpx", "httpcore"})
_EXCUSED = " (no xfail mark and no plugin tolerates a failure here; a waiver does, see --waivers)"


def why_not(session: Session, item: pytest.Item) -> str | None:
    """Why a test of a level is not started; None when it is."""
    if session.aborted is not None:
        return f"the run was ended: {session.aborted[1]}"
    if session.distrusted is not None:
        return session.distrusted
    if item.stash[LEVEL] == profile_fields.LEVELS[0]:
        return None
    failed = [
        test
        for test in session.ledger
        if test.level == profile_fields.LEVELS[0]
        and test.verdict is Verdict.FAIL
        and not test.excused
        and not test.is_beside
    ]
    if failed:
        return f"the smoke level failed ({failed[0].id}); what it needs comes first"
    return None


def require_able(session: Session, item: pytest.Item, other: str | None) -> None:
    """Go on only if a test can run. `other`: another reason why it cannot. Raises NotRun."""
    why = why_not(session, item) or other
    if why is not None:
        raise NotRun(why)


def crash(error: BaseException) -> ServerError | UnderLoad | RanOutOfTime | None:
    """The error, when it means that the server may have failed; None for any other."""
    if isinstance(error, ServerError | UnderLoad):
        return error
    if isinstance(error, pytest.fail.Exception) and str(error).startswith(_TIMEOUT):
        return RanOutOfTime(str(error).splitlines()[0])
    return None


def take(
    session: Session, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Update a test's verdict with one phase. After the last phase it goes into the ledger."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, Inapplicable):
        session.inapplicable.add(item.stash[ID])
    if isinstance(error, NotRun):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, str(error))
    excused = error is not None and not report.failed and not isinstance(error, _NO_FAILURE)
    if excused:  # by an xfail mark, or by another plugin
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    finding = item.stash.setdefault(FINDING, _unfinished(item))
    finding.seconds = round(finding.seconds + report.duration, 3)
    if "kernels" in getattr(item, "fixturenames", ()):
        finding.kernel = _judged_kernel(item, finding.kernel)
    if report.skipped and finding.verdict in (Verdict.NOT_RUN, Verdict.PASS):
        finding.skipped = True
        finding.verdict = Verdict.NOT_RUN
        finding.message = printable(_why_skipped(error, report))[:_MESSAGE_LENGTH]
    elif report.failed:
        facts = _facts(session, error, report)
        message, note = _message(session, item, facts)
        failed = finding.model_copy(
            update={
                "skipped": False,  # skipped, then failed in its teardown: failed
                "verdict": error.verdict if isinstance(error, Undecided) else Verdict.FAIL,
                "message": message + (_EXCUSED if excused else ""),
                "unmet": noted(facts, note),
                "waived": False,
                "tolerated": None,
            }
        )
        _excuse(session, item, failed, error, report)
        if finding.verdict is Verdict.PASS or stands(finding, failed) is failed:
            item.stash[FINDING] = finding = failed
    elif report.when == "call" and finding.verdict is Verdict.NOT_RUN:
        finding.verdict = Verdict.PASS
        finding.message = ""
        _mended(session, item)
    if report.when == "teardown":
        recorded = session.recorder.recorded[item.stash.get(MEASURED, 0) :]
        finding.metrics = [one.measurement.name for one in recorded]
        finding.deviations = item.stash.get(DEVIATIONS, None)
        finding.symptoms = item.stash.get(SYMPTOMS, [])
        session.ledger.decide(finding)
        session.save()
    report.user_properties.append(("verdict", finding.verdict.value))


def _why_skipped(error: BaseException | None, report: pytest.TestReport) -> str:
    if isinstance(error, NotRun):
        return str(error)
    if isinstance(error, pytest.skip.Exception):
        return error.msg or ""
    reason = getattr(report, "wasxfail", None) or report.longrepr
    return str(reason[2] if isinstance(reason, tuple) else reason)


def leave_out_libraries(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Keep the frames of HTTP clients out of a traceback: of a status 500 they are a hundred lines,
    none about the server. ``--tb=long``, ``--tb=native`` and ``--full-trace`` show them."""
    if item.config.option.tbstyle in ("long", "native"):
        return
    error = call.excinfo.value if call.excinfo is not None else None
    while error is not None:
        frames = error.__traceback__
        while frames is not None:
            names = frames.tb_frame.f_globals
            if str(names.get("__name__")).partition(".")[0] in _CLIENTS:
                names["__tracebackhide__"] = True  # as pytest looks for it
            frames = frames.tb_next
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _unfinished(item: pytest.Item) -> TestReport:
    ability = item.get_closest_marker("ability")
    return TestReport(
        id=item.stash[ID],
        level=item.stash[LEVEL],
        verdict=Verdict.NOT_RUN,
        message="not finished",
        severity=severity_of(item),
        ability=str(ability.args[0]) if ability is not None else None,
    )


def severity_of(item: pytest.Item) -> Severity:
    """What a failure of a test is, as far as its marker says."""
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
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return before or (case and JudgedKernel(operation=case.operation))


def _facts(session: Session, error: BaseException | None, report: pytest.TestReport) -> list[Fact]:
    """What does not hold; the one place where somebody else's failure becomes a fact."""
    kind = type(error).__qualname__
    if error is None:  # a strict xfail that passed
        facts = [Fact("", str(report.longrepr))]
    elif isinstance(error, AssertionError | errors.Sm121Error):
        facts = [_without_reprs(fact) for fact in facts_of(error)]
    elif _is_an_answer(error):
        body = json.dumps(steady(getattr(error, "body", None)), default=str)
        facts = [Fact("", f"{getattr(error, 'status_code', None)} {body}", kind=kind)]
    else:
        facts = [Fact("", str(error), kind=kind)]

    def shown(said: str) -> str:
        whole = printable(session.redact(said))
        rest = whole[_OBSERVED_LENGTH:]
        return whole[:_OBSERVED_LENGTH] + (f" and {digest.of([rest])}" if rest else "")

    return [fact.mapped(shown) for fact in facts]


def _without_reprs(fact: Fact) -> Fact:
    """What pytest adds of where a value came from has addresses in it: it is evidence."""
    if fact.required:
        return fact
    lines = fact.observed.splitlines()
    observed = "\n".join(line for line in lines if not line.startswith(" + "))
    parts = (fact.evidence, *(line.strip() for line in lines if line.startswith(" + ")))
    return replace(fact, observed=observed, evidence="; ".join(filter(None, parts)))


def _message(session: Session, item: pytest.Item, facts: list[Fact]) -> tuple[str, str]:
    lines = [line.strip() for line in text(facts).splitlines() if line.strip()]
    first = lines[0] if lines else "failed without a message"
    explanation = failure.explain(facts[0].observed)
    if explanation is not None:
        first = f"{first[: _MESSAGE_LENGTH // 3]}; {explanation}"
    parts = [part for fact in facts for part in (fact.requirement, fact.observation)]
    parts += [crash.kind for crash in session.file.crashes if crash.test == item.stash[ID]]
    bugs = (bug for bug in _bugs(session, item) for part in parts if re.search(bug.says, part))
    bug = next(bugs, None)
    note = f"known of {bug.build or bug.versions}: {bug.what} ({bug.source})" if bug else ""
    also = f"; {note}" if note else ""
    return first[: _MESSAGE_LENGTH - len(also)] + also, "; ".join(filter(None, (explanation, note)))


def _bugs(session: Session, item: pytest.Item) -> list[capabilities.Bug]:
    engine = session.file.engine
    if engine.name not in capabilities.shipped():
        return []
    can = capabilities.of(engine.name, engine.version, identity=engine.identity)
    return can.bugs(item.stash[ID])


def _mended(session: Session, item: pytest.Item) -> None:
    """Remark on a known bug whose range is open, where the test that shows it holds."""
    engine = session.file.engine
    for bug in (bug for bug in _bugs(session, item) if bug.mended_by(item.stash[ID])):
        session.remark(
            f"{item.stash[ID]}: a bug is known of {engine.name} {bug.versions}, and "
            f"{engine.version} does not show it ({bug.what}): close the range in "
            f"fixtures/engines/{engine.name}.toml",
            at_once=False,
        )


def _excuse(
    session: Session,
    item: pytest.Item,
    finding: TestReport,
    error: BaseException | None,
    report: pytest.TestReport,
) -> None:
    """Tolerate a failure; never a crash, or what says that nothing is proven (docs/verdicts.md)."""
    never = _never_waived(session, item, finding, error)
    plain = isinstance(error, AssertionError)
    if isinstance(error, Unmet) and error.severity is not None:
        finding.severity = error.severity
    if never or not plain or report.when != "call":
        # It did not come to what it judges: no answer, a 5xx, or one that cannot be read.
        finding.severity = Severity.BLOCKER
    _waive(session, finding, never, report)
    if finding.waived or never:
        return
    trusted = session.settings.against
    if finding.severity not in session.severities_needed:
        finding.tolerated = "listed"
        report.wasxfail = f"listed, as {finding.severity}: {finding.message}"
    elif trusted is not None and (plain or _is_an_answer(error)) and not session.settings.certify:
        named = any(waiver.test == finding.id for waiver in session.settings.waivers)
        source = trusted.known(finding)
        if source is not None and not named:
            finding.tolerated = "known"
            report.wasxfail = f"known, {source} has it, too: {finding.message}"
    if finding.tolerated is not None:
        report.outcome = "skipped"


def _is_an_answer(error: BaseException | None) -> bool:
    """Whether the server answered with a status, which the openai package has made an error of."""
    module = type(error).__module__.partition(".")[0]
    return module == "openai" and isinstance(getattr(error, "status_code", None), int)


def _waive(
    session: Session, finding: TestReport, never: str | None, report: pytest.TestReport
) -> None:
    today = datetime.date.today()
    facts = finding.facts
    waivers = [each for each in session.settings.waivers if each.test == finding.id]
    if not waivers:
        return
    in_force: dict[Waiver, None] = {}
    reasons = [f"not waived, since {never} never is"] if never else []
    for fact in facts:
        names_it = (waiver for waiver in waivers if waiver.names(fact, facts))
        waiver = max(names_it, key=lambda each: each.expires, default=None)
        if waiver is None:
            cases = ", ".join(dict.fromkeys(repr(each.case) for each in facts))
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
    """What a failure is that no waiver tolerates; None for one that a waiver may."""
    if finding.verdict is not Verdict.FAIL:
        return f"what is {finding.verdict}"
    if error is not None and crash(error) is not None:
        return "a crash"
    if isinstance(error, Unmet) and error.never_waived:
        return error.never_waived
    marker = item.get_closest_marker("never_waived")
    if marker is not None:
        return str(marker.args[0])
    if "record_metric" in getattr(item, "fixturenames", ()):
        measured = session.recorder.recorded[item.stash.get(MEASURED, 0) :]
        metrics = [session.file.metrics.get(one.measurement.name) for one in measured]
        if not metrics or any(metric is None or metric.value is None for metric in metrics):
            return "a measurement without a number"
    return None
