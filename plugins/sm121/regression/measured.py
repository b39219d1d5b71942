"""A run's measurements compared with the stored runs that they can be compared with."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError
from sm121.core.unmet import Fact, Unmet, noted, require_none
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict
from sm121.measure.box import BoxState
from sm121.performance.recorder import Recorder
from sm121.regression import trend
from sm121.regression.change import Change
from sm121.run import stored_run
from sm121.run.stored_run import StoredMetric, StoredRun

#: A run that did not pass is no baseline for the next one, either.
_WAY_OUT = (
    "store a run of a build that you trust on this machine as it is now, "
    "`pytest -m performance --benchmark-autosave`, or compare both builds with --ab"
)
#: What to do after a first run.
_STORED = "This run is stored: if it passes, the next run is compared with it"
_NOT_STORED = "Run a build that you trust with --benchmark-autosave"


@dataclass
class MeasuredHistory:
    """What a run is compared with, read when it is first asked for. ``storage``: of
    pytest-benchmark, as ``--benchmark-storage`` names it, relative to ``root``; ``baseline``: the
    stored run to compare with, beside all that can be compared."""

    recorder: Recorder
    storage: str
    root: Path
    baseline: str | None = None
    #: This run is stored when it has ended.
    is_stored: bool = False
    findings: list[str] = field(default_factory=list)

    @property
    def current(self) -> dict[str, StoredMetric]:
        """The metrics of this run. Raises NotRun: the performance level was not selected;
        Unmet: it was, and measured nothing."""
        selected = [test for test in self.recorder.harness.ledger if test.level == "performance"]
        if self._now is not None:
            metrics = dict(self._now.metrics)
            of_a_server = any(metric.case is None for metric in metrics.values())
            if of_a_server or all(test.skipped for test in selected):
                return metrics
        if not selected:
            raise NotRun(
                "nothing was measured in this run; select the performance level with this one: "
                "tests/test_performance.py tests/test_regression.py"
            )
        skipped = [test for test in selected if test.skipped]
        if len(skipped) == len(selected):
            raise NotRun(f"the performance level did not run here: {skipped[0].message}")
        observed = f"none of {len(selected)} tests did; an empty run is no success"
        raise Unmet(Fact("the performance level leaves measurements", observed))

    @functools.cached_property
    def runs(self) -> list[StoredRun]:
        """The stored runs that this one can be compared with, oldest first. Raises NotRun: there is
        none yet; Inconclusive: only the machine or the kernel path changed since the latest;
        Invalid: the one that was asked for is of another machine, path, profile or plan."""
        assert self.current
        stored = self._stored()
        if matches := [run for run in stored if not run.unlike(self._context)]:
            return matches
        if self.named is not None:
            return [self.named]
        raise none_matches(
            stored,
            self._context,
            self._folder,
            measured=len(self.current),
            is_stored=self.is_stored,
        )

    @functools.cached_property
    def named(self) -> StoredRun | None:
        """The latest stored run that was asked for by name; None: none was. Raises NotRun: there is
        none; Invalid: of another machine, path, profile or plan, or it did not pass."""
        if self.baseline is None:
            return None
        stored = self._stored(self.baseline)
        option = f"--benchmark-compare {self.baseline}"
        if not stored:
            raise NotRun(f"{option}: {self._folder} has no such run; --benchmark-autosave adds one")
        run = stored[-1]
        if reasons := run.unlike(self._context):
            raise Invalid(f"{option}: {run.name} is no baseline: {'; '.join(reasons)}")
        return run

    @property
    def missing(self) -> list[str]:
        """Metrics of the latest run, and of the one that was named, that this one lacks. (One that
        is INVALID is there.)"""
        self._check_comparable()
        baselines = [run for run in (self.named, self.runs[-1]) if run is not None]
        lines: list[str] = []
        for run in baselines:
            lines += map(str, trend.missing(self.current, self._asked_of(run)))
        return list(dict.fromkeys(lines))

    def _asked_of(self, run: StoredRun) -> StoredRun:
        """A stored run without the times of kernels that this run did not ask for: neither was a
        test of theirs selected, nor was any other kernel timed."""
        ledger = self.recorder.harness.ledger
        timed = any(metric.case is not None for metric in self.current.values())
        asked = {
            name: metric
            for name, metric in run.metrics.items()
            if metric.case is None or timed or metric.test in ledger
        }
        return replace(run, metrics=asked)

    def compared(self) -> None:
        """Hold each metric against the last runs. Raises AssertionError: some are worse; Invalid,
        Inconclusive: some cannot be compared, or not decided."""
        self._check_comparable()
        harness = self.recorder.harness
        limits = harness.profile.regression
        changes = trend.compare(self.current, self.runs, limits)
        if self.named is not None and [run.name for run in self.runs] != [self.named.name]:
            changes = [*trend.compare(self.current, [self.named], limits), *changes]
        for change in changes:
            line = f"{change.verdict.value}: {change.text}"
            harness.remark(f"regression {line}", at_once=False)
            self.findings.append(harness.redact(line))
        self._note(changes)
        require_none([change.fact for change in changes if change.verdict is Verdict.FAIL])
        if undecided := [c.fact for c in changes if c.verdict is Verdict.INCONCLUSIVE]:
            raise Inconclusive(*undecided)

    def levels_held(self) -> None:
        """Look for a change of level in the history. Raises AssertionError: one to the worse."""
        self._check_comparable()
        limits = self.recorder.harness.profile.regression
        changes = trend.changes(self.current, self.runs, limits)
        self._note(changes)
        require_none([change.fact for change in changes])

    @property
    def _folder(self) -> Path:
        return stored_run.storage_folder(self.storage, self.root)

    def _stored(self, pattern: str = "*") -> list[StoredRun]:
        try:
            return stored_run.load_benchmarks(self._folder, pattern)
        except UsageError as error:
            raise Invalid(str(error)) from error

    def _note(self, changes: Sequence[Change]) -> None:
        noted = self.recorder.harness.file.changes
        for change in changes:
            beside = f"{change.pairs} stored runs" if change.pairs > 1 else "the stored run"
            noted += [] if change.holds else [change.report(beside)]

    def _check_comparable(self) -> None:
        assert self.named is None or self.named.metrics  # one that is refused is refused first
        box = self.recorder.harness.file.box
        if box.state == BoxState.DEGRADED and self.runs:
            raise Inconclusive(f"the box is DEGRADED: {box.reason}")
        void = {each.measurement.name for each in self.recorder.recorded if not each.comparable}
        if lost := [name for name in self.runs[-1].metrics if name in void]:
            raise Invalid(f"measured and INVALID, so that nothing can be compared: {lost}")

    @property
    def _context(self) -> dict[str, Any]:
        return dict(self._now.context) if self._now is not None else self.recorder.context()

    @functools.cached_property
    def _now(self) -> StoredRun | None:
        return of_this_run(self.recorder)


def of_this_run(recorder: Recorder) -> StoredRun | None:
    """What was measured so far, as a stored run; None without a valid measurement."""
    valid = [recorder.described(recorded) for recorded in recorder.recorded if recorded.comparable]
    return stored_run.of_benchmarks("this run", recorder.harness.file.started, valid)


def none_matches(
    stored: Sequence[StoredRun],
    context: Mapping[str, Any],
    folder: Path,
    *,
    measured: int,
    is_stored: bool,
) -> NotRun | Inconclusive:
    """Return why a run is compared with none of the stored runs.

    A driver or a kernel path that changed must not make a slower build green. What the user chose,
    as another plan, and another machine have a history of their own.

    Args:
        stored: The stored runs, oldest first.
        context: What the run has in common with those that it can be compared with.
        folder: The folder of the stored runs.
        measured: The number of metrics of the run.
        is_stored: Whether the run is stored when it has ended.
    """
    for run in reversed(stored):
        if changed := run.changed(context):
            facts = [Fact(f"the {k} of the latest stored run", v) for k, v in changed.items()]
            return Inconclusive(*noted(facts, f"{run.name}; {_WAY_OUT}"))
    unlike = {run.name: run.unlike(context) for run in stored}
    others = ""
    if unlike:
        nearest = min(reversed(unlike), key=lambda name: len(unlike[name]))
        why = "; ".join(unlike[nearest])
        others = f" (the nearest of {len(stored)} other runs, {nearest}: {why})"
    then = _STORED if is_stored else _NOT_STORED
    return NotRun(
        f"no stored run of this machine, profile, plan and kernel path that passed in {folder}"
        f"{others}; metrics not compared: {measured}. {then}"
    )
