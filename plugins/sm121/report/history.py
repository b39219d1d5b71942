"""Many runs: series of a build on a machine, where their levels changed, since when they are red,
checks that are red and green on one build and machine, machines apart from their like. Changes go
by the rules of the regression level; nothing else is judged anew."""

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sm121.core import builds, digest, templates
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.printable import printable, some_of
from sm121.core.verdict import Verdict
from sm121.regression import trend
from sm121.regression.change import Change
from sm121.report import chart, comparison, metric_names, page
from sm121.run import stored_run, verdict_file
from sm121.run.engine_report import EngineReport
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import VerdictFile

#: Written beside the page.
SUMMARY = "summary.json"
_MOST_CHARTS = 12
_SUFFIXES = (".json", ".csv", ".yaml", ".yml")
#: The metric of each column, unless most runs have another one whose name begins so.
_COLUMNS = {"tg": "tg32@d0", "pp": "pp2048@d0", "ttft": "ttft_p50"}
_COUNTS_NOT = (Verdict.INVALID, Verdict.INCONCLUSIVE)
#: A machine is apart by so much, and by so many times what the others differ among themselves (one
#: of 20 alike once in 100 times); by chance as seldom, over all comparisons; and runs that tell it.
_APART, _SPREADS, _CHANCE, _FEWEST = 0.035, 3.5, 0.001, 3


@dataclass(frozen=True)
class PastRun:
    """One run. ``machine``: its kind, and which one of it; ``checks``: whether each check that
    decided passed; ``exact``: the digest that runs of one build on one machine share."""

    path: Path
    run: StoredRun
    machine: tuple[str, str]
    verdict: Verdict | None = None
    commit: str = ""
    checks: Mapping[str, bool] = field(default_factory=dict)
    exact: str | None = None

    @property
    def is_red(self) -> bool:
        """Whether its verdict is FAIL."""
        return self.verdict is Verdict.FAIL

    @property
    def engine(self) -> str:
        """The engine and its version."""
        engine = self.run.file.engine
        return " ".join(filter(None, (engine.name, engine.identity or engine.version)))

    @property
    def question(self) -> tuple[str, ...]:
        """What the runs of one series share: build, configuration, model, profile, plan."""
        file, build = self.run.file, builds.named(self.run.file.engine.identity)
        name = f"{file.engine.name} {build.name}" if build is not None else file.engine.name
        plan = file.fingerprint.plan if file.fingerprint is not None else ""
        model = file.engine.model.rstrip("/").rpartition("/")[2]
        return (name, file.engine.configuration or "", model, file.profile, plan)

    @property
    def when(self) -> str:
        """When it started, as text that sorts; empty where nothing says so."""
        return self.run.file.started.replace(" ", "T", 1)


class Step(NamedTuple):
    """A change of level. ``run`` is the first with the new one, ``is_red``: worse than allowed,
    ``stands``: the last level is so, too."""

    series: str
    metric: StoredMetric
    run: PastRun
    before: float
    after: float
    is_red: bool
    stands: bool


class Flaky(NamedTuple):
    """A check that is red and green on one build and machine: the runs in which it is red."""

    id: str
    machine: str
    engine: str
    red: list[str]
    runs: int


@dataclass(frozen=True)
class Line:
    """Runs of one question on one machine, oldest first."""

    label: str
    runs: tuple[PastRun, ...]
    limits: Regression

    def levels(self, metric: str) -> tuple[list[PastRun], list[tuple[int, int, float]]]:
        """The runs that have a metric, and its levels over them as (start, end, median)."""
        runs = [past for past in self.runs if metric in past.run.metrics]
        if not runs:
            return [], []
        values = [past.run.metrics[metric].value for past in runs]
        higher = runs[-1].run.metrics[metric].higher_is_better
        return runs, trend.levels_of(values, higher_is_better=higher, limits=self.limits)

    @cached_property
    def steps(self) -> list[Step]:
        """Every change of a level."""
        steps = []
        for name in dict.fromkeys(name for past in self.runs for name in past.run.metrics):
            runs, levels = self.levels(name)
            metric = runs[-1].run.metrics[name]
            for (_, _, before), (start, _, after) in itertools.pairwise(levels):
                ratios = (after / before, levels[-1][2] / before)
                worse = [1 - r if metric.higher_is_better else r - 1 for r in ratios]
                is_red, stands = (each > self.limits.allowed(name) for each in worse)
                steps.append(Step(self.label, metric, runs[start], before, after, is_red, stands))
        return steps

    @cached_property
    def fallen(self) -> list[Change]:
        """What is worse in the last run than at its best, by the rules of the regression level."""
        measured = [past.run for past in self.runs if past.run.metrics]
        return trend.changes(measured[-1].metrics, measured[:-1], self.limits) if measured else []

    @cached_property
    def first_red(self) -> list[PastRun]:
        """Each run that is red after one that is not, or after none."""
        runs = [past for past in self.runs if past.verdict is not None]
        pairs = zip(runs, [None, *runs], strict=False)
        return [past for past, before in pairs if past.is_red and not (before and before.is_red)]


