"""Fixtures for the tests of answers."""

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sm121.answers import (
    exam,
    golden,
    oracle_file,
    oracle_making,
    oracle_tolerance,
    price,
    prompts,
    published,
    served_rounding,
)
from sm121.answers.equivalence import Continuations
from sm121.answers.golden import GoldenFile, Identity
from sm121.answers.oracle_tolerance import OracleReference, bound_for
from sm121.api.speculation import Speculation
from sm121.client.completions import Asker, Refused
from sm121.core import errors, level_settings, model_folder, verdict
from sm121.core.level_settings import PRICES
from sm121.core.metric_name import without_depth
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet
from sm121.engines.capabilities import Capabilities
from sm121.evidence import metrics
from sm121.measure import counters
from sm121.measure.measurement import Measurement
from sm121.oracles.formats import EXACT, Rounding
from sm121.plugin.benchmarks import MetricRecorder, ReplayClock
from sm121.regression.ab import MetricOfStart
from sm121.run.verdict_file import MetricReport
from sm121.session import certification, signals
from sm121.session.session import Session

_GOLDEN = pytest.StashKey[GoldenFile]()
_ORACLE = pytest.StashKey[oracle_file.OracleFile]()
_SAY_EVERY_S = 15.0
_SAID_NO_TOKENIZER = (
    "token ids were not compared with their text: no tokenizer.json of the served model is here; "
    "name its checkpoint with --reference PATH"
)


def refuse_wrong_files(config: pytest.Config, session: Session) -> None:
    """Read the files that options and the profile name, before anything is started. Raises
    UsageError: a file is not what was expected, or is about another model."""
    settings = session.settings
    profile = session.target.profile
    if profile is not None:
        exam.load(profile.correctness.exam)
        for row in profile.correctness.prices:
            Rounding.parse(row.rounding, f"profile {profile.name}: correctness.prices: rounding")
        if profile.correctness.rounding is not None:
            origin = f"profile {profile.name}: correctness.rounding"
            Rounding.parse(profile.correctness.rounding, origin)
    if settings.scores is not None:
        published.refuse_without_harness(settings.scores)
    if settings.oracle is not None:
        config.stash[_ORACLE] = oracle = oracle_file.load(settings.oracle)
        price.refuse_rounded(oracle, settings.oracle)
        if settings.rounding is not None:
            oracle_file.refuse_other_rounding(oracle, settings.rounding)
        folder = _served_folder(session)
        if folder is not None:
            oracle_file.refuse_other(oracle, settings.oracle, folder)
    if settings.golden is not None:
        config.stash[_GOLDEN] = loaded = golden.load(settings.golden)
        served = _identity(session)
        origin = f"--golden {settings.golden}"
        golden.refuse_other(loaded, origin, served, prompts.continuations())
        if settings.certify:
            golden.refuse_doubtful(loaded, origin)
        unproven = golden.unproven(loaded, served)
        if unproven is not None:
            session.remark(unproven)


def conclude_golden(session: Session) -> None:
    """Write into the file of --record-golden what the run's end says of its answers."""
    path = session.settings.record_golden
    if path is not None and path.is_file() and session.settings.worker is None:
        doubt = certification.doubt_of_answers(
            session.file, session.profile, certification.inventory(), session.deselected
        )
        try:
            golden.conclude(path, doubt)
        except OSError as error:
            session.cannot_write(error)
        if doubt is not None:
            session.remark(f"golden file {path}: not for a certificate: {doubt}")
        session.save()


def _served_folder(session: Session) -> Path | None:
    if session.attached is not None or session.target.profile is None or not session.configurations:
        return None
    under_test = session.managed_configuration(session.profile.under_test)
    return model_folder.folder_of(under_test.model, os.environ | dict(under_test.environment))


def _identity(session: Session) -> Identity:
    if session.attached is not None:
        return golden.identity(session.attached.endpoint.served_name, session.settings.reference)
    if session.target.profile is None or not session.configurations:
        return Identity(served_name="")
    under_test = session.managed_configuration(session.profile.under_test)
    return golden.identity(under_test.served_name, _served_folder(session))


@pytest.fixture
def asker(conformance: Session, server: Server) -> Asker:
    """Asks the server under test for greedy completions."""
    asker = Asker(server, checkpoint=conformance.settings.reference)
    if asker.vocabulary is None:
        conformance.remark(_SAID_NO_TOKENIZER)
    return asker


@pytest.fixture
def reference(
    pytestconfig: pytest.Config, conformance: Session, server: Server, profile: Profile
) -> OracleReference:
    """What the oracle says of the served checkpoint, and the tolerance for what the server rounds.
    It is computed where it is not there yet; that time is not the test's."""
    rounding = _rounding(conformance, server)
    file = _oracle(pytestconfig, conformance, server, rounding)
    oracle_file.refuse_other_rounding(file, rounding)
    return oracle_tolerance.reference_for(file, server, profile)


