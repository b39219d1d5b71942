"""Fixtures of the levels stress, performance and regression."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from sm121.core import errors, unmet
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.core.server import Server, context_argument
from sm121.core.verdict import Inconclusive, NotRun, Undecided, Verdict
from sm121.engines.capabilities import Capabilities
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.box import RunBox
from sm121.performance.checks import PerformanceChecks
from sm121.plugin import answers
from sm121.plugin.benchmarks import HISTORY, MetricRecorder, history_of
from sm121.plugin.stash import LEVEL, PROGRESS, SESSION, SETTINGS
from sm121.plugin.terminal import say
from sm121.regression.ab import Side
from sm121.regression.ab_run import AbRun
from sm121.regression.measured import MeasuredHistory
from sm121.run import unknown_memory
from sm121.run.events import Decided
from sm121.run.record import Target
from sm121.run.verdict_file import BESIDE, TestReport
from sm121.session import target
from sm121.session.session import Session
from sm121.session.settings import Settings

if TYPE_CHECKING:
    from sm121.stress import level

_LINE_EVERY_S = 10.0
#: The longest context of a published model, in tokens (Llama 4 Scout).
_LONGEST_CONTEXT = 10_000_000


@dataclass(frozen=True)
class _Loaded:
    """A server and the load on it."""

    server: Server
    stress: level.Stress


_STRESS = pytest.StashKey[_Loaded]()
_BENCH = pytest.StashKey[Bench]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the values of `depth`, `tokens`, `streams` or `position` in the plan.

    Args:
        metafunc: The test.
    """
    if "performance" not in metafunc.fixturenames:
        return
    settings = metafunc.config.stash[SETTINGS]
    chosen = settings.expected_profile()
    plan = Plan.of(chosen, plan=FULL, sizes=settings.measuring.sizes)
    for name, letter, choices in (
        ("depth", "d", plan.depths),
        ("tokens", "tg", plan.generated_tokens),
        ("streams", "c", plan.measuring.concurrency),
        ("position", "", plan.measuring.draft_positions),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, choices, ids=[f"{letter}{value}" for value in choices])


def refuse_wrong_sizes(session: Session) -> None:
    """Refuse prompt sizes that exceed the server's context length.

    Args:
        session: The run.

    Raises:
        UsageError: An option requests such a size.
    """
    run = session.run
    chosen = run.target.profile
    if chosen is None or run.target.obstacle is not None:
        return
    if run.servers.attached is not None:
        context = run.servers.attached.context_tokens()
    else:
        under_test = run.configurations.managed(run.profile.under_test)
        context = context_argument(under_test.arguments)
    _refuse_sizes_above(context, session.settings, chosen)


def refuse_planned_sizes(settings: Settings, chosen: Target) -> None:
    """Refuse prompt sizes that exceed the context length of a server which is not started.

    Args:
        settings: The settings of the run.
        chosen: The target. An attached server is not asked for its context length.

    Raises:
        UsageError: An option requests such a size.
    """
    profile = chosen.profile
    if profile is None or chosen.obstacle is not None or settings.base_url is not None:
        return
    under_test = profile.configurations[profile.under_test].arguments
    arguments = (*profile.engine.arguments, *under_test, *settings.engine.arguments)
    _refuse_sizes_above(context_argument(arguments), settings, profile)


def _refuse_sizes_above(context: int | None, settings: Settings, profile: Profile) -> None:
    """Raise UsageError if an option requests a size that exceeds a context length in tokens."""
    plan = settings.measuring_plan(profile)
    sizes = settings.measuring.sizes
    has = f"the server's context has {context}"
    if context is None:
        context = _LONGEST_CONTEXT
        has = f"no model is known with a context of more than {context}"
    prompt = settings.measuring.prompt_tokens
    if prompt is not None and context < prompt + plan.longest:
        raise errors.UsageError(
            f"--pp {prompt}: expected at most {max(context - plan.longest, 0)} tokens, since"
            f" {has} and the rest of the request takes {plan.longest}"
        )
    for option, values, more in (
        ("--depths", sizes.only_depths or (), plan.longest),
        ("--depth", sizes.depths, plan.longest),
        ("--tg", sizes.generated_tokens, 0),
    ):
        needed = plan.prompt_tokens + more
        if values and context < needed + max(values):
            raise errors.UsageError(
                f"{option} {max(values)}: expected at most {max(context - needed, 0)} tokens, since"
                f" {has} and the rest of the request takes {needed}"
            )


