"""The matrix level: the plan as parametrized tests, and the servers that they are run on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sm121.answers import prompts
from sm121.core import architecture, profile
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.profile import MatrixPlan, Profile
from sm121.core.verdict import Invalid, NotRun
from sm121.engines import registry
from sm121.engines.managed import ServerError
from sm121.engines.protocol import ChecksArguments
from sm121.evidence.failure import Cause
from sm121.matrix import axes, cost, covering, isolation, order, report, state
from sm121.matrix.axes import Space, identity, label
from sm121.matrix.covering import Array, Planned, Strength
from sm121.matrix.examine import Bench, chosen
from sm121.matrix.isolation import FailingSet
from sm121.matrix.outcome import CellRecord, Outcome
from sm121.plugin import crashes, target, workers
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.plugin.terminal import announce
from sm121.run.directory import WORKERS

_FOLDER = "matrix"
#: Of a test's time, what is kept for stopping a server and for the reports.
_SPARE_S = 15.0


@dataclass(frozen=True)
class Plan:
    """What will be tried, known when tests are collected."""

    profile: Profile
    plan: MatrixPlan
    space: Space
    array: Array
    cells: tuple[Planned, ...]
    focus: str | None

    def arguments(self, cell: axes.Cell, settings: Settings) -> tuple[str, ...]:
        """The engine's, in the order of `target.configurations`, so that equal ones are equal."""
        own = self.space.arguments(cell)
        return (*self.profile.engine.arguments, *own, *settings.engine_arguments)

    def under_test(self, settings: Settings) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Arguments and variables of the profile's configuration under test."""
        own = self.profile.configurations[settings.configuration or self.profile.under_test]
        engine = self.profile.engine
        return (
            (*engine.arguments, *own.arguments, *settings.engine_arguments),
            environment_items(
                engine.environment, own.environment, dict(settings.engine_environment)
            ),
        )

    def environment(self, cell: axes.Cell, settings: Settings) -> tuple[tuple[str, str], ...]:
        """The engine's variables."""
        return environment_items(
            self.profile.engine.environment,
            self.space.environment(cell),
            dict(settings.engine_environment),
        )


