"""What engines can do: the files, which engine a server is, and tests that ask for more."""

import itertools
from contextlib import ExitStack

import pytest
from data_rows import from_data
from loopback import JsonHandler, serving

from sm121.api.client import Api
from sm121.api.guarded_client import GuardedClient
from sm121.core import errors, profile
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun
from sm121.engines import capabilities, detection
from sm121.session import target
from sm121.session.settings import Settings


@pytest.fixture
def answering():
    """A server that answers GETs with these bodies by path; where it listens."""
    with ExitStack() as servers:

        def start(bodies: dict[str, object]) -> Server:
            class Handler(JsonHandler):
                def do_GET(self):
                    found = self.path in bodies
                    self.say(bodies.get(self.path, {"detail": "no"}), 200 if found else 404)

            endpoint = Endpoint(servers.enter_context(serving(Handler)), "key", "canary")
            return Server(endpoint, False, "openai-compatible", None, None, None, None)

        yield start


def owned_by(owner: str) -> dict[str, object]:
    return {"object": "list", "data": [{"id": "canary", "owned_by": owner}]}


@from_data
def test_an_attached_server_is_recognised(answering, bodies, engine, version):
    found = detection.detect(answering(bodies))
    assert (found.engine, found.version) == (engine, version)


@pytest.mark.parametrize(("counter", "refused"), [("spec_decode_num_drafts", 2), ("prompts", 0)])
def test_a_server_that_speculates_lacks_what_vllm_refuses_then(answering, counter, refused):
    pages = {"/v1/models": owned_by("vllm"), "/version": {"version": "0.32.0"}}
    can = detection.detect(answering(pages | {"/metrics": f"vllm:{counter}_total 0.0\n"}))
    missing = [*filter(None, map(can.missing, ("logit_bias", "min_p")))]
    assert len(missing) == refused
    assert all("which speculates" in reason for reason in missing)
    assert can.can("top_k")


@from_data
def test_replicas_behind_one_address_are_said_before_the_first_test(starts, versions, seen):
    """It was a crash in the middle of the run: "ended, and was perhaps started again"."""
    moments, releases = itertools.cycle(starts), itertools.cycle(versions)

    class Handler(JsonHandler):
        def do_GET(self):
            if self.path == "/version":
                self.say({"version": next(releases)})
            else:
                self.say(f"process_start_time_seconds {next(moments)}\n", kind="text/plain")

    with serving(Handler) as url:
        asked = Settings(arch="cpu", profile=profile.load("cpu-tiny-gpt-oss"), base_url=url)
        obstacle = target.resolve(asked, ()).obstacle or ""
    assert obstacle.startswith("several processes answer at") is (seen is not None), obstacle
    assert (seen or "") in obstacle


def test_the_user_knows_better(answering):
    server = answering({"/v1/models": owned_by("vllm"), "/props": {"build_info": "b7"}})
    found = detection.detect(server, "llama-cpp")
    assert (found.engine, found.version) == ("llama-cpp", "b7")
    with pytest.raises(errors.UsageError, match=r"expected one of .*llama-cpp.*vllm"):
        detection.detect(server, "ollama")


def test_every_engine_answers_to_everything_and_says_why():
    for file in capabilities.shipped().values():
        assert set(file.capabilities) == set(capabilities.NAMES)
        for name, own in file.capabilities.items():
            assert own.can or own.reason, (file.name, name)


@from_data
def test_a_request_says_what_it_needs(path, body, name):
    assert name in capabilities.needed(path, body)
    assert name not in capabilities.needed("/v1/completions", {"prompt": "a"})


def test_what_the_engine_cannot_do_is_not_sent():
    """Neither by the SDK nor by the client of our own: nobody listens at that address."""
    endpoint = Endpoint("http://127.0.0.1:9", "key", "canary")
    llama = capabilities.of("llama-cpp", "b7")
    with pytest.raises(NotRun, match=r"llama-server b7: min_tokens: no such parameter"):
        Api(endpoint, llama).complete("a", min_tokens=3)
    with GuardedClient(endpoint, llama) as client, pytest.raises(NotRun, match="min_tokens"):
        client.completions.create(model="canary", prompt="a", extra_body={"min_tokens": 3})
    with pytest.raises(NotRun, match="regex: grammars are GBNF"):
        llama.structured("regex", "a+")


