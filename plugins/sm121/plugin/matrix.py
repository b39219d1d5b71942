"""The matrix level: one parametrized test for each cell, and the fixture ``matrix``."""

import contextlib
from collections.abc import Sequence

import pytest

from sm121.core import errors, verdict
from sm121.engines.registry import Installed
from sm121.matrix import covering
from sm121.matrix.level import MatrixLevel
from sm121.matrix.plan import CellPlan, make_plan, refuse_arguments, space_of
from sm121.matrix.space import identity
from sm121.plugin import terminal
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.session import target
from sm121.session.session import Session

PLAN = pytest.StashKey[CellPlan | None]()
_MATRIX = pytest.StashKey[MatrixLevel]()
REFUSED = pytest.StashKey[errors.UsageError]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the cells of the plan, as `cell`, in the order of their starts.

    Args:
        metafunc: The test.
    """
    if "cell" not in metafunc.fixturenames or "matrix" not in metafunc.fixturenames:
        return
    plan = _plan(metafunc.config)
    if plan is None or not plan.cells:
        metafunc.parametrize("cell", [None], ids=["no-cells"])
        return
    ids = [identity(plan.space, planned.cell) for planned in plan.cells]
    metafunc.parametrize("cell", plan.cells, ids=ids)


def _plan(config: pytest.Config) -> CellPlan | None:
    if PLAN not in config.stash:
        try:
            config.stash[PLAN] = _make_plan(config)
        except errors.UsageError as error:  # reported later, when pytest can show a usage error
            config.stash[PLAN] = None
            config.stash[REFUSED] = error
    return config.stash[PLAN]


def refuse_wrong_options(config: pytest.Config) -> None:
    """Refuse options of the matrix that give no plan, before the tests are collected.

    Args:
        config: The configuration of pytest; nothing happens without these options.

    Raises:
        UsageError: The profile has no such axes, or fewer axes than the strength.
    """
    if config.getoption("--matrix") is None and config.getoption("--matrix-axes") is None:
        return
    _plan(config)
    refused = config.stash.get(REFUSED, None)
    if refused is not None:
        raise refused


def _make_plan(config: pytest.Config) -> CellPlan | None:
    settings = config.stash[SETTINGS]
    chosen = settings.expected_profile()
    strength = config.getoption("--matrix")
    axes_file = config.getoption("--matrix-axes")
    if chosen.matrix is None:
        if any(option not in (None, "none") for option in (axes_file, strength)):
            raise errors.UsageError(f"--matrix: profile {chosen.name} has no [matrix]")
        return None
    if terminal.NOTHING_RUNS in config.stash and strength is not None:
        # Only check the strength. Computing the cells of `--matrix=9` takes 20 s, and this machine
        # examines none of them.
        space = space_of(chosen, axes_file, settings.engine.name)
        covering.require_strength(space, covering.parse_strength(strength))
        return None
    engine = Installed()
    if settings.base_url is None:
        with contextlib.suppress(errors.UsageError):  # reported when the run is opened
            engine = target.installed_engine(settings, chosen)
    return make_plan(
        chosen.judging(settings.target.configuration, engine.identity, engine.options),
        space_of(chosen, axes_file, settings.engine.name, engine.identity, options=engine.options),
        strength=strength,
        engine_arguments=(*target.parallel(settings, chosen), *settings.engine.arguments),
        engine_environment=settings.engine.environment,
    )


def refuse_wrong_arguments(
    config: pytest.Config, session: Session, items: Sequence[pytest.Item]
) -> None:
    """Check each value of an axis with the engine's own parser, before a server starts.

    Args:
        config: The configuration of pytest.
        session: The run.
        items: The selected tests.

    Raises:
        UsageError: The engine's parser refuses a value.
    """
    plan = _plan_to_run(config, session, items)
    if plan is not None:
        refuse_arguments(plan, session.run.configurations.managed(session.run.profile.under_test))


def show_outlook(config: pytest.Config, session: Session, items: Sequence[pytest.Item]) -> None:
    """Show how long the cells will take, before a server starts.

    Args:
        config: The configuration of pytest.
        session: The run.
        items: The selected tests.
    """
    if _plan_to_run(config, session, items) is not None:
        for line in _level(config, session).outlook():
            session.run.record.say("matrix", line)


def _plan_to_run(
    config: pytest.Config, session: Session, items: Sequence[pytest.Item]
) -> CellPlan | None:
    """The matrix plan, or None if no server is started for it.

    This is so if the plan has no cells, if the server is already running, or if no test of the
    matrix is selected.
    """
    plan = config.stash.get(PLAN, None)
    if plan is None or not plan.cells or session.run.servers.pool is None:
        return None
    if not any(item.stash.get(LEVEL, "") == "matrix" for item in items):
        return None
    return plan


def end(config: pytest.Config, *, interrupted: bool) -> None:
    """Write the files of the matrix once more, with the fact whether the run was interrupted.

    Args:
        config: The configuration of pytest.
        interrupted: Whether the run was interrupted.
    """
    level = config.stash.get(_MATRIX, None)
    if level is not None and level.records:
        level.write(interrupted=interrupted)


def show_account(reporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """Show the results of the cells.

    Args:
        reporter: The terminal reporter of pytest.
        config: The configuration of pytest.
    """
    level = config.stash.get(_MATRIX, None)
    if level is not None and level.records:
        reporter.section("matrix")
        for line in level.account():
            reporter.write_line(line)


def _level(config: pytest.Config, session: Session) -> MatrixLevel:
    run = session.run
    if _MATRIX not in config.stash:
        plan = _plan(config)
        if run.servers.attached is not None:
            raise verdict.NotRun("the matrix starts its own servers; run without --base-url")
        if run.servers.pool is None:
            raise verdict.NotRun(run.target.obstacle or "no server can be started here")
        if plan is None:
            raise verdict.NotRun(f"profile {run.profile.name} has no [matrix]")
        config.stash[_MATRIX] = MatrixLevel(
            session.run,
            plan,
            cache=session.settings.root / ".cache",
        )
    return config.stash[_MATRIX]


@pytest.fixture(scope="session")
def matrix(conformance: Session, pytestconfig: pytest.Config) -> MatrixLevel:
    """The cells of the matrix plan. Each cell's test starts the cell's server and examines it.

    Args:
        conformance: The run.
        pytestconfig: The configuration of pytest. Its stash keeps the plan and its cells.

    Raises:
        NotRun: The server is attached, no server can start here, or the profile has no matrix.
    """
    return _level(pytestconfig, conformance)
