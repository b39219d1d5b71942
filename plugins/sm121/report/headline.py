"""The result of a run in one sentence, and the next step.

The page, the terminal, the summary and junit.xml use the same sentence. It is composed of fields of
verdict.json. A test's message is only inserted if no field contains the result of the test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sm121.core import templates, unmet
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES
from sm121.core.numbers import apart, number
from sm121.core.profile_fields import LEVELS
from sm121.core.verdict import Verdict
from sm121.machine.box import BoxState
from sm121.oracles.formats import Rounding
from sm121.regression.change import is_price
from sm121.report import findings, metric_names, metric_verdicts
from sm121.report.crash_list import Crash
from sm121.report.stored import StoredReport
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.verdict_file import AGAINST, MetricReport, TestReport, VerdictFile

#: Maximum number of characters of a message that the sentence quotes.
_MOST = 160
#: Separators at which a text can be truncated without splitting a word or a number.
_STOPS = ("; ", ". ", ", ", ": ")
#: The ability of tests that compare answers with the oracle.
_ORACLE = "oracle"


@dataclass(frozen=True)
class Headline:
    """A run's verdict, its reservations, and the reason."""

    verdict: Verdict
    sentence: str
    #: The limitations of a PASS: what was not checked, or is not shown.
    reservations: tuple[str, ...] = ()
    #: ``certified``, with the number of waivers; empty for a run that is not certified.
    certificate: str = ""
    #: The parts that the server rounds more than the checkpoint does, and the accuracy cost of that
    #: rounding; empty if the cost was not measured.
    price: str = ""

    @property
    def word(self) -> str:
        """The verdict with its qualification, for example ``PASS (not certified: ...)``."""
        if self.verdict is not Verdict.PASS or not (self.reservations or self.certificate):
            return self.verdict.value
        how = self.certificate or "not certified"
        if self.reservations:
            how += f": {'; '.join(self.reservations)}"
        return f"{self.verdict.value} ({how})"

    def __str__(self) -> str:
        return f"{self.word}: {self.sentence}"


@dataclass(frozen=True)
class Action:
    """The next step."""

    #: The kind. For ``run again``, the text is a command.
    kind: Literal["run again", "remedy", "read"]
    text: str
    #: A more detailed text instead of the kind: ``unplug the machine, then run again``.
    words: str = ""

    @property
    def title(self) -> str:
        """The words before the text on a terminal."""
        return self.words or self.kind

    @property
    def heading(self) -> str:
        """The words before the text on a page."""
        return self.title[:1].upper() + self.title[1:]


def headline_of(run: VerdictFile) -> Headline:
    """Return the headline of a run.

    Args:
        run: The verdict file of a run, finished or not.
    """
    sentence = _sentence(run)
    if run.question:
        sentence += f" (question: {run.question}?)"
    return Headline(
        verdict=run.verdict,
        sentence=sentence,
        reservations=_reservations(run),
        certificate=run.certificate if run.certified else "",
        price=templates.rendered(
            "price.j2",
            run=run,
            rounding=_rounding(run),
            prices=PRICES,
            words=metric_names.words,
            number=number,
        ),
    )


def _rounding(run: VerdictFile) -> Rounding | None:
    """Return the rounding of a run's server; None if it is unknown, or of another release."""
    if run.engine.rounding is None:
        return None
    try:
        return Rounding.parse(run.engine.rounding)
    except UsageError:
        return None


def _reservations(run: VerdictFile) -> tuple[str, ...]:
    """Return the limitations of a PASS: what was not checked, or is not shown."""
    if run.verdict is not Verdict.PASS:
        return ()
    text = templates.rendered(
        "reservations.j2",
        run=run,
        levels=LEVELS,
        no_evidence=metric_verdicts.no_evidence,
        brief=brief,
    )
    return tuple(text.splitlines())


