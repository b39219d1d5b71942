"""``--against RUN``: compares this run with a trusted run.

If a test failed in the trusted run in the same way, its failure is known and does not count. A new
failure counts, and so does a test that now fails in another way. This module finds differences that
no test shows: tests that ran only in the trusted run, unrequested changes of the kernel path, and
metrics that are worse.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sm121.core import unmet
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.profile_fields import LEVELS
from sm121.core.server import UNRECOGNISED
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.machine import this_machine
from sm121.machine.box import BoxState
from sm121.measure.measurement import COUNTED
from sm121.regression import metric_levels, trend
from sm121.regression.change import is_price
from sm121.run import trade
from sm121.run.fingerprint import Fingerprint
from sm121.run.merge import nothing_compared
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import (
    AGAINST,
    AgainstReport,
    ChangeReport,
    MetricReport,
    TestReport,
    VerdictFile,
)
from sm121.session import path_changes
from sm121.session.trusted_runs import PEAK, Trusted

#: The name of the trusted run in descriptions of changes.
THE_TRUSTED = "the trusted run"
_LEVEL = "regression"
#: The fields of a fingerprint whose differences are not listed. The machine is judged separately,
#: and the trusted run of each run differs anyway.
_NOT_LISTED = ("machine", "against")
_RECORDS = "--record-golden"
_COMPARES = "--golden"


def refuse(trusted: Trusted, run: VerdictFile) -> None:
    """Refuse a comparison with a trusted run of another target.

    Args:
        trusted: The trusted run.
        run: This run.

    Raises:
        UsageError: The trusted run has another architecture, profile, engine or model, or a smaller
            plan.
    """
    why = path_changes.unlike(trusted.newest.file, run)
    if why is not None:
        raise UsageError(
            f"--against: {trusted.name} has another {why}: expected a run with the same settings"
        )


@dataclass(frozen=True)
class TrustedComparison:
    """How a run compares with the trusted run.

    Attributes:
        report: The comparison as verdict.json shows it.
        changes: All metrics of the run that are worse than before, or may be worse.
        worse: A decision for each deterioration since the trusted run that no test shows.
    """

    report: AgainstReport
    changes: list[ChangeReport]
    worse: list[TestReport]


def compare_with_trusted(
    run: VerdictFile,
    trusted: Trusted,
    profile: Profile,
    metrics: Mapping[str, StoredMetric],
    asked_for: Callable[[TestReport], bool],
    reasons: Mapping[str, str] | None = None,
) -> TrustedComparison:
    """Compare a finished run with the trusted run, before its verdict is set.

    Args:
        run: The run. It is not changed.
        trusted: The trusted run.
        profile: The profile of the run.
        metrics: The metrics of the run, with their samples.
        asked_for: Returns whether this run requested a given test of the trusted run.
        reasons: For each metric of the run, the reason for its verdict, if there is one.
    """
    before = trusted.newest.file
    report = AgainstReport(run=trusted.name, engine=_engine(before))
    changes = [change for change in run.changes if change.beside != THE_TRUSTED]
    comparison = TrustedComparison(report, changes, worse=[])
    judging = _Judge(run, trusted, comparison, profile, metrics, reasons or {})
    unasked = judging.compare_tests(asked_for)
    levels = {test.level for test in run.tests}
    report.not_asked = sorted({test.level for test in unasked} - levels)
    judging.require_anything_in_common()
    judging.compare_paths()
    judging.compare_metrics(_lost(before, unasked))
    if before.fingerprint is not None and run.fingerprint is not None:
        report.differs = _differing(before.fingerprint, run.fingerprint)
    has_price = any(is_price(name) for name in metrics)
    if has_price and not any(is_price(name) for name in trusted.newest.metrics):
        report.differs.append(
            f"cost of rounding: not compared, because {trusted.name} did not measure it"
        )
    _note_rates(report, trusted, metrics)
    report.measured = _measured(run, trusted)
    report.trade = trade.trade(trade.values(report.measured), trade.values(run.metrics))
    report.no_worse = not comparison.worse and not report.new and not report.changed
    return comparison


def _differing(before: Fingerprint, now: Fingerprint) -> list[str]:
    # The trusted run recorded the golden file with which this run compares its answers.
    recorded = before.options.get(_RECORDS)
    is_pair = recorded is not None and recorded == now.options.get(_COMPARES)
    lines = []
    for difference in before.differences(now):
        if is_pair and difference.key in (_RECORDS, _COMPARES):
            continue
        if difference.field not in _NOT_LISTED:
            lines.append(
                f"{difference.name}: {difference.one} in the trusted run, "
                f"{difference.other} in this run"
            )
    return lines


@dataclass(frozen=True)
class _MetricVerdict:
    """The verdict on a metric, or on all of them, compared with the trusted run."""

    metric: str
    verdict: Verdict
    text: str


class _Judge:
    """Compares a run with the trusted run, and adds what it finds to the comparison."""

    def __init__(
        self,
        run: VerdictFile,
        trusted: Trusted,
        comparison: TrustedComparison,
        profile: Profile,
        metrics: Mapping[str, StoredMetric],
        reasons: Mapping[str, str],
    ) -> None:
        self._run = run
        self._trusted = trusted
        self._before = trusted.newest.file
        self._comparison = comparison
        self._report = comparison.report
        self._profile = profile
        self._metrics = metrics
        self._reasons = reasons

    def _add(self, name: str, fact: Fact, verdict: Verdict = Verdict.FAIL) -> None:
        decision = TestReport.of(f"{AGAINST}{name}", _LEVEL, fact, verdict=verdict)
        self._comparison.worse.append(decision)

    def compare_tests(self, asked_for: Callable[[TestReport], bool]) -> list[TestReport]:
        """Compare the engine and the tests. Return the tests that this run did not request."""
        before = self._before
        report = self._report
        # A worker that runs no test with the server does not know the server's engine.
        if len({before.engine.name, self._run.engine.name} - {UNRECOGNISED}) > 1:
            line = (
                f"engine: {before.engine.name} in the trusted run, "
                f"{self._run.engine.name} in this run"
            )
            report.path.append(line)
            self._add("engine", Fact(f"the engine of {report.run}", line))
        missing, unasked = _not_executed(before, self._run, asked_for)
        report.missing = list(missing)
        for name, why in missing.items():
            self._add(name, Fact(f"{name} to run, as in {report.run}", f"not run: {why}"))
        tests_before = {test.id: test for test in before.tests}
        for test in self._run.tests:
            deviations = _sort(report, test, tests_before.get(test.id))
            if deviations:
                known = f"a known deviation of {_engine(self._run)} ({', '.join(deviations)})"
                text = f"a failure that is excused as {known}, which {report.run} did not show"
                self._add(test.id, Fact(f"{test.id} to pass, as in {report.run}", text))
        return unasked

    def require_anything_in_common(self) -> None:
        """Fail the comparison if no test and no metric of the trusted run is in this run.

        A shard or a worker of a run does not fail, because another part of the run may have common
        tests. In this case, the report only contains the fact.
        """
        ran = {test.id for test in self._run.tests if test.executed}
        before = {test.id for test in self._before.tests if test.executed}
        if ran.isdisjoint(before) and self._metrics.keys().isdisjoint(self._trusted.metrics):
            self._report.nothing_in_common = True
            if self._run.shard is None:
                decision = nothing_compared(self._report.run, len(ran))
                self._comparison.worse.append(decision)

    def compare_paths(self) -> None:
        """Record the differences of the kernel path. Unrequested differences count as worse."""
        report = self._report
        for change in path_changes.find(self._before, self._run):
            if change.is_expected:
                report.path_told.append(change.text)
                continue
            report.path.append(change.text)
            required = f"the path of {report.run}, because no other path was requested"
            self._add(f"path {change.part}", Fact(required, change.text, kind=unmet.OF_PATH))

    def compare_metrics(self, lost: Collection[str]) -> None:
        """Compare the metrics. ``lost``: the metrics that this run must have."""
        for judged in self._judged_metrics(lost):
            if judged.verdict is Verdict.PASS:
                self._report.metrics.append(judged.text)
            else:
                self._report.worse.append(judged.text)
                self._add(judged.metric, Fact("", judged.text), judged.verdict)

    def _judged_metrics(self, lost: Collection[str]) -> Iterator[_MetricVerdict]:
        if not self._trusted.metrics or (not self._metrics and not lost):
            return
        obstacle = self._obstacle()
        if obstacle is not None:
            yield obstacle
            return
        yield from self._missing(lost)
        same: dict[str, StoredMetric] = {}
        for name, now in self._metrics.items():
            there = self._trusted.metrics.get(name)
            if name == PEAK and _asked_before(self._run) != _asked_before(self._before):
                self._report.unjudged.append(name)
            elif there is None or there.kind == now.kind:
                same[name] = now
            else:
                line = (
                    f"{name}: {now.kind} in this run, {there.kind} in the trusted run, so they "
                    "cannot be compared"
                )
                yield _MetricVerdict(name, Verdict.INVALID, line)
        limits = self._profile.regression
        changes = trend.compare(same, self._trusted.runs, limits)
        changes += metric_levels.find_falls(same, self._trusted.runs, limits)
        for change in changes:
            if change.verdict is Verdict.NOT_RUN:
                self._report.unjudged.append(change.metric)
            if change.holds:
                yield _MetricVerdict(change.metric, Verdict.PASS, change.text)
            else:
                self._comparison.changes.append(change.report(THE_TRUSTED))
                yield _MetricVerdict(change.metric, change.verdict, change.text)

    def _obstacle(self) -> _MetricVerdict | None:
        """Return why no metric can be compared (another or a DEGRADED machine), or None."""
        before = self._before.fingerprint or Fingerprint()
        now = self._run.fingerprint or Fingerprint()
        apart = this_machine.differences(before.machine, now.machine)
        if apart:
            why = f"which is of another machine ({'; '.join(apart)})"
            text = f"metrics cannot be compared with {self._trusted.name}, {why}"
            return _MetricVerdict("metrics", Verdict.INVALID, text)
        if self._run.box.state == BoxState.DEGRADED:
            text = f"the machine is DEGRADED: {self._run.box.reason}"
            return _MetricVerdict("metrics", Verdict.INCONCLUSIVE, text)
        return None

    def _missing(self, lost: Collection[str]) -> Iterator[_MetricVerdict]:
        """Yield the metrics that this run should have but does not have."""
        trusted = self._trusted
        absent = trend.missing(self._metrics, trusted.newest)
        if trusted.rated is not None and trusted.rated is not trusted.newest:
            absent += trend.missing(self._metrics, trusted.rated)
        for missing in absent:
            name = missing.metric
            if name not in lost:
                continue
            metric = self._run.metrics.get(name)
            was_measured = metric is not None and metric.value is not None
            if metric is not None and was_measured and metric.verdict is Verdict.NOT_RUN:
                text = self._reasons.get(name) or f"{name}: measured, but without a verdict"
                yield _MetricVerdict(name, Verdict.INCONCLUSIVE, text)
            else:
                yield _MetricVerdict(name, Verdict.FAIL, str(missing))


def _note_rates(
    report: AgainstReport, trusted: Trusted, metrics: Mapping[str, StoredMetric]
) -> None:
    """Record which trusted run the rates are compared with, if it is not the newest one."""
    if trusted.newest.rates_unfit is None:
        if metrics and not trusted.metrics:
            report.rates_not_judged = f"{trusted.name} measured nothing"
        return
    why = f"the machine of {trusted.name} was DEGRADED"
    if trusted.rated is None:
        report.rates_not_judged = why
    else:
        report.differs.append(f"rates: compared with {trusted.rated.name}, since {why}")


def _measured(run: VerdictFile, trusted: Trusted) -> dict[str, MetricReport]:
    """Return the trusted run's values of the metrics that both runs have.

    If the newest trusted run cannot be a baseline for rates, the rates are those of an earlier one.
    """
    before = trusted.newest.file.metrics
    if trusted.newest.rates_unfit is not None:
        rates = trusted.rated.file.metrics if trusted.rated is not None else {}
        counted = {name: metric for name, metric in before.items() if metric.unit in COUNTED}
        before = {**rates, **counted}
    return {name: before[name] for name in run.metrics if name in before}


def _not_executed(
    before: VerdictFile, run: VerdictFile, asked_for: Callable[[TestReport], bool]
) -> tuple[dict[str, str], list[TestReport]]:
    """Find the tests that ran in the trusted run (`before`) but not in this run.

    Returns:
        Two values: for each such test that this run requested, the reason by its id; and the tests
        that this run did not request.
    """
    tests = {test.id: test for test in run.tests}
    reasons: dict[str, str] = {}
    unasked: list[TestReport] = []
    for test in before.tests:
        if not test.executed or test.has_no_test or test.is_of_option:
            continue
        now = tests.get(test.id)
        if now is None and not asked_for(test):
            unasked.append(test)
        elif now is None or not now.executed:
            reasons[test.id] = "it was not collected" if now is None else now.message
    return reasons, unasked


def _lost(before: VerdictFile, unasked: Iterable[TestReport]) -> set[str]:
    """Return the metrics that this run must have, because it requested the tests that measure them.

    Earlier versions of the suite did not record which test measured a metric. For their runs, the
    level of the metric decides.
    """
    lost = set(before.metrics)
    has_lists = any(test.metrics for test in before.tests)
    for test in unasked:
        if has_lists:
            lost.difference_update(test.metrics)
        elif test.level == "performance":
            return set()
    return lost


def _sort(report: AgainstReport, test: TestReport, before: TestReport | None) -> list[str]:
    """Add a test to its list in the report. ``before``: the same test in the trusted run.

    Returns:
        The known deviations that excuse the test here but did not occur in the trusted run.
    """
    failed_before = before is not None and before.verdict is Verdict.FAIL and not before.skipped
    if test.verdict is Verdict.PASS:
        if failed_before:
            report.mended.append(test.id)
            return []
        more = _new_deviations(test, before)
        if more:
            report.changed.append(test.id)
        return more
    is_waived = test.counted is Verdict.PASS and test.tolerated != "known"
    if test.tolerated == "listed" and not failed_before:
        report.listed.append(test.id)
    elif not test.executed or is_waived:
        pass
    elif test.tolerated == "known":
        report.known.append(test.id)
    elif failed_before:
        report.changed.append(test.id)
    else:
        report.new.append(test.id)
    return []


def _new_deviations(test: TestReport, before: TestReport | None) -> list[str]:
    if before is None or before.verdict is not Verdict.PASS or before.deviations is None:
        return []
    return [name for name in test.deviations or () if name not in before.deviations]


def _engine(run: VerdictFile) -> str:
    return f"{run.engine.name} {run.engine.version or ''}".strip()


def _asked_before(run: VerdictFile) -> set[str]:
    """Return the levels with at least one executed test that come before the level performance."""
    levels = LEVELS[: LEVELS.index("performance")]
    return {test.level for test in run.tests if test.executed}.intersection(levels)
