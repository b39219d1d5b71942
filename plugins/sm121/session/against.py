"""``--against RUN``: this run is compared with one that is trusted. A test that failed there in the
same way is known, and not red. A new failure is, and so is a known one that fails in another way:
both are red by themselves. What is found here is what no test shows: a test that ran there and not
here, a path that nobody asked to change, a metric that is worse."""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm121.core import digest
from sm121.core.errors import UsageError
from sm121.core.profile import FULL, Profile
from sm121.core.profile_fields import LEVELS
from sm121.core.unmet import Fact, alike, same_kind
from sm121.core.verdict import Verdict
from sm121.measure import machine
from sm121.measure.box import BoxState
from sm121.measure.measurement import COUNTED
from sm121.regression import metric_levels, trend
from sm121.regression.change import is_price, trade
from sm121.run import details, stored_run, verdict_file
from sm121.run.fingerprint import Fingerprint
from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import AgainstReport, MetricReport, TestReport, VerdictFile

#: ``--against`` this word: the newest run that ``sm121 trust`` has kept.
TRUSTED = "trusted"
_FOLDER = "trusted"
#: In the folder of a run that was kept: what was kept before it no longer counts.
_ANEW = "anew"
#: Before the ids of what is found beside the tests.
PREFIX = "--against::"
THE_TRUSTED = "the trusted run"
_LEVEL = "regression"
#: The most that a server held so far depends on what was asked of it before.
_PEAK = "memory_peak_gib"
#: Of a path: what is another path when it differs.
_PATH = (
    "attention", "moe", "cuda_graphs", "kv_layout", "speculative", "native_fp4", "kv_cache_dtype",
    "dtype", "quantization", "prefix_caching", "block_size",
)  # fmt: skip


@dataclass(frozen=True)
class Trusted:
    """A run that is trusted, and those that were trusted before it, oldest first."""

    runs: tuple[StoredRun, ...]
    digest: str
    """Of the newest one's verdict.json."""

    @property
    def name(self) -> str:
        return self.newest.name

    @property
    def newest(self) -> StoredRun:
        return self.runs[-1]

    @property
    def rated(self) -> StoredRun | None:
        """The newest run whose rates and times are a baseline; None: those of none are."""
        return next((run for run in reversed(self.runs) if run.rates_unfit is None), None)

    @property
    def metrics(self) -> dict[str, StoredMetric]:
        """What a metric of each name must share its kind with."""
        rates = self.rated.metrics if self.rated is not None else {}
        return {**rates, **self.newest.metrics}

    def known(self, failure: TestReport) -> str | None:
        """The name of this run, if the test failed in it in the same way. Of a failure that several
        runs in a row have had, the first one counts as well: nothing gets worse step by step."""

        def same(test: TestReport | None) -> bool:
            return test is not None and same_kind(test.facts, failure.facts)

        tests = (run.failures.get(failure.id) for run in reversed(self.runs))
        failed = [test for test in itertools.takewhile(same, tests) if test is not None]
        near = all(alike(test.facts, failure.facts) for test in failed[:1] + failed[-1:])
        if failed and near:
            return self.name
        return None


def load(asked: str, storage: Path) -> Trusted:
    """The run that ``--against`` names. `asked`: a report directory, a verdict.json, or
    ``trusted``; `storage`: pytest-benchmark's folder, which has the runs that ``sm121 trust`` kept.
    Raises UsageError: there is none, or it is no run to hold another one against."""
    if asked == TRUSTED:
        folders = _kept(storage)
        if not folders:
            raise UsageError(
                f"--against trusted: {storage / _FOLDER} has no run; `sm121 trust REPORT` puts one "
                "there"
            )
    else:
        folders = [stored_run.folder_of(Path(asked))]
    try:
        *earlier, newest = map(_read, folders)
    except UsageError as error:
        raise UsageError(f"--against {asked}: {error}") from error
    comparable = [
        run
        for run in earlier
        if _unlike(run.file, newest.file) is None and not [*_path(run.file, newest.file)]
    ]
    content = (folders[-1] / verdict_file.NAME).read_text("utf-8")
    return Trusted((*comparable, newest), digest.of([content]))


def _read(folder: Path) -> StoredRun:
    run = stored_run.read(folder)
    if run.unfit:
        raise UsageError(f"{folder}: expected a run that can be trusted: {run.unfit[0]}")
    return run.baseline


