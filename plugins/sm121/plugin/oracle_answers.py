"""The oracle's answers for the served checkpoint, with which the server's answers are compared."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sm121.answers import oracle_file, oracle_making, oracle_tolerance, served_rounding
from sm121.answers.oracle_process import OracleProcess
from sm121.answers.oracle_tolerance import OracleReference
from sm121.core.errors import Sm121Error
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities
from sm121.oracles.formats import Rounding
from sm121.plugin.stash import LEVEL
from sm121.session import signals
from sm121.session.session import Session

ORACLE = pytest.StashKey[oracle_file.OracleFile]()
#: The process that computes the plan's prompts; None if the run needs none.
_PROCESS = pytest.StashKey[OracleProcess | None]()
#: The levels beside which the process may run, because they measure nothing.
_LEVELS = ("smoke", "kernel", "correctness")
#: The fixture of the test that needs the process.
_FIXTURE = "prompt_reference"
#: The memory that the oracle needs for some prompts. For gpt-oss-120b's shape, 0.8 to 1.4 GiB were
#: measured, according to the server's formats.
_NEEDED_GIB = 3.0
_SAY_EVERY_S = 15.0


@pytest.fixture
def reference(
    pytestconfig: pytest.Config, conformance: Session, server: Server, profile: Profile
) -> OracleReference:
    """The oracle's answers for the served checkpoint, and the tolerance for the server's rounding.

    They are computed on first use. This time does not count for the test's timeout.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the answers for later tests.
        conformance: The run. Its options name the checkpoint, the rounding or a file of the oracle.
        server: The server under test.
        profile: The profile, which contains the tolerances.

    Raises:
        UsageError: The oracle's file was computed with another rounding than the server's.
        NotRun: The checkpoint is not on this machine, torch or safetensors is not installed, or the
            profile has no tolerance for the server's dtype.
    """
    rounding = rounding_of(conformance, server)
    file = oracle_of(pytestconfig, conformance, server, rounding)
    oracle_file.refuse_other_rounding(file, rounding)
    return oracle_tolerance.reference_for(file, server, profile)


@pytest.fixture
def prompt_reference(
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    conformance: Session,
    server: Server,
    profile: Profile,
    capabilities: Capabilities,
) -> OracleReference:
    """The oracle's answers to the plan's prompts, and the tolerance for the server's rounding.

    If the plan has all prompts, this is the fixture `reference`. If it has some, a process has
    computed them beside earlier tests.

    Args:
        request: The request of pytest, from which the fixture `reference` is taken.
        pytestconfig: The configuration of pytest. Its stash keeps the process.
        conformance: The run. Its plan names the prompts.
        server: The server under test.
        profile: The profile, which contains the tolerances.
        capabilities: The capabilities of the server.

    Raises:
        UsageError: The oracle's file was computed with another rounding than the server's.
        NotRun: As for `reference`; or the engine sends no log-probabilities of a prompt; or the
            process failed, took too long, or did not start because the machine lacks memory.
    """
    names = profile.plan(conformance.settings.plan).oracle_prompts
    if names is None:
        whole: OracleReference = request.getfixturevalue("reference")
        return whole
    capabilities.require("prompt_logprobs")
    rounding = rounding_of(conformance, server)
    if ORACLE in pytestconfig.stash:
        file = oracle_file.only_prompts(pytestconfig.stash[ORACLE], names)
        oracle_file.refuse_other_rounding(file, rounding)
        return oracle_tolerance.reference_for(file, server, profile)
    settings = conformance.settings
    checkpoint = oracle_tolerance.checkpoint_of(server, settings.answers.reference)
    with signals.own_time():
        _wait(pytestconfig, conformance)
        folder = _cache(conformance)
        if oracle_making.kept_prompts(checkpoint, rounding, folder, names) is None:
            _require_memory(profile)
        file = oracle_making.prompts_kept_or_made(
            checkpoint,
            rounding,
            folder,
            names,
            _progress_of(conformance),
            anew=settings.judging.certify,
        )
    return oracle_tolerance.reference_for(file, server, profile)


def rounding_of(conformance: Session, server: Server) -> Rounding:
    """Return the rounding that an option or the profile names, or else that of the kernel path.

    Args:
        conformance: The run.
        server: The server.

    Raises:
        NotRun: The kernel path does not show the rounding, or the checkpoint is not known.
    """
    run = conformance.run
    settings = conformance.settings
    if settings.answers.rounding is not None:
        return settings.answers.rounding
    rounding = run.profile.correctness.rounding
    if rounding is not None:
        return Rounding.parse(rounding)
    model = {}
    if settings.answers.oracle is None:
        checkpoint = oracle_tolerance.checkpoint_of(server, settings.answers.reference)
        model = json.loads((checkpoint / "config.json").read_bytes())
    path = run.paths.of(server)
    return served_rounding.served_rounding(server, run.profile, path, model)


def oracle_of(
    config: pytest.Config, conformance: Session, server: Server, rounding: Rounding
) -> oracle_file.OracleFile:
    """Return the oracle's file, which is read once per run. If there is none, compute it.

    Args:
        config: The configuration of pytest. Its stash keeps the file.
        conformance: The run.
        server: The server.
        rounding: The formats in which the checkpoint is served.

    Raises:
        NotRun: The checkpoint is not on this machine, or torch or safetensors is not installed.
    """
    if ORACLE in config.stash:
        return config.stash[ORACLE]
    settings = conformance.settings
    checkpoint = oracle_tolerance.checkpoint_of(server, settings.answers.reference)
    with signals.own_time():
        made = oracle_making.kept_or_made(
            checkpoint,
            rounding,
            _cache(conformance),
            _progress_of(conformance),
            anew=settings.judging.certify,
        )
    config.stash[ORACLE] = made
    return made


def begin_beside(item: pytest.Item, session: Session) -> None:
    """Start to compute the plan's prompts after the first test whose server is ready.

    Args:
        item: The test that has ended. Its fixtures still exist.
        session: The run.
    """
    config = item.config
    server = getattr(item, "funcargs", {}).get("server")
    if _PROCESS in config.stash or server is None or item.stash[LEVEL] not in _LEVELS:
        return
    config.stash[_PROCESS] = None
    later = item.session.items[item.session.items.index(item) + 1 :]
    if any(_FIXTURE in getattr(each, "fixturenames", ()) for each in later):
        config.stash[_PROCESS] = _process_for(config, session, server)


def end_beside(config: pytest.Config) -> None:
    """End the process, because it would disturb a measurement.

    Args:
        config: The configuration of pytest. Its stash keeps the process.
    """
    process = config.stash.get(_PROCESS, None)
    if process is not None:
        process.close()
        config.stash[_PROCESS] = None


def end_with_its_levels(item: pytest.Item) -> None:
    """End the process before a level that measures.

    Args:
        item: The next test.
    """
    if item.stash[LEVEL] not in _LEVELS:
        end_beside(item.config)


def _process_for(config: pytest.Config, session: Session, server: Server) -> OracleProcess | None:
    """Start the process, unless the plan, an option or the cache makes it needless."""
    profile = session.run.profile
    settings = session.settings
    names = profile.plan(settings.plan).oracle_prompts
    if names is None or "oracle" in profile.correctness.cannot or ORACLE in config.stash:
        return None
    if settings.worker is not None or settings.judging.certify:
        return None
    try:
        checkpoint = oracle_tolerance.checkpoint_of(server, settings.answers.reference)
        rounding = rounding_of(session, server)
        if oracle_making.kept_prompts(checkpoint, rounding, _cache(session), names) is not None:
            return None
        _require_memory(profile)
        return OracleProcess(checkpoint, rounding, _cache(session), names)
    except (Sm121Error, OSError, ValueError):  # the test reports the reason
        return None


def _wait(config: pytest.Config, conformance: Session) -> None:
    """Wait for the process, and show that the run is waiting."""
    process = config.stash.get(_PROCESS, None)
    if process is None:
        return
    begun = said_at = time.monotonic()

    def say() -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at > _SAY_EVERY_S:
            said_at = now
            conformance.run.record.say("oracle", f"waiting for its answers, {now - begun:.0f} s")

    try:
        process.wait(say)
    finally:
        end_beside(config)


def _require_memory(profile: Profile) -> None:
    """Refuse to compute if the server has left too little memory."""
    floor_gib = profile.stress.memory_floor_gib.value
    available_gib = psutil.virtual_memory().available / 2**30
    if available_gib < floor_gib + _NEEDED_GIB:
        raise NotRun(
            f"the oracle: expected at least {floor_gib + _NEEDED_GIB:g} GiB of available memory "
            f"beside the server, got {available_gib:.1f} GiB. Stop the server and run `sm121 "
            "golden CHECKPOINT -o oracle.json` once, then give --reference oracle.json"
        )


def _progress_of(conformance: Session) -> Callable[[int, int], None]:
    """Return a function that shows the completed layers from time to time."""
    said_at = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            conformance.run.record.say("oracle", f"{done} of {of} layers")

    return progress


def _cache(conformance: Session) -> Path:
    return conformance.settings.root / ".cache" / "oracle"
