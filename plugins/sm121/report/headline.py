"""What a run came to, in one sentence, and the one thing to do next: the same words on the page, in
the terminal, in the summary and in junit.xml. The sentence is made of fields of verdict.json. Only
where a test says something that no field has, its message is put in."""

from collections.abc import Sequence
from dataclasses import dataclass

from sm121.core import templates, unmet
from sm121.core.level_settings import PRICES
from sm121.core.numbers import apart, number
from sm121.core.profile_fields import LEVELS
from sm121.core.verdict import Verdict, worst
from sm121.measure import gate, statistics
from sm121.measure.box import BoxState
from sm121.regression.priced import is_price
from sm121.report import findings, metric_names
from sm121.report.stored import StoredReport
from sm121.run.verdict_file import (
    BESIDE,
    MEMORY_FLOOR,
    ChangeReport,
    MetricReport,
    TestReport,
    VerdictFile,
)

#: Characters of somebody else's words in the sentence.
_MOST = 160
#: The same in brackets.
_LITTLE = 70
#: Where a text can be cut without a word or a number being cut.
_STOPS = ("; ", ". ", ", ", ": ")
#: The ability of tests whose answers are held against the oracle.
_ORACLE = "oracle"
#: What a metric without a gate is said to do.
_COUNTS = {Verdict.INVALID: "counts neither way", Verdict.INCONCLUSIVE: "is not decided"}
#: How more of a unit is called where less is better.
_MORE = {"GiB": "larger", "%": "worse", "tokens": "worse", "nats": "worse"}
#: Parts of a rounding for people.
_PARTS = {"kv": "KV cache", "experts": "experts' inputs"}
#: Before the ids of what ``--against`` has found, and of those that are about the path.
_AGAINST = "--against::"
_AGAINST_PATH = f"{_AGAINST}path "
#: What B of ``--ab`` is held against.
_OF_AB = "A"


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

    kind: str
    """``run again``, ``remedy`` or ``read``."""
    text: str

    @property
    def command(self) -> bool:
        """Whether the text can be typed."""
        return self.kind == _AGAIN


_AGAIN, _REMEDY, _READ = "run again", "remedy", "read"


def of(run: VerdictFile) -> Headline:
    """The sentence of a run, finished or not."""
    reservations = tuple(_reservations(run)) if run.verdict is Verdict.PASS else ()
    question = f" (asked: {run.question}?)" if run.question else ""
    certificate = run.certificate if run.certified else ""
    return Headline(run.verdict, _said(run) + question, reservations, certificate, _price(run))


def lead(run: VerdictFile) -> TestReport | None:
    """The test that the sentence is about; None where no test has the run's verdict."""
    return next((test for test in findings.failures(run) if test.verdict is run.verdict), None)


def action(report: StoredReport) -> Action | None:
    """The one thing to do next; None where nothing is to be done, or nothing is known."""
    run = report.run
    if run.verdict is Verdict.PASS or (run.verdict is Verdict.NOT_RUN and run.finished):
        return None  # the same command would run as little once more: the sentence has the reason
    first = lead(run)
    details = {detail.id: detail for detail in report.details.failures}
    detail = details.get(first.id) if first is not None else None
    if (decisive := _decisive(run)) is not None and decisive < len(report.crashes):
        crash = report.crashes[decisive]
        if crash.remedy:
            return Action(_REMEDY, crash.remedy)
        affected = details.get(crash.test or "")
        logs = affected.logs if affected is not None else []
        if (file := logs[-1] if logs else crash.bundle) is not None:
            return Action(_READ, str(report.directory / file))
    whole = first is None or (
        # It measures nothing itself, and so it cannot be run alone.
        first.level == "regression" and all(change.beside != _OF_AB for change in run.changes)
    )
    alone = detail.reproduce if detail is not None and not whole else None
    command = alone or report.details.command
    return Action(_AGAIN, command) if command else None


def _fixed(value: float | None) -> str:
    return number(None if value is None else round(value, 4) + 0.0)


def _price(run: VerdictFile) -> str:
    measured = {name: run.metrics[name] for name in PRICES if name in run.metrics}
    costs = [
        f"{metric_names.words(name)} {_fixed(each.value)}"
        + (f" [{_fixed(each.ci_low)}, {_fixed(each.ci_high)}]" if each.ci_low is not None else "")
        + f" {each.unit}"
        for name, each in measured.items()
        if each.value is not None
    ]
    parts: dict[str, list[str]] = {}
    for part, _, form in (item.partition("=") for item in (run.engine.rounding or "").split(",")):
        parts.setdefault(form.partition("-")[0].upper(), []).append(_PARTS.get(part, part))
    to = ", ".join(f"{', '.join(names)} to {form}" for form, names in parts.items() if form)
    none = "nothing" if run.engine.rounding else "not known"
    return f"Rounded beyond the checkpoint: {to or none}; {', '.join(costs)}" if costs else ""


