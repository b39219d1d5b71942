"""Fixtures for the tests that judge the server's answers."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sm121.answers import (
    exam,
    golden,
    oracle_file,
    oracle_texts,
    oracle_tolerance,
    price,
    prompts,
    published,
)
from sm121.answers.equivalence import Continuations
from sm121.answers.oracle_tolerance import bound_for
from sm121.api.speculation import Speculation
from sm121.client.completions import Asker, Refused
from sm121.core import errors, level_settings, verdict
from sm121.core.level_settings import PRICES
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.engines.capabilities import Capabilities
from sm121.evidence import metrics
from sm121.measure import counters
from sm121.oracles.formats import EXACT, Rounding
from sm121.plugin import golden_answers, oracle_answers
from sm121.plugin.benchmarks import MetricRecorder, ReplayClock
from sm121.plugin.price_decision import Priced, PriceDecision
from sm121.regression.ab import MetricOfStart
from sm121.run.events import EngineShown
from sm121.session import certification
from sm121.session.session import Session
from sm121.session.settings import Settings

#: The largest block size, in tokens, at which tests expect prefix cache hits.
_LONGEST_BLOCK = 128
_NO_TOKENIZER = (
    "token ids were not compared with their text: the folder of the model's tokenizer.json is not "
    "known. If it is on this machine, name the checkpoint: --reference DIR"
)
_NO_GOLDEN = (
    "log-probabilities were not compared with the trusted run, and the profile has no oracle: "
    "record them with --record-golden FILE in the trusted run, then give --golden FILE"
)


def refuse_wrong_files(config: pytest.Config, session: Session) -> None:
    """Read the files that options and the profile name, before a server starts.

    Args:
        config: The configuration of pytest. Its stash keeps the files.
        session: The run.

    Raises:
        UsageError: A file has the wrong format, or was made for another model.
    """
    settings = session.settings
    if session.run.target.profile is not None:
        _refuse_wrong_profile(session.run.target.profile)
    if settings.answers.scores is not None:
        published.refuse_without_harness(settings.answers.scores)
    if settings.answers.oracle is not None:
        config.stash[oracle_answers.ORACLE] = _read_oracle(settings.answers.oracle, session)
    if settings.answers.golden is not None:
        config.stash[golden_answers.GOLDEN] = golden_answers.read(settings.answers.golden, session)
    elif settings.judging.against is not None:
        profile = session.run.target.profile
        if profile is not None and "oracle" in profile.correctness.cannot:
            session.run.record.remark(_NO_GOLDEN)


def refuse_unreadable(settings: Settings) -> None:
    """Read the files that options name. This needs no run.

    Args:
        settings: The settings of the run.

    Raises:
        UsageError: A file cannot be read, or is not what was expected.
    """
    if settings.answers.scores is not None:
        published.refuse_without_harness(settings.answers.scores)
    if settings.answers.oracle is not None:
        oracle_file.load(settings.answers.oracle)
    if settings.answers.golden is not None:
        golden.load(settings.answers.golden)
    if settings.answers.exam is not None:
        exam.load(str(settings.answers.exam))


def _refuse_wrong_profile(profile: Profile) -> None:
    """Raise UsageError if the profile names an exam, a rounding or a prompt that does not exist."""
    exam.load(profile.correctness.exam)
    prompt_names = [name for name, _ in oracle_texts.prompts()]
    for plan, row_of_plan in profile.plans.items():
        for name in row_of_plan.oracle_prompts or ():
            if name not in prompt_names:
                raise errors.UsageError(
                    f"profile {profile.name}: key plans.{plan}.oracle_prompts: expected names of "
                    f"{', '.join(prompt_names)}, got {name}"
                )
    for row in profile.correctness.prices:
        Rounding.parse(row.rounding, f"profile {profile.name}: correctness.prices: rounding")
    if profile.correctness.rounding is not None:
        origin = f"profile {profile.name}: correctness.rounding"
        Rounding.parse(profile.correctness.rounding, origin)


def _read_oracle(path: Path, session: Session) -> oracle_file.OracleFile:
    oracle = oracle_file.load(path)
    price.refuse_rounded(oracle, path)
    if session.settings.answers.rounding is not None:
        oracle_file.refuse_other_rounding(oracle, session.settings.answers.rounding)
    folder = golden_answers.served_folder(session)
    if folder is not None:
        oracle_file.refuse_other(oracle, path, folder)
    return oracle


def conclude_golden(session: Session) -> None:
    """Add to the file of --record-golden whether the run's answers can be trusted.

    Args:
        session: The run. It has ended.
    """
    run = session.run
    path = session.settings.answers.record_golden
    if path is None or not path.is_file() or session.settings.worker is not None:
        return
    doubt = certification.doubt_of_answers(
        run.record.file, run.profile, certification.inventory(), session.selected.deselected
    )
    try:
        golden.conclude(path, doubt)
    except OSError as error:
        run.record.cannot_write(error)
    if doubt is not None:
        run.record.remark(f"golden file {path}: not for a certificate: {doubt}")
    session.write_verdict()


@pytest.fixture
def asker(conformance: Session, server: Server) -> Asker:
    """Requests greedy completions from the server under test.

    Args:
        conformance: The run. Without a tokenizer for the served model, its report gets a remark.
        server: The server under test.
    """
    asker = Asker(server, checkpoint=conformance.settings.answers.reference)
    if asker.vocabulary is None:
        conformance.run.record.remark(_NO_TOKENIZER)
    return asker


_PRICED = pytest.StashKey[Priced]()


def _priced(
    config: pytest.Config, conformance: Session, server: Server, depths: Sequence[int]
) -> Priced:
    settings = conformance.settings
    exam_name = conformance.run.profile.correctness.exam
    rounding = None
    with contextlib.suppress(verdict.NotRun):  # the tests against the oracle report the reason
        rounding = oracle_answers.rounding_of(conformance, server)
    computed_with = EXACT
    if depths and rounding:
        computed_with = rounding
    file = oracle_answers.oracle_of(config, conformance, server, computed_with)
    asker = Asker(server, checkpoint=settings.answers.reference)
    try:
        samples, reasons = price.measure(asker, file, exam_name, depths)
        return Priced(rounding, samples, reasons)
    except Refused as refusal:
        if refusal.status == 400 and "max allowed" in str(refusal):
            raise verdict.NotRun(
                "accuracy: expected 20 log-probabilities for each token, but the server refuses "
                f"them. Start it with --max-logprobs 20. Its answer: {refusal}"
            ) from refusal
        raise


def price_of(
    config: pytest.Config, conformance: Session, server: Server
) -> dict[str, MetricOfStart]:
    """Measure what the rounding of one side of ``--ab`` costs in accuracy.

    Args:
        config: The configuration of pytest.
        conformance: The run.
        server: The server of this side.

    Returns:
        The values by metric. Empty if no reference is named and the suite ships none, because
        computing one takes minutes.

    Raises:
        Unmet: An answer is malformed.
        Refused: The server has rejected a valid request.
    """
    settings = conformance.settings
    try:
        if not settings.answers.oracle and not settings.answers.reference:
            _require_shipped_oracle(server)
        priced = _priced(config, conformance, server, ())
    except errors.Sm121Error as why:
        if isinstance(why, Refused) and why.status >= 500:
            raise
        conformance.run.record.remark(
            f"A/B: the accuracy cost of rounding was not measured: {why}", at_once=False
        )
        return {}
    by_metric = {}
    for name, samples in priced.samples.items():
        unit, higher_is_better = PRICES[name]
        by_metric[name] = MetricOfStart(fmean(samples), unit, higher_is_better)
    return by_metric


def _require_shipped_oracle(server: Server) -> None:
    """Raise NotRun if the suite ships no oracle file for the served checkpoint."""
    if not oracle_file.shipped(oracle_tolerance.checkpoint_of(server)):
        raise verdict.NotRun(
            "the suite has no reference answers for this checkpoint: give the checkpoint, or a "
            "file of sm121 golden, with --reference PATH"
        )


@pytest.fixture
def price_of_rounding(
    pytestconfig: pytest.Config,
    conformance: Session,
    server: Server,
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is created
    benchmark: BenchmarkFixture,
) -> Callable[[str], None]:
    """Measures the accuracy cost of the server's rounding once; judges one metric of `PRICES`.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the measurement for later tests.
        conformance: The run, whose recorder gets the gates of this measurement.
        server: The server under test.
        metric_clock: The timer of the benchmark.
        benchmark: pytest-benchmark's fixture of the test.

    Returns:
        A function that takes the name of a metric without a depth (see `PriceDecision.decide`).

    Raises:
        NotRun: The checkpoint is not on this machine, or the server refuses to send 20
            log-probabilities for each token.
        Refused: The server answered a valid request with another error.
        Unmet: An answer is malformed.
    """
    run = conformance.run
    recorder = conformance.recorder
    if _PRICED not in pytestconfig.stash:
        pytestconfig.stash[_PRICED] = _priced(pytestconfig, conformance, server, price.DEPTHS)
    priced = pytestconfig.stash[_PRICED]
    recorder.gates = price.gates(run.profile.correctness.prices, priced.rounding)
    shown = EngineShown.of(
        run.record.file.engine,
        rounding=priced.rounding.formats if priced.rounding else None,
        price_allowed=run.profile.regression.price_allowed,
    )
    run.record.emit(shown)
    record = MetricRecorder(recorder, benchmark, metric_clock)
    return PriceDecision(conformance, priced, record).decide


_CONTINUATIONS = pytest.StashKey[dict[str, Continuations]]()


@pytest.fixture
def continuations(
    pytestconfig: pytest.Config, asker: Asker, server: Server, profile: Profile
) -> Continuations:
    """The prompt set, and the server's answers to it (see `Continuations`).

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the answers of each server
            process.
        asker: Requests the answers.
        server: The server under test.
        profile: The profile, which contains the tolerance between two answers.

    Raises:
        NotRun: The profile has no tolerance for the server's dtype.
    """
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
    """The server under test, if it uses speculative decoding; otherwise raises Inapplicable.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the object for each server
            process.
        conformance: The run, which reads the method of speculation from the server's log.
        asker: Requests the answers.
        server: The server under test.
        agreement_bound: The tolerance between two answers.
        capabilities: The capabilities of the server.

    Raises:
        Inapplicable: The log shows that the server does not speculate, or the log shows no method
            and the server counts no drafted tokens.
    """
    method = conformance.run.paths.of(server).speculative
    if method == "none" or (method is None and counters.drafted(server.endpoint) is None):
        raise verdict.Inapplicable(
            "the server under test does not speculate; the profile's configurations that do: "
            f"{_speculating(conformance.run.profile) or 'none'} (--configuration NAME)"
        )
    by_server = pytestconfig.stash.setdefault(_SPECULATION, {})
    key = f"{server.endpoint.base_url} {server.startup_s}"
    if key not in by_server:
        by_server[key] = Speculation(
            server, asker, prompts.continuations(), agreement_bound, method, capabilities
        )
    return by_server[key]


def _speculating(profile: Profile) -> str:
    """The names of a profile's configurations with speculative decoding."""
    names = []
    for name, configuration in profile.configurations.items():
        if any("--speculative" in argument for argument in configuration.arguments):
            names.append(name)
    return ", ".join(names)


