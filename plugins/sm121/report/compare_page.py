"""One file that puts two stored runs side by side: what is new in B, what is fixed, what else
differs. It has no script and asks no network. Nothing is measured or judged anew: tests have the
verdicts that their runs gave them, and metrics go by the rules of the regression level."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sm121.core import templates, unmet
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.verdict import Severity, Verdict
from sm121.measure.box import BoxState
from sm121.regression import trend
from sm121.regression.change import Change
from sm121.report import (
    charts,
    comparison,
    findings,
    forest,
    headline,
    metric_names,
    page,
    rows,
    stored,
)
from sm121.report.comparison import KERNELS
from sm121.report.forest import Forest
from sm121.report.headline import Headline
from sm121.report.rows import Row, shortened
from sm121.report.stored import StoredReport
from sm121.run import stored_run
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import MetricReport, TestReport

NAME = Path("compare.html")
#: Characters of all rows of a table: where everything fails, the page must still open.
_ROOM = 40_000
#: Metrics of a table: the page must still be one file of 2 MB.
_MOST_METRICS = 1000
#: Of the kernel path, beside what `sm121 compare` shows of it: what the log admits.
_ADMITTED = ("fallbacks", "silent_fallbacks", "differences", "unknown_env", "failure")
#: Of the record, what differs between any two runs and says nothing.
_OF_ONE_RUN = ("resources",)


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    letter: str
    name: str
    report: StoredReport
    #: Its report.html, as seen from the page; None where it has none.
    link: str | None

    @cached_property
    def headline(self) -> Headline:
        """The run's own sentence."""
        return headline.of(self.report.run)

    @cached_property
    def tests(self) -> Mapping[str, TestReport]:
        """The tests of the run, and what was found beside them; but not what it is against a third
        run, or what a certificate lacks."""
        return {t.id: t for t in self.report.run.tests if not t.id.startswith("--")}

    @cached_property
    def stored(self) -> StoredRun:
        """The run, as others are compared with it."""
        return stored_run.of_report(self.report.run, self.report.details)


class Group(NamedTuple):
    """The first rows of a table, as many as have room, and how many more there are."""

    id: str
    rows: list[Row]
    more: int

    @classmethod
    def of(cls, name: str, every: list[Row]) -> "Group":
        """Of all the rows of a table."""
        room, listed = _ROOM, []
        for row in every:
            room -= sum(map(len, (row.name, row.a, row.b, row.a_said, row.b_said)))
            if room < 0:
                break
            listed.append(row)
        return cls(name, listed, len(every) - len(listed))

    @property
    def total(self) -> int:
        """All of them, those that are not shown included."""
        return len(self.rows) + self.more