def action(report: StoredReport) -> Action | None:
    """Return the next step after a run.

    Args:
        report: The stored report.

    Returns:
        The step; None after a PASS, or if no step is known.
    """
    run = report.run
    if run.verdict is Verdict.PASS:
        return None
    if run.verdict is Verdict.NOT_RUN and run.finished:
        return None  # the same command would again run nothing; the sentence states the reason
    decisive = _decisive(run)
    if decisive is not None and decisive < len(report.crashes):
        step = _after_crash(report, report.crashes[decisive])
        if step is not None:
            return step
    remedy = _remedy_of_the_box(run)
    command = report.details.again or report.details.command
    if command and remedy:
        return Action("run again", command, f"{remedy}, then run again")
    if command:
        rounds = _more_rounds(run)
        if run.certificate_levels is not None and command == report.details.command:
            rounds = None  # --certify refuses --rounds
        if rounds is not None:
            return Action("run again", f"{command} --rounds {rounds}", "run again with more rounds")
        return Action("run again", command)
    if remedy:
        return Action("remedy", remedy)
    return None


def _remedy_of_the_box(run: VerdictFile) -> str:
    """Return the remedy of a run that the machine's state made INCONCLUSIVE; else empty."""
    if _is_of_the_box(run):
        return run.box.remedy or "quiet the machine"  # older files have no remedy
    return ""


def _more_rounds(run: VerdictFile) -> int | None:
    """Return how many rounds may be enough for a verdict on an INCONCLUSIVE rate.

    Return None if no rate is INCONCLUSIVE, or if more rounds would not help.
    """
    bad = [test for test in findings.failures(run) if test.verdict is run.verdict]
    if run.verdict is not Verdict.INCONCLUSIVE or not bad:
        return None
    values = _topic(run, bad).values
    if "metric" not in values or metric_names.rate(values["which"]) is None:
        return None
    metric: MetricReport = values["metric"]
    # More rounds do not help if starts differ too much, or if tokens are counted by chunks.
    if metric.start_spread is not None or metric.clock == "chunks" or not metric.rounds:
        return None
    return 2 * metric.rounds


def _after_crash(report: StoredReport, crash: Crash) -> Action | None:
    if crash.remedy:
        return Action("remedy", crash.remedy)
    file = crash.bundle
    for detail in report.details.failures:
        if crash.test and detail.id == crash.test and detail.logs:
            file = detail.logs[-1]
    if file is None:
        return None
    return Action("read", str(report.directory / file))