def trust(
    report: Path, storage: Path, *, anew: bool = False
) -> tuple[Path, VerdictFile, list[str]]:
    """Keep a run as the one that others are compared with, behind those that were kept before.
    `anew`: those that were kept before no longer count: what is worse is accepted. Returns: where
    it is kept, the run, and what it has less than the one that was trusted before. Raises
    UsageError: it is no run to hold another one against."""
    run = _read(report)
    before = _kept(storage)
    narrower = list[str]()
    for folder in () if anew else before:  # what is trusted twice would count as two runs
        if (folder / verdict_file.NAME).read_bytes() == (report / verdict_file.NAME).read_bytes():
            raise UsageError(f"{report}: expected a run that is not kept yet, it is {folder}")
    try:
        last = _read(before[-1]) if before else run
    except UsageError as error:
        last = run
        narrower = [f"what is not known: {error}"]
    ran = {test.id for test in run.file.tests if test.executed}
    tests = [test.id for test in last.file.tests if test.executed and test.id not in ran]
    measured = run.metrics if run.rates_unfit is None else run.file.metrics
    metrics = [name for name in last.metrics if name not in measured]
    for label, lost in (("tests", tests), ("metrics", metrics)):
        narrower += [f"{len(lost)} {label} ({lost[0]})"] if lost else []
    store = storage / _FOLDER
    store.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=store))
    for name in (details.NAME, verdict_file.NAME):
        if (report / name).is_file():
            shutil.copy2(report / name, new / name)
    if anew:
        (new / _ANEW).touch()
    new.chmod(0o755)  # mkdtemp makes it for one user; whoever may read the storage may read it
    numbers = [int(folder.name) for folder in store.iterdir() if folder.name.isdecimal()]
    stored = new.rename(store / f"{max(numbers, default=0) + 1:04}")
    return stored, run.file, narrower


def _kept(storage: Path) -> list[Path]:
    folders = [path.parent for path in storage.glob(f"{_FOLDER}/*/{verdict_file.NAME}")]
    in_order = sorted(
        (folder for folder in folders if folder.name.isdecimal()), key=lambda f: int(f.name)
    )
    first = max((i for i, folder in enumerate(in_order) if (folder / _ANEW).is_file()), default=0)
    return in_order[first:]


def refuse(trusted: Trusted, run: VerdictFile) -> None:
    """Refuse a run that has nothing in common with this one. Raises UsageError: it is of another
    architecture, profile, engine or model, or of a smaller plan."""
    why = _unlike(trusted.newest.file, run)
    if why is not None:
        raise UsageError(
            f"--against: {trusted.name} is of another {why}: expected a run that asked the same"
        )


def _unlike(one: VerdictFile, other: VerdictFile) -> str | None:
    before = one.fingerprint or Fingerprint()
    after = other.fingerprint or Fingerprint()
    pairs = [
        ("architecture", one.arch, other.arch),
        ("profile", one.profile, other.profile),
        ("model's digest", before.model, after.model),
    ]
    if one.engine.managed and other.engine.managed:  # else it is recognised later
        pairs.append(("engine", one.engine.name, other.engine.name))
    if before.plan not in (FULL, after.plan):
        pairs.append(("plan", before.plan, after.plan))
    for name, value, now in pairs:
        if value != now:
            return f"{name} ({value}, now {now})"
    return None


def judge(
    run: VerdictFile,
    trusted: Trusted,
    profile: Profile,
    metrics: Mapping[str, StoredMetric],
    asked_for: Callable[[TestReport], bool],
) -> list[TestReport]:
    """What is worse than in the trusted run and shows in no test of a finished run, except for its
    verdict; ``run.against`` is set. ``asked_for``: whether this run asked for a test."""
    before = trusted.newest.file
    tests_before = {test.id: test for test in before.tests}
    report = AgainstReport(run=trusted.name, engine=_engine(before))
    run.against = report
    run.changes = [change for change in run.changes if change.beside != THE_TRUSTED]
    worse: list[TestReport] = []

    def add(name: str, fact: Fact, verdict: Verdict = Verdict.FAIL) -> None:
        worse.append(TestReport.of(f"{PREFIX}{name}", _LEVEL, fact, verdict=verdict))

    if before.engine.name != run.engine.name:
        line = f"engine: {before.engine.name} there, {run.engine.name} here"
        report.path.append(line)
        add("engine", Fact(f"the engine of {trusted.name}", line))
    missing, unasked = _not_executed(before, run, asked_for)
    report.missing = [*missing]
    for name, why in missing.items():
        add(name, Fact(f"{name} runs, as in {trusted.name}", f"it did not: {why}"))
    for test in run.tests:
        deviations = _sort(report, test, tests_before.get(test.id))
        if deviations:
            excused = f"it is excused, as known of {_engine(run)} ({', '.join(deviations)})"
            fact = Fact(
                f"{test.id} holds, as in {trusted.name}", f"{excused}, which that run did not show"
            )
            add(test.id, fact)
    levels = {test.level for test in run.tests}
    report.not_asked = sorted({test.level for test in unasked} - levels)
    for part, fact in _judge_path(report, before, run):
        add(f"path {part}", fact)
    lost = _lost(before, unasked)
    for name, verdict, text in _metrics(run, report, trusted, profile, metrics, lost):
        (report.metrics if verdict is Verdict.PASS else report.worse).append(text)
        if verdict is not Verdict.PASS:
            add(name, Fact("", text), verdict)
    if before.fingerprint is not None and run.fingerprint is not None:
        report.differs = [
            f"{each.name}: {each.one} there, {each.other} here"
            for each in before.fingerprint.differences(run.fingerprint)
            if each.field not in ("machine", "against")
        ]
    if any(map(is_price, metrics)) and not any(map(is_price, trusted.newest.metrics)):
        report.differs.append(f"price of rounding: not measured in {trusted.name}, not compared")
    _note_rates(report, trusted)
    report.measured = _measured(run, trusted)
    values = ({n: m.value for n, m in each.items()} for each in (report.measured, run.metrics))
    report.trade = trade(*values)
    report.no_worse = not worse and not report.new and not report.changed
    return worse


