"""The matrix level: its options, its cells as parametrized tests, and its fixture."""

from __future__ import annotations

import pytest

from sm121.core import architecture, profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.verdict import NotRun
from sm121.matrix import covering
from sm121.matrix.arguments import refuse_arguments
from sm121.matrix.axes import identity
from sm121.matrix.level import MatrixLevel
from sm121.matrix.plan import CellPlan, make_plan, space_of
from sm121.plugin import target, workers
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.plugin.terminal import announce

_PLAN = pytest.StashKey[CellPlan | None]()
_MATRIX = pytest.StashKey[MatrixLevel]()
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


def _plan(config: pytest.Config) -> CellPlan | None:
    """The plan in force, made once; None where the profile has no axes."""
    if _PLAN not in config.stash:
        try:
            config.stash[_PLAN] = _make_plan(config)
        except UsageError as error:  # raised where pytest takes it for what it is
            config.stash[_PLAN] = None
            config.stash[_REFUSED] = error
    return config.stash[_PLAN]


def plan_of_items(config: pytest.Config) -> CellPlan | None:
    """The plan whose cells were collected, None when none were."""
    return config.stash.get(_PLAN, None)


def _make_plan(config: pytest.Config) -> CellPlan | None:
    settings = config.stash[SETTINGS]
    own = _profile(settings)
    strength, focus = config.getoption("--matrix"), config.getoption("--matrix-axis")
    axes_file, build = config.getoption("--matrix-axes"), config.getoption("--matrix-build")
    if own.matrix is None:
        if any(option not in (None, "none") for option in (focus, build, axes_file, strength)):
            raise UsageError(f"--matrix: profile {own.name} has no [matrix]")
        return None
    version = None
    if settings.base_url is None:
        try:
            version = target.engine_version(settings, own)
        except UsageError:  # said again, to the user, when the run is opened
            version = None
    return make_plan(
        own,
        space_of(own, axes_file, settings.engine, version, build),
        strength=strength,
        focus=focus,
        engine_arguments=settings.engine_arguments,
        engine_environment=settings.engine_environment,
    )


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
        refuse_arguments(
            plan, run.managed_configuration(run.profile.under_test), config.rootpath / ".cache"
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    for line in _matrix(config).outlook():  # what it will cost, before anything is started
        announce(config, "matrix", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    matrix = terminalreporter.config.stash.get(_MATRIX, None)
    if matrix is None or not matrix.records:
        return
    terminalreporter.section("matrix")
    for line in matrix.account():
        terminalreporter.write_line(line)


def _matrix(config: pytest.Config) -> MatrixLevel:
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
        config.stash[_MATRIX] = MatrixLevel(
            run,
            plan,
            cache=config.rootpath / ".cache",
            # A worker's own directory is below the one that keeps earlier runs.
            resume=config.stash[SETTINGS].report_dir if config.getoption("--resume") else None,
            is_part=workers.of(config) is not None,
        )
    return config.stash[_MATRIX]


@pytest.fixture(scope="session")
def matrix(conformance: Run) -> MatrixLevel:
    """The cells of the plan, run when they are judged."""
    return _matrix(conformance.config)
