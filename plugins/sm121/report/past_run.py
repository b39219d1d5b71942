"""A stored run in the form that the history uses, and its reader."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm121.core import builds, digest
from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import comparison, metric_names
from sm121.run import stored_run, verdict_file
from sm121.run.engine_report import EngineReport
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import VerdictFile

#: If a metric has one of these verdicts, its value is ignored.
_COUNTS_NOT = (Verdict.INVALID, Verdict.INCONCLUSIVE)
_COMMIT_DIGITS = 9


@dataclass(frozen=True)
class PastRun:
    """One stored run.

    Attributes:
        path: The run's report directory or file.
        run: The run's numbers, without tests and environment.
        machine: The kind of machine, and the identity of this one.
        verdict: The verdict; None in a file of a tool that has no verdicts.
        commit: The engine's commit, shortened; empty if it is unknown.
        checks: By test id: whether the check passed. Only checks that passed or failed.
        exact: A digest that runs with the same build and options share; None without a
            fingerprint.
    """

    path: Path
    run: StoredRun
    machine: tuple[str, str]
    verdict: Verdict | None = None
    commit: str = ""
    checks: Mapping[str, bool] = field(default_factory=dict)
    exact: str | None = None

    @property
    def is_red(self) -> bool:
        """Whether the verdict is FAIL."""
        return self.verdict is Verdict.FAIL

    @property
    def engine(self) -> str:
        """The engine and its version."""
        engine = self.run.file.engine
        return " ".join(filter(None, (engine.name, engine.identity or engine.version)))

    @property
    def question(self) -> tuple[str, ...]:
        """The build, configuration, model, profile and plan, which all runs of a series share."""
        file = self.run.file
        build = builds.named(file.engine.identity)
        name = f"{file.engine.name} {build.name}" if build is not None else file.engine.name
        plan = file.fingerprint.plan if file.fingerprint is not None else ""
        model = file.engine.model.rstrip("/").rpartition("/")[2]
        return (name, file.engine.configuration or "", model, file.profile, plan)

    @property
    def when(self) -> str:
        """The time of the start, as text that can be sorted; empty if it is unknown."""
        return self.run.file.started.replace(" ", "T", 1)


def read_past_run(file: Path, machine: str | None, name: str) -> PastRun:
    """Read a stored run.

    Args:
        file: A report directory, its verdict.json, or a file of results.
        machine: The name of the run's machine; None to take it from the run.
        name: The name of the run.

    Raises:
        UsageError: The file is no result, or a newer version of the suite wrote it.
    """
    directory = stored_run.folder_of(file)
    if directory.is_dir():
        run = stored_run.read_run(directory)
        if run.file.schema_version > verdict_file.SCHEMA_VERSION:
            raise UsageError(f"{directory}: {run.unfit[0]}")
        return _past(name, directory, run, machine, run.file.verdict)
    source = comparison.read_results(file)
    reports = {row.metric: row.report for row in source.rows}
    stored = source.run
    if stored is None:
        stored = VerdictFile(
            arch=None,
            profile=source.tool,
            started=source.started,
            engine=EngineReport(name=source.engine, managed=False, model=source.model),
            metrics=reports,
        )
    metrics = {}
    for metric, report in reports.items():
        if report.value is not None and report.verdict not in _COUNTS_NOT:
            metrics[metric] = StoredMetric(
                name=metric,
                unit=report.unit,
                higher_is_better=report.unit == "tok/s",
                quantile=metric_names.fraction(metric),
                samples=(),
                value=report.value,
            )
    # A renamed verdict.json has a verdict; the files of other tools have none.
    verdict: Verdict | None = stored.verdict
    if verdict is Verdict.NOT_RUN:
        verdict = None
    return _past(name, file, StoredRun(name, stored, metrics), machine, verdict)


def _past(
    name: str, path: Path, run: StoredRun, machine: str | None, verdict: Verdict | None
) -> PastRun:
    """Return a stored run without the parts that are not shown.

    The tests of a thousand runs would take gigabytes of memory.
    """
    file = run.file
    small = file.model_copy(update={"tests": [], "environment": {}, "memory": None, "box": None})
    metrics = {key: replace(metric, samples=()) for key, metric in run.metrics.items()}
    source = (file.environment.get("git_shas") or {}).get(file.engine.name) or {}
    return PastRun(
        path=path,
        run=StoredRun(printable(name), small, metrics),
        machine=_machine(file, machine),
        verdict=verdict,
        commit=str(source.get("sha") or "")[:_COMMIT_DIGITS],
        checks=_checks(file),
        exact=_exact(file),
    )


def _machine(file: VerdictFile, named: str | None) -> tuple[str, str]:
    """Return the kind and identity of a machine. A name that the user gave is a kind of its own."""
    if named:
        return named, ""
    parts = file.fingerprint.machine if file.fingerprint is not None else {}
    kind = parts.get("attached_to") or parts.get("gpu") or parts.get("cpu_model")
    gpus = file.environment.get("gpus") or ()
    unit = " ".join(str(gpu.get("unit") or "") for gpu in gpus)
    return str(kind or "machine not named"), unit.strip()


def _checks(file: VerdictFile) -> dict[str, bool]:
    checks = {}
    for test in file.tests:
        is_decided = test.executed and test.verdict in (Verdict.PASS, Verdict.FAIL)
        if is_decided and not test.is_of_option:
            checks[test.id] = test.verdict is Verdict.PASS
    return checks


def _exact(file: VerdictFile) -> str | None:
    """Return a digest of a run's build and options; None without a fingerprint."""
    fingerprint = file.fingerprint
    if fingerprint is None:
        return None
    request = fingerprint.model_dump(mode="json", exclude={"against", "waivers"})
    return digest.of_value([request, file.engine.version, file.profile])