def test_structured_output_is_asked_for_as_the_engine_wants_it():
    assert capabilities.of("vllm", "0.32.0").structured("regex", "a+") == {
        "structured_outputs": {"regex": "a+"}
    }
    assert capabilities.of("sglang", "0.5.23").structured("regex", "a+") == {"regex": "a+"}


def test_a_version_before_the_parameter_cannot():
    assert capabilities.of("vllm", "0.10.1").missing("token_ids")
    assert not capabilities.of("vllm", "0.32.0").missing("token_ids")
    assert not capabilities.of("vllm", "0.33.1rc2.dev5+g1234").missing("token_ids")
    assert capabilities.of("vllm", None).missing("token_ids")


@from_data
def test_no_certificate_asks_for_what_a_release_did_not_have(engine, version, ability, missing):
    """But for token ids, without which none is certified."""
    abilities = ("logprobs", "bad_words") if ability is None else (ability,)
    with pytest.raises(NotRun) as raised:
        capabilities.of(engine, version).require(*abilities)
    assert raised.type is missing


def test_a_run_says_what_an_engine_cannot_and_which_engine_it_is(fault_server, run_pytest):
    status, run = run_pytest(
        "--arch", "cpu", *fault_server("created").options,
        "--engine", "llama-cpp", "tests/test_correctness.py",
        "-k", "test_min_tokens or test_regex or test_models_are",
    )  # fmt: skip
    verdicts = {t["id"].split("::")[1]: (t["verdict"], t["message"]) for t in run.verdict["tests"]}
    assert status == 0 and verdicts["test_models_are_as_published"][0] == "PASS", run.output
    verdict, message = verdicts["test_regex_is_kept"]
    assert verdict == "NOT_RUN" and "grammars are GBNF" in message, message
    assert run.verdict["engine"]["name"] == "llama-cpp"


def test_a_bug_of_a_release_comes_with_its_issue_and_asks_to_be_closed_when_mended(
    fault_server, run_pytest
):
    _, run = run_pytest(
        "--arch", "cpu", *fault_server("old").options,
        "--engine", "vllm", "meta_tests/scenarios/known_bugs.py",
    )  # fmt: skip
    said = {test["id"].split("::")[1]: test["message"] for test in run.verdict["tests"]}
    bug = said["test_answers_in_a_form_are_right"]
    assert "known of >=0.27,<0.32: " in bug and "vllm/issues/22519" in bug, bug
    assert "known of" not in said["test_no_harmony_error_in_the_log"], "another text, another bug"
    assert run.verdict["verdict"] == "FAIL", "a known bug is a bug"
    closed = [line for line in run.verdict["remarks"] if "close the range" in line]
    assert not closed, "0.29 is not in a range whose test holds here"


def test_what_is_known_of_releases():
    def known(version: str, name: str) -> list[str]:
        own = capabilities.of("vllm", version)
        return [bug.source for bug in own.bugs(f"tests/test_correctness.py::{name}")]

    tool, fp32 = "test_a_tool_can_be_required", "vllm/pull/56252"
    assert "vllm/issues/44216" in known("0.26.0", tool)[0]
    assert [fp32 in source for source in known("0.27.0", tool)] == [True]
    assert known("0.32.0", tool) == []
    (bug,) = [own for own in capabilities.of("vllm", "0.26.0").file.bugs if "44216" in own.source]
    assert bug.mended_by(f"tests/test_correctness.py::{tool}")
    assert not bug.mended_by("tests/test_correctness.py::test_a_tool_can_be_named")


def test_what_a_model_cannot_is_said_by_its_profile(fault_server, run_pytest):
    _, run = run_pytest(
        "--arch", "cpu", *fault_server().options,
        "tests/test_correctness.py", "-k", "in_parallel",
    )  # fmt: skip
    (test,) = run.verdict["tests"]
    assert test["verdict"] == "NOT_RUN" and "one call a turn" in test["message"], test


def test_metrics_that_a_server_does_not_tell_are_not_zero(fault_server, run_pytest):
    for fault in ("none", "no-metrics"):
        server = fault_server(fault)
        status, run = run_pytest(
            "--arch", "cpu", *server.options,
            "meta_tests/scenarios/prefix_hits.py",
        )  # fmt: skip
        assert status == 0, run.output
