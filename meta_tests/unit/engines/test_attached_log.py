"""The mark of a request, the start and the pid decide whether a log is the attached server's."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meta_tests.fakes.scripted_engine import lines_of_a_start
from meta_tests.fakes.scripted_sessions import attached_engine
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint, Server
from sm121.engines import attached_log
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart
from sm121.session import target
from sm121.session.settings import Settings


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., Server]:
    """Attach to a scripted engine that is started with these arguments, with the engine's log."""

    def attach_with(*arguments: str) -> Server:
        log = tmp_path / "server.log"
        with attached_engine(log, *arguments) as (url, _):
            return target.attach_to(url, log, Settings(), profile.load("cpu-tiny-gpt-oss"))

    return attach_with


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch):
    """Set the time zone of this process and its children."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="access log"),
        pytest.param(["--logs-paths-alone"], id="access log without queries (llama-server)"),
        pytest.param(["--no-access-log", "--log-requests"], id="request ids"),
        pytest.param(["--no-start-time"], id="no start in its metrics"),
    ],
)
def test_a_mark_proves_the_log(attach, arguments):
    server = attach(*arguments)
    assert server.log is not None, server.why_no_log


def test_a_log_without_lines_of_requests_is_not_proven(attach):
    server = attach("--no-access-log")
    assert server.log is None
    assert "no line about the requests" in server.why_no_log
    assert "--disable-uvicorn-access-log" in server.why_no_log


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        pytest.param("llama-cpp", "let the suite start it: --engine llama-cpp", id="llama-server"),
        pytest.param("vllm", "docker logs -f NAME", id="vLLM"),
    ],
)
def test_the_advice_about_a_log_without_requests_is_possible(engine, advice, monkeypatch, tmp_path):
    """No option makes llama-server log its requests."""
    log = tmp_path / "server.log"
    log.write_text("build_info: b11434\n", "utf-8")
    monkeypatch.setattr(attached_log, "_send_marked", lambda _endpoint, _mark: None)
    monkeypatch.setattr(attached_log, "_WRITTEN_WITHIN_S", 0.0)
    endpoint = Endpoint("http://127.0.0.1:9", "key", "mine")
    doubt = attached_log._does_not_grow(endpoint, log, KernelPath(), engine)
    assert doubt is not None and advice in doubt.text
    assert ("vLLM" in doubt.text) == (engine == "vllm")


@pytest.mark.parametrize("zone_of_server", ["UTC", "<-09>9"])
def test_a_start_is_read_in_utc_and_in_the_zone_of_the_suite(
    attach, in_zone, monkeypatch, zone_of_server
):
    in_zone("<-09>9")
    with monkeypatch.context() as patch:
        # Without a call of tzset, only the server's time zone changes.
        patch.setenv("TZ", zone_of_server)
        server = attach()
    assert server.log is not None, server.why_no_log


def test_a_start_in_a_third_zone_names_the_variable_that_sets_it(attach, in_zone, monkeypatch):
    in_zone("<-09>9")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "<+05>-5")
        server = attach()
    assert server.log is None
    assert "the log's last start is of" in server.why_no_log
    assert "set the variable TZ of the suite to that zone" in server.why_no_log


@pytest.mark.parametrize(
    ("entry", "logged", "is_of_another"),
    [
        pytest.param({}, {"model": "/models/x.gguf"}, False, id="an alias of llama.cpp"),
        pytest.param({"root": "/a", "parent": "base"}, {"model": "base"}, None, id="an adapter"),
        pytest.param({"root": "/a"}, {"model": "/b"}, True, id="another root"),
        pytest.param({}, {"model": "/b", "served_model": "b"}, True, id="another served name"),
    ],
)
def test_a_model_is_another_one_only_if_both_sides_name_it(
    monkeypatch, entry, logged, is_of_another
):
    pages = {"/v1/models": {"data": [{"id": "mine", **entry}]}, "/props": {}}
    monkeypatch.setattr(attached_log, "json_of", lambda _http, page: pages[page])
    path = KernelPath(log=LogStart(**logged))
    doubt = attached_log._wrong_model(path, Endpoint("http://127.0.0.1:9", "key", "mine"))
    assert (doubt.is_of_another if doubt is not None else None) is is_of_another


@pytest.mark.parametrize(
    ("logged", "is_of_another"),
    [("/models/x.gguf", None), ("/models/y.gguf", True)],
    ids=["its own log", "the log of another model"],
)
def test_an_alias_of_llama_server_hides_the_model_only_in_the_list(
    monkeypatch, logged, is_of_another
):
    """The alias of a llama-server hides only its name in the list of models.

    The endpoint /props still contains the path of the model that the log shows."""
    pages = {
        "/v1/models": {"data": [{"id": "mine"}]},
        "/props": {"model_alias": "mine", "model_path": "/models/x.gguf"},
    }
    monkeypatch.setattr(attached_log, "json_of", lambda _http, page: pages[page])
    path = KernelPath(log=LogStart(model=logged))
    doubt = attached_log._wrong_model(path, Endpoint("http://127.0.0.1:9", "key", "mine"))
    assert (doubt.is_of_another if doubt is not None else None) is is_of_another


def test_the_log_of_another_server_is_refused(tmp_path):
    """The log of another server is refused.

    Otherwise, a run with it would be PASS although its kernel path is unknown."""
    others = {
        "expected a log of vllm 0.32.0, got one of 0.24.0": {"version": "0.24.0"},
        "got one of other": {"model": "other", "path": "/models/other"},
        "the log's last start is of": {"at": time.time() - 3 * 86400},
    }
    given = tmp_path / "given.log"
    chosen = profile.load("cpu-tiny-gpt-oss")
    with attached_engine(tmp_path / "server.log") as (url, _):
        for why, start in others.items():
            given.write_text(lines_of_a_start(**start))
            with pytest.raises(UsageError, match=f"--server-log .* log of the server at .*{why}"):
                target.attach_to(url, given, Settings(), chosen)