_PLAN = pytest.StashKey[Plan | None]()
_MATRIX = pytest.StashKey["MatrixRun"]()
_REFUSED = pytest.StashKey[UsageError]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sm121")
    group.addoption(
        "--matrix",
        metavar="N|full|none",
        help="every combination of the values of N axes is in some cell: 1, 2 (pairs), ..., full; "
        "none: no cells (default: the profile's, 2)",
    )
    group.addoption(
        "--matrix-axis",
        metavar="NAME",
        help="one axis against each other one, the others among themselves at strength 1",
    )
    group.addoption(
        "--matrix-build",
        metavar="NAME",
        help="the build whose own knobs are used, as the axes' file names it (default: upstream's)",
    )
    group.addoption(
        "--matrix-axes",
        metavar="NAME|PATH",
        help="the axes (default: the profile's)",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        if (text := config.getoption("--matrix")) is not None:
            covering.parse_strength(text)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `cell` runs for each cell of the plan, in the order of the boots."""
    if "cell" not in metafunc.fixturenames or "matrix" not in metafunc.fixturenames:
        return
    plan = _plan(metafunc.config)
    cells = plan.cells if plan is not None else ()
    metafunc.parametrize(
        "cell",
        cells or [None],
        ids=[identity(plan.space, p.cell) for p in cells] if plan and cells else ["no-cells"],
    )


def _plan(config: pytest.Config) -> Plan | None:
    """The plan in force, made once; None where the profile has no axes."""
    if _PLAN not in config.stash:
        try:
            config.stash[_PLAN] = _make_plan(config)
        except UsageError as error:  # raised where pytest takes it for what it is
            config.stash[_PLAN] = None
            config.stash[_REFUSED] = error
    return config.stash[_PLAN]


def plan_of_items(config: pytest.Config) -> Plan | None:
    """The plan whose cells were collected, None when none were."""
    return config.stash.get(_PLAN, None)


def _make_plan(config: pytest.Config) -> Plan | None:
    settings = config.stash[SETTINGS]
    own = _profile(settings)
    axis, build = config.getoption("--matrix-axis"), config.getoption("--matrix-build")
    if own.matrix is None:
        given = [axis, build, config.getoption("--matrix-axes"), config.getoption("--matrix")]
        if any(option not in (None, "none") for option in given):
            raise UsageError(f"--matrix: profile {own.name} has no [matrix]")
        return None
    version = None
    if settings.base_url is None:
        try:
            version = target.engine_version(settings, own)
        except UsageError:  # said again, to the user, when the run is opened
            version = None
    file = axes.load(config.getoption("--matrix-axes") or own.matrix.axes)
    space = Space(file, settings.engine, version, build or own.matrix.build)
    strength: Strength = covering.parse_strength(
        config.getoption("--matrix") or str(min(own.matrix.strength, max(1, len(space.axes))))
    )
    array = covering.build(space, strength, focus=axis)
    cells = order.ordered(
        space,
        array.cells,
        lambda planned: (space.arguments(planned.cell), *space.environment(planned.cell).items()),
    )
    if strength == "none":
        cells = []
    return Plan(own, own.matrix, space, array, tuple(cells), axis)


def _profile(settings: Settings) -> Profile:
    """The profile that will be chosen; while tests are collected none is yet."""
    if settings.profile is not None:
        return settings.profile
    arch = settings.arch or architecture.detect().name or architecture.CPU
    try:
        name = profile.for_architecture(arch, settings.engine)
    except UsageError:  # said again, to the user, when the target is resolved
        name = profile.for_architecture(architecture.CPU)
    return profile.load(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --matrix none there is no matrix: its tests are no gap in a certificate."""
    if (refused := config.stash.get(_REFUSED, None)) is not None:
        raise pytest.UsageError(str(refused)) from refused
    if config.getoption("--matrix") == "none":
        items[:] = [item for item in items if item.stash.get(LEVEL, "") != "matrix"]


@pytest.hookimpl(trylast=True)  # after the run was opened, before anything was started
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    run = config.stash.get(RUN, None)
    plan = config.stash.get(_PLAN, None)
    asked = [item for item in session.items if item.stash.get(LEVEL, "") == "matrix"]
    if run is None or plan is None or not asked or run.pool is None or not plan.cells:
        return
    try:
        _refuse_arguments(run, plan)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    for line in _matrix(config).outlook():  # what it will cost, before anything is started
        announce(config, "matrix", line)


def _refuse_arguments(run: Run, plan: Plan) -> None:
    """What the engine's own parser says to each value, before the first start.

    Raises:
        UsageError: it refuses one; names axis, value, and the engine's message.
    """
    engine = registry.engine(run.settings.engine)
    if not isinstance(engine, ChecksArguments):
        return
    base = run.managed_configuration(run.profile.under_test)
    lists: list[tuple[str, ...]] = [plan.arguments(plan.space.baseline, run.settings)]
    names = ["the baseline"]
    for axis in plan.space.axes:
        for value in plan.space.values(axis):
            setting = plan.space.settings[axis][value]
            if setting.arguments and value != plan.space.baseline[axis]:
                cell = {**plan.space.baseline, axis: value}
                lists.append(plan.arguments(cell, run.settings))
                names.append(f"{axis}={value} ({' '.join(setting.arguments)})")
    environment = dict(engine.environment(base, api_key=""))
    # Importing the engine to ask it takes seconds: what it has accepted once it is not asked again.
    kept = run.config.rootpath / ".cache" / "matrix-arguments.txt"
    digest = state.digest([engine.name, base.python, plan.space.version, lists])
    if plan.space.version is not None and kept.is_file() and digest in kept.read_text("utf-8"):
        return
    for name, message in zip(
        names, engine.check_arguments(base.python, lists, environment), strict=True
    ):
        if message is not None:
            raise UsageError(
                f"matrix {plan.space.file.name}: {name}: {engine.name} "
                f"{plan.space.version or ''} refuses it: {message}"
            )
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a", encoding="utf-8") as stream:
            stream.write(digest + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    matrix = terminalreporter.config.stash.get(_MATRIX, None)
    if matrix is None or not matrix.records:
        return
    terminalreporter.section("matrix")
    for line in matrix.account():
        terminalreporter.write_line(line)


@dataclass
class MatrixRun:
    """The cells of a run: what each came to, and what that says together."""

    run: Run
    plan: Plan
    records: list[CellRecord] = field(default_factory=list)
    sets: list[FailingSet] = field(default_factory=list)
    predicted: cost.Prediction | None = None
    resumed_from: str | None = None
    #: Starts of the baseline that are no cell of this run's: others were compared with them.
    references: list[CellRecord] = field(default_factory=list)
    #: Logs of the ends that a bundle was made of: each cell of a start-up gets the same error.
    _told: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.directory = self.run.directory / _FOLDER
        self.space = self.plan.space
        kept = f"matrix-costs-{self.plan.profile.name}.json"
        self.durations = cost.Durations(self.run.config.rootpath / ".cache" / kept)
        self._fingerprint = self._made_of()
        self._state = state.State(self.directory, self._fingerprint)
        if self.run.config.getoption("--resume", default=False):
            self._take_over()
        self._bench = Bench(
            space=self.space,
            profile=self.plan.profile,
            plan=self.plan.plan,
            prompts=chosen(
                prompts.continuations(), self.plan.plan.prompts, self.plan.plan.answer_tokens
            ),
            directory=self.directory,
            start=self.run.start,
            alive=lambda: self.run.pool.check() if self.run.pool is not None else None,
            path_of=self.run.kernel_path,
            redact=self.run.redact,
            died=self._died,
        )
        if self.records:
            self.write()

    def judge(self, planned: Planned | None) -> None:
        """The cell works.

        Raises:
            AssertionError: it does not; names the outcome, the reason and the evidence.
            Invalid, NotRun: that could not be told.
        """
        if planned is None:
            raise NotRun(f"profile {self.plan.profile.name} has no cells to try")
        record = self._record_of(planned) or self._examine(planned)
        text = f"{record.outcome}: {record.reason}"
        if record.bundle:
            text += f" Bundle: {self.run.directory / record.bundle}"
        elif record.log:
            text += f" Log: {self.run.directory / record.log}"
        if record.outcome is Outcome.INVALID:
            raise Invalid(text)
        if record.outcome is Outcome.NOT_RUN:
            raise NotRun(text)
        assert not record.outcome.broken, text

    def covered(self) -> None:
        """The plan has every combination that was asked for.

        Raises:
            AssertionError: it has not.
        """
        strength = self.plan.array.strength
        if not isinstance(strength, int):
            return
        wanted = 1 if self.plan.focus else strength
        cells = [planned.cell for planned in self.plan.cells]
        found = covering.coverage(self.space, cells, wanted)
        assert not found.missing, (
            f"required: all allowed combinations of {wanted} values, missing: "
            f"{', '.join(label(choice) for choice in found.missing[:5])}"
        )

    def isolate(self) -> None:
        """Nothing fails, or what fails is known down to the smallest set of values.

        Raises:
            AssertionError: names the sets.
        """
        if workers.of(self.run.config) is not None:
            raise NotRun("the cells of all workers are judged together, when the run ends")
        if not self.records:
            raise NotRun("no cell came to an outcome")
        left = self.plan.plan.isolation_boots
        ends = time.monotonic() + self._time_limit() - _SPARE_S

        def try_cell(cell: dict[str, str]) -> CellRecord | None:
            nonlocal left
            if left == 0 or self._untrusted() or time.monotonic() + self._longest() > ends:
                return None
            left -= 1
            announce(self.run.config, "matrix", f"isolating: {identity(self.space, cell)}")
            return self._examine(Planned(cell, ("isolating",)), isolating=True)

        self._found(isolation.smallest(self.space, list(self.records), try_cell, self._found))
        file = self.directory / "FEATURE_MATRIX.md"
        assert not self.sets, f"{'; '.join(str(one) for one in self.sets)}. All of it: {file}"

    def _found(self, sets: Sequence[FailingSet]) -> None:
        """Keep what is known; a test that runs out of time has written it."""
        self.sets = list(sets)
        self.write()

    def _time_limit(self) -> float:
        """Seconds that a test of this level may take."""
        return float(self.plan.profile.test_timeout_s.get("matrix", float("inf")))

    def _longest(self) -> float:
        """Seconds that one more cell may take: as many as the longest so far."""
        return max(record.took_s for record in self.records)

    def _untrusted(self) -> str | None:
        """Why nothing more is started in this run; None while all is well."""
        return self.run.aborted[1] if self.run.aborted is not None else self.run.distrusted

    def _died(self, record: CellRecord, error: ServerError) -> Cause:
        """What the run does after any abnormal end: a bundle, one line, a look at what is left."""
        if self.run.pool is None or error.log in self._told:
            return error.cause
        self._told.add(error.log)
        known = {test.id.rpartition("[")[2]: test.id for test in self.run.file.tests}
        test = known.get(f"{record.id}]", "")
        evidence = crashes.gather(self.run, test, error, self.run.pool.latest)
        evidence.test = test or None  # a cell that is run to find a set is no test's
        crashes.tell(self.run, evidence)
        crashes.replace_server(self.run, evidence)
        return evidence.cause

    def outlook(self) -> list[str]:
        """What is going to happen, and how long it takes."""
        array, space = self.plan.array, self.space
        cells = [planned.cell for planned in self.plan.cells]
        strength = array.strength if isinstance(array.strength, int) else 2
        lines = [
            f"{space.engine} {space.version or '(version unknown)'}: {len(space.axes)} axes "
            f"({', '.join(space.axes)}), {space.product} combinations",
            f"strength {array.strength}: {len(cells)} cells; "
            f"{covering.coverage(space, cells, min(strength, len(space.axes)))}",
        ]
        if self.plan.focus:
            lines[-1] += f"; each value of {self.plan.focus} with each value of every other axis"
        waiting = [p for p in self.plan.cells if self._record_of(p) is None]
        if self.resumed_from:
            lines.append(f"{len(cells) - len(waiting)} cells are taken over: {self.resumed_from}")
        current = self.run.pool.current if self.run.pool is not None else None
        to_run = [p.cell for p in waiting]
        if to_run and space.baseline not in to_run:
            to_run.insert(0, space.baseline)  # to compare with
        predicted = cost.predict(
            space,
            to_run,
            [self.configuration(cell).key for cell in to_run],
            self.plan.plan,
            self.durations,
            current.configuration.key if current is not None else None,
        )
        self.predicted = dataclasses.replace(predicted, cells=len(waiting))
        return [*lines, f"predicted: {self.predicted}"]

    def account(self) -> list[str]:
        """What came of it, for the terminal."""
        counts = {o: sum(r.outcome is o for r in self.records) for o in Outcome}
        spent = cost.spent(self.records, self.references)
        lines = [
            ", ".join(f"{n} {o.value}" for o, n in counts.items() if n),
            f"{spent['cells']:.0f} cells on {spent['boots']:.0f} boots in "
            f"{cost.duration(spent['seconds'])}, {cost.duration(spent['boot_s'])} of it boots"
            + (f" (predicted: {self.predicted})" if self.predicted else ""),
            *(str(one) for one in self.sets),
            f"{self.directory / 'FEATURE_MATRIX.md'}",
        ]
        return [self.run.redact(line) for line in lines if line]

    def configuration(self, cell: axes.Cell) -> ServerConfiguration:
        """What is started for a cell: one of the profile's own where that is the same."""
        own = self.run.managed_configuration(self.run.profile.under_test)
        arguments = self.plan.arguments(cell, self.run.settings)
        environment = self.plan.environment(cell, self.run.settings)
        for known in self.run.configurations.values():
            if known.arguments == arguments and known.environment == environment:
                return known
        made = dataclasses.replace(
            own, name="matrix", arguments=arguments, environment=environment, traces=None, nsys=None
        )
        return dataclasses.replace(made, name=f"matrix-{made.key[:8]}")

    def write(self) -> None:
        """matrix.json and FEATURE_MATRIX.md as they stand."""
        file = report.build(
            self.space,
            self.plan.array,
            self.records,
            self.sets,
            profile=self.plan.profile.name,
            predicted=str(self.predicted) if self.predicted else None,
            focus=self.plan.focus,
            references=self.references,
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.as_json(self.space, file), indent=2, ensure_ascii=False)
        write_text(self.run.redact(text) + "\n", self.directory / "matrix.json")
        write_text(
            self.run.redact(report.markdown(self.space, file, command=self._command())),
            self.directory / "FEATURE_MATRIX.md",
        )

    def _command(self) -> str:
        words = ["pytest tests/test_matrix.py", f"--matrix {self.plan.array.strength}"]
        if self.space.engine != "vllm":
            words.append(f"--engine {self.space.engine}")
        if self.plan.focus:
            words.append(f"--matrix-axis {self.plan.focus}")
        return " ".join(words)

    def _record_of(self, planned: Planned) -> CellRecord | None:
        return next((r for r in self.records if r.values == planned.cell), None)

    def _examine(self, planned: Planned, *, isolating: bool = False) -> CellRecord:
        baseline = planned.cell == self.space.baseline
        if (why := self._untrusted()) is not None:
            raise NotRun(why)
        unfit = [finding for finding in self.run.findings if finding.severity == "error"]
        if unfit:
            raise NotRun(f"no server is started on a machine that is not fit: {unfit[0].message}")
        if self._bench.reference is None and not baseline:
            self._be_given_a_reference()
        if self._bench.reference is None and not baseline:
            raise NotRun("the baseline came to no answers; nothing can be compared with it")
        name = identity(self.space, planned.cell)
        announce(self.run.config, "matrix", f"{name} ({len(self.records) + 1})")
        configuration = self.configuration(planned.cell)
        if isolating and self.run.pool is not None and self._record_of(planned) is not None:
            self.run.pool.forget(configuration)  # to see it a second time it must start anew
        record = self._bench.examine(planned, configuration, isolating=isolating)
        announce(self.run.config, "matrix", f"{name}: {record.outcome} {record.reason[:160]}")
        if not baseline or self._is_planned(planned):
            self._keep(record)
        return record

    def _be_given_a_reference(self) -> None:
        """The baseline is run as what others are compared with, where its own test is elsewhere:
        another shard, another worker, or a run that was taken over."""
        announce(self.run.config, "matrix", "the baseline, to compare with")
        kept = self._record_of(Planned(self.space.baseline, ()))
        record = self._bench.examine(
            Planned(self.space.baseline, ("baseline",)), self.configuration(self.space.baseline)
        )
        self.references.append(record)
        self.durations.learn([record])
        if record.outcome.broken and kept is None:
            self._bench.reference = None

    def _is_planned(self, planned: Planned) -> bool:
        return "isolating" in planned.why or planned in self.plan.cells

    def _keep(self, record: CellRecord) -> None:
        self.records.append(record)
        self._state.add(record)
        self.durations.learn([record])
        self.write()

    def _made_of(self) -> Mapping[str, object]:
        """What decides an outcome: cells of another of these are not this run's."""
        own = self.run.configurations.get(self.run.profile.under_test)
        return {
            "profile": state.digest([self.plan.profile.model_dump(mode="json")]),
            "axes": state.digest([self.space.file.model_dump(mode="json")]),
            "engine": self.space.engine,
            "version": self.space.version,
            "build": self.space.build,
            "model": own.model if own is not None else None,
            "python": own.python if own is not None else None,
            "arguments": list(self.run.settings.engine_arguments),
            "environment": state.digest([self.run.settings.engine_environment]),
        }

    def _take_over(self) -> None:
        """Cells of the newest earlier run that was the same one; with workers, of all of them."""
        root = self.run.config.stash[SETTINGS].report_dir  # a worker's own is below it
        earlier = sorted((root / "earlier").glob("*"), reverse=True)
        reasons: list[str] = []
        for folder in earlier:
            parts = [folder / _FOLDER, *sorted((folder / WORKERS).glob(f"*/{_FOLDER}"))]
            for part in [part for part in parts if part.is_dir()]:
                found, why = state.read(part, self._fingerprint)
                if why is not None:
                    reasons.append(why)
                    continue
                self._take(part, found)
            if self.records:
                self.resumed_from = str(folder / _FOLDER)
                return
        if reasons:
            self.run.remark(f"--resume: no cell is taken over: {reasons[0]}")
        else:
            self.run.remark("--resume: there is no earlier matrix in the report directory")

    def _take(self, part: Path, found: Sequence[CellRecord]) -> None:
        for record in found:
            known = any(own.values == record.values for own in self.records)
            if record.outcome is not Outcome.NOT_RUN and not record.isolating and not known:
                self.records.append(record)
                self._state.add(record)
        bundles = part / "bundles"
        if bundles.is_dir():
            for bundle in bundles.iterdir():
                _copy_tree(bundle, self.directory / "bundles" / bundle.name)


def _copy_tree(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_file():
            (destination / item.name).write_bytes(item.read_bytes())


def _matrix(config: pytest.Config) -> MatrixRun:
    if _MATRIX not in config.stash:
        run = config.stash.get(RUN, None)
        plan = _plan(config)
        if run is None:
            raise NotRun("no conformance run is open")
        if run.attached is not None:
            raise NotRun("the matrix starts its own servers; run without --base-url")
        if run.pool is None:
            raise NotRun(run.target.obstacle or "no server can be started here")
        if plan is None:
            raise NotRun(f"profile {run.profile.name} has no [matrix]")
        config.stash[_MATRIX] = MatrixRun(run, plan)
    return config.stash[_MATRIX]


@pytest.fixture(scope="session")
def matrix(conformance: Run) -> MatrixRun:
    """The cells of the plan, run when they are judged."""
    return _matrix(conformance.config)
