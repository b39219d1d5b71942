"""What a run came to, in one sentence, and the one thing to do next: the same words on the page, in
the terminal, in the summary and in junit.xml. The sentence is made of fields of verdict.json. Only
where a test says something that no field has, its message is put in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sm121.core import templates, unmet
from sm121.core.level_settings import PRICES
from sm121.core.numbers import apart, number
from sm121.core.profile_fields import LEVELS
from sm121.core.verdict import Verdict
from sm121.measure.box import BoxState
from sm121.regression.change import is_price
from sm121.report import findings, metric_names, metric_verdicts
from sm121.report.stored import StoredReport
from sm121.run.verdict_file import (
    BESIDE,
    MEMORY_FLOOR,
    TestReport,
    VerdictFile,
)

#: Characters of somebody else's words in the sentence.
_MOST = 160
#: Where a text can be cut without a word or a number being cut.
_STOPS = ("; ", ". ", ", ", ": ")
#: The ability of tests whose answers are held against the oracle.
_ORACLE = "oracle"
#: Before the ids of what ``--against`` has found, and of those that are about the path.
_AGAINST = "--against::"
_AGAINST_PATH = f"{_AGAINST}path "


@dataclass(frozen=True)
class Headline:
    """A run's verdict, what it may not be taken for, and why."""

    verdict: Verdict
    sentence: str
    #: Of a PASS: what was not looked at, or is not shown.
    reservations: tuple[str, ...] = ()
    #: Of a certified run: that, and with how many waivers.
    certificate: str = ""
    #: What is rounded beyond the checkpoint, and what that costs; empty where nothing measured it.
    price: str = ""

    @property
    def word(self) -> str:
        """The verdict with what qualifies it: ``PASS (not certified: ...)``."""
        if self.verdict is not Verdict.PASS or not (self.reservations or self.certificate):
            return self.verdict.value
        how = self.certificate or "not certified"
        why = f": {'; '.join(self.reservations)}" if self.reservations else ""
        return f"{self.verdict.value} ({how}{why})"

    def __str__(self) -> str:
        return f"{self.word}: {self.sentence}"


@dataclass(frozen=True)
class Action:
    """What to do next."""

    #: With ``run again`` the text can be typed.
    kind: Literal["run again", "remedy", "read"]
    text: str


def of(run: VerdictFile) -> Headline:
    """The sentence of a run, finished or not."""
    reservations: tuple[str, ...] = ()
    if run.verdict is Verdict.PASS:  # what it may not be taken for, a line each
        text = templates.rendered(
            "reservations.j2",
            run=run,
            levels=LEVELS,
            no_evidence=metric_verdicts.no_evidence,
            brief=brief,
        )
        reservations = tuple(text.splitlines())
    question = f" (asked: {run.question}?)" if run.question else ""
    certificate = run.certificate if run.certified else ""
    price = templates.rendered(
        "price.j2", run=run, prices=PRICES, words=metric_names.words, number=number
    )
    return Headline(run.verdict, _said(run) + question, reservations, certificate, price)


def action(report: StoredReport) -> Action | None:
    """The one thing to do next; None where nothing is to be done, or nothing is known."""
    run = report.run
    if run.verdict is Verdict.PASS or (run.verdict is Verdict.NOT_RUN and run.finished):
        return None  # the same command would run as little once more: the sentence has the reason
    if (decisive := _decisive(run)) is not None and decisive < len(report.crashes):
        crash = report.crashes[decisive]
        if crash.remedy:
            return Action("remedy", crash.remedy)
        details = {detail.id: detail for detail in report.details.failures}
        affected = details.get(crash.test or "")
        logs = affected.logs if affected is not None else []
        if (file := logs[-1] if logs else crash.bundle) is not None:
            return Action("read", str(report.directory / file))
    command = report.details.again or report.details.command
    return Action("run again", command) if command else None


