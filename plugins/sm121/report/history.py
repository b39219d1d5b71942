"""The history of many runs.

- The series of each build on each machine, where their levels changed, and since when they fail.
- Flaky checks: they both fail and pass on one build and machine.
- Machines that differ from others of the same kind.

Changes are judged by the rules of the regression level; other verdicts are taken from the runs.
"""

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sm121.core import templates
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.printable import printable, some_of
from sm121.measure.statistics import relative_loss
from sm121.regression import metric_levels
from sm121.regression.change import Change
from sm121.regression.metric_levels import SeriesLevel
from sm121.report import chart, comparison, machines, metric_names, page
from sm121.report.past_run import PastRun, read_past_run
from sm121.run import verdict_file
from sm121.run.stored_run import StoredMetric

#: The file that is written next to the page.
SUMMARY = "summary.json"
_MOST_CHARTS = 12
_SUFFIXES = (".json", ".csv", ".yaml", ".yml")
#: The default metric of each column. If no run has it, the most frequent similar metric is used.
_COLUMNS = {"tg": "tg32@d0", "pp": "pp2048@d0", "ttft": "ttft_p50"}
#: The probability of falsely reporting a machine, over all comparisons of a history.
_CHANCE = 0.001


@dataclass(frozen=True)
class LevelChange:
    """A change of level of a metric.

    Attributes:
        series: The label of the series.
        metric: The metric, with the value of the last run.
        run: The first run with the new level.
        before: The level before the change.
        after: The level after the change.
        is_red: Whether the new level is worse than allowed.
        stands: Whether the last level of the series is also worse than allowed.
    """

    series: str
    metric: StoredMetric
    run: PastRun
    before: float
    after: float
    is_red: bool
    stands: bool


@dataclass(frozen=True)
class Flaky:
    """A check that both fails and passes on one build and machine.

    Attributes:
        id: The test's id.
        machine: The machine's name.
        engine: The engine and its version.
        red: The names of the runs in which it failed.
        runs: The number of runs in which it failed or passed.
    """

    id: str
    machine: str
    engine: str
    red: list[str]
    runs: int


@dataclass(frozen=True)
class Line:
    """Runs of one build, configuration, model, profile and plan on one machine, oldest first."""

    label: str
    runs: tuple[PastRun, ...]
    limits: Regression

    @property
    def is_short(self) -> bool:
        """Whether the series has too few runs with numbers to judge a change of level."""
        measured = [past for past in self.runs if past.run.metrics]
        return len(measured) < metric_levels.SERIES

    def levels(self, metric: str) -> tuple[list[PastRun], list[SeriesLevel]]:
        """Divide the runs at the points where a metric changes, and return the segments.

        Args:
            metric: The metric's name.

        Returns:
            The runs that contain the metric, and the segments between two changes of its value:
            for each segment, the positions of its start and end in these runs, and its median.
        """
        runs = [past for past in self.runs if metric in past.run.metrics]
        if not runs:
            return [], []
        values = [past.run.metrics[metric].value for past in runs]
        higher = runs[-1].run.metrics[metric].higher_is_better
        return runs, metric_levels.levels_of(values, higher_is_better=higher, limits=self.limits)

    @cached_property
    def steps(self) -> list[LevelChange]:
        """All changes of level."""
        names: dict[str, None] = {}
        for past in self.runs:
            names |= dict.fromkeys(past.run.metrics)
        steps: list[LevelChange] = []
        for name in names:
            steps += self._steps_of(name)
        return steps

    def _steps_of(self, name: str) -> list[LevelChange]:
        runs, levels = self.levels(name)
        metric = runs[-1].run.metrics[name]
        allowed = self.limits.allowed(name)
        last_level = levels[-1][2]
        steps = []
        for (_, _, before), (start, _, after) in itertools.pairwise(levels):
            steps.append(
                LevelChange(
                    series=self.label,
                    metric=metric,
                    run=runs[start],
                    before=before,
                    after=after,
                    is_red=relative_loss(after, before, metric.higher_is_better) > allowed,
                    stands=relative_loss(last_level, before, metric.higher_is_better) > allowed,
                )
            )
        return steps

    @cached_property
    def fallen(self) -> list[Change]:
        """The metrics of the last run that are worse than their best level.

        They are judged by the rules of the regression level.
        """
        measured = [past.run for past in self.runs if past.run.metrics]
        if not measured:
            return []
        return metric_levels.find_falls(measured[-1].metrics, measured[:-1], self.limits)

    @cached_property
    def first_red(self) -> list[PastRun]:
        """The failed runs whose predecessor did not fail, or that have no predecessor."""
        first = []
        was_red = False
        for past in self.runs:
            if past.verdict is None:
                continue
            if past.is_red and not was_red:
                first.append(past)
            was_red = past.is_red
        return first