@pytest.fixture(scope="session")
def bench(conformance: Session, pytestconfig: pytest.Config) -> Iterator[Bench]:
    """The measuring client, and the plan of the run.

    Args:
        conformance: The run, whose options and profile give the plan.
        pytestconfig: The configuration of pytest. Its stash keeps the open bench.

    Raises:
        NotRun: There is no server to measure.
        StartError: The server did not start.
        Sm121Error: The server accepts neither token ids nor text.
    """
    settings = conformance.settings
    plan = settings.measuring_plan(conformance.run.profile)
    tails = settings.measuring.percentiles or settings.judging.certify
    shown_at = -_LINE_EVERY_S

    def show(line: str) -> None:
        nonlocal shown_at
        progress = pytestconfig.stash.get(PROGRESS, None)
        now = time.monotonic()
        if now - shown_at >= _LINE_EVERY_S or (progress is not None and progress.rewrites):
            shown_at = now
            say(pytestconfig, "measuring", line)

    with Bench.open(conformance.run, plan, tails=tails, show=show) as opened:
        pytestconfig.stash[_BENCH] = opened
        yield opened
        del pytestconfig.stash[_BENCH]


@pytest.fixture
def performance(bench: Bench, record_metric: MetricRecorder, server: Server) -> PerformanceChecks:
    """Measures the server under test, and records the measurements.

    Args:
        bench: The measuring client.
        record_metric: Records a measurement, and raises its verdict if it is not PASS.
        server: The server under test.

    Raises:
        Inconclusive: The server under test is no longer the one that the bench measures.
    """
    if server.endpoint != bench.server.endpoint:
        raise Inconclusive(
            "the server that this level measures ended, and another one answers now. Find the "
            "cause of its end, and run the level again"
        )
    return PerformanceChecks(bench, record_metric)


@pytest.fixture
def last_look(bench: Bench, conformance: Session) -> Callable[[], None]:
    """Measures again the metrics that have passed, and judges them again.

    Args:
        bench: The measuring client.
        conformance: The run, whose recorder contains the measurements.
    """
    return functools.partial(bench.last_look, conformance.recorder)