def brief(text: str, most: int = _MOST) -> str:
    """A text on one line, cut behind a part of it that can stand alone, else behind a word."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    part = line[:most]
    at = max(part.rfind(stop) for stop in _STOPS)
    if at < most // 2:
        at = part.rfind(" ")
    if at < most // 2:  # one long word: of it as much as there is room for
        at = most
    return f"{part[:at].rstrip(' ,;:.')} ..."


def _said(run: VerdictFile) -> str:
    bad = [test for test in findings.failures(run) if test.verdict is run.verdict]
    ended = any(crash.kind == MEMORY_FLOOR for crash in run.crashes)
    if not bad or (ended and run.verdict is Verdict.INCONCLUSIVE):
        why = ""
        if run.finished and not any(test.executed for test in run.tests):
            most = max(findings.not_run(run), key=len, default=[])
            reason = most[0].message or "no reason was given" if most else ""
            counts = f"{len(most)} of {len(run.tests)}"
            is_said = run.reason.startswith(reason)
            if most:
                why = f" ({counts} checks)" if is_said else f" ({counts}: {brief(reason)})"
        return brief(run.reason, 2 * _MOST) + why
    sentences = (about(run, bad) for about in (_crash, _box, _change, _gate, _oracle))
    kind, covered, values = next(filter(None, sentences), ("test", 1, {}))
    return templates.rendered(
        "sentence.j2",
        run=run,
        kind=kind,
        first=bad[0],
        message=unmet.text(bad[0].facts),
        reason=findings.reason_of(bad[0]),
        beside=BESIDE,
        covered=covered,
        others=len(bad) - covered,
        brief=brief,
        named=_named,
        by=metric_verdicts.by,
        percent=metric_verdicts.percent,
        is_price=is_price,
        number=number,
        apart=apart,
        required=metric_verdicts.required,
        limit=metric_verdicts.limit,
        bound=metric_verdicts.bound,
        **values,
    )


#: A kind of sentence, how many of the tests with the run's verdict it is about, and its values.
_Told = tuple[str, int, dict[str, Any]] | None


def _crash(run: VerdictFile, bad: Sequence[TestReport]) -> _Told:
    if (decisive := _decisive(run)) is None:
        return None
    crash = run.crashes[decisive]
    level = next((test.level for test in run.tests if test.id == crash.test), None)
    affected = {test.id for test in bad} & {each.test for each in run.crashes}
    return "crash", len(affected), {"crash": crash, "level": level}


def _decisive(run: VerdictFile) -> int | None:
    """Which crash made the run fail: the first that a failure is about, else one of no test."""
    if run.verdict is not Verdict.FAIL:
        return None
    bad = {test.id for test in findings.failures(run) if test.verdict is Verdict.FAIL}
    positions = range(len(run.crashes))
    about = (position for position in positions if run.crashes[position].test in bad)
    others = (position for position in positions if run.crashes[position].kind != MEMORY_FLOOR)
    return next(about, next(others, None))


def _box(run: VerdictFile, bad: Sequence[TestReport]) -> _Told:
    is_unfit = run.verdict is Verdict.INCONCLUSIVE and run.box.state == BoxState.DEGRADED
    return ("box", len(bad), {}) if is_unfit else None


def _change(run: VerdictFile, bad: Sequence[TestReport]) -> _Told:
    changes = [change for change in run.changes if change.verdict is run.verdict]
    if bad[0].level != "regression" or not changes:
        return None
    names = {each.metric for each in changes}
    about = [
        test
        for test in bad
        if test.level == "regression"
        and (
            test.id.startswith(_AGAINST_PATH)
            or test.id in [f"{_AGAINST}{name}" for name in names]
            or any(fact.about in names for fact in test.facts)
        )
    ]
    change = max(changes, key=lambda each: each.worse or 0.0)
    return "change", max(1, len(about)), {"change": change, "metrics": len(names)}


def _gate(run: VerdictFile, bad: Sequence[TestReport]) -> _Told:
    metrics = {name: one for name, one in run.metrics.items() if one.verdict is run.verdict}
    # Version 1 did not note which test measured what.
    older = bad[0].level == "performance" and not any(test.metrics for test in run.tests)
    names = [name for name in bad[0].metrics or (metrics if older else ()) if name in metrics]
    if not names:
        return None
    about = [test for test in bad if test is bad[0] or {*test.metrics} & {*names}]
    metric = metrics[names[0]]
    kind = "gate" if run.verdict is Verdict.FAIL and metric.gated else "metric"
    return kind, len(about), {"which": names[0], "metric": metric}


def _oracle(run: VerdictFile, bad: Sequence[TestReport]) -> _Told:
    if bad[0].kernel is not None:
        return "oracle", sum(test.kernel is not None for test in bad), {}
    if bad[0].ability != _ORACLE or run.verdict is not Verdict.FAIL:
        return None
    return "oracle", sum(test.ability == _ORACLE for test in bad), {}


def _named(metric: str) -> str:
    rate = metric_names.rate(metric)
    if rate is None:
        return metric_names.words(metric)
    return f"{'decode' if rate.decoding else 'prefill'} {metric}"