def _rounding(conformance: Session, server: Server) -> Rounding:
    settings = conformance.settings
    model = {}
    if settings.rounding is not None:
        return settings.rounding
    rounding = conformance.profile.correctness.rounding
    if rounding is not None:
        return Rounding.parse(rounding)
    if settings.oracle is None:
        checkpoint = oracle_tolerance.checkpoint_of(server, settings.reference)
        model = json.loads((checkpoint / "config.json").read_bytes())
    path = conformance.kernel_path(server)
    return served_rounding.served_rounding(server, conformance.profile, path, model)


def _oracle(
    config: pytest.Config, conformance: Session, server: Server, rounding: Rounding
) -> oracle_file.OracleFile:
    settings = conformance.settings
    said_at = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            conformance.say("oracle", f"{done} of {of} passes of a layer")

    if _ORACLE not in config.stash:
        checkpoint = oracle_tolerance.checkpoint_of(server, settings.reference)
        folder = settings.root / ".cache" / "oracle"
        anew = settings.certify
        with signals.own_time():
            made = oracle_making.kept_or_made(checkpoint, rounding, folder, progress, anew=anew)
        config.stash[_ORACLE] = made
    return config.stash[_ORACLE]


#: How the server rounds, if that is known, and what `price.measure` says of it.
Priced = tuple[Rounding | None, dict[str, list[float]], dict[str, str]]
_PRICED = pytest.StashKey[Priced]()


def _priced(
    config: pytest.Config, conformance: Session, server: Server, depths: Sequence[int]
) -> Priced:
    settings = conformance.settings
    exam_name = conformance.profile.correctness.exam
    rounding = None
    with contextlib.suppress(verdict.NotRun):  # the tests against the oracle say why
        rounding = _rounding(conformance, server)
    file = _oracle(config, conformance, server, rounding if depths and rounding else EXACT)
    asker = Asker(server, checkpoint=settings.reference)
    try:
        return rounding, *price.measure(asker, file, exam_name, depths)
    except Refused as refusal:
        if refusal.status == 400 and "max allowed" in str(refusal):
            raise verdict.NotRun(f"--max-logprobs 20 shows it: {refusal}") from refusal
        raise


def price_of(
    config: pytest.Config, conformance: Session, server: Server
) -> dict[str, MetricOfStart]:
    """What the rounding of a side of ``--ab`` costs. Nothing where no reference was named, and none
    is shipped: to make one takes minutes. Raises Unmet: an answer is malformed; Refused: the server
    is at fault."""
    settings = conformance.settings
    try:
        if not (settings.oracle or settings.reference) and not oracle_file.shipped(
            oracle_tolerance.checkpoint_of(server)
        ):
            raise verdict.NotRun("name the checkpoint, or a file of sm121 golden: --reference PATH")
        _, samples, _ = _priced(config, conformance, server, ())
    except errors.Sm121Error as why:
        if isinstance(why, Refused) and why.status >= 500:
            raise
        conformance.remark(f"A/B: the price of rounding was not measured: {why}", at_once=False)
        return {}
    return {name: MetricOfStart(fmean(of), *PRICES[name]) for name, of in samples.items()}


@pytest.fixture
def price_of_rounding(
    pytestconfig: pytest.Config,
    conformance: Session,
    server: Server,
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is made
    benchmark: BenchmarkFixture,
) -> Callable[[str], None]:
    """Measures what the server's rounding costs, once for all of `PRICES`, and decides on one."""
    recorder = conformance.recorder
    engine = conformance.file.engine
    limits = conformance.profile.regression
    prices = conformance.profile.correctness.prices
    if _PRICED not in pytestconfig.stash:
        pytestconfig.stash[_PRICED] = _priced(pytestconfig, conformance, server, price.DEPTHS)
    rounding, samples, reasons = pytestconfig.stash[_PRICED]
    engine.rounding = rounding.formats if rounding else None
    recorder.gates = price.gates(prices, rounding)
    engine.price_allowed = limits.price_allowed

    def decide(metric: str) -> None:
        unit, higher = PRICES[metric]
        record = MetricRecorder(recorder, benchmark, metric_clock)
        failed = list[Fact]()
        gated = [each for each in recorder.gates if without_depth(each) == metric]
        unmeasured = [
            f"{each}: {reasons.get(each, 'no such depth')}" for each in gated if each not in samples
        ]
        for name in (each for each in {**reasons, **samples} if without_depth(each) == metric):
            if name in reasons:
                conformance.file.metrics[name] = MetricReport(value=None, unit=unit)
                conformance.remark(f"{name} was not measured: {reasons[name]}", at_once=False)
                continue
            one = Measurement(name=name, unit=unit, samples=samples[name], higher_is_better=higher)
            try:
                record(one.model_copy(update={"is_mean": True}), part=name != metric)
            except Unmet as unmet:
                failed += unmet.facts
            if limits.price_allowed and rounding != EXACT and name not in recorder.gates:
                failed.append(Fact(f"{name} in correctness.prices", f"{engine.rounding}: none"))
            if name not in recorder.gates and not math.isfinite(fmean(samples[name])):
                failed.append(Fact("log-probabilities that are numbers", "some are none", name))
        if failed:
            raise Unmet(*failed)
        if unmeasured:
            raise verdict.NotRun("; ".join(unmeasured))
        if metric in reasons:
            raise verdict.Inapplicable(reasons[metric])
        if prices and not recorder.gates:
            rounds = f"rounding {engine.rounding}" if engine.rounding else "what does not show"
            raise verdict.NotRun(f"measured, and correctness.prices has no row for {rounds}")

    return decide