def look_again_after_the_level(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Repeat the measurements after the level, if the test that does so was not run.

    That test may be deselected by -k or by its id, or not reached because of -x.

    Args:
        item: The test that has ended.
        nextitem: The next test; None after the last one.
    """
    bench = item.config.stash.get(_BENCH, None)
    if bench is None or item.stash.get(LEVEL, None) != "performance":
        return
    if nextitem is not None and nextitem.stash.get(LEVEL, None) == "performance":
        return
    session = item.config.stash[SESSION]
    try:
        bench.last_look(session.recorder, unless_latest=True)
    except NotRun:
        return  # no rate was measured
    except (unmet.Unmet, Undecided) as failure:
        verdict = Verdict.FAIL
        if isinstance(failure, Undecided):
            verdict = failure.verdict
        facts = [fact.mapped(session.run.record.redact) for fact in unmet.facts_of(failure)]
        decision = TestReport.of(f"{BESIDE}last look", "performance", *facts, verdict=verdict)
        session.run.record.emit(Decided(decision))


def read_the_box_again(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Read the state of the machine at the end of the last level that measures.

    The state after that has no effect on the numbers.

    Args:
        item: The test that has ended.
        nextitem: The next test; None after the last one.

    Returns:
        Whether the state of the machine was read.
    """
    session = item.config.stash[SESSION]
    box = session.recorder.box
    if box is None or not box.unread:
        return False
    if nextitem is not None and nextitem.stash.get(LEVEL, None) == item.stash[LEVEL]:
        return False
    later = item.session.items[item.session.items.index(item) + 1 :]
    if any("record_metric" in getattr(each, "fixturenames", ()) for each in later):
        return False
    box.read_at_the_end()
    return True


@pytest.fixture
def startup_s(server: Server) -> float:
    """The time in seconds that the server under test needed to become ready, with warm caches.

    Args:
        server: The server under test.

    Raises:
        NotRun: The server is attached, or its caches were cold.
    """
    if server.startup_s is None:
        raise NotRun("the suite did not start the attached server; run without --base-url")
    if server.why_cold:
        raise NotRun(server.why_cold)
    return server.startup_s


@pytest.fixture
def memory_peak_gib(conformance: Session) -> float:
    """The peak memory of the server so far, in GiB: host and GPU together.

    Args:
        conformance: The run, which samples the memory of the server's processes.

    Raises:
        NotRun: The processes or the GPU memory of the server cannot be read.
    """
    run = conformance.run
    sampler = run.servers.sampler
    assert sampler is not None
    if not run.servers.processes():
        raise NotRun(unknown_memory.reason(run))
    sampler.sample()
    resources = sampler.resources
    if resources.tree_rss_peak_bytes is None:
        raise NotRun("no process of the server could be inspected")
    host = f"{resources.tree_rss_peak_bytes / 2**30:.2f} GiB are resident in the host's memory"
    if resources.memory_peak_bytes is None:
        raise NotRun(f"GPU memory of the server: {resources.memory_source}; {host}")
    run.record.remark(f"memory_peak_gib: {resources.memory_source}; {host}", at_once=False)
    return resources.memory_peak_bytes / 2**30


@pytest.fixture(scope="session")
def measured_history(conformance: Session, pytestconfig: pytest.Config) -> MeasuredHistory:
    """The measurements of this run, and the stored runs that are comparable.

    Args:
        conformance: The run.
        pytestconfig: The configuration of pytest, which names the storage of earlier runs.
    """
    return pytestconfig.stash.setdefault(HISTORY, history_of(pytestconfig, conformance))


@pytest.fixture(scope="session")
def ab_run(conformance: Session, box: RunBox, pytestconfig: pytest.Config) -> AbRun:
    """The comparison of A with B; their servers are started alternately.

    Args:
        conformance: The run, whose option ``--ab`` gives the two sides.
        box: The machine's state, which must be read before the first server starts.
        pytestconfig: The configuration of pytest. Its stash keeps the oracle's answers.

    Raises:
        NotRun: The run has no ``--ab``.
    """
    run = conformance.run
    assert box is not None  # read before the first server starts
    settings = conformance.settings
    profile = run.profile
    ab = settings.ab
    if ab is None:
        raise NotRun("nothing to compare: give --ab A B")

    def attach_to(side: Side) -> Server:
        log = side.log
        attached = run.servers.attached
        if log is None and attached is not None and attached.endpoint.base_url == side.url:
            given = settings.attached
            log = given.log if given is not None else None
        return target.attach_to(str(side.url), log, settings, profile)

    return AbRun(
        conformance.run,
        ab.sides,
        settings.measuring_plan(profile),
        attach_to,
        box.read_beside,
        pairs=ab.pairs,
        hypothesis=ab.hypothesis,
        obstacle=run.target.obstacle,
        price=functools.partial(answers.price_of, pytestconfig, conformance),
    )


@pytest.fixture
def stress(
    conformance: Session, pytestconfig: pytest.Config, server: Server, capabilities: Capabilities
) -> level.Stress:
    """The server under load (see `Stress`); the same object as long as the server runs.

    Args:
        conformance: The run.
        pytestconfig: The configuration of pytest. Its stash keeps the object.
        server: The server under test.
        capabilities: The capabilities of the server.
    """
    current = pytestconfig.stash.get(_STRESS, None)
    if current is None or current.server is not server:
        # This imports aiohttp, which takes a fifth of a second in runs that do not need it.
        from sm121.stress import level

        end_load(pytestconfig)
        current = _Loaded(server, level.Stress(conformance.run, server, capabilities))
        pytestconfig.stash[_STRESS] = current
    return current.stress


@pytest.fixture
def soak_s(pytestconfig: pytest.Config) -> float:
    """The duration of ``--soak`` in seconds.

    Args:
        pytestconfig: The configuration of pytest, which contains the settings of the run.
    """
    duration_s = pytestconfig.stash[SETTINGS].stress.soak_s
    assert duration_s is not None, "without --soak, the test is not collected"
    return duration_s


def end_with_its_level(item: pytest.Item, session: Session) -> None:
    """Stop sampling at the end of the stress level, because it would disturb other levels.

    Args:
        item: The next test.
        session: The run.
    """
    if item.stash[LEVEL] != "stress":
        end_load(item.config)
        session.crashes.under_load(None)  # its samples belong to this server only


def end_load(config: pytest.Config) -> None:
    """Stop sampling, and store the samples.

    Args:
        config: The configuration of pytest. Its stash contains the load.
    """
    current = config.stash.get(_STRESS, None)
    if current is not None:
        current.stress.close()
        del config.stash[_STRESS]
