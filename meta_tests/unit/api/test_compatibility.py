"""OpenAI's compatibility test, with scripted engines over HTTP, in the chat API and the Responses
API."""

import itertools
import json
import time
import tomllib

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.folders import DATA
from sm121.api import compatibility
from sm121.api.client import CHAT, RESPONSES, Api
from sm121.core import data_file, profile
from sm121.core.server import Endpoint
from sm121.core.unmet import Unmet
from sm121.core.verdict import Inconclusive, NotRun
from sm121.engines import capabilities

TEMPLATES = tomllib.loads((DATA / "tool-answers.toml").read_text("utf-8"))
CANARY = profile.load("cpu-tiny-gpt-oss")
REAL = profile.load("sm121-gpt-oss-120b")
(SCORE,) = (score for score in REAL.correctness.scores if score.tries)
FILE = data_file.load(f"scores/{SCORE.task}.toml", compatibility._File)
CASES = {case.question: case for case in FILE.cases}
CALLS = itertools.count(1)
#: Changes of a correct call (name, arguments, reasoning). None stands for no call, 500 for an
#: error.
FAULTS = {
    "another tool": (lambda call: ("generate_chart", *call[1:]), "got generate_chart"),
    "a tool that there is not": (lambda call: ("get_status", *call[1:]), "got get_status"),
    "arguments cut off": (lambda call: (call[0], call[1][:-1], call[2]), "are not JSON"),
    "arguments in a fence": (lambda c: (c[0], f"```json\n{c[1]}\n```", c[2]), "are not JSON"),
    "arguments by another schema": (
        lambda c: (c[0], '[{"city": 1}]', c[2]),
        "that match its schema",
    ),
    "every third without": (lambda c: c if next(CALLS) % 3 else None, "pass@3: 12 of 12 right"),
    "no calls": (lambda _call: None, "a call of get_system_health, got none"),
    "no reasoning": (lambda call: (*call[:2], ""), "of 36 answers 36 are invalid"),
    "errors": (lambda _call: 500, "got 500"),
}
QUICK = {("every third without", RESPONSES), ("arguments cut off", CHAT)}
SHORT = {"questions": 12, "tries": 3}


def right(call: tuple[str, str, str]) -> tuple[str, str, str]:
    return call


def judged(chat, responses, folder, engine="vllm", *, dies_at_results=False, **update) -> list[str]:
    """Return the remarks on a server that changes its right calls in the given way.

    The keys are APIs."""
    scripts = {CHAT: chat, RESPONSES: responses}
    requests = []
    remarks = list[str]()

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            body = self.asked()
            requests.append(body)
            messages = body.get("messages") or body["input"]
            case = CASES[messages[0]["content"]]
            is_first = len(messages) == 1
            call = (case.tool, json.dumps(case.arguments), "Hm.")
            call = scripts[self.path](call) if is_first else None
            if call == 500 or (dies_at_results and not is_first):
                return self.say({"error": {"message": "died", "type": "InternalServerError"}}, 500)
            text = TEMPLATES[self.path]["call" if call else "end"]
            for word, value in zip(("NAME", "ARGUMENTS", "REASONING"), call or (), strict=False):
                text = text.replace(word, json.dumps(value))
            return self.say(text)

    score = SCORE.model_copy(update=update)
    update = {"correctness": REAL.correctness.model_copy(update={"scores": (score,)})}
    with serving(Handler) as url:
        api = Api(Endpoint(url, "key", "m"), capabilities.capabilities_of(engine, "0.32.0"))
        compatibility.judge_scores(
            api, REAL.model_copy(update=update), folder / "scores", remarks.append
        )
    assert {body["tools"][0]["type"] for body in requests} == {"function"}
    for body in requests:
        assert "temperature" not in body
    return remarks


def test_a_server_that_calls_its_tools_has_its_score(tmp_path):
    by_chat, by_responses = judged(right, right, tmp_path)
    assert "pass@5: 30 of 30 right" in by_chat and "pass^5: 30 of 30 right" in by_responses
    assert "of 150 answers 0 are invalid, 0 have other arguments" in by_chat
    assert len([*(tmp_path / "scores").glob("*.jsonl")]) == 2


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow("another of its kind"))
        for each in itertools.product(FAULTS, (CHAT, RESPONSES))
    ],
)
def test_a_fault_of_one_api_fails(tmp_path, name, path):
    fault, text = FAULTS[name]
    scripts = (fault, right) if path == CHAT else (right, fault)
    with pytest.raises(Unmet) as caught:
        judged(*scripts, tmp_path, **SHORT)
    (fact,) = caught.value.facts
    assert path in fact.about and text in str(fact)


def test_a_server_that_dies_of_results_is_red(tmp_path):
    with pytest.raises(Unmet, match="died"):
        judged(right, right, tmp_path, dies_at_results=True, **SHORT)


def test_other_arguments_by_the_schema_are_counted_and_green(tmp_path):
    def elsewhere(call: tuple[str, str, str]) -> tuple[str, str, str]:
        return (call[0], '{"location": "Rome"}', call[2]) if call[0] == "get_weather" else call

    remarks = judged(right, elsewhere, tmp_path, tries=1)
    assert "30 of 30 right" in remarks[1] and "5 have other arguments" in remarks[1]


@pytest.mark.parametrize(
    ("fault", "update", "text"),
    [
        (lambda c: c if "location" not in c[1] else None, {"tries": 1}, "25 of 30 right"),
        (lambda call: time.sleep(0.1) or call, {"within_s": 0.2}, "an end within 0 s"),
        (right, {"questions": 2, "tries": 2}, "2 of 2 right"),
    ],
    ids=["one tool of six", "too slow", "all of too few questions"],
)
def test_an_undecided_score_is_inconclusive(tmp_path, fault, update, text):
    with pytest.raises(Inconclusive, match=text):
        judged(right, fault, tmp_path, **update)


def test_an_engine_without_tools_in_responses_is_judged_by_chat(tmp_path):
    with pytest.raises(NotRun, match="by /v1/responses"):
        judged(right, right, tmp_path, engine="sglang", **SHORT)
    with pytest.raises(Unmet, match="by /v1/chat/completions"):
        judged(FAULTS["no calls"][0], right, tmp_path, engine="sglang", **SHORT)


def test_the_canary_has_a_reason_without_tool_scores(tmp_path):
    assert "two tools" in CANARY.correctness.cannot["tool_scores"]
    with pytest.raises(NotRun, match="profile cpu-tiny-gpt-oss has no"):
        compatibility.judge_scores(None, CANARY, tmp_path, str)
