"""The abilities of engines: their files, how an engine is recognised, and tests that need more
abilities."""

import dataclasses
import itertools
from contextlib import ExitStack

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from sm121.api.client import Api
from sm121.api.guarded_client import GuardedClient
from sm121.core import errors, profile
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Inapplicable, NotRun
from sm121.engines import capabilities, detection
from sm121.session import target
from sm121.session.given_attached import GivenServer
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings


@pytest.fixture
def answering():
    """Start a server that answers GET requests with these bodies, and yield its address.

    The keys are paths."""
    with ExitStack() as servers:

        def start(bodies: dict[str, object]) -> Server:
            class Handler(JsonHandler):
                def do_GET(self):
                    has_page = self.path in bodies
                    self.say(bodies.get(self.path, {"detail": "no"}), 200 if has_page else 404)

            endpoint = Endpoint(servers.enter_context(serving(Handler)), "key", "canary")
            return Server(endpoint, False, "openai-compatible", None, None, None, None)

        yield start


def owned_by(owner: str) -> dict[str, object]:
    return {"object": "list", "data": [{"id": "canary", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("bodies", "engine", "version"),
    [
        pytest.param(
            {
                "/v1/models": {"object": "list", "data": [{"id": "canary", "owned_by": "vllm"}]},
                "/version": {"version": "0.33.0"},
            },
            "vllm",
            "0.33.0",
            id="/v1/models object list data id canary owned_by vllm",
        ),
        pytest.param(
            {
                "/v1/models": {"object": "list", "data": [{"id": "canary", "owned_by": "sglang"}]},
                "/get_server_info": {"version": "0.5.23"},
            },
            "sglang",
            "0.5.23",
            id="/v1/models object list data id canary owned_by sglang",
        ),
        pytest.param(
            {
                "/v1/models": {"object": "list", "data": [{"id": "canary", "owned_by": "me"}]},
                "/props": {"build_info": "b9"},
            },
            "llama-cpp",
            "b9",
            id="/v1/models object list data id canary owned_by me",
        ),
        pytest.param(
            {"/v1/models": {"object": "list", "data": [{"id": "canary", "owned_by": "llamacpp"}]}},
            "llama-cpp",
            None,
            id="/v1/models object list data id canary owned_by",
        ),
        pytest.param(
            {"/v1/models": {"object": "list", "data": [{"id": "canary", "owned_by": "somebody"}]}},
            "openai",
            None,
            id="/v1/models object list data id canary owned_by (2)",
        ),
        pytest.param(
            {"/v1/models": ["nonsense"]}, "openai", None, id="/v1/models nonsense, openai"
        ),
        pytest.param({}, "openai", None, id="openai"),
    ],
)
def test_an_attached_server_is_recognised(answering, bodies, engine, version):
    detected = detection.detect(answering(bodies))
    assert (detected.engine, detected.version) == (engine, version)


@pytest.mark.parametrize(
    ("key", "types", "drafts"),
    [
        ("speculative.types", "none", False),
        ("speculative.types", "ngram-simple", True),
        ("speculative.types", "", False),
        ("speculative.types", None, False),
        ("speculative.type", "none", False),
        ("speculative.type", "ngram-simple", True),
        ("no type", "", False),
    ],
)
def test_a_llama_server_that_speculates_sends_no_log_probabilities(answering, key, types, drafts):
    """Its /metrics contain the counters of drafts also without speculation."""
    params = {"params": {key: types}}
    pages = {
        "/v1/models": owned_by("llamacpp"),
        "/props": {"build_info": "b11434", "default_generation_settings": params},
        "/metrics": "llamacpp:spec_decode_num_drafts_total 0\n",
    }
    can = detection.detect(answering(pages))
    assert can.engine == "llama-cpp"
    assert can.can("logprobs") == can.can("chat_logprobs") == (not drafts)


@pytest.mark.parametrize(("counter", "refused"), [("spec_decode_num_drafts", 2), ("prompts", 0)])
def test_a_server_that_speculates_lacks_what_vllm_refuses_then(answering, counter, refused):
    pages = {"/v1/models": owned_by("vllm"), "/version": {"version": "0.32.0"}}
    can = detection.detect(answering(pages | {"/metrics": f"vllm:{counter}_total 0.0\n"}))
    missing = [*filter(None, map(can.missing, ("logit_bias", "min_p")))]
    assert len(missing) == refused
    for reason in missing:
        assert "with speculative decoding" in reason
    assert can.can("top_k")


@pytest.mark.parametrize(
    ("starts", "versions", "text"),
    [
        pytest.param(
            (1000.0, 2000.0),
            ("0.32.0",),
            "2 different start times",
            id="1000.0 2000.0, 0.32.0, 2 different start times",
        ),
        pytest.param(
            (1000.0, 2000.0, 3000.0),
            ("0.32.0",),
            "3 different start times",
            id="1000.0 2000.0 3000.0, 0.32.0, 3 different start times",
        ),
        pytest.param(
            (1000.0,),
            ("0.32.0", "0.33.0"),
            "0.32.0 and 0.33.0",
            id="1000.0, 0.32.0 0.33.0, 0.32.0 and 0.33.0",
        ),
        # the readings are from one process, and its clock is read with a small difference
        pytest.param((1000.0, 1000.9), ("0.32.0",), None, id="1000.0 1000.9, 0.32.0"),
        pytest.param((1000.0,), ("0.32.0",), None, id="1000.0, 0.32.0"),
    ],
)
def test_replicas_behind_one_address_are_reported_before_the_first_test(starts, versions, text):
    """Replicas behind one address are reported before the first test.

    Before, they were reported as a crash in the middle of the run: "ended, and was perhaps started
    again".
    """
    moments = itertools.cycle(starts)
    releases = itertools.cycle(versions)

    class Handler(JsonHandler):
        def do_GET(self):
            if self.path == "/version":
                self.say({"version": next(releases)})
            else:
                self.say(f"process_start_time_seconds {next(moments)}\n", kind="text/plain")

    with serving(Handler) as url:
        run = Settings(
            target=GivenTarget(arch="cpu", profile=profile.load("cpu-tiny-gpt-oss")),
            attached=GivenServer(base_url=url),
        )
        obstacle = target.resolve(run, ()).obstacle or ""
    assert obstacle.startswith("several processes answer at") is (text is not None), obstacle
    assert (text or "") in obstacle


def test_a_given_engine_overrides_the_detected_one(answering):
    server = answering({"/v1/models": owned_by("vllm"), "/props": {"build_info": "b7"}})
    detected = detection.detect(server, "llama-cpp")
    assert (detected.engine, detected.version) == ("llama-cpp", "b7")
    with pytest.raises(errors.UsageError, match=r"expected one of .*llama-cpp.*vllm"):
        detection.detect(server, "ollama")


def test_every_engine_answers_to_everything_and_says_why():
    for file in capabilities.shipped().values():
        assert set(file.capabilities) == set(capabilities.NAMES)
        for name, row in file.capabilities.items():
            assert row.can or row.reason, (file.name, name)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        pytest.param(
            "/v1/completions",
            {"prompt": [1, 2]},
            "token_prompts",
            id="/v1/completions, prompt 1 2, token_prompts",
        ),
        pytest.param(
            "/v1/completions",
            {"prompt": ["a", "b"]},
            "prompt_lists",
            id="/v1/completions, prompt a b, prompt_lists",
        ),
        pytest.param(
            "/v1/completions",
            {"prompt": "a", "min_tokens": 3},
            "min_tokens",
            id="/v1/completions, prompt a min_tokens 3, min_tokens",
        ),
        pytest.param(
            "/v1/completions",
            {"prompt": "a", "return_token_ids": True},
            "token_ids",
            id="/v1/completions, prompt a return_token_ids True",
        ),
        pytest.param(
            "/v1/completions",
            {"prompt": "a", "prompt_logprobs": 0},
            "prompt_logprobs",
            id="/v1/completions, prompt a prompt_logprobs 0",
        ),
        pytest.param(
            "/v1/completions",
            {"prompt": "a", "n": 2},
            "several_choices",
            id="/v1/completions, prompt a n 2, several_choices",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"return_token_ids": True},
            "chat_token_ids",
            id="/v1/chat/completions, return_token_ids True",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"logprobs": True},
            "chat_logprobs",
            id="/v1/chat/completions, logprobs True, chat_logprobs",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"tools": [{}]},
            "tools",
            id="/v1/chat/completions, tools, tools",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"tool_choice": "required"},
            "tool_choice",
            id="/v1/chat/completions, tool_choice required, tool_choice",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema"}},
            "json_schema",
            id="/v1/chat/completions, response_format type json_schema",
        ),
        pytest.param(
            "/v1/completions",
            {"stream_options": {"include_usage": True}},
            "stream_usage",
            id="/v1/completions, stream_options include_usage True",
        ),
        pytest.param("/v1/responses", {}, "responses", id="/v1/responses, responses"),
    ],
)
def test_the_abilities_that_a_request_needs(path, body, name):
    assert name in capabilities.needed(path, body)
    assert name not in capabilities.needed("/v1/completions", {"prompt": "a"})