def judged(run: VerdictFile, name: str) -> tuple[Verdict, str]:
    """What came of a metric, in all that was asked of it: the verdict that it is shown in, and
    words. A percentile of too few requests is shown as what did not run."""
    metric = run.metrics[name]
    changes = [
        change
        for change in run.changes
        if change.metric == name and change.verdict is not Verdict.PASS and change.beside != _OF_AB
    ]
    verdict = worst([metric.verdict, *(change.verdict for change in changes)])
    if verdict is not metric.verdict:
        change = next(change for change in changes if change.verdict is verdict)
        return verdict, f"{verdict.value}: {_by(change)} {change.beside}"
    if (why := no_evidence(name, metric)) is not None:
        return Verdict.NOT_RUN, why
    if not metric.gated and verdict is Verdict.PASS:
        return verdict, "measured"
    if not metric.gated and verdict is Verdict.NOT_RUN and metric.value is not None:
        return verdict, "measured on a busy machine"
    return verdict, verdict.value + (f" ({metric.grade})" if metric.grade else "")


def no_evidence(name: str, metric: MetricReport) -> str | None:
    """Why the PASS of a percentile shows nothing: so few requests could not have shown that its
    gate does not hold. None for any other metric."""
    fraction = metric_names.fraction(name)
    sure = metric.confidence
    if fraction is None or fraction <= 0.5 or metric.at_most is None or sure is None:
        return None
    if metric.verdict is not Verdict.PASS or sure >= statistics.CONFIDENCE:
        return None
    how = "no evidence" if sure < 0.5 else "little evidence"
    return (
        f"p{100 * fraction:g} of {metric.rounds} requests: {how} ({sure:.0%} confidence; "
        f"{statistics.CONFIDENCE:.0%} takes {gate.requests_needed(fraction)})"
    )


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


# The sentence.


def _said(run: VerdictFile) -> str:
    first = lead(run)
    ended = any(crash.kind == MEMORY_FLOOR for crash in run.crashes)
    if first is None or (ended and run.verdict is Verdict.INCONCLUSIVE):
        return brief(run.reason, 2 * _MOST) + _why_nothing_ran(run)
    bad = _Bad(run, [test for test in findings.failures(run) if test.verdict is run.verdict])
    for about in (_crash, _box, _change, _gate, _kernels, _oracle):
        if (answer := about(bad)) is not None:
            sentence, covered = answer
            break
    else:
        beside = first.id.startswith(BESIDE)
        name = first.id.removeprefix(BESIDE) if beside else first.id.rpartition("::")[2] or first.id
        sentence, covered = f"{brief(name)}: {brief(unmet.text(first.facts))}", 1
    if (others := len(bad.tests) - covered) > 0:
        sentence += f" (and {others} more check{'s' if others > 1 else ''})"
    return sentence if run.finished else f"{sentence}; the run has not finished"


def _why_nothing_ran(run: VerdictFile) -> str:
    groups = findings.not_run(run)
    if not groups or not run.finished or any(test.executed for test in run.tests):
        return ""
    most = max(groups, key=len)
    why = most[0].why_not_run or "no reason was given"
    return f" ({len(most)} of {len(run.tests)}: {brief(why)})"


@dataclass(frozen=True)
class _Bad:
    """The tests that have the run's verdict, which is no PASS."""

    run: VerdictFile
    tests: Sequence[TestReport]

    @property
    def first(self) -> TestReport:
        return self.tests[0]


#: A sentence, and how many of the tests it is about.
_Told = tuple[str, int] | None


def _crash(bad: _Bad) -> _Told:
    if (decisive := _decisive(bad.run)) is None:
        return None
    crash = bad.run.crashes[decisive]
    level = next((test.level for test in bad.run.tests if test.id == crash.test), None)
    where = f" in {level}" if level else ""
    happened = f"{crash.happened or crash.kind}{where}: "
    affected = {test.id for test in bad.tests} & {each.test for each in bad.run.crashes}
    return f"{happened}{brief(crash.summary)}", len(affected)


def _decisive(run: VerdictFile) -> int | None:
    """Which crash made the run fail: the first that a failure is about, else one of no test."""
    if run.verdict is not Verdict.FAIL:
        return None
    bad = {test.id for test in findings.failures(run) if test.verdict is Verdict.FAIL}
    positions = range(len(run.crashes))
    about = (position for position in positions if run.crashes[position].test in bad)
    others = (position for position in positions if run.crashes[position].kind != MEMORY_FLOOR)
    return next(about, next(others, None))


def _box(bad: _Bad) -> _Told:
    if bad.run.verdict is not Verdict.INCONCLUSIVE or bad.run.box.state != BoxState.DEGRADED:
        return None
    return f"the box is DEGRADED: {brief(bad.run.box.reason or 'no reason is known')}", len(
        bad.tests
    )


