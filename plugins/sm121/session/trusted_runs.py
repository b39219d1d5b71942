"""Stores the trusted runs for ``--against``, and selects those that count.

``sm121 trust REPORT`` adds a run to the trusted runs in pytest-benchmark's folder.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm121.core import digest
from sm121.core.errors import UsageError
from sm121.core.unmet import alike, same_kind
from sm121.core.verdict import Verdict
from sm121.machine import this_machine
from sm121.regression import metric_levels, trend
from sm121.run import details, stored_run, verdict_file
from sm121.run.fingerprint import Fingerprint
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import TestReport, VerdictFile
from sm121.session import path_changes
from sm121.session.path_changes import other_target, unlike

#: The value of ``--against`` that stands for the newest run of ``sm121 trust``.
TRUSTED = "trusted"
#: The peak memory of a server. It depends on the requests before it was read.
PEAK = "memory_peak_gib"
_FOLDER = "trusted"
#: If a trusted run's folder contains this file, earlier trusted runs no longer count.
_ANEW = "anew"
#: The mode of a run's folder: readable for all, unlike a folder of mkdtemp.
_MODE = 0o755


@dataclass(frozen=True)
class Trusted:
    """The trusted run, and the trusted runs before it.

    Attributes:
        runs: The runs, oldest first.
        digest: The digest of the newest run's verdict.json.
    """

    runs: tuple[StoredRun, ...]
    digest: str

    @property
    def name(self) -> str:
        """The name of the newest run."""
        return self.newest.name

    @property
    def newest(self) -> StoredRun:
        """The newest run."""
        return self.runs[-1]

    @property
    def rated(self) -> StoredRun | None:
        """The newest run whose rates and times can be a baseline; None without one."""
        for run in reversed(self.runs):
            if run.rates_unfit is None:
                return run
        return None

    @property
    def metrics(self) -> dict[str, StoredMetric]:
        """The trusted metrics by name: those of the newest run, else the rates of `rated`."""
        rates = self.rated.metrics if self.rated is not None else {}
        return {**rates, **self.newest.metrics}

    def known(self, failure: TestReport) -> str | None:
        """Return the name of the trusted run if the same test failed in it in the same way.

        If several consecutive trusted runs had the failure, it must also be like the failure in the
        first of them. This detects a failure that gets worse step by step.

        Args:
            failure: A failed test of the new run.

        Returns:
            The name of the trusted run; None for a new failure.
        """
        failed: list[TestReport] = []
        for run in reversed(self.runs):
            test = run.failures.get(failure.id)
            if test is None or not same_kind(test.facts, failure.facts):
                break
            failed.append(test)
        if not failed:
            return None
        newest = failed[0]
        oldest = failed[-1]
        if alike(newest.facts, failure.facts) and alike(oldest.facts, failure.facts):
            return self.name
        return None


def load(named: str, storage: Path) -> Trusted:
    """Load the run that ``--against`` names.

    Args:
        named: A report directory, a verdict.json, or ``trusted``.
        storage: The folder of pytest-benchmark, which contains the runs of ``sm121 trust``.

    Raises:
        UsageError: The run does not exist, or cannot be trusted.
    """
    if named == TRUSTED:
        folders = _kept(storage)
        if not folders:
            raise UsageError(
                f"--against trusted: {storage / _FOLDER} has no run; `sm121 trust REPORT` puts one "
                "there"
            )
    else:
        folders = [stored_run.folder_of(Path(named))]
    try:
        *earlier, newest = map(_read, folders)
    except UsageError as error:
        raise UsageError(f"--against {named}: {error}") from error
    comparable = [run for run in earlier if _is_comparable(run.file, newest.file)]
    content = (folders[-1] / verdict_file.NAME).read_text("utf-8")
    return Trusted((*comparable, newest), digest.of_value([content]))


def _is_comparable(earlier: VerdictFile, newest: VerdictFile) -> bool:
    if unlike(earlier, newest) is not None:
        return False
    return not path_changes.find(earlier, newest)


def _read(folder: Path) -> StoredRun:
    run = stored_run.read_run(folder)
    if run.unfit:
        raise UsageError(f"{folder}: expected a run that can be trusted: {run.unfit[0]}")
    return run.baseline


def trust(
    report: Path, storage: Path, *, anew: bool = False
) -> tuple[Path, VerdictFile, list[str]]:
    """Store a run as the trusted run.

    Args:
        report: The report directory of the run, or its verdict.json.
        storage: The folder of pytest-benchmark.
        anew: Whether earlier trusted runs no longer count, so that a worse run is accepted.

    Returns:
        The folder of the stored run, the run, and a line for each kind of check of which it has
        fewer than the last trusted run.

    Raises:
        UsageError: The run cannot be trusted, or it is already stored. Or, without `anew`, it is
            worse than the trusted runs, or fails a check that passed in the newest of them.
    """
    report = stored_run.folder_of(report)
    run = _read(report)
    before = _kept(storage)
    if not anew:
        _refuse_kept(report, before)
    narrower: list[str] = []
    if before:
        try:
            trusted = load(TRUSTED, storage)
        except UsageError as error:
            narrower = [f"unreadable results ({error})"]
        else:
            narrower = _narrower(run, trusted.newest)
            if not anew:
                _refuse_worse(report, run, trusted)
    return _store(report, storage / _FOLDER, anew=anew), run.file, narrower


def _refuse_kept(report: Path, kept: list[Path]) -> None:
    """Raise UsageError if a run is already stored, because it would count twice."""
    content = (report / verdict_file.NAME).read_bytes()
    for folder in kept:
        if (folder / verdict_file.NAME).read_bytes() == content:
            raise UsageError(
                f"{report}: expected a run that is not stored yet, got one that is stored as "
                f"{folder}"
            )


def _refuse_worse(report: Path, run: StoredRun, trusted: Trusted) -> None:
    """Raise UsageError if a metric is worse than in the trusted runs, or a check newly fails."""
    if other_target(trusted.newest.file, run.file) is not None:
        return
    judged = run.file.against
    if judged is not None and judged.no_worse and judged.run == trusted.name:
        return  # the run was compared with the limits of its own profile, and passed
    worse = [
        *_failed_checks(run, trusted),
        *_slower(run, trusted),
        *_failed_gates(run, trusted),
    ]
    if worse:
        more = f" (and {len(worse) - 1} more)" if len(worse) > 1 else ""
        raise UsageError(
            f"{report}: expected a run that is not worse than the trusted run {trusted.name}, got "
            f"{worse[0]}{more}. To accept the loss: sm121 trust --anew {report}"
        )


def _slower(run: StoredRun, trusted: Trusted) -> list[str]:
    """Return a line for each metric that is worse by the rules of ``--against``.

    A loss that one slow start may have caused counts, because a slow start must not become the
    baseline. A loss that may be noise does not count.
    """
    from sm121.report import comparison  # only `sm121 trust` needs it, no run of the tests

    before = trusted.newest.file.fingerprint or Fingerprint()
    now = run.file.fingerprint or Fingerprint()
    if this_machine.differences(before.machine, now.machine):
        return []
    same: dict[str, StoredMetric] = {}
    for name, metric in run.metrics.items():
        there = trusted.metrics.get(name)
        if name != PEAK and there is not None and there.kind == metric.kind:
            same[name] = metric
    limits = comparison.limits_of(run.file.profile)
    changes = trend.compare(same, trusted.runs, limits)
    changes += metric_levels.find_falls(same, trusted.runs, limits)
    return [change.text for change in changes if change.is_measured_loss]


def _failed_checks(run: StoredRun, trusted: Trusted) -> list[str]:
    """Return a line for each check that fails and passed in the trusted run.

    Checks with a failed gate are left out, because `_failed_gates` has a line for the gate.
    """
    passed = {test.id for test in trusted.newest.file.tests if test.verdict is Verdict.PASS}
    metrics = run.file.metrics.items()
    failed_gates = {name for name, metric in metrics if metric.verdict is Verdict.FAIL}
    lines = []
    for test in run.failures.values():
        if test.id in passed and failed_gates.isdisjoint(test.metrics):
            lines.append(f"{test.id}, which passed there")
    return lines


def _failed_gates(run: StoredRun, trusted: Trusted) -> list[str]:
    """Return a line for each metric that fails a gate which it did not fail in the trusted run."""
    lines = []
    for name, metric in run.file.metrics.items():
        before = trusted.newest.file.metrics.get(name)
        failed_before = before is not None and before.verdict is Verdict.FAIL
        if metric.verdict is Verdict.FAIL and not failed_before:
            lines.append(f"{name}, which failed its gate")
    return lines


def _narrower(run: StoredRun, last: StoredRun) -> list[str]:
    """Return lines on the tests and metrics of the last trusted run that a run does not have."""
    ran = {test.id for test in run.file.tests if test.executed}
    tests = [test.id for test in last.file.tests if test.executed and test.id not in ran]
    measured = run.metrics if run.rates_unfit is None else run.file.metrics
    metrics = [name for name in last.metrics if name not in measured]
    lines = []
    if tests:
        lines.append(f"{len(tests)} tests ({tests[0]})")
    if metrics:
        lines.append(f"{len(metrics)} metrics ({metrics[0]})")
    return lines


def _store(report: Path, store: Path, *, anew: bool) -> Path:
    """Copy a run into the next numbered folder, and return the folder."""
    store.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=store))
    for name in (details.NAME, verdict_file.NAME):
        if (report / name).is_file():
            shutil.copy2(report / name, new / name)
    if anew:
        (new / _ANEW).touch()
    new.chmod(_MODE)
    numbers = [int(folder.name) for folder in store.iterdir() if folder.name.isdecimal()]
    return new.rename(store / f"{max(numbers, default=0) + 1:04}")


def _kept(storage: Path) -> list[Path]:
    """Return the folders of the trusted runs that count, oldest first."""
    folders = []
    for file in storage.glob(f"{_FOLDER}/*/{verdict_file.NAME}"):
        if file.parent.name.isdecimal():
            folders.append(file.parent)
    folders.sort(key=lambda folder: int(folder.name))
    first = 0
    for position, folder in enumerate(folders):
        if (folder / _ANEW).is_file():
            first = position
    return folders[first:]
