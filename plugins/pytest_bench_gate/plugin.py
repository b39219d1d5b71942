"""The hooks of the plugin, in pytest's order, and its fixture."""

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_bench_gate import against, history, requests
from pytest_bench_gate.closing import NOT_RUN, Closing
from pytest_bench_gate.run import GateRun

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_bench_gate.gates import Gate

_RUN = pytest.StashKey[GateRun]()
#: The value of a test's `gate` fixture.
_GATE = pytest.StashKey["Gate"]()
#: Whether the code of a test has ended without an error.
_ENDED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, trylast=True)  # before pytest rejects unknown options
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Add ``--against`` after all other plugins and conftest.py files have added their options."""
    result = yield
    against.add(early_config, parser, args)
    return result


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    """Reject options with which pytest-benchmark would crash. Register the summary of the run."""
    against.apply(config)
    requests.refuse_what_crashes(config)
    config.stash[history.DESELECTED] = set()
    if not requests.is_worker(config):
        config.pluginmanager.register(Closing(config, _RUN), "pytest_bench_gate.closing")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts its workers
def pytest_sessionstart(session: pytest.Session) -> None:
    """Reject a path in place of a stored run, and a comparison in a run with workers of xdist."""
    config = session.config
    if not requests.is_worker(config):
        requests.refuse_paths(config)
    if requests.starts_workers(config) and history.load(config) is not None:
        raise pytest.UsageError(f"{history.option(config)}: {requests.WITH_WORKERS}")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: Mapping[str, Any]
) -> Generator[None, object, object]:
    """Store the description of the machine, and suppress a ValueError of pytest-benchmark.

    The error is a bug of pytest-benchmark 5.3: its warning about another machine fails if the
    storage is outside the working directory.
    """
    config.stash[history.MACHINE] = machine_info
    try:
        return (yield)
    except ValueError:
        return None


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Record the tests that ``-k``, ``-m`` and other options deselect."""
    for item in items:
        item.config.stash[history.DESELECTED].add(item.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Read the stored runs. Reject invalid options before any test runs."""
    config = session.config
    if requests.is_worker(config) or config.option.collectonly:
        return
    has_gates = any(_has_gate(item) for item in session.items)
    if has_gates:
        requests.refuse(config)
    stored = history.load(config)
    if stored is None and has_gates and requests.is_compared(config):
        history.require(config)
    if config.getoption("lf", False):
        config.stash[history.LAST_FAILED] = bool(config.cache.get("cache/lastfailed", {}))
    config.stash[_RUN] = GateRun(config, stored)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fail a run with missing metrics, after the last test and before the run is stored."""
    result = yield
    run = session.config.stash.get(_RUN, None)
    if run is not None:
        run.end(failed=session.testsfailed > 0)
        session.testsfailed += len(run.missing)
    return result


@pytest.hookimpl(tryfirst=True)  # before --benchmark-skip skips the test, to count it
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose gate cannot be judged in this process."""
    if _has_gate(item):
        _skip_unable(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that requests `gate`, but does not call it, because the test judges nothing."""
    item.stash[_ENDED] = False
    result = yield
    item.stash[_ENDED] = True
    made = item.stash.get(_GATE, None)
    if made is not None and not made.called and "gate" in _arguments_of(item):
        pytest.fail(
            "expected a call of gate, got none. Call gate, or remove the fixture", pytrace=False
        )
    return result


@pytest.fixture
def gate(
    request: pytest.FixtureRequest, benchmark: "BenchmarkFixture"
) -> "Generator[Gate, None, None]":
    """Judges samples, or the rounds of ``benchmark``, against a limit and against a stored run."""
    _skip_unable(request.node)  # needed if the test calls request.getfixturevalue("gate")
    from pytest_bench_gate.gates import Gate  # imports numpy and scipy, needed only here

    run = request.config.stash[_RUN]
    if run.stored is None and requests.is_compared(request.config):
        history.require(request.config)
    made = Gate(run, request.node.nodeid, benchmark)
    request.node.stash[_GATE] = made
    yield made
    if made.has_samples or not made.called:
        benchmark.skipped = True  # otherwise pytest-benchmark warns that it was not called
    if not made.called and request.node.stash.get(_ENDED, False):
        _fail_uncalled(request.node)


def _fail_uncalled(item: pytest.Item) -> None:
    """Fail a test that requests a fixture which requests `gate`, if nothing has called `gate`.

    A test that requests `gate` itself has failed before. A fixture for all tests (``autouse``) may
    leave `gate` alone.
    """
    if "gate" in _arguments_of(item) or _is_for_all_tests(item):
        return
    pytest.fail(
        "expected a call of gate, which a fixture of this test requests, got none. Call gate, or "
        "remove the fixture from this test",
        pytrace=False,
    )


def _is_for_all_tests(item: pytest.Item) -> bool:
    """Whether a test requests `gate` only by fixtures with ``autouse``."""
    if "gate" not in getattr(item, "fixturenames", ()):
        return False  # the test has called request.getfixturevalue("gate")
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    marks = item.iter_markers("usefixtures")
    wanted = [*_arguments_of(item), *(str(name) for mark in marks for name in mark.args)]
    requested: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in requested:
            requested.add(name)
            wanted += [each for made in definitions.get(name, ()) for each in made.argnames]
    return "gate" not in requested


def _skip_unable(item: pytest.Item) -> None:
    why = requests.why_not_run(item.config)
    if why is not None:
        item.user_properties.append((NOT_RUN, why))
        pytest.skip(why)


def _arguments_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the fixtures that a test requests directly."""
    names: tuple[str, ...] = item._fixtureinfo.argnames  # type: ignore[attr-defined]
    return names


def _has_gate(item: pytest.Item) -> bool:
    """Whether a test uses this plugin's `gate`, and not another fixture with that name."""
    if "gate" not in getattr(item, "fixturenames", ()):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.get("gate", ())  # type: ignore[attr-defined]
    return any(definition.func.__module__ == __name__ for definition in definitions[-1:])