@pytest.fixture
def agreement_bound(server: Server, profile: Profile) -> level_settings.AgreementBound:
    """The profile's tolerance between two answers of one server.

    Args:
        server: The server under test.
        profile: The profile.

    Raises:
        NotRun: The profile has no tolerance for the server's dtype.
    """
    return bound_for(profile.correctness.agreement, server, profile, "agreement")


@pytest.fixture
def attempts(agreement_bound: level_settings.AgreementBound) -> int:
    """How many answers to one request a test may compare until one equals the expected answer.

    It is one if the profile requires equal tokens. Otherwise it is three: if two tokens have nearly
    the same probability, the server may choose either of them. A failed request is not repeated.

    Args:
        agreement_bound: The tolerance between two answers.
    """
    if agreement_bound.fork == 0:
        return 1
    return 3


@pytest.fixture
def prefix_cache_hits(server: Server) -> Callable[[], float | None]:
    """Returns how many prompt tokens have come from the prefix cache so far; None if unknown.

    Args:
        server: The server under test. Its ``/metrics`` are read at each call.
    """
    page = functools.partial(server.endpoint.page, "/metrics")
    return lambda: metrics.total(page() or "", "vllm:prefix_cache_hits_total")


@pytest.fixture
def caches_prefixes(conformance: Session, server: Server) -> bool:
    """Whether the server's log shows a prefix cache whose blocks are short enough for hits.

    Args:
        conformance: The run, which reads the server's log.
        server: The server under test.
    """
    path = conformance.run.paths.of(server)
    return path.prefix_caching is True and int(path.block_size or 0) <= _LONGEST_BLOCK