def _change(bad: _Bad) -> _Told:
    changes = [change for change in bad.run.changes if change.verdict is bad.run.verdict]
    if bad.first.level != "regression" or not changes:
        return None
    change = max(changes, key=lambda each: each.worse or 0.0)
    others = {each.metric for each in changes} - {change.metric}
    more = (
        f", and {len(others)} more metric{'s are' if len(others) > 1 else ' is'}" if others else ""
    )
    maybe = "may be" if change.verdict is Verdict.INCONCLUSIVE else "is"
    before, now = (number(value) or "no number" for value in (change.before, change.here))
    values = f"{before} → {now} {change.unit}"
    limit = f"{number(change.allowed)} {change.unit}"
    allowed = f"{limit if is_price(change.metric) else _percent(change.allowed)} allowed"
    against = bad.run.against
    paths = against.path if against is not None else []
    path = f"; another kernel path ran ({brief(paths[0], _LITTLE)})" if paths else ""
    sentence = (
        f"{_named(change.metric)} {maybe} {_by(change)} {change.beside} ({values}; {allowed})"
        f"{more}{path}{f'; {against.trade}' if against and against.trade else ''}"
    )
    names = [each.metric for each in changes]
    about = [
        test
        for test in bad.tests
        if test.level == "regression"
        and (
            test.id.startswith(_AGAINST_PATH)
            or test.id in [f"{_AGAINST}{name}" for name in names]
            or any(fact.about in names for fact in test.facts)
        )
    ]
    return sentence, max(1, len(about))


def _gate(bad: _Bad) -> _Told:
    # Older versions did not note which test measured what.
    is_older = not any(test.metrics for test in bad.run.tests)
    every = bad.run.metrics if bad.first.level == "performance" and is_older else ()
    measured = bad.first.metrics or [*every]
    metrics = bad.run.metrics
    names = [n for n in measured if n in metrics and metrics[n].verdict is bad.run.verdict]
    if not names:
        return None
    name, metric = names[0], metrics[names[0]]
    about = [test for test in bad.tests if test is bad.first or {*test.metrics} & {*names}]
    if bad.run.verdict is not Verdict.FAIL or not metric.gated:
        counts = _COUNTS.get(bad.run.verdict, "does not hold")
        return f"{_named(name)} {counts}: {brief(findings.reason_of(bad.first))}", len(about)
    limit = metric.minimum if metric.minimum is not None else metric.at_most
    need = (
        f"{number(limit)} required"
        if limit == metric.minimum
        else f"at most {number(limit)} allowed"
    )
    value = (
        f"{apart(metric.value, limit)} {metric.unit}" if metric.value is not None else "no number"
    )
    why = f". It reads {metric.out_of_reach}" if metric.out_of_reach else ""
    return f"{_named(name)} is {value}; {need} ({bad.run.profile}){why}", len(about)


def _kernels(bad: _Bad) -> _Told:
    if bad.first.kernel is None:
        return None
    about = [test for test in bad.tests if test.kernel is not None]
    whose = f" of {bad.first.kernel.provider}" if bad.first.kernel.provider else ""
    subject = f"{bad.first.kernel.operation}{whose}: "
    return _against_oracle(bad, "a kernel differs from the oracle", subject, about)


def _oracle(bad: _Bad) -> _Told:
    if bad.first.ability != _ORACLE or bad.run.verdict is not Verdict.FAIL:
        return None
    about = [test for test in bad.tests if test.ability == _ORACLE]
    return _against_oracle(bad, "answers differ from the oracle", "", about)


def _against_oracle(bad: _Bad, sentence: str, subject: str, about: Sequence[TestReport]) -> _Told:
    checks = f" in {len(about)} checks (first: " if len(about) > 1 else " ("
    return f"{sentence}{checks}{subject}{brief(unmet.text(bad.first.facts))})", len(about)


def _named(metric: str) -> str:
    """A metric with its own name where that says more: ``decode tg32@d0``."""
    rate = metric_names.rate(metric)
    if rate is None:
        return metric_names.words(metric)
    return f"{'decode' if rate.decoding else 'prefill'} {metric}"


def _by(change: ChangeReport) -> str:
    how = _MORE.get(change.unit, "slower")
    if change.worse is None:
        return f"{how} than"
    percentages = (_percent(change.worse, digits) for digits in range(1, 6))
    much = next((text for text in percentages if text != _percent(change.allowed)), "hardly")
    return f"{much} {how} than"


def _percent(fraction: float, digits: int = 1) -> str:
    return f"{round(100 * fraction, digits):.10g} %"


# What a PASS may not be taken for.


def _reservations(run: VerdictFile) -> list[str]:
    text = templates.rendered(
        "reservations.j2", run=run, levels=LEVELS, no_evidence=no_evidence, brief=brief
    )
    return text.splitlines()