def _note_rates(report: AgainstReport, trusted: Trusted) -> None:
    """Say whose rates are compared, where it is not the newest trusted run."""
    if trusted.newest.rates_unfit is None:
        return
    why = f"the box of {trusted.name} was DEGRADED"
    if trusted.rated is None:
        report.rates_not_judged = why
    else:
        report.differs.append(f"rates: compared with {trusted.rated.name}, since {why}")


def _measured(run: VerdictFile, trusted: Trusted) -> dict[str, MetricReport]:
    """What both runs measured, as the trusted one did; without rates that are no baseline."""
    before = trusted.newest.file.metrics
    if trusted.newest.rates_unfit is not None:
        rates = trusted.rated.file.metrics if trusted.rated is not None else {}
        counted = {name: metric for name, metric in before.items() if metric.unit in COUNTED}
        before = {**rates, **counted}
    return {name: before[name] for name in run.metrics if name in before}


def _not_executed(
    before: VerdictFile, run: VerdictFile, asked_for: Callable[[TestReport], bool]
) -> tuple[dict[str, str], list[TestReport]]:
    """The tests that ran before and not in this run: the reasons by the ids of those that this run
    asked for, and the tests that it did not ask for."""
    tests = {test.id: test for test in run.tests}
    reasons: dict[str, str] = {}
    unasked: list[TestReport] = []
    for test in before.tests:
        if not test.executed or test.is_beside or test.is_of_option:
            continue
        now = tests.get(test.id)
        if now is None and not asked_for(test):
            unasked.append(test)
        elif now is None or not now.executed:
            reasons[test.id] = "it was not collected" if now is None else now.message
    return reasons, unasked


def _lost(before: VerdictFile, unasked: Iterable[TestReport]) -> set[str]:
    """The metrics that are lost where this run has none of them: those of tests that were asked.
    Which test measured what is known of no run of an earlier suite; there all go by the level."""
    unasked = [*unasked]
    if not any(test.metrics for test in before.tests):
        if any(t.level == "performance" for t in unasked):
            return set()
        return {*before.metrics}
    return {*before.metrics} - {name for test in unasked for name in test.metrics}


def _sort(report: AgainstReport, test: TestReport, before: TestReport | None) -> list[str]:
    """Put a test into the list that it belongs to. `before`: the same test in the trusted run.
    Returns: deviations by which it is excused, and which the trusted run did not show."""
    failed_before = before is not None and before.verdict is Verdict.FAIL and not before.skipped
    if test.verdict is Verdict.PASS:
        if failed_before:
            report.mended.append(test.id)
        elif before and before.verdict is Verdict.PASS and before.deviations is not None:
            more = [name for name in test.deviations or () if name not in before.deviations]
            report.changed += [test.id] if more else []
            return more
    elif test.tolerated == "listed" and not failed_before:
        report.listed.append(test.id)
    elif not test.executed or (test.counted is Verdict.PASS and test.tolerated != "known"):
        pass  # it did not run, or it is waived
    elif test.tolerated == "known":
        report.known.append(test.id)
    else:
        (report.changed if failed_before else report.new).append(test.id)
    return []


def _engine(run: VerdictFile) -> str:
    return f"{run.engine.name} {run.engine.version or ''}".strip()