def test_requests_that_the_engine_does_not_support_are_not_sent():
    """Neither the SDK nor the suite's client sends requests that the engine does not support.

    No server listens at that address."""
    endpoint = Endpoint("http://127.0.0.1:9", "key", "canary")
    llama = capabilities.capabilities_of("llama-cpp", "b7")
    with pytest.raises(NotRun, match=r"llama-server b7: min_tokens: no such parameter"):
        Api(endpoint, llama).complete("a", min_tokens=3)
    with GuardedClient(endpoint, llama) as client, pytest.raises(NotRun, match="min_tokens"):
        client.completions.create(model="canary", prompt="a", extra_body={"min_tokens": 3})
    with pytest.raises(NotRun, match="regex: grammars are GBNF"):
        llama.structured("regex", "a+")


def test_chats_of_a_model_without_a_chat_template_are_not_sent():
    lacks = {"chats": "the model has no chat template"}
    vllm = dataclasses.replace(capabilities.capabilities_of("vllm", "0.32.0"), lacks=lacks)
    api = Api(Endpoint("http://127.0.0.1:9", "key", "base"), vllm)
    for send in (api.chat, api.respond, api.stream_chat):
        with pytest.raises(NotRun, match="no chat template"):
            send("Hello")
    assert vllm.can("completions") and vllm.can("json_schema") and not vllm.can("tools")