@dataclass(frozen=True)
class History:
    """All runs.

    Attributes:
        runs: The runs, oldest first.
        left_out: One line per file that looks like a run but cannot be read, with the reason.
    """

    runs: tuple[PastRun, ...]
    left_out: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> dict[str, str]:
        """The metric of each column."""
        counts: Counter[str] = Counter()
        for past in self.runs:
            counts.update(past.run.file.metrics.keys())
        columns = {}
        for kind, usual in _COLUMNS.items():
            names = [usual]
            if usual not in counts:
                names = _plain_rates(counts, kind)
            if names:
                columns[kind] = max(names, key=counts.__getitem__)
        return columns

    def machine(self, past: PastRun) -> str:
        """Return the name of the machine of a run.

        Args:
            past: The run. If there are several machines of its kind, the name includes the first
                characters of the machine's identity.
        """
        kind, unit = past.machine
        if self._machines_of_kind[kind] > 1:
            return f"{kind} {unit[:6]}".strip()
        return kind

    @cached_property
    def _machines_of_kind(self) -> Counter[str]:
        return Counter(kind for kind, _ in {past.machine for past in self.runs})

    @cached_property
    def lines(self) -> list[Line]:
        """The series. A label contains only the properties in which the series differ."""
        groups: dict[tuple[str, ...], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            groups[(*past.question, self.machine(past))].append(past)
        distinct = []
        for position, values in enumerate(zip(*groups, strict=True)):
            if len(set(values)) > 1:
                distinct.append(position)
        lines = []
        for key, runs in groups.items():
            label = ", ".join(key[position] for position in distinct if key[position])
            limits = comparison.limits_of(runs[-1].run.file.profile)
            lines.append(Line(label or f"{key[0]}, {key[-1]}", tuple(runs), limits))
        return lines

    @cached_property
    def steps(self) -> list[LevelChange]:
        """All changes of level. The ones worse than allowed come first, then the latest ones."""
        steps: list[LevelChange] = []
        for line in self.lines:
            steps += line.steps
        return sorted(steps, key=lambda step: (step.is_red, step.run.when), reverse=True)

    @cached_property
    def flaky(self) -> list[Flaky]:
        """Checks that both fail and pass on one build and machine, most failures first.

        Runs without a fingerprint are ignored.
        """
        groups: dict[tuple[str, str, tuple[str, str]], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            if past.exact:
                for check in past.checks:
                    groups[check, past.exact, past.machine].append(past)
        flaky = []
        for (check, _, _), runs in groups.items():
            red = [past.run.name for past in runs if not past.checks[check]]
            if 0 < len(red) < len(runs):
                machine = self.machine(runs[0])
                flaky.append(Flaky(check, machine, runs[0].engine, red, len(runs)))
        return sorted(flaky, key=lambda check: -len(check.red) / check.runs)

    @cached_property
    def starts(self) -> list[str]:
        """One line per build whose starts on one machine differ by more than allowed.

        One start of such a build shows neither a regression nor an improvement. A run is one start.
        """
        groups: dict[tuple[str, str, tuple[str, str]], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            for name in self.columns.values():
                if past.exact and name in past.run.metrics:
                    groups[name, past.exact, past.machine].append(past)
        lines = []
        for (name, _, _), runs in groups.items():
            line = self._starts_line(name, runs)
            if line is not None:
                lines.append(line)
        return lines

    def _starts_line(self, name: str, runs: Sequence[PastRun]) -> str | None:
        """Return how much starts differ; None if they differ by no more than allowed."""
        last = runs[-1]
        unit = last.run.metrics[name].unit
        limits = comparison.limits_of(last.run.file.profile)
        values = sorted(past.run.metrics[name].value for past in runs)
        lowest = values[0]
        highest = values[-1]
        if len(runs) < machines.FEWEST or not limits.of_starts(name, unit) or lowest <= 0.0:
            return None
        difference = highest / lowest - 1.0
        if difference <= limits.allowed(name):
            return None
        build = " ".join(filter(None, (last.engine, last.commit)))
        return (
            f"{self.machine(last)}, {build}: {metric_names.words(name)} of {len(runs)} runs is "
            f"between {number(lowest)} and {number(highest)} {unit} ({difference:.0%})"
        )

    @cached_property
    def apart(self) -> list[str]:
        """One line per machine whose numbers differ from those of other machines of its kind."""
        groups: dict[tuple[str, str, tuple[str, ...]], list[PastRun]] = defaultdict(list)
        for past in self.runs:
            for name in sorted(past.run.metrics, key=lambda name: not _is_decoding(name)):
                groups[name, past.machine[0], past.question].append(past)
        compared: list[tuple[str, machines.MachineLevel]] = []
        for (name, _, _), runs in groups.items():
            for level in machines.compare_machines(runs, name):
                compared.append((name, level))
        by_machine: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, level in compared:
            if level.chance < _CHANCE / len(compared):
                key = (self.machine(level.last), level.last.question[0])
                by_machine[key].append(_apart_text(name, level))
        lines = []
        for (machine, build), texts in by_machine.items():
            lines.append(f"{machine}, {build}: {some_of(texts, 3)}")
        return lines


def _is_decoding(name: str) -> bool:
    """Whether a metric is a rate of generated tokens."""
    rate = metric_names.rate(name)
    return rate is not None and rate.decoding


def _plain_rates(names: Iterable[str], direction: str) -> list[str]:
    """Return the rates of one stream in an empty context: decode (tg) or prefill (pp)."""
    plain = []
    for name in names:
        rate = metric_names.rate(name)
        if rate is not None and rate.plain and rate.direction == direction:
            plain.append(name)
    return plain


def _apart_text(name: str, level: machines.MachineLevel) -> str:
    is_better = (level.ratio > 1) is level.last.run.metrics[name].higher_is_better
    word = "better" if is_better else "worse"
    return f"{abs(level.ratio - 1):.1%} {word} in {metric_names.words(name)}"


def read_runs(arguments: Sequence[tuple[str | None, Path]]) -> History:
    """Read the runs in folders and files. Copies of a run are ignored.

    Args:
        arguments: Folders, which are searched recursively, and files; each with an optional name
            of the machine.

    Raises:
        UsageError: A file that was named is no result, or there is no run.
    """
    runs: dict[object, PastRun] = {}
    left_out: list[str] = []
    for machine, path in arguments:
        base = path if len(arguments) == 1 else path.parent
        for file in _files(path):
            name = file.name if file == path else file.relative_to(base).as_posix()
            try:
                past = read_past_run(file, machine, name)
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
        raise UsageError(
            f"{paths}: expected report directories or files of results, got none{why}. Name a "
            "folder in which a run has written its verdict.json."
        )
    ordered = sorted(runs.values(), key=lambda past: past.when)
    return History(tuple(ordered), tuple(left_out))


def _files(path: Path) -> list[Path]:
    """Return the report directories and result files in a folder; for a file, the file itself."""
    if not path.is_dir():
        return [path]
    folders = {file.parent for file in path.rglob(verdict_file.NAME)}
    files = []
    for file in (*folders, *path.rglob("*.*")):
        is_result = file in folders or file.suffix in _SUFFIXES
        if is_result and folders.isdisjoint(file.parents):
            files.append(file)
    return sorted(set(files))


def write(history: History, target: Path) -> list[Path]:
    """Write the page of a history, and summary.json next to it.

    Args:
        history: The runs.
        target: The path of the page.

    Returns:
        The two paths.

    Raises:
        UsageError: The target is a folder, or its folder does not exist.
    """
    if target.is_dir():
        raise UsageError(
            f"--html {target}: expected a file, got a folder. Name a file in it: "
            f"{target / 'history.html'}"
        )
    folder = target.absolute().parent
    if not folder.is_dir():
        raise UsageError(
            f"--html {target}: expected a file in a folder that exists, got no folder {folder}. "
            "Create it, or name another one."
        )
    links = {}
    for past in history.runs:
        report = past.path / page.NAME
        if report.is_file():
            links[past.path] = os.path.relpath(report, target.parent)
    values = page.inlined("report", "history") | _values(history)
    template = page.environment().get_template("history.html.j2")
    write_text(template.render(values, links=links), target)
    summary = target.with_name(SUMMARY)
    write_text(text(history, "json"), summary)
    return [target, summary]


def text(history: History, kind: str) -> str:
    """Return a history as text.

    Args:
        history: The runs.
        kind: ``json``, which is the content of summary.json, or ``txt``, for a terminal.
    """
    text = templates.rendered(f"history.{kind}.j2", templates.one_line, **_values(history))
    return text.rstrip() + "\n"


def _values(history: History) -> dict[str, object]:
    names = [*history.columns.values()]
    names += [step.metric.name for step in history.steps]
    for past in history.runs:
        names += [name for name, metric in past.run.file.metrics.items() if metric.gated]
    return {
        "history": history,
        "names": list(dict.fromkeys(names))[:_MOST_CHARTS],
        "places": {past.path: place for place, past in enumerate(history.runs, 1)},
        "fewest": metric_levels.SERIES,
        "colours": (*chart.SERIES, *chart.OTHERS),
        "figure_of": chart.figure_of,
        "looks": chart.LOOKS,
        "escaped": chart.escaped,
        "words": metric_names.words,
        "number": number,
    }
