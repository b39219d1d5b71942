"""What the API tests are given: a client that holds every answer against the schema, what the
engine can do, and the cases."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sm121.api import cases
from sm121.api.cases import Case
from sm121.api.client import Api
from sm121.core.server import Server
from sm121.engines import capabilities as engine_capabilities
from sm121.engines.capabilities import Capabilities
from sm121.engines.detection import detect
from sm121.plugin.run import Run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "api_cases: run with each case of fixtures/api/cases.toml as `case`"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("api_cases") is not None:
        metafunc.parametrize("case", cases.shipped().case, ids=str)


@dataclass
class _Known:
    """What was found out about the servers of this run, by address."""

    capabilities: dict[str, Capabilities] = field(default_factory=dict)
    healthy: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="session")
def _known() -> _Known:
    return _Known()


@pytest.fixture
def capabilities(conformance: Run, server: Server, _known: _Known) -> Capabilities:
    """What the server under test can do. Ask with ``require``: what it cannot is NOT_RUN."""
    address = server.endpoint.base_url
    if address not in _known.capabilities:
        if server.managed:
            version = server.version or conformance.file.engine.version
            found = engine_capabilities.of(server.engine, version)
        else:
            found = detect(server, conformance.settings.attached_engine)
            conformance.file.engine.name = found.engine
            conformance.file.engine.version = found.version
        _known.capabilities[address] = found
    return _known.capabilities[address]


@pytest.fixture
def api(server: Server, capabilities: Capabilities) -> Api:
    """The API of the server under test; every answer is valid, or the test fails."""
    return Api(server.endpoint, capabilities)


@dataclass(frozen=True)
class Judge:
    """Holds the server against a case. Notes are kept in the report."""

    _run: Run
    _api: Api
    _known: _Known

    def __call__(self, case: Case) -> str | None:
        """What is wrong; None when nothing is, or only what a note says."""
        address = self._api.endpoint.base_url
        if address not in self._known.healthy:
            self._known.healthy[address] = cases.healthy(self._api)
        judged = cases.judge(self._api, case, self._known.healthy[address])
        if judged.problem is not None and judged.problem.fails:
            return judged.problem.text
        if judged.problem is not None:
            self._run.remark(f"{case.id}: {judged.problem.text}", at_once=False)
        elif case.tier == "unspecified":
            text = f"{case.id}: unspecified ({case.why}); seen: {judged.seen[:100]}"
            self._run.remark(text, at_once=False)
        return None

    def known(self, case: str, kind: str, text: str) -> bool:
        """Whether a failure is a known deviation of this engine's version; it is noted then."""
        deviation = self._api.capabilities.deviation(case, kind)
        if deviation is not None:
            title = self._api.capabilities.file.title
            said = f"{case}: known of {title} {deviation.versions}: {text}"
            self._run.remark(said, at_once=False)
        return deviation is not None


@pytest.fixture
def judge(conformance: Run, api: Api, _known: _Known) -> Judge:
    """Holds the server against a case of ``fixtures/api/cases.toml``."""
    return Judge(conformance, api, _known)
