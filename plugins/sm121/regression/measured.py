"""The comparison of a run's measurements with comparable stored runs."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError
from sm121.core.unmet import Fact, Unmet, noted, require_none
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict
from sm121.machine.box import BoxState
from sm121.performance.recorder import Recorder
from sm121.regression import metric_levels, trend
from sm121.regression.change import Change
from sm121.run import stored_benchmarks
from sm121.run.events import Changed
from sm121.run.stored_run import StoredMetric, StoredRun

#: The remedy if only the machine's state or the kernel path changed. A run that did not pass is no
#: baseline for the next run either.
_WAY_OUT = (
    "store a run of a build that you trust on this machine as it is now, "
    "`pytest -m performance --benchmark-autosave`, or compare both builds with --ab"
)
#: The next step if there is no comparable run yet, and this run is stored.
_STORED = "This run is stored: if it passes, the next run is compared with it"
#: The next step if there is no comparable run yet, and the machine is DEGRADED.
_STORED_DEGRADED = (
    "This run is stored, but no later run is compared with it, because its machine is DEGRADED"
)
#: The next step if there is no comparable run yet, and this run is not stored.
_NOT_STORED = "Run a build that you trust with --benchmark-autosave"


class NothingComparable(NotRun):
    """No stored run is comparable.

    Attributes:
        fact: The most similar stored run, with its differences.
    """

    def __init__(self, message: str, fact: Fact) -> None:
        super().__init__(message)
        self.fact = fact


@dataclass
class MeasuredHistory:
    """The stored runs with which a run is compared; they are read on first use."""

    recorder: Recorder
    #: The storage of pytest-benchmark, as ``--benchmark-storage`` names it.
    storage: str
    #: The folder to which the storage's path is relative.
    root: Path
    #: The run given with ``--benchmark-compare``; None: only compare with all comparable runs.
    baseline: str | None = None
    #: Whether this run is stored when it has ended.
    is_stored: bool = False
    #: The line of each change that was judged.
    findings: list[str] = field(default_factory=list)

    @property
    def current(self) -> dict[str, StoredMetric]:
        """The metrics of this run by name.

        Raises:
            NotRun: The performance level was not selected, or was skipped.
            Unmet: The level ran and measured nothing.
        """
        selected = [test for test in self.recorder.run.record.ledger if test.level == "performance"]
        if self._now is not None:
            metrics = dict(self._now.metrics)
            is_of_server = any(metric.case is None for metric in metrics.values())
            if is_of_server or all(test.skipped for test in selected):
                return metrics
        if not selected:
            raise NotRun(
                "nothing was measured in this run; also select the performance level: "
                "tests/test_performance.py tests/test_regression.py"
            )
        skipped = [test for test in selected if test.skipped]
        if len(skipped) == len(selected):
            raise NotRun(f"the performance level did not run here: {skipped[0].message}")
        observed = f"none from {len(selected)} tests; a run without measurements does not pass"
        raise Unmet(Fact("measurements of the performance level", observed))

    @functools.cached_property
    def runs(self) -> list[StoredRun]:
        """The comparable stored runs, oldest first.

        Raises:
            NotRun: There is no comparable run yet.
            Inconclusive: Only the machine's state or the kernel path differs from the latest run.
            Invalid: The named run has another machine, kernel path, profile or plan.
        """
        assert self.current
        stored = self._stored()
        matches = [run for run in stored if not run.unlike(self._context)]
        if matches:
            return matches
        if self.named is not None:
            return [self.named]
        raise none_matches(
            stored,
            self._context,
            self._folder,
            measured=len(self.current),
            next_step=self._next_step(),
        )

    def _next_step(self) -> str:
        """Return what the user can do if there is no comparable run yet."""
        if not self.is_stored:
            return _NOT_STORED
        if self.recorder.run.record.file.box.state == BoxState.DEGRADED:
            return _STORED_DEGRADED
        return _STORED

    @functools.cached_property
    def named(self) -> StoredRun | None:
        """The latest stored run that ``--benchmark-compare`` names; None if it names none.

        Raises:
            NotRun: There is no such run.
            Invalid: It has another machine, kernel path, profile or plan, or did not pass.
        """
        if self.baseline is None:
            return None
        stored = self._stored(self.baseline)
        option = f"--benchmark-compare {self.baseline}"
        if not stored:
            raise NotRun(f"{option}: {self._folder} has no such run; --benchmark-autosave adds one")
        run = stored[-1]
        reasons = run.unlike(self._context)
        if reasons:
            raise Invalid(
                f"{option}: run {run.short_name} cannot be a baseline: {'; '.join(reasons)}"
            )
        return run

    @property
    def missing(self) -> list[str]:
        """One line per metric that the latest or the named run has, and this run lacks.

        A metric that is INVALID in this run does not count as missing.
        """
        self._check_comparable()
        lines: dict[str, None] = {}
        for run in (self.named, self.runs[-1]):
            if run is None:
                continue
            for missing in trend.missing(self.current, self._without_unselected(run)):
                lines[str(missing)] = None
        return list(lines)

    def _without_unselected(self, run: StoredRun) -> StoredRun:
        """Return a stored run without the times of kernels that were not selected in this run.

        A kernel was selected if its test was, or if any kernel was timed.
        """
        if any(metric.case is not None for metric in self.current.values()):
            return run
        ledger = self.recorder.run.record.ledger
        selected = {
            name: metric
            for name, metric in run.metrics.items()
            if metric.case is None or metric.test in ledger
        }
        return replace(run, metrics=selected)

    def compared(self) -> None:
        """Require that no metric is worse than in the last runs.

        Raises:
            AssertionError: Some metrics are worse.
            Invalid: Some metrics cannot be compared.
            Inconclusive: Some metrics are undecided, or the machine is DEGRADED.
        """
        self._check_comparable()
        self._check_in_common()
        run = self.recorder.run
        limits = run.profile.regression
        changes: list[Change] = []
        if self.named is not None and [run.name for run in self.runs] != [self.named.name]:
            changes += trend.compare(self.current, [self.named], limits)
        changes += trend.compare(self.current, self.runs, limits)
        for change in changes:
            line = f"{change.verdict.value}: {change.text}"
            run.record.remark(f"regression {line}", at_once=False)
            self.findings.append(run.record.redact(line))
        self._note(changes)
        require_none([change.fact for change in changes if change.verdict is Verdict.FAIL])
        undecided = [change.fact for change in changes if change.verdict is Verdict.INCONCLUSIVE]
        if undecided:
            raise Inconclusive(*undecided)

    def levels_held(self) -> None:
        """Require that no metric fell from its best level in the history.

        Raises:
            AssertionError: Some metrics fell.
            Inconclusive: The machine is DEGRADED.
        """
        self._check_comparable()
        limits = self.recorder.run.profile.regression
        changes = metric_levels.find_falls(self.current, self.runs, limits)
        self._note(changes)
        require_none([change.fact for change in changes])

    @property
    def _folder(self) -> Path:
        return stored_benchmarks.storage_folder(self.storage, self.root)

    def _stored(self, pattern: str = "*") -> list[StoredRun]:
        try:
            return stored_benchmarks.load_benchmarks(self._folder, pattern)
        except UsageError as error:
            raise Invalid(str(error)) from error

    def _note(self, changes: Sequence[Change]) -> None:
        """Add the regressions and undecided changes to verdict.json."""
        run = self.recorder.run
        worse = list(run.record.file.changes)
        for change in changes:
            if change.holds:
                continue
            beside = f"{change.pairs} stored runs" if change.pairs > 1 else "the stored run"
            worse.append(change.report(beside))
        run.record.emit(Changed(worse))

    def _check_in_common(self) -> None:
        """Raise NothingComparable if this run and the stored (or named) run share no metric."""
        options = {"the comparable stored runs": self.runs}
        if self.named is not None:
            options[f"run {self.named.short_name}"] = [self.named]
        measured = list(self.current.values())
        for name, runs in options.items():
            if any(run.find(metric) is not None for run in runs for metric in measured):
                continue
            metrics = ", ".join(self.current)
            raise NothingComparable(
                f"no metric of this run ({metrics}) is in {name}. Store a run of the same tests "
                "with pytest --benchmark-autosave",
                Fact(f"a metric in {name}", f"none of {metrics}, so nothing was compared"),
            )

    def _check_comparable(self) -> None:
        """Raise Inconclusive or Invalid if this run cannot be compared."""
        assert self.named is None or self.named.metrics  # `named` raises if it is no baseline
        box = self.recorder.run.record.file.box
        if box.state == BoxState.DEGRADED and self.runs:
            raise Inconclusive(f"the machine is DEGRADED: {box.reason}")
        void = set()
        for recorded in self.recorder.recorded:
            if not recorded.comparable:
                void.add(recorded.measurement.name)
        lost = [name for name in self.runs[-1].metrics if name in void]
        if lost:
            raise Invalid(f"INVALID measurements, so nothing can be compared: {lost}")

    @property
    def _context(self) -> dict[str, Any]:
        """The properties that a stored run must have in common with this run."""
        return dict(self._now.context) if self._now is not None else self.recorder.context()

    @functools.cached_property
    def _now(self) -> StoredRun | None:
        return of_this_run(self.recorder)


def of_this_run(recorder: Recorder) -> StoredRun | None:
    """Return this run's measurements so far in the form of a stored run.

    Args:
        recorder: The recorder of the run.

    Returns:
        The run; None without a valid measurement.
    """
    valid = [recorder.described(recorded) for recorded in recorder.recorded if recorded.comparable]
    return stored_benchmarks.of_benchmarks("this run", recorder.run.record.file.started, valid)


def none_matches(
    stored: Sequence[StoredRun],
    context: Mapping[str, Any],
    folder: Path,
    *,
    measured: int,
    next_step: str = _NOT_STORED,
) -> NothingComparable | Inconclusive:
    """Return the error that explains why a run is compared with none of the stored runs.

    After a driver update or a change of the kernel path, the result is Inconclusive, so that it
    cannot hide a slowdown. Another machine or a choice of the user, such as another plan, has its
    own history.

    Args:
        stored: The stored runs, oldest first.
        context: The properties that a stored run must have in common with the run.
        folder: The folder of the stored runs.
        measured: The number of metrics of the run.
        next_step: What the user can do. The message ends with it.

    Returns:
        Inconclusive if only the machine's state or the kernel path changed, else NothingComparable.
    """
    for run in reversed(stored):
        changed = run.changed(context)
        if changed:
            facts = [
                Fact(f"the {name} of the latest stored run", difference)
                for name, difference in changed.items()
            ]
            return Inconclusive(*noted(facts, f"{run.name}; {_WAY_OUT}"))
    others = ""
    found = f"none in {folder}"
    if stored:
        nearest = min(reversed(stored), key=lambda run: len(run.unlike(context)))
        why = "; ".join(nearest.unlike(context))
        others = f" (the most similar of {len(stored)} other runs, {nearest.name}: {why})"
        found = f"{nearest.short_name}: {why}"
    return NothingComparable(
        f"{folder}: expected a run that passed with this machine, profile, plan and kernel path, "
        f"got none{others}; metrics not compared: {measured}. {next_step}",
        Fact("a comparable stored run", found),
    )
