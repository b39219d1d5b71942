"""The facts about an engine when a run opens, and the first screen."""

from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import stand_in
from sm121.core import profile
from sm121.core.server import Endpoint, Server
from sm121.plugin import terminal
from sm121.run.record import Target
from sm121.run.verdict_file import VerdictFile
from sm121.session import opening
from sm121.session.given_attached import GivenServer
from sm121.session.options import GivenTarget
from sm121.session.session import Session
from sm121.session.settings import Settings

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("reader", "version", "says"),
    [
        ("vllm", "0.32.0", "engine: vllm 0.32.0, attached, model gpt-oss"),
        ("sglang", None, "engine: sglang, attached, model gpt-oss"),
        (None, None, "engine: openai-compatible, attached, model gpt-oss"),
    ],
    ids=["vLLM", "an engine without /version", "an unknown engine"],
)
def test_the_first_screen_has_the_version_of_an_attached_server(reader, version, says, monkeypatch):
    server = Server(
        Endpoint(URL, "", "gpt-oss"), False, "openai-compatible", version, None, None, None,
        reader=reader,
    )  # fmt: skip
    monkeypatch.setattr(opening.targets, "attached_server", lambda *_: server)
    cpu = profile.load("cpu-tiny-gpt-oss")
    settings = Settings(target=GivenTarget(profile=cpu), attached=GivenServer(base_url=URL))
    target, _, engine = opening._look_at_engine(settings, Target("cpu", cpu, None))
    assert (engine.version, engine.managed) == (version, False)
    run = VerdictFile(
        arch=target.arch, profile=cpu.name, started="2026-11-29T10:00:00+00:00", engine=engine
    )
    assert terminal.target(SimpleNamespace(run=stand_in(file=run)))[1] == says


def test_a_refused_run_shows_no_line_after_its_report_is_removed():
    """A refused run prints nothing after its report is removed.

    A thread that still reads the environment would otherwise report that it cannot write the
    report."""
    said = []
    record = SimpleNamespace(say=lambda *words: said.append(words), log=SimpleNamespace(path=None))
    servers = SimpleNamespace(sampler=None, kept_log=None)
    report = SimpleNamespace(lock=SimpleNamespace(close=lambda: None))
    session = SimpleNamespace(run=SimpleNamespace(record=record, servers=servers), report=report)
    Session.withdraw(session)
    record.say("report", "the report cannot be written")
    assert said == []
