"""Fixtures for tests that need a server: clients (one validates each answer) and API cases.

The server starts when the first test needs it.
"""

import dataclasses
import functools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from sm121.answers import exam
from sm121.api import cases, exams, sampled
from sm121.api.cases import Judge
from sm121.api.client import CHAT, RESPONSES, Api
from sm121.api.sdk import Sdk
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities
from sm121.engines.detection import detect
from sm121.engines.endings import StopReport
from sm121.evidence.kernel_path import KernelPath
from sm121.plugin.stash import DEVIATIONS, MENDED, SESSION, SYMPTOMS
from sm121.run.configurations import Configurations
from sm121.run.events import EngineShown
from sm121.run.paths import KernelPaths
from sm121.run.run import Run
from sm121.session.session import Session

if TYPE_CHECKING:
    import openai

#: The capabilities of each server. The keys are the servers' addresses.
_CAPABILITIES = pytest.StashKey[dict[str, Capabilities]]()
#: The API cases that each server has passed. The keys are the servers' addresses.
_WELL = pytest.StashKey[dict[str, str]]()
#: The ids of all responses in a run.
_IDS = pytest.StashKey[Counter[str]]()
_SAMPLERS = pytest.StashKey[dict[str, sampled.Sampler]]()


@pytest.fixture(scope="session")
def conformance(pytestconfig: pytest.Config) -> Session:
    """The conformance run: settings, target, report directory.

    If a test without the marker of a level uses this fixture, the setup of the test fails.

    Args:
        pytestconfig: The configuration of pytest, whose stash contains the run.
    """
    run = pytestconfig.stash.get(SESSION, None)
    if run is None:
        pytest.fail(
            "fixtures of the suite: expected a test with the marker of a level, got a test without "
            "one. Add for example @pytest.mark.smoke and @pytest.mark.applies_to('cpu', 'gpu'), or "
            "use llm_server, the server of the plugin pytest_llm_server",
            pytrace=False,
        )
    return run


@pytest.fixture(scope="session")
def profile(conformance: Session) -> Profile:
    """The profile of the run.

    Args:
        conformance: The run.

    Raises:
        NotRun: This machine cannot judge the target.
    """
    return conformance.run.profile


@pytest.fixture(scope="session")
def remark(conformance: Session) -> Callable[[str], None]:
    """Records a remark for the report. A remark changes no verdict.

    Args:
        conformance: The run.
    """
    return conformance.run.record.remark


@pytest.fixture(scope="session")
def configurations(conformance: Session) -> Configurations:
    """The server configurations of the profile, and why one of them cannot start here.

    Args:
        conformance: The run.
    """
    return conformance.run.configurations


@pytest.fixture(scope="session")
def paths(conformance: Session) -> KernelPaths:
    """The kernel path of each server, and its contradictions to the profile.

    Args:
        conformance: The run.
    """
    return conformance.run.paths