def test_structured_output_is_asked_for_as_the_engine_wants_it():
    regex = {"regex": "a+"}
    vllm = capabilities.capabilities_of("vllm", "0.32.0")
    sglang = capabilities.capabilities_of("sglang", "0.5.23")
    assert vllm.structured("regex", "a+") == {"structured_outputs": regex}
    assert sglang.structured("regex", "a+") == regex


def test_a_version_before_the_parameter_cannot():
    versions = ("0.10.1", "0.32.0", "0.33.1rc2.dev5+g1234", None)
    lacking = [v for v in versions if capabilities.capabilities_of("vllm", v).missing("token_ids")]
    assert lacking == ["0.10.1", None]


@pytest.mark.parametrize(
    ("engine", "version", "ability", "missing"),
    [
        pytest.param(
            "vllm",
            "0.14.0rc1.dev375+g8409484b4",
            None,
            Inapplicable,
            id="vllm, 0.14.0rc1.dev375+g8409484b4",
        ),
        pytest.param(
            "vllm", "0.25.1", None, Inapplicable, id="vllm, 0.25.1, sm121.core.verdict.Inapplicable"
        ),
        # it is unknown whether this engine has the capability
        pytest.param("vllm", None, None, NotRun, id="vllm, NotRun"),
        pytest.param("vllm", "0.9.0", "token_ids", NotRun, id="vllm, 0.9.0, token_ids, NotRun"),
        pytest.param(
            "vllm", "0.9.0", "chat_token_ids", NotRun, id="vllm, 0.9.0, chat_token_ids, NotRun"
        ),
        # without a known release, the replacement must be proven
        pytest.param("llama-cpp", "b11434", None, NotRun, id="llama-cpp, b11434, NotRun"),
    ],
)
def test_no_certificate_asks_for_what_a_release_did_not_have(engine, version, ability, missing):
    """A certificate requires no ability that a release did not have.

    The only exception is token ids, without which no release is certified."""
    abilities = ("logprobs", "bad_words") if ability is None else (ability,)
    with pytest.raises(NotRun) as raised:
        capabilities.capabilities_of(engine, version).require(*abilities)
    assert raised.type is missing