def brief(text: str, most: int = _MOST) -> str:
    """Return a text on one line, truncated after a complete part, or else after a word.

    Args:
        text: Any text.
        most: The maximum number of characters, without the dots of a truncated text.
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    part = line[:most]
    end = max(part.rfind(stop) for stop in _STOPS)
    if end < most // 2:
        end = part.rfind(" ")
    if end < most // 2:  # one long word: truncate it
        end = most
    return f"{part[:end].rstrip(' ,;:.')} ..."


@dataclass(frozen=True)
class _Topic:
    """The subject of the sentence.

    Attributes:
        kind: The part of ``sentence.j2`` that is used.
        covered: How many of the failed tests with the run's verdict the sentence covers.
        values: Further values for the template.
    """

    kind: str
    covered: int
    values: dict[str, Any] = field(default_factory=dict)


def _sentence(run: VerdictFile) -> str:
    bad = [test for test in findings.failures(run) if test.verdict is run.verdict]
    was_ended = any(crash.kind == MEMORY_FLOOR for crash in run.crashes)
    if not bad or (was_ended and run.verdict is Verdict.INCONCLUSIVE):
        return brief(run.reason, 2 * _MOST) + _nothing_ran(run)
    topic = _topic(run, bad)
    return templates.rendered(
        "sentence.j2",
        run=run,
        kind=topic.kind,
        first=bad[0],
        message=unmet.facts_text(bad[0].facts),
        reason=findings.reason_of(bad[0]),
        covered=topic.covered,
        others=len(bad) - topic.covered,
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
        **topic.values,
    )


def _nothing_ran(run: VerdictFile) -> str:
    """Return the most frequent reason why tests did not run, if no test ran; else an empty text."""
    if not run.finished or any(test.executed for test in run.tests):
        return ""
    most = max(findings.not_run(run), key=len, default=[])
    if not most:
        return ""
    counts = f"{len(most)} of {len(run.tests)}"
    reason = most[0].message or "no reason was given"
    if run.reason == reason:
        return f" ({counts} checks)"
    return f" ({counts}: {brief(reason)})"


def _topic(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic:
    for topic_of in (_crash, _box, _change, _gate, _oracle):
        topic = topic_of(run, bad)
        if topic is not None:
            return topic
    return _Topic("test", covered=1)


def _crash(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic | None:
    decisive = _decisive(run)
    if decisive is None:
        return None
    crash = run.crashes[decisive]
    level = next((test.level for test in run.tests if test.id == crash.test), None)
    crashed = {crash.test for crash in run.crashes}
    affected = {test.id for test in bad} & crashed
    return _Topic("crash", len(affected), {"crash": crash, "level": level})


def _decisive(run: VerdictFile) -> int | None:
    """Return the index of the crash that made the run fail: preferably that of a failed test."""
    if run.verdict is not Verdict.FAIL:
        return None
    failed = {test.id for test in findings.failures(run) if test.verdict is Verdict.FAIL}
    for position, crash in enumerate(run.crashes):
        if crash.test in failed:
            return position
    for position, crash in enumerate(run.crashes):
        if crash.kind != MEMORY_FLOOR:
            return position
    return None


def _box(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic | None:
    return _Topic("box", len(bad)) if _is_of_the_box(run) else None


def _is_of_the_box(run: VerdictFile) -> bool:
    return run.verdict is Verdict.INCONCLUSIVE and run.box.state == BoxState.DEGRADED


def _change(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic | None:
    changes = [change for change in run.changes if change.verdict is run.verdict]
    if bad[0].level != "regression" or not changes:
        return None
    metrics = {change.metric for change in changes}
    covered = [test for test in bad if _is_of_change(test, metrics)]
    largest = max(changes, key=lambda change: change.worse or 0.0)
    values = {"change": largest, "metrics": len(metrics)}
    return _Topic("change", max(1, len(covered)), values)


def _is_of_change(test: TestReport, metrics: set[str]) -> bool:
    if test.level != "regression":
        return False
    if test.id in {f"{AGAINST}{name}" for name in metrics}:
        return True
    return any(fact.kind == unmet.OF_PATH or fact.about in metrics for fact in test.facts)


def _gate(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic | None:
    first = bad[0]
    metrics = {}
    for name, metric in run.metrics.items():
        if metric.verdict is run.verdict:
            metrics[name] = metric
    # Version 1 of the file did not store which test measured which metric.
    is_noted = any(test.metrics for test in run.tests)
    if first.level == "performance" and not is_noted:
        names = list(metrics)
    else:
        names = [name for name in first.metrics if name in metrics]
    if not names:
        return None
    covered = [test for test in bad if test is first or not set(names).isdisjoint(test.metrics)]
    metric = metrics[names[0]]
    kind = "gate" if run.verdict is Verdict.FAIL and metric.gated else "metric"
    return _Topic(kind, len(covered), {"which": names[0], "metric": metric})


def _oracle(run: VerdictFile, bad: Sequence[TestReport]) -> _Topic | None:
    if bad[0].kernel is not None:
        return _Topic("oracle", sum(test.kernel is not None for test in bad))
    if bad[0].ability == _ORACLE and run.verdict is Verdict.FAIL:
        return _Topic("oracle", sum(test.ability == _ORACLE for test in bad))
    return None


def _named(metric: str) -> str:
    rate = metric_names.rate(metric)
    if rate is None:
        return metric_names.words(metric)
    kind = "decode" if rate.decoding else "prefill"
    return f"{kind} {metric}"