_CONTINUATIONS = pytest.StashKey[dict[str, Continuations]]()


@pytest.fixture
def continuations(
    pytestconfig: pytest.Config, asker: Asker, server: Server, profile: Profile
) -> Continuations:
    """The prompt set and the answers of the server under test (see `Continuations`)."""
    by_server = pytestconfig.stash.setdefault(_CONTINUATIONS, {})
    key = f"{server.endpoint.base_url} {server.startup_s}"
    if key not in by_server:
        bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
        by_server[key] = Continuations(prompts.continuations(), bound, asker)
    return by_server[key]


_SPECULATION = pytest.StashKey[dict[str, Speculation]]()


@pytest.fixture
def speculation(
    pytestconfig: pytest.Config,
    conformance: Session,
    asker: Asker,
    server: Server,
    agreement_bound: level_settings.AgreementBound,
    capabilities: Capabilities,
) -> Speculation:
    """The server under test as one that speculates. Raises Inapplicable: it does not."""
    method = conformance.kernel_path(server).speculative
    if method == "none" or (method is None and counters.drafted(server.endpoint) is None):
        speculating = (
            name
            for name, configuration in conformance.profile.configurations.items()
            if any("--speculative" in argument for argument in configuration.arguments)
        )
        raise verdict.Inapplicable(
            "the server under test does not speculate; the profile's configurations that do: "
            f"{', '.join(speculating) or 'none'} (--configuration NAME)"
        )
    by_server = pytestconfig.stash.setdefault(_SPECULATION, {})
    key = f"{server.endpoint.base_url} {server.startup_s}"
    if key not in by_server:
        by_server[key] = Speculation(
            server, asker, prompts.continuations(), agreement_bound, method, capabilities
        )
    return by_server[key]


@pytest.fixture
def agreement_bound(server: Server, profile: Profile) -> level_settings.AgreementBound:
    """What the profile accepts between two answers of one server."""
    return bound_for(profile.correctness.agreement, server, profile, "agreement")


@pytest.fixture
def attempts(agreement_bound: level_settings.AgreementBound) -> int:
    """How often a request may be repeated until it repeats itself: where the engine promises equal
    tokens once, else often enough for two tokens that are equally likely within the noise."""
    if agreement_bound.fork == 0:
        return 1
    return 3


@pytest.fixture
def golden_bound(server: Server, profile: Profile) -> level_settings.GoldenBound:
    """What the profile accepts against a golden file."""
    return bound_for(profile.correctness.golden, server, profile, "golden")


@pytest.fixture
def golden_file(pytestconfig: pytest.Config) -> GoldenFile:
    """The file of ``--golden``; it is of this model and these prompts."""
    return pytestconfig.stash[_GOLDEN]


@pytest.fixture
def recorder(
    conformance: Session, asker: Asker, server: Server, profile: Profile
) -> Callable[[], GoldenFile]:
    """Records the answers of the server under test."""
    return lambda: golden.record(
        asker,
        prompts.continuations(),
        model=_identity(conformance),
        dtype=oracle_tolerance.dtype_of(server, profile),
        engine=server.engine,
        engine_version=server.version or conformance.file.engine.version,
        configuration=profile.under_test,
        environment=conformance.file.environment,
    )


@pytest.fixture
def prefix_cache_hits(server: Server) -> Callable[[], float | None]:
    """Tokens that the server took from its prefix cache so far, None where it does not count."""
    page = functools.partial(server.endpoint.page, "/metrics")
    return lambda: metrics.total(page() or "", "vllm:prefix_cache_hits_total")


@pytest.fixture
def caches_prefixes(conformance: Session, server: Server) -> bool:
    """Whether the server's log says that it has a prefix cache, and of no long blocks."""
    path = conformance.kernel_path(server)
    return path.prefix_caching is True and int(path.block_size or 0) <= 128
