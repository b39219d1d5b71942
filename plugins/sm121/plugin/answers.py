"""What the tests of answers are given, and which of them wait to be asked for by an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sm121.answers import accuracy, golden, log_probabilities, prompts
from sm121.answers.agreement import Bound
from sm121.answers.equivalence import Continuations
from sm121.answers.golden import GoldenFile, Identity
from sm121.answers.log_probabilities import OracleReference, bound_for
from sm121.client.completions import Asker
from sm121.core.errors import UsageError
from sm121.core.profile import GoldenBound, Profile
from sm121.core.server import Server
from sm121.evidence import metrics
from sm121.plugin.options import SETTINGS
from sm121.plugin.run import RUN, Run

_WAITING = pytest.StashKey[int]()
_GOLDEN = pytest.StashKey[GoldenFile]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "asked_for(option): runs only when that option is given; else it is no test"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A golden file or a file of questions is a choice: without one there is nothing to judge."""
    waiting = [item for item in items if _option(item) and not config.getoption(_option(item))]
    if waiting:
        items[:] = [item for item in items if item not in waiting]
        config.stash[_WAITING] = len(waiting)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    count = config.stash.get(_WAITING, 0)
    options = "--golden, --record-golden, --accuracy, --soak"
    return [f"{count} tests wait for an option of theirs ({options})"] if count else []


@pytest.hookimpl(trylast=True)  # after the run was opened, before anything was started
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    run = config.stash.get(RUN, None)
    if run is None:
        return
    settings = config.stash[SETTINGS]
    try:
        if settings.accuracy is not None:
            accuracy.load(settings.accuracy)
        if settings.accuracy_baseline is not None:
            if settings.accuracy is None:
                raise UsageError("--accuracy-baseline: expected --accuracy beside it")
            accuracy.load_outputs(settings.accuracy_baseline)
        if settings.golden is not None:
            config.stash[_GOLDEN] = loaded = golden.load(settings.golden)
            origin = f"--golden {settings.golden}"
            served = _identity(run)
            golden.refuse_other(loaded, origin, served, prompts.continuations())
            if (unproven := golden.unproven(loaded, served)) is not None:
                run.remark(unproven)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def _option(item: pytest.Item) -> str:
    mark = item.get_closest_marker("asked_for")
    return str(mark.args[0]) if mark is not None else ""


def _identity(run: Run) -> Identity:
    """What is served: of a managed server by its files, of an attached one by its name."""
    if run.attached is not None:
        return golden.identity(run.attached.endpoint.served_name, run.settings.reference)
    if run.target.profile is None or not run.configurations:
        return Identity(served_name="")
    own = run.managed_configuration(run.profile.under_test)
    return golden.identity(own.served_name, Path(own.model))


@pytest.fixture
def asker(server: Server) -> Asker:
    """Asks the server under test for greedy completions."""
    return Asker(server)


@pytest.fixture
def reference(conformance: Run, server: Server, profile: Profile) -> OracleReference:
    """What the oracle computes from, and the tolerance for the server's dtype."""
    return log_probabilities.reference_for(server, profile, conformance.settings.reference)


_CONTINUATIONS = pytest.StashKey[dict[str, Continuations]]()


@pytest.fixture
def continuations(
    pytestconfig: pytest.Config, asker: Asker, server: Server, profile: Profile
) -> Continuations:
    """The prompt set and the answers of the server under test (see `Continuations`)."""
    kept = pytestconfig.stash.setdefault(_CONTINUATIONS, {})
    key = f"{server.endpoint.base_url} {server.startup_s}"
    if key not in kept:
        own = bound_for(profile.correctness.agreement, server, profile, "agreement")
        limits = Bound(own.max_abs, own.mean_abs, own.fork)
        kept[key] = Continuations(prompts.continuations(), limits, asker)
    return kept[key]


@pytest.fixture
def attempts(server: Server, profile: Profile) -> int:
    """How often a request may be repeated until it repeats itself: where the engine promises equal
    tokens once, else often enough for two tokens that are equally likely within the noise."""
    own = bound_for(profile.correctness.agreement, server, profile, "agreement")
    return 1 if own.fork == 0 else 3


@pytest.fixture
def golden_bound(server: Server, profile: Profile) -> GoldenBound:
    """What the profile accepts against a golden file."""
    return bound_for(profile.correctness.golden, server, profile, "golden")


@pytest.fixture
def golden_file(pytestconfig: pytest.Config) -> GoldenFile:
    """The file of ``--golden``; it is of this model and these prompts."""
    return pytestconfig.stash[_GOLDEN]


@pytest.fixture
def recorder(
    conformance: Run, asker: Asker, server: Server, profile: Profile
) -> Callable[[], GoldenFile]:
    """Records the answers of the server under test."""
    return lambda: golden.record(
        asker,
        prompts.continuations(),
        model=_identity(conformance),
        dtype=log_probabilities.dtype_of(server, profile),
        engine=server.engine,
        engine_version=server.version or conformance.file.engine.version,
        configuration=profile.under_test,
        environment=conformance.file.environment,
    )


@pytest.fixture
def prefix_cache_hits(server: Server) -> Callable[[], float | None]:
    """Tokens that the server took from its prefix cache so far, None where it does not count."""
    name = "vllm:prefix_cache_hits_total"
    return lambda: metrics.total(metrics.fetch(server.endpoint) or "", name)