def test_a_run_names_the_engine_and_its_missing_abilities(fault_server, run_pytest):
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


def test_known_bugs_are_shown_with_their_issue_and_close_the_range(fault_server, run_pytest):
    _, run = run_pytest(
        "--arch", "cpu", *fault_server("old").options,
        "--engine", "vllm", "meta_tests/whole/scenarios/known_bugs.py",
    )  # fmt: skip
    texts = {test["id"].split("::")[1]: test["message"] for test in run.verdict["tests"]}
    known = {test["id"].split("::")[1]: test["known_bug"] for test in run.verdict["tests"]}
    bug = texts["test_answers_in_a_form_are_right"]
    assert "known bug of >=0.27,<0.32: " in bug and "vllm/issues/22519" in bug, bug
    assert known["test_answers_in_a_form_are_right"].startswith(">=0.27,<0.32: ")
    assert known["test_no_harmony_error_in_the_log"] is None
    assert "known bug of" not in texts["test_no_harmony_error_in_the_log"], (
        "another text, another bug"
    )
    assert run.verdict["verdict"] == "FAIL", "a known bug is a bug"
    closed = [line for line in run.verdict["remarks"] if "end the range" in line]
    assert not closed, "0.29 is not in a range whose test holds here"


def test_known_bugs_of_releases():
    test = "tests/test_correctness.py::test_a_tool_can_be_required"
    for version, source in (("0.26.0", "vllm/issues/44216"), ("0.27.0", "vllm/pull/56252")):
        assert source in capabilities.capabilities_of("vllm", version).bugs(test)[0].source
    later = capabilities.capabilities_of("vllm", "0.27.0").bugs(test)
    assert not [bug for bug in later if "44216" in bug.source]
    latest = capabilities.capabilities_of("vllm", "0.32.0").bugs(test)
    assert not [bug for bug in latest if bug.checks != ("*",)]
    (bug,) = [
        bug
        for bug in capabilities.capabilities_of("vllm", "0.26.0").file.bugs
        if "44216" in bug.source
    ]
    assert bug.mended_by(test)
    assert not bug.mended_by("tests/test_correctness.py::test_a_tool_can_be_named")


def test_an_ability_missing_in_the_profile_is_not_run(fault_server, run_pytest):
    attached = ("--arch", "cpu", *fault_server().options)
    _, run = run_pytest(*attached, "tests/test_correctness.py", "-k", "in_parallel")
    (test,) = run.verdict["tests"]
    assert test["verdict"] == "NOT_RUN" and "one call a turn" in test["message"], test


@pytest.mark.parametrize("fault", ["none", "no-metrics"])
def test_missing_metrics_are_not_zero(fault_server, run_pytest, fault):
    attached = ("--arch", "cpu", *fault_server(fault).options)
    status, run = run_pytest(*attached, "meta_tests/whole/scenarios/prefix_hits.py")
    assert status == 0, run.output