def _judge_path(
    report: AgainstReport, before: VerdictFile, run: VerdictFile
) -> Iterator[tuple[str, Fact]]:
    """Note what differs of the kernel path; each unexpected change by its part."""
    for change in _path(before, run):
        if change.is_expected:
            report.path_told.append(change.text)
            continue
        report.path.append(change.text)
        required = f"the path of {report.run}, since no other was asked for"
        yield change.part, Fact(required, change.text)


@dataclass(frozen=True)
class _PathChange:
    """What differs of the kernel path between the trusted run and this one."""

    #: The field of the path, as in the id of the failure.
    part: str
    seen: str
    #: A request of this run that the other had not speaks of it, or the other run did not show it.
    is_expected: bool = False

    @property
    def text(self) -> str:
        return f"{self.part}: {self.seen}"


def _path(trusted: VerdictFile, run: VerdictFile) -> Iterator[_PathChange]:
    if not (run.engine.base_url or run.engine.startup_s or run.engine.path.evidence):
        return  # nothing was served here
    one = trusted.engine.path
    other = run.engine.path
    requests = {(each.field, each.by) for each in one.requested}
    requests ^= {(each.field, each.by) for each in other.requested}
    changed_requests = {field for field, _ in requests}
    for name in _PATH:
        before = getattr(one, name)
        now = getattr(other, name)
        if before == now:
            pass
        elif now is None:
            yield _PathChange(name, f"{before} there, no evidence of any here")
        elif before is None:
            yield _PathChange(name, f"not shown there, {now} here", is_expected=True)
        else:
            is_expected = name in changed_requests
            yield _PathChange(name, f"{before} there, {now} here", is_expected)
        more = [value for value in other.also.get(name, ()) if value not in one.also.get(name, ())]
        if more:
            text = f"some layers run {', '.join(more)}, not there"
            yield _PathChange(name, text, name in changed_requests)
    for group in ("fallbacks", "silent_fallbacks", "differences"):
        for kind in getattr(other, group):
            if kind not in getattr(one, group):
                yield _PathChange(group.replace("_", " "), f"{kind} here, not there")


def _asked_before(run: VerdictFile) -> set[str]:
    return {t.level for t in run.tests if t.executed} & {*LEVELS[: LEVELS.index("performance")]}


def _metrics(
    run: VerdictFile,
    report: AgainstReport,
    trusted: Trusted,
    profile: Profile,
    metrics: Mapping[str, StoredMetric],
    lost: Collection[str],
) -> Iterable[tuple[str, Verdict, str]]:
    """Each metric of both, by the rules of the regression level. `lost`: missed if missing."""
    if not trusted.metrics or (not metrics and not lost):
        return
    fingerprints = trusted.newest.file.fingerprint, run.fingerprint
    machines = [each.machine if each is not None else {} for each in fingerprints]
    apart = machine.differences(*machines)
    if apart:
        why = f"which is of another machine ({'; '.join(apart)})"
        text = f"metrics cannot be compared with {trusted.name}, {why}"
        yield "metrics", Verdict.INVALID, text
        return
    if run.box.state == BoxState.DEGRADED:
        yield "metrics", Verdict.INCONCLUSIVE, f"the box is DEGRADED: {run.box.reason}"
        return
    absent = trend.missing(metrics, trusted.newest)
    if trusted.rated is not None and trusted.rated is not trusted.newest:
        absent += trend.missing(metrics, trusted.rated)
    for each in absent:
        name = each.metric
        if name not in lost:
            continue
        metric = run.metrics.get(name)
        if metric is not None and metric.verdict is Verdict.NOT_RUN and metric.value is not None:
            yield name, Verdict.INCONCLUSIVE, f"{name} was measured on a busy machine"
        else:
            yield name, Verdict.FAIL, str(each)
    same: dict[str, StoredMetric] = {}
    for name, now in metrics.items():
        trusted_metric = trusted.metrics.get(name)
        if name == _PEAK and _asked_before(run) != _asked_before(trusted.newest.file):
            report.unjudged.append(name)
        elif trusted_metric is None or trusted_metric.kind == now.kind:
            same[name] = now
        else:
            line = f"{name} is {now.kind} here, {trusted_metric.kind} there: not the same quantity"
            yield name, Verdict.INVALID, line
    limits = profile.regression
    changes = trend.compare(same, trusted.runs, limits)
    changes += metric_levels.find_falls(same, trusted.runs, limits)
    for change in changes:
        if change.verdict is Verdict.NOT_RUN:
            report.unjudged.append(change.metric)
        if not change.holds:
            run.changes.append(change.report(THE_TRUSTED))
        yield change.metric, Verdict.PASS if change.holds else change.verdict, change.text