@dataclass(frozen=True)
class Beside:
    """Everything that the page of two runs shows."""

    a: Side
    b: Side

    @cached_property
    def apart(self) -> list[str]:
        """Why the changes of metrics are not judged, a phrase each; empty where they are."""
        one, two = self.a.report.run, self.b.report.run
        pairs = [
            ("architecture", one.arch, two.arch),
            ("profile", one.profile, two.profile),
            ("engine", one.engine.name, two.engine.name),
            *comparison.differences(one, two),
        ]
        lines = [f"{name}: A {a or 'none'}, B {b or 'none'}" for name, a, b in pairs if a != b]
        for side in self.sides:
            if side.report.run.fingerprint is None:
                lines.append(f"{side.letter} does not say what it asked: an older version wrote it")
        return lines

    @property
    def sides(self) -> tuple[Side, Side]:
        """A and B."""
        return self.a, self.b

    @cached_property
    def tests(self) -> list[Group]:
        """The tests that tell the runs apart, and those that hold in neither."""
        one, two = self.a.tests, self.b.tests
        ran_a, ran_b = ([n for n, test in side.items() if test.executed] for side in (one, two))
        bad_a = {name for name in ran_a if _bad(one[name])}
        bad_b = {name for name in ran_b if _bad(two[name])}
        kinds = {
            "new": [n for n in ran_b if n in bad_b - bad_a],
            "mended": [n for n in ran_b if n in bad_a - bad_b],
            "both": [n for n in ran_b if n in bad_a & bad_b],
            "only-a": [n for n in ran_a if n not in ran_b],
            "only-b": [n for n in ran_b if n not in ran_a and n not in bad_b],
        }

        def grave(name: str) -> tuple[bool, int]:
            tests = [side.tests[name] for side in self.sides if name in side.tests]
            return not any(map(_bad, tests)), [*Severity].index(tests[-1].severity)

        return [
            Group.of(kind, [*map(self._row, sorted(names, key=grave))])
            for kind, names in kinds.items()
        ]

    def _row(self, name: str) -> Row:
        one, two = self.a.tests.get(name), self.b.tests.get(name)
        note = ""
        if one is not None and two is not None and _bad(one) and _bad(two):
            same = unmet.alike(one.facts, two.facts) and unmet.alike(two.facts, one.facts)
            note = "in the same way" if same else "in another way"
        return Row(name, _word(one), _word(two), _said(one), _said(two), note=note)

    @cached_property
    def changes(self) -> list[Change]:
        """Every metric that both measured, B against A; those that are worse come first."""
        one, two = self.a.report.run.metrics, self.b.report.run.metrics
        names = [name for name in one if name in two and not name.startswith("ab:")]
        changes = [self._change(name, one[name], two[name]) for name in names]
        order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID)
        changes.sort(key=lambda c: order.index(c.verdict) if c.verdict in order else len(order))
        return changes

    @cached_property
    def forest(self) -> Forest | None:
        """The plot of as many of them as have room."""
        return forest.draw(self.changes[:_MOST_METRICS])

    @cached_property
    def only(self) -> list[Row]:
        """Metrics that one of the two has."""
        a, b = (
            {
                name: f"{number(metric.value) or 'none'} {metric.unit}"
                for name, metric in side.report.run.metrics.items()
                if not name.startswith("ab:")
            }
            for side in self.sides
        )
        return [Row(n, a.get(n, ""), b.get(n, "")) for n in {**a, **b} if (n in a) != (n in b)]

    @cached_property
    def limits(self) -> tuple[Regression, str]:
        """How much worse a metric may be, and who says so."""
        return comparison.limits_of(self.b.report.run.profile)

    def _change(self, name: str, one: MetricReport, two: MetricReport) -> Change:
        before, now = self.a.stored.metrics.get(name), self.b.stored.metrics.get(name)
        samples = [side.report.details.samples.get(name) for side in self.sides]
        first = next((each for each in samples if each is not None), None)
        higher = first.higher_is_better if first is not None else one.unit.endswith("/s")
        ratio = None
        if one.unit == two.unit and one.value and two.value and min(one.value, two.value) > 0:
            ratio = two.value / one.value
        interval: tuple[float | None, float | None] = (None, None)
        whole = all(each is not None and not each.failures for each in samples)
        if before is not None and now is not None and ratio is not None and whole:
            interval = trend.interval(now, before) or interval
        verdict, note = self._judged(name, one, two, before, now)
        return Change(
            name, two.unit, higher, one.value, two.value, ratio, *interval,
            allowed=None if self.apart else self.limits[0].allowed(name), verdict=verdict,
            a_interval=charts.interval(one), b_interval=charts.interval(two), note=note,
        )  # fmt: skip

    def _judged(
        self,
        name: str,
        one: MetricReport,
        two: MetricReport,
        before: StoredMetric | None,
        now: StoredMetric | None,
    ) -> tuple[Verdict, str]:
        for side, metric in ((self.a, one), (self.b, two)):
            if metric.verdict not in (Verdict.PASS, Verdict.FAIL):
                return metric.verdict, f"{metric.verdict.value} in {side.letter}"
        if self.apart:
            return Verdict.NOT_RUN, ""
        if one.unit != two.unit or (before and now and before.quantile != now.quantile):
            return Verdict.INVALID, "not the same quantity"
        if before is None or now is None:
            return Verdict.NOT_RUN, "no samples are stored"
        for side in self.sides:
            if side.report.run.box.state == BoxState.DEGRADED:
                return Verdict.INCONCLUSIVE, f"the machine of {side.letter} was DEGRADED"
        (change,) = trend.compare({name: now}, [self.a.stored], self.limits[0])
        unjudged = change.verdict is Verdict.NOT_RUN
        return change.verdict, "too few samples to judge" if unjudged else ""

    @cached_property
    def path(self) -> list[Row]:
        """The kernel paths with their evidence; what differs comes first."""
        one, two = (side.report.run.engine.path for side in self.sides)
        parts = [
            rows.of_path(
                name,
                getattr(one, name),
                getattr(two, name),
                also=(one.also.get(name, ()), two.also.get(name, ())),
                said=(shortened(one.evidence.get(name, "")), shortened(two.evidence.get(name, ""))),
            )
            for name in (*KERNELS, "block_size", *_ADMITTED)
            if getattr(one, name) not in (None, []) or getattr(two, name) not in (None, [])
        ]
        return sorted(parts, key=lambda row: (not row.differs, bool(row.note)))

    @cached_property
    def record(self) -> tuple[Group, Group]:
        """The environments value by value: what differs, and what is the same."""
        sides = [
            {
                key: value
                for part, content in side.report.run.environment.items()
                if part not in _OF_ONE_RUN
                for key, value in _flat(part, content)
            }
            for side in self.sides
        ]
        differ: list[Row] = []
        same: list[Row] = []
        for name in {**sides[0], **sides[1]}:
            one, two = (side.get(name) for side in sides)
            row = Row(shortened(name), shortened(one or ""), shortened(two or ""))
            (same if one == two else differ).append(row)
        return Group.of("differs", differ), Group.of("same", same)

    @property
    def headline(self) -> str:
        """What is different, in a sentence."""
        parts = templates.rendered("beside.j2", beside=self, words=metric_names.words).splitlines()
        text = "; ".join(filter(None, parts))
        return f"{text[0].upper()}{text[1:]}."