@dataclass(frozen=True)
class History:
    """All runs, oldest first. ``left_out``: files that may have been meant as runs, and why."""

    runs: tuple[PastRun, ...]
    left_out: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> dict[str, str]:
        """The metric of each column."""
        counts = Counter(name for past in self.runs for name in past.run.file.metrics)
        plain = [name for name in counts if (rate := metric_names.rate(name)) and rate.plain]
        columns = {}
        for kind, usual in _COLUMNS.items():
            names = [usual] if usual in counts else [n for n in plain if n.startswith(kind)]
            if names:
                columns[kind] = max(names, key=counts.__getitem__)
        return columns

    def machine(self, past: PastRun) -> str:
        """The name of the machine of a run."""
        kind, unit = past.machine
        return f"{kind} {unit[:6]}".strip() if self._of_a_kind[kind] > 1 else kind

    @cached_property
    def _of_a_kind(self) -> Counter[str]:
        return Counter(kind for kind, _ in {past.machine for past in self.runs})

    @cached_property
    def lines(self) -> list[Line]:
        """The series. A label has what tells them apart."""
        groups: dict[tuple[str, ...], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            groups[(*past.question, self.machine(past))].append(past)
        apart = [at for at, each in enumerate(zip(*groups, strict=True)) if len({*each}) > 1]
        lines = []
        for key, runs in groups.items():
            label = ", ".join(key[at] for at in apart if key[at])
            limits = comparison.limits_of(runs[-1].run.file.profile)
            lines.append(Line(label or f"{key[0]}, {key[-1]}", tuple(runs), limits))
        return lines

    @cached_property
    def steps(self) -> list[Step]:
        """All changes of level, those that are red first, then the latest."""
        every = [step for line in self.lines for step in line.steps]
        return sorted(every, key=lambda step: (step.is_red, step.run.when), reverse=True)

    @cached_property
    def flaky(self) -> list[Flaky]:
        """Checks that are red and green on one build and machine, the reddest first. Runs that do
        not say what they are of are not looked at."""
        groups: dict[tuple[str, ...], list[tuple[PastRun, bool]]] = defaultdict(list)
        for past in self.runs:
            for name, passed in past.checks.items() if past.exact else ():
                groups[name, past.exact or "", *past.machine].append((past, passed))
        checks = [
            Flaky(name, self.machine(runs[0][0]), runs[0][0].engine, red, len(runs))
            for (name, *_), runs in groups.items()
            if 0 < len(red := [past.run.name for past, passed in runs if not passed]) < len(runs)
        ]
        return sorted(checks, key=lambda check: -len(check.red) / check.runs)

    @cached_property
    def starts(self) -> list[str]:
        """Builds whose starts on one machine differ by more than is allowed, a line each: one start
        shows neither a regression nor an improvement of them. A run is one start."""
        groups: dict[tuple[str, ...], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            for name in self.columns.values():
                if past.exact and name in past.run.metrics:
                    groups[name, past.exact, *past.machine].append(past)
        lines = []
        for (name, *_), runs in groups.items():
            last, metric = runs[-1], runs[-1].run.metrics[name]
            limits = comparison.limits_of(last.run.file.profile)
            values = sorted(past.run.metrics[name].value for past in runs)
            if len(runs) < _FEWEST or not limits.of_starts(name, metric.unit) or values[0] <= 0.0:
                continue
            if (differ_by := values[-1] / values[0] - 1.0) > limits.allowed(name):
                build = " ".join(filter(None, (last.engine, last.commit)))
                lines.append(
                    f"{self.machine(last)}, {build}: {metric_names.words(name)} of {len(runs)} "
                    f"runs is between {number(values[0])} and {number(values[-1])} {metric.unit} "
                    f"({differ_by:.0%})"
                )
        return lines

    @cached_property
    def apart(self) -> list[str]:
        """Machines that differ from their like by more than their runs differ, a line each."""
        groups: dict[tuple[str, ...], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            for name in sorted(past.run.metrics, key=lambda name: name[:2] != "tg"):
                groups[name, past.machine[0], *past.question].append(past)
        results = [(key[0], each) for key, runs in groups.items() for each in _beside(runs, key[0])]
        by_machine: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, (past, ratio, chance) in results:
            if chance < _CHANCE / len(results):
                how = (
                    "better" if (ratio > 1) is past.run.metrics[name].higher_is_better else "worse"
                )
                text = f"{abs(ratio - 1):.1%} {how} in {metric_names.words(name)}"
                by_machine[self.machine(past), past.question[0]].append(text)
        return [f"{m}, {build}: {some_of(texts, 3)}" for (m, build), texts in by_machine.items()]


def _beside(runs: Sequence[PastRun], name: str) -> Iterator[tuple[PastRun, float, float]]:
    """Of each machine the last run, the ratio of its level of a metric to the others', and the
    chance of it by Welch's test: 1 where they differ by no more than one run from the next, or than
    the others among themselves. A value is taken relative to its build on all machines that ran it,
    which hides a share of the noise."""
    from scipy import stats  # a second, which every other command need not spend

    by_build: dict[object, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    for past in runs:
        if (value := past.run.metrics[name].value) > 0.0:
            by_build[past.engine, past.commit][past.machine].append(float(np.log(value)))
    relative: dict[object, list[float]] = defaultdict(list)
    for machines in by_build.values():
        level = float(np.mean([np.median(logs) for logs in machines.values()]))
        for machine, logs in machines.items() if len(machines) > 1 else ():
            relative[machine] += [log - level for log in logs]
    for machine, logs in relative.items():
        rest = [log for other, its in relative.items() if other != machine for log in its]
        if min(len(logs), len(rest)) < _FEWEST:
            continue
        noise = [float(np.std(each, ddof=1)) or 1e-9 for each in (logs, rest)]
        a, b = (each * np.sqrt(len(relative) / (len(relative) - 1)) for each in noise)
        off = float(np.mean(logs) - np.mean(rest))
        test = stats.ttest_ind_from_stats(off, a, len(logs), 0.0, b, len(rest), equal_var=False)
        others = [float(np.mean(its)) for other, its in relative.items() if other != machine]
        spread = float(np.std(others, ddof=1)) if len(others) > 1 else 0.0
        is_apart = abs(off) > max(_APART, _SPREADS * spread, np.hypot(a, b) / np.sqrt(2))
        last = next(past for past in reversed(runs) if past.machine == machine)
        yield last, float(np.exp(off)), float(test.pvalue) if is_apart else 1.0


def read(arguments: Sequence[tuple[str | None, Path]]) -> History:
    """The runs of folders and files; a name is that of their machine. Raises UsageError: a file
    that was named is no result, or there is no run."""
    runs: dict[object, PastRun] = {}
    left_out: list[str] = []
    for machine, path in arguments:
        folders = {file.parent for file in path.rglob(verdict_file.NAME)}
        loose = (file for file in path.rglob("*.*") if file.suffix in _SUFFIXES)
        files = {file for file in (*folders, *loose) if not folders & {*file.parents}}
        for file in sorted(files) if path.is_dir() else [path]:
            try:
                past = _read(file, machine, path, path if len(arguments) == 1 else path.parent)
            except UsageError as error:
                if file == path:
                    raise
                left_out.append(printable(str(error)))
                continue
            values = tuple(report.value for report in past.run.file.metrics.values())
            checks = tuple(past.checks.items())
            runs.setdefault((past.when, past.engine, past.machine, checks, values), past)
    if not runs:
        paths = some_of([str(path) for _, path in arguments], 3)
        why = f" ({left_out[0]})" if left_out else ""
        raise UsageError(f"{paths}: expected report directories or files of results{why}")
    return History(tuple(sorted(runs.values(), key=lambda past: past.when)), tuple(left_out))


def _read(file: Path, machine: str | None, root: Path, base: Path) -> PastRun:
    name = printable(file.name if file == root else file.relative_to(base).as_posix())
    directory = stored_run.folder_of(file)
    if directory.is_dir():
        run = stored_run.read(directory)
        if run.file.schema_version > verdict_file.SCHEMA_VERSION:
            raise UsageError(f"{directory}: {run.unfit[0]}")
        return _past(name, directory, run, machine, run.file.verdict)
    source = comparison.read(file)
    reports = {row.metric: row.report for row in source.rows}
    engine = EngineReport(name=source.engine, managed=False, model=source.model)
    verdict = source.run or VerdictFile(
        arch=None, profile=source.tool, started=source.started, engine=engine, metrics=reports
    )
    metrics = {
        key: StoredMetric(key, report.unit, report.unit.endswith("/s"), quantile, (), report.value)
        for key, report in reports.items()
        if report.value is not None and report.verdict not in _COUNTS_NOT
        for quantile in (metric_names.fraction(key),)
    }
    is_judged = verdict.verdict is not Verdict.NOT_RUN  # in a verdict.json of another name
    of_suite = verdict.verdict if is_judged else None
    return _past(name, file, StoredRun(name, verdict, metrics), machine, of_suite)


def _past(
    name: str, path: Path, run: StoredRun, machine: str | None, verdict: Verdict | None
) -> PastRun:
    """Only what is shown of a run: a thousand have gigabytes of tests."""
    file, fingerprint = run.file, run.file.fingerprint
    parts = fingerprint.machine if fingerprint is not None else {}
    kind = machine or parts.get("attached_to") or parts.get("gpu") or parts.get("cpu_model")
    exact = None
    if fingerprint is not None:
        request = fingerprint.model_dump(mode="json", exclude={"against", "waivers"})
        exact = digest.of([request, file.engine.version, file.profile])
    unit = " ".join(str(gpu.get("unit") or "") for gpu in file.environment.get("gpus") or ())
    source = (file.environment.get("git_shas") or {}).get(file.engine.name) or {}
    checks = {
        test.id: test.verdict is Verdict.PASS
        for test in file.tests
        if test.executed and test.verdict in (Verdict.PASS, Verdict.FAIL) and test.id[:2] != "--"
    }
    small = file.model_copy(update={"tests": [], "environment": {}, "memory": None, "box": None})
    metrics = {key: replace(metric, samples=()) for key, metric in run.metrics.items()}
    which = (str(kind or "machine not named"), "" if machine else unit.strip())
    commit = str(source.get("sha") or "")[:9]
    return PastRun(path, StoredRun(name, small, metrics), which, verdict, commit, checks, exact)


def write(history: History, target: Path) -> list[Path]:
    """Write the page, and summary.json beside it. Raises UsageError: there is no such folder."""
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--html {target}: expected a file in a folder that is there")
    links = {
        past.path: os.path.relpath(past.path / page.NAME, target.parent)
        for past in history.runs
        if (past.path / page.NAME).is_file()
    }
    values = page.inlined("report", "history") | _values(history)
    template = page.environment().get_template("history.html.j2")
    write_text(template.render(values, links=links), target)
    beside = target.with_name(SUMMARY)
    write_text(text(history, "json"), beside)
    return [target, beside]


def text(history: History, kind: str) -> str:
    """The runs as ``json``, which is the content of summary.json, or ``txt``, for a terminal."""
    text = templates.rendered(f"history.{kind}.j2", templates.one_line, **_values(history))
    return text.rstrip() + "\n"


def _values(history: History) -> dict[str, object]:
    reports = [past.run.file.metrics for past in history.runs]
    gated = [name for metrics in reports for name, metric in metrics.items() if metric.gated]
    names = [*history.columns.values(), *(step.metric.name for step in history.steps), *gated]
    return {
        "history": history,
        "names": [*dict.fromkeys(names)][:_MOST_CHARTS],
        "places": {past.path: place for place, past in enumerate(history.runs, 1)},
        "fewest": trend.SERIES,
        "colours": (*chart.SERIES, *chart.OTHERS),
        "figure_of": chart.figure_of,
        "looks": chart.LOOKS,
        "escaped": chart.escaped,
        "words": metric_names.words,
        "number": number,
    }