@dataclass(frozen=True)
class ConfigurationServers:
    """Servers by the name of their configuration. Starting one stops the running one."""

    _run: Run

    def __call__(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration. Start it if it is not running.

        Args:
            configuration: The name of the configuration. None: the configuration under test.
        """
        return self._run.server(configuration)

    def last(self, configuration: str) -> Server | None:
        """Return the last server of a configuration that became ready, even if it is stopped.

        Args:
            configuration: The name of the configuration.

        Returns:
            The server; None if none became ready, or if the server is attached.
        """
        return self._run.servers.last(configuration)

    def stop(self) -> StopReport:
        """Stop the running server.

        Returns:
            The report on processes, memory and files that it left behind.

        Raises:
            NotRun: The server is attached, or no server is running.
        """
        report = self._run.servers.stop()
        if report is None:
            raise NotRun(
                "no server that the suite started is running; attached ones are not stopped"
            )
        return report


@pytest.fixture(scope="session")
def servers(conformance: Session) -> ConfigurationServers:
    """Starts the server of any configuration of the profile.

    Args:
        conformance: The run.
    """
    return ConfigurationServers(conformance.run)


@pytest.fixture
def server(conformance: Session) -> Iterator[Server]:
    """The server under test. It must be alive before and after the test.

    Args:
        conformance: The run, which starts the server if it does not run.

    Raises:
        NotRun: The server cannot start on this machine, or an earlier start failed.
        StartError: The server did not start.
        ServerDied: The server died during the test.
    """
    yield conformance.run.server()
    conformance.run.servers.check_alive()


@pytest.fixture
def client(server: Server, capabilities: Capabilities) -> "Iterator[openai.OpenAI]":
    """An OpenAI client for the server under test.

    It does not retry. A request for a capability that the engine does not have is NOT_RUN.

    Args:
        server: The server under test.
        capabilities: The capabilities of the server.
    """
    from sm121.api.guarded_client import GuardedClient

    with GuardedClient(server.endpoint, capabilities) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client for endpoints of the server that are not part of the OpenAI API.

    Args:
        server: The server under test.
    """
    with server.endpoint.http() as client:
        yield client


@pytest.fixture
def model(server: Server) -> str:
    """The served name of the model.

    Args:
        server: The server under test.
    """
    return server.endpoint.served_name


@pytest.fixture
def kernel_path(conformance: Session, server: Server) -> KernelPath:
    """The kernel path of the server under test, as its log shows it.

    Args:
        conformance: The run, which reads the log.
        server: The server under test.
    """
    return conformance.run.paths.of(server)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that has the marker ``api_cases``: one ``case`` for each API case.

    Args:
        metafunc: The test.
    """
    if metafunc.definition.get_closest_marker("api_cases") is not None:
        parameters = []
        for case in cases.shipped().case:
            ability = case.ability
            if ability is None and case.path in (CHAT, RESPONSES):
                ability = "chats"
            marks = [pytest.mark.ability(ability)] if ability is not None else []
            parameters.append(pytest.param(case, id=str(case), marks=marks))
        metafunc.parametrize("case", parameters)


@pytest.fixture
def capabilities(pytestconfig: pytest.Config, conformance: Session, server: Server) -> Capabilities:
    """The capabilities of the server under test. ``require`` raises NotRun if one is missing.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the capabilities of each address.
        conformance: The run, whose profile lists the abilities that the model lacks.
        server: The server under test.
    """
    run = conformance.run
    by_address = pytestconfig.stash.setdefault(_CAPABILITIES, {})
    detected = by_address.get(server.endpoint.base_url)
    if detected is None:
        named: str | None = server.engine
        given = conformance.settings.attached
        if given is not None:
            named = given.engine
        detected = detect(server, named, identity=run.record.file.engine.identity)
        detected = dataclasses.replace(detected, lacks=run.profile.correctness.cannot)
        if not server.managed:
            before = run.record.file.engine
            shown = EngineShown.of(before, name=detected.engine, version=detected.version)
            run.record.emit(shown)
        by_address[server.endpoint.base_url] = detected
    return detected


@pytest.fixture
def api(pytestconfig: pytest.Config, server: Server, capabilities: Capabilities) -> Api:
    """The API of the server under test. An invalid answer fails the test.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the ids of all responses, which
            must be unique.
        server: The server under test.
        capabilities: The capabilities of the server.
    """
    every_id = pytestconfig.stash.setdefault(_IDS, Counter())
    return Api(server.endpoint, capabilities, every_id=every_id)


@pytest.fixture(scope="session")
def _seed_of_samples(conformance: Session) -> int:
    seed = secrets.randbits(32)
    conformance.run.record.remark(f"sampling: values drawn with seed {seed}", at_once=False)
    return seed


@pytest.fixture
def sampler(pytestconfig: pytest.Config, api: Api, _seed_of_samples: int) -> sampled.Sampler:
    """Requests samples from the server under test. Tests of one server share greedy answers.

    Args:
        pytestconfig: The configuration of pytest. Its stash keeps the sampler of each address.
        api: The API of the server under test.
        _seed_of_samples: The seed of the drawn values, which is a remark in the report.
    """
    by_address = pytestconfig.stash.setdefault(_SAMPLERS, {})
    address = api.endpoint.base_url
    return by_address.setdefault(address, sampled.Sampler(api, _seed_of_samples))


@pytest.fixture
def server_environment(server: Server, profile: Profile) -> dict[str, str]:
    """The server's environment variables; for an attached server, those of the profile.

    Args:
        server: The server under test.
        profile: The profile.
    """
    if server.configuration is not None:
        return dict(server.configuration.environment)
    return dict(profile.engine.environment)


@pytest.fixture
def sdk(client: "openai.OpenAI", model: str) -> Sdk:
    """The server under test, accessed with the ``openai`` package.

    Args:
        client: An OpenAI client for the server under test.
        model: The served name of the model.
    """
    return Sdk(client, model)


@pytest.fixture
def judge(request: pytest.FixtureRequest, conformance: Session, api: Api) -> Judge:
    """Judges the server by one case of ``fixtures/api/cases.toml``.

    Args:
        request: The test, whose stash gets the deviations that the judge excuses or does not find.
        conformance: The run, whose report gets the judge's remarks.
        api: The API of the server under test.
    """
    answered = request.config.stash.setdefault(_WELL, {})
    remark = functools.partial(conformance.run.record.remark, at_once=False)
    kept = request.node.stash
    excused = kept.setdefault(DEVIATIONS, [])
    symptoms = kept.setdefault(SYMPTOMS, [])
    mended = kept.setdefault(MENDED, [])
    return Judge(api, remark, answered, excused=excused, symptoms=symptoms, mended=mended)


@pytest.fixture
def candidate(conformance: Session, api: Api, judge: Judge, profile: Profile) -> exams.Candidate:
    """The exam of the profile: sends its questions to the server under test, and judges answers.

    Args:
        conformance: The run, whose report gets remarks on the answers.
        api: The API of the server under test.
        judge: The judge of the API cases.
        profile: The profile, which names the exam.
    """
    return exams.Candidate(
        api, judge, exam.load(profile.correctness.exam), conformance.run.record.remark
    )
