"""This run's measurements and the stored ones, for the regression level."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from sm121.core.errors import UsageError
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict
from sm121.measure.box import BoxState
from sm121.plugin.benchmarks import RECORDED, context, extra_info
from sm121.plugin.run import Run
from sm121.regression import history
from sm121.regression import trend as regression
from sm121.regression.history import StoredMetric, StoredRun
from sm121.regression.trend import Finding


@dataclass(frozen=True)
class History:
    """What this run is compared with. Everything is read when it is first asked for."""

    _run: Run

    @functools.cached_property
    def context(self) -> dict[str, Any]:
        """Machine, profile, configuration, model, plan and kernel path of this run."""
        now = self._now
        return dict(now.context) if now is not None else dict(context(self._run))

    @property
    def current(self) -> dict[str, StoredMetric]:
        """The metrics of this run.

        Raises:
            NotRun: the performance level was not selected.
            AssertionError: it was, and measured nothing.
        """
        if self._now is not None:
            return dict(self._now.metrics)
        selected = [test for test in self._run.file.tests if test.level == "performance"]
        if not selected:
            raise NotRun(
                "nothing was measured in this run; select the performance level with this one: "
                "tests/test_performance.py tests/test_regression.py"
            )
        skipped = [test for test in selected if test.skipped]
        if len(skipped) == len(selected):
            raise NotRun(f"the performance level did not run here: {skipped[0].message}")
        raise AssertionError(
            "required: the performance level leaves measurements, seen: none of "
            f"{len(selected)} tests did; an empty run is no success"
        )

    @functools.cached_property
    def runs(self) -> list[StoredRun]:
        """The stored runs that this one can be compared with, oldest first.

        Raises:
            NotRun: there is none yet, and how to make one.
            Invalid: the one that was asked for is of another machine, path, profile or plan.
        """
        assert self.current
        config = self._run.config
        storage = config.getoption("benchmark_storage")
        asked = config.getoption("benchmark_compare")
        named = asked if isinstance(asked, str) and asked else None
        try:
            folder = history.folder(storage, config.invocation_params.dir)
            stored = history.load(folder, named or "*")
        except UsageError as error:
            raise Invalid(str(error)) from error
        unlike = {run.name: run.unlike(self.context) for run in stored}
        comparable = [run for run in stored if not unlike[run.name]]
        if comparable:
            return comparable
        if named is not None and stored:
            why = "; ".join(unlike[stored[-1].name])
            raise Invalid(f"--benchmark-compare {named}: {stored[-1].name} is no baseline: {why}")
        nearest = min(reversed(stored), key=lambda run: len(unlike[run.name]), default=None)
        others = (
            f" (the nearest of {len(stored)} other runs, {nearest.name}: "
            f"{'; '.join(unlike[nearest.name])})"
            if nearest is not None
            else ""
        )
        raise NotRun(
            f"no stored run of this machine, profile, plan and kernel path in {folder}{others}; "
            "run a build that you trust with --benchmark-autosave"
        )

    @property
    def missing(self) -> list[str]:
        """Metrics of the latest run that this one lacks. (One that is INVALID is there.)"""
        self._fit()
        return regression.missing(self.current, self.runs[-1])

    def compared(self) -> None:
        """Hold each metric against the last runs.

        Raises:
            AssertionError: some are worse.
            Invalid, Inconclusive: some cannot be compared, or not decided.
        """
        self._fit()
        current, runs = self.current, self.runs
        findings = regression.compare(current, runs, self._run.profile.regression)
        for finding in findings:
            self._run.remark(f"regression {finding.verdict.value}: {finding.text}", at_once=False)
        _conclude(findings)

    def levels_held(self) -> None:
        """Look for a change of level in the whole history.

        Raises:
            AssertionError: there is one to the worse.
        """
        self._fit()
        runs = self.runs
        findings = regression.changes(self.current, runs, self._run.profile.regression)
        assert not findings, "; ".join(finding.text for finding in findings)

    def _fit(self) -> None:
        """Whether this run may be compared at all."""
        void = [
            recorded.measurement.name
            for recorded in self._recorded
            if recorded.verdict is Verdict.INVALID
        ]
        if self._run.file.box.state == BoxState.DEGRADED and self.runs:
            raise Inconclusive(f"the box is DEGRADED: {self._run.file.box.reason}")
        lost = [name for name in void if name in self.runs[-1].metrics]
        if lost:
            raise Invalid(f"measured and INVALID, so that nothing can be compared: {lost}")

    @property
    def _recorded(self) -> Sequence[Any]:
        return self._run.config.stash.get(RECORDED, [])

    @functools.cached_property
    def _now(self) -> StoredRun | None:
        return history.of_benchmarks(
            "this run",
            self._run.file.started,
            [
                extra_info(
                    self._run,
                    recorded.measurement,
                    recorded.estimate,
                    recorded.verdict,
                    "",
                    len(recorded.measurement.samples),
                )
                for recorded in self._recorded
                if recorded.verdict is not Verdict.INVALID
            ],
        )


def _conclude(findings: Sequence[Finding]) -> None:
    failed = [finding.text for finding in findings if finding.verdict is Verdict.FAIL]
    assert not failed, "; ".join(failed)
    open_ones = [f.text for f in findings if f.verdict is Verdict.INCONCLUSIVE]
    if open_ones:
        raise Inconclusive("; ".join(open_ones))


@pytest.fixture(scope="session")
def measured_history(conformance: Run) -> History:
    """This run's measurements and the stored ones that they can be compared with."""
    return History(conformance)
