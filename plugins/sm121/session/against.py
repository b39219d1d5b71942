"""``--against RUN``: this run is held against one that is trusted.

A test that failed there in the same way is known, and not red. A new failure is, and so is a known
one that fails in another way: both are red by themselves. What is found here is what no test shows:
a test that ran there and not here, a path that nobody asked to change, a metric that is worse.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.verdict import Verdict
from sm121.measure import machine
from sm121.measure.box import BoxState
from sm121.regression import trend
from sm121.regression.history import StoredMetric, StoredRun
from sm121.report import details
from sm121.run import verdict_file
from sm121.run.alike import alike
from sm121.run.fingerprint import Difference
from sm121.run.merge import contradiction
from sm121.run.verdict_file import BESIDE, AgainstReport, TestReport, VerdictFile

#: ``--against`` this word: the newest run that ``sm121 trust`` has kept.
TRUSTED = "trusted"
#: In the folder of pytest-benchmark's storage.
_FOLDER = "trusted"
#: Before the ids of what is found beside the tests.
PREFIX = "--against::"
_LEVEL = "regression"
#: Of a path: what is another path when it differs.
_PATH = (
    "attention", "moe", "cuda_graphs", "kv_layout", "speculative", "native_fp4", "kv_cache_dtype",
    "dtype", "quantization", "prefix_caching", "block_size",
)  # fmt: skip
#: What may differ in two fingerprints so that a change of the path was asked for.
_ASKED = ("configuration", "engine's arguments", "variable ")


@dataclass(frozen=True)
class Trusted:
    """A run that is trusted."""

    name: str
    file: VerdictFile
    metrics: Mapping[str, StoredMetric]

    def known(self, failure: TestReport) -> str | None:
        """The name of this run, if the test failed in it in the same way."""
        test = self._tests.get(failure.id)
        if test is None or test.verdict is not Verdict.FAIL or test.skipped:
            return None
        return self.name if alike(test.message, failure.message) else None

    @property
    def _tests(self) -> dict[str, TestReport]:
        return {test.id: test for test in self.file.tests}


def load(asked: str, storage: Path) -> Trusted:
    """The run that ``--against`` names.

    Args:
        asked: a report directory, a verdict.json, or ``trusted``.
        storage: pytest-benchmark's folder, which has the runs that ``sm121 trust`` kept.

    Raises:
        UsageError: there is none, or it is no run to hold another one against.
    """
    if asked == TRUSTED:
        path = newest(storage)
        if path is None:
            raise UsageError(
                f"--against trusted: {storage / _FOLDER} has no run; `sm121 trust REPORT` puts one "
                "there"
            )
        return _read(path, f"--against trusted: {path}")
    path = Path(asked)
    return _read(path.parent if path.is_file() else path, f"--against {asked}", path)


def _read(folder: Path, what: str, file: Path | None = None) -> Trusted:
    path = file if file is not None and file.is_file() else folder / "verdict.json"
    try:
        found = verdict_file.read(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{what}: expected a report directory, a verdict.json, or the word {TRUSTED} "
            f"({type(error).__name__})"
        ) from error
    if (wrong := unfit(found)) is not None:
        raise UsageError(f"{what}: expected a run that can be trusted: {wrong}")
    known = details.read(folder)
    metrics = {
        name: StoredMetric(
            name=name,
            unit=metric.unit,
            higher_is_better=samples.higher_is_better,
            quantile=samples.quantile,
            samples=tuple(samples.samples),
            value=metric.value,
            verdict=metric.verdict.value,
        )
        for name, metric in found.metrics.items()
        if metric.value is not None
        and metric.verdict in (Verdict.PASS, Verdict.FAIL)
        and (samples := known.samples.get(name)) is not None
        and metric.value > 0.0
    }
    return Trusted(f"the run of {found.started}", found, metrics)


def unfit(run: VerdictFile) -> str | None:
    """Why no other run can be held against this one; None where one can."""
    if not run.finished:
        return f"it has not finished ({run.reason})"
    if (changed := contradiction(run)) is not None:
        return f"it was changed after it was written: {changed}"
    if run.fingerprint is None:
        return "it does not say what was asked (it is of an earlier version)"
    if run.crashes:
        return f"something crashed in it: {run.crashes[0].summary}"
    if not any(test.executed for test in run.tests):
        return "no test of a level was executed in it"
    return None


def trust(report: Path, storage: Path) -> tuple[Path, VerdictFile]:
    """Keep a run as the one that others are held against, behind those that were kept before.

    Raises:
        UsageError: it is no run to hold another one against.
    """
    run = _read(report, f"sm121 trust {report}").file
    kept = [int(folder.name[:4]) for folder in _kept(storage)]
    folder = storage / _FOLDER / f"{max(kept, default=0) + 1:04}"
    folder.mkdir(parents=True)
    for name in ("verdict.json", details.NAME):
        if (report / name).is_file():
            shutil.copy2(report / name, folder / name)
    return folder, run


def newest(storage: Path) -> Path | None:
    """The run that was kept last; None without any."""
    return max(_kept(storage), default=None)


def _kept(storage: Path) -> list[Path]:
    return [path.parent for path in storage.glob(f"{_FOLDER}/[0-9][0-9][0-9][0-9]/verdict.json")]


def refuse(trusted: Trusted, run: VerdictFile) -> None:
    """Refuse a run that has nothing in common with this one.

    Raises:
        UsageError: it is of another architecture, profile, engine or model.
    """
    theirs, ours = trusted.file.fingerprint, run.fingerprint
    pairs = [
        Difference("architecture", trusted.file.arch, run.arch),
        Difference("profile", trusted.file.profile, run.profile),
    ]
    if trusted.file.engine.managed and run.engine.managed:  # else it is recognised later
        pairs.append(Difference("engine", trusted.file.engine.name, run.engine.name))
    if theirs is not None and ours is not None:
        pairs.append(Difference("model's digest", theirs.model, ours.model))
    for what, one, other in pairs:
        if one != other:
            raise UsageError(
                f"--against: {trusted.name} is of another {what} ({one}, now {other}): expected a "
                "run that asked the same"
            )


def judge(
    run: VerdictFile,
    trusted: Trusted,
    profile: Profile,
    metrics: Mapping[str, StoredMetric],
    left_out: Collection[str],
) -> list[TestReport]:
    """What is worse than in the trusted run and shows in no test; ``run.against`` is set.

    Args:
        run: finished, except for the verdict.
        metrics: what was measured in it.
        left_out: ids of tests that were collected and not asked for.
    """
    theirs, ours = trusted.file, {test.id: test for test in run.tests}
    asked_levels = {test.level for test in run.tests}
    report = AgainstReport(run=trusted.name, engine=_engine(theirs))
    run.against = report
    found: list[TestReport] = []

    def add(what: str, verdict: Verdict, message: str) -> None:
        found.append(
            TestReport(id=f"{PREFIX}{what}", level=_LEVEL, verdict=verdict, message=message)
        )

    for test in theirs.tests:
        if not test.executed or test.id.startswith((BESIDE, "--")) or test.id in left_out:
            continue
        now = ours.get(test.id)
        if now is None and test.level not in asked_levels:
            report.not_asked += [test.level] * (test.level not in report.not_asked)
        elif now is None or not now.executed:
            why = "it was not collected" if now is None else now.why_not_run
            report.missing.append(test.id)
            add(test.id, Verdict.FAIL, f"required: {test.id} runs, as in {trusted.name}; "
                f"seen: it did not: {why}")  # fmt: skip
        elif test.verdict is Verdict.FAIL and now.verdict is Verdict.PASS:
            report.mended.append(test.id)
        elif test.verdict is Verdict.FAIL and now.verdict is Verdict.FAIL:
            same = alike(test.message, now.message)
            (report.known if same else report.changed).append(test.id)
        elif now.verdict is not Verdict.PASS and test.verdict is Verdict.PASS:
            report.new.append(test.id)
    there = {test.id for test in theirs.tests}
    report.new += [
        test.id
        for test in run.tests
        if test.id not in there and test.verdict is Verdict.FAIL and not test.skipped
    ]
    for line, asked in _path(theirs, run):
        if asked:
            report.asked_for.append(line)
        else:
            report.path.append(line)
            add(f"path {line.partition(':')[0]}", Verdict.FAIL,
                f"required: the path of {trusted.name}, since nothing else was asked for; "
                f"seen: {line}")  # fmt: skip
    for name, verdict, text in _metrics(run, trusted, profile, metrics):
        if verdict is Verdict.PASS:
            report.metrics.append(text)
        else:
            report.worse.append(text)
            add(name, verdict, text)
    report.no_worse = not found and not report.new and not report.changed
    return found


def in_words(report: AgainstReport) -> str:
    """How a run compares with the trusted one, in one phrase."""
    how = "no worse" if report.no_worse else "worse"
    known = len(report.known)
    return f"{how} than {report.run}" + (f", {known} known failures" if known else "")


def _engine(run: VerdictFile) -> str:
    return f"{run.engine.name} {run.engine.version or ''}".strip()


def _path(theirs: VerdictFile, run: VerdictFile) -> Iterable[tuple[str, bool]]:
    """What differs of the kernel path, and whether somebody asked for it."""
    if (
        run.engine.base_url is None
        and run.engine.startup_s is None
        and not run.engine.path.evidence
    ):
        return  # nothing was served here
    asked = (
        theirs.fingerprint is not None
        and run.fingerprint is not None
        and any(
            each.what.startswith(_ASKED) for each in theirs.fingerprint.differences(run.fingerprint)
        )
    )
    for name in _PATH:
        one, other = getattr(theirs.engine.path, name), getattr(run.engine.path, name)
        if one is not None and one != other:
            shown = "no evidence of any" if other is None else other
            yield f"{name}: {one} there, {shown} here", asked
    for kind in run.engine.path.fallbacks:
        if kind not in theirs.engine.path.fallbacks:
            yield f"fallback {kind}: admitted by the log here, not there", asked


def _metrics(
    run: VerdictFile, trusted: Trusted, profile: Profile, metrics: Mapping[str, StoredMetric]
) -> Iterable[tuple[str, Verdict, str]]:
    """Each metric of both, by the rule of the regression level."""
    common = [name for name in metrics if name in trusted.metrics]
    if not common:
        return
    fingerprints = trusted.file.fingerprint, run.fingerprint
    machines = [found.machine if found is not None else {} for found in fingerprints]
    if apart := machine.differences(*machines):
        yield (
            "metrics",
            Verdict.INVALID,
            f"{len(common)} metrics cannot be held against {trusted.name}, which is of another "
            f"machine ({'; '.join(apart)})",
        )
        return
    if run.box.state == BoxState.DEGRADED:
        yield "metrics", Verdict.INCONCLUSIVE, f"the box is DEGRADED: {run.box.reason}"
        return
    baseline = StoredRun(trusted.name, trusted.file.started, {}, trusted.metrics)
    for change in trend.compare(metrics, [baseline], profile.regression):
        yield change.metric, change.verdict, change.text