def _bad(test: TestReport) -> bool:
    return test.executed and test.verdict in findings.BAD


def _word(test: TestReport | None) -> str:
    if test is None:
        return "not there"
    return (test.verdict if test.executed else Verdict.NOT_RUN).value


def _said(test: TestReport | None) -> str:
    if test is None or test.verdict is Verdict.PASS:
        return ""
    excused = "waived" if test.waived else test.tolerated
    return shortened(f"({excused}) {test.message}" if excused else test.why_not_run)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name} {key}", item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for position, item in enumerate(value, 1):
            yield from _flat(f"{name} {position}", item)
    elif isinstance(value, list):
        yield name, " ".join(map(str, value))
    else:
        yield name, "not known" if value is None else str(value)


def write(runs: list[tuple[str, Path]], target: Path) -> Path:
    """Write the page of two runs. `runs`: the name and the report directory of A, and of B. Raises
    UsageError: they are not two report directories."""
    if len(runs) != 2:
        raise UsageError(f"--html: expected two runs, A and B, got {len(runs)}")
    sides = []
    for letter, (name, path) in zip("AB", runs, strict=True):
        report = stored.read(path)
        beside, folder = (report.directory / page.NAME).absolute(), target.absolute().parent
        link = Path(os.path.relpath(beside, folder)).as_posix() if beside.is_file() else None
        sides.append(Side(letter, name, report, link))
    write_text(html(Beside(*sides)), target)
    return target


def html(beside: Beside) -> str:
    """The page of two runs."""
    template = page.environment().get_template("compare.html.j2")
    return template.render(
        page.inlined("report", "beside", "compare", plotted=False), beside=beside
    )
