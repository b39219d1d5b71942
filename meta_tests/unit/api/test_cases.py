"""How a server may refuse an invalid request, and which deviations are known."""

from collections import Counter
from unittest.mock import Mock

import pytest

from meta_tests.fakes.api_answers import COMPLETION, ENDPOINT, ERROR, answer, replying
from sm121.api import cases, client
from sm121.api.cases import Case
from sm121.api.client import Api
from sm121.client.exchange import Exchange
from sm121.core import verdict
from sm121.core.server import NO_KEY, Endpoint
from sm121.engines import capabilities
from sm121.plugin import fixtures


def judged(case: Case, *answers: Exchange, engine: str = "vllm", version: str | None = "0.32.0"):
    """Return the result of a case with the given answers.

    The last one is the answer to the plain request afterwards."""
    return cases.judge_case(replying(*answers, engine=engine, version=version), case, " Paris.")[1]


#: The smallest id of a special token in gpt-oss's vocabulary.
FIRST_OF_HARMONY = 199_998
WELL = answer(200, COMPLETION)
#: The bodies to which rows refer.
BODIES = {"ERROR": ERROR, "COMPLETION": COMPLETION}


def case(name: str) -> Case:
    return next(each for each in cases.shipped().case if each.id == name)


@pytest.mark.parametrize(
    ("name", "status", "body", "kind", "fails"),
    [
        ("negative-max-tokens", 400, "ERROR", None, None),
        ("negative-max-tokens", 200, "COMPLETION", "served", True),
        ("negative-max-tokens", 500, "ERROR", "server_error", True),
        ("negative-max-tokens", None, None, "hang", True),
        pytest.param(
            "negative-max-tokens",
            400,
            {"detail": "no"},
            "no_error_object",
            True,
            id="negative-max-tokens, no error object",
        ),
        ("negative-max-tokens", 200, "ERROR", "served", True),
        ("wrong-model", 418, "ERROR", "wrong_status", True),
        ("nul-character", 400, "ERROR", "refused", True),
        ("huge-logit-bias", 400, "ERROR", None, None),
        # Unspecified behaviour is a remark, unless the server breaks.
        pytest.param(
            "unknown-field",
            400,
            {"detail": "no"},
            "no_error_object",
            False,
            id="unknown-field, no error object",
        ),
        ("unknown-field", 500, "ERROR", "server_error", True),
        # Only the known deviation is excused.
        pytest.param(
            "wrong-key",
            401,
            {"error": "Unauthorized"},
            "no_error_object",
            False,
            id="wrong-key, known of vLLM 0.32",
        ),
        ("wrong-key", 200, "COMPLETION", "served", True),
    ],
)
def test_each_answer_to_a_case_has_its_verdict(name, status, body, kind, fails):
    """Each answer to a case has its own verdict. A row without a status stands for no answer."""
    first = answer(status, BODIES.get(str(body), body), failure="" if status else "no answer")
    problem = judged(case(name), first, WELL)
    assert (problem and problem.kind) == kind
    assert problem is None or problem.fails == fails


def test_a_server_that_asks_for_no_key_is_not_asked_with_a_wrong_one():
    endpoint = Endpoint("http://127.0.0.1:1", NO_KEY, "canary")
    for name in ("wrong-key", "wrong-key-chat"):
        with pytest.raises(verdict.Inapplicable, match="attached without --api-key"):
            cases.judge_case(
                Api(endpoint, capabilities.capabilities_of("vllm", None)), case(name), " Paris."
            )
    assert "omit --api-key" in judged(case("wrong-key"), WELL, WELL).fact.observed


#: Each known deviation of vLLM, as observed on the wire, with its case and its kind.
DEVIATIONS = {
    "wrong-key": (401, {"error": "Unauthorized"}),
    "wrong-key-chat": (401, {"error": "Unauthorized"}),
    "unknown-path": (404, {"detail": "Not Found"}),
    "body-is-not-utf-8": (400, {"detail": "There was an error parsing the body"}),
    "one-model": (404, {"detail": "Not Found"}),
    "empty-messages": (200, "COMPLETION"),
    "user-without-content": (200, "COMPLETION"),
    "tool-result-of-no-call": (200, "COMPLETION"),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_known_deviation_is_excused_until_it_is_mended(name):
    """A known deviation is excused until a release fixes it.

    0.24 has the same deviations as 0.32, and an unknown release may have them, too."""
    status, body = DEVIATIONS[name]
    deviation = answer(status, BODIES.get(str(body), body))
    later = ("0.24.0", "0.32.0", "0.33.0", "0.34.0", "0.33.1rc2.dev5+g1234")
    for version in (*later, None, "0.11.0"):
        problem = judged(case(name), deviation, WELL, version=version)
        assert problem is not None and problem.fails == (version not in later), version
        assert problem.fails or "a known deviation of vLLM" in problem.fact.about, version


def test_a_deviation_that_is_mended_asks_to_be_removed():
    excused: list[list[str]] = []
    symptoms: list[str] = []
    mended: list[str] = []

    def remarks(name: str, reply: Exchange, version: str = "0.40.0") -> list[str]:
        lines: list[str] = []
        api = replying(reply, WELL, version=version)
        judge = cases.Judge(api, lines.append, {ENDPOINT.base_url: " Paris."})
        judge(case(name))
        excused.append(judge.excused)
        symptoms.extend(judge.symptoms)
        mended.extend(judge.mended)
        return lines

    (remark,) = remarks("wrong-key", answer(401, ERROR))
    assert (
        "0.40.0 does not show it: end the range of versions in fixtures/engines/vllm.toml" in remark
    )
    assert remarks("wrong-key", answer(401, {"error": "Unauthorized"})) == []
    assert len(symptoms) == 1 and "a known deviation of vLLM >=0.14:" in symptoms[0], (
        "apart from the remarks"
    )
    assert excused == [[], ["wrong-key: no_error_object"]], "what a trusted run is asked about"
    assert remarks("negative-max-tokens", answer(400, ERROR)) == []
    assert remarks("wrong-key", answer(401, ERROR), "0.11.0") == []
    assert mended == [remark]


def test_the_end_token_of_a_choice_is_known_from_where_the_grammar_allows_it():
    for version, is_recorded in (("0.26.0", False), ("0.28.0", True), ("0.34.0", True)):
        deviation = capabilities.capabilities_of("vllm", version).deviation(
            "choice-in-a-chat", "special_token"
        )
        assert (deviation is not None) == is_recorded, version


def test_a_case_fails_if_later_answers_are_wrong():
    other = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "text": "!!!!"}]}
    problem = judged(case("unknown-field"), answer(400, ERROR), answer(200, other))
    assert problem is not None and problem.fails and problem.kind == "serves_wrongly_afterwards"


def test_a_server_that_is_not_well_to_begin_with_is_not_judged():
    with pytest.raises(AssertionError, match="before any invalid one"):
        cases.healthy(replying(answer(503, "dead"), version="0.32.0"))


def test_every_case_says_why_and_none_comes_twice():
    tiers = Counter(case.tier for case in cases.shipped().case)
    assert len(tiers) == 3 and min(tiers.values()) >= 5, tiers


def test_cases_of_chats_need_chats():
    metafunc = Mock()
    fixtures.parametrize(metafunc)
    (_, parameters) = metafunc.parametrize.call_args.args
    by_id = {each.id: each.marks for each in parameters}
    for case in cases.shipped().case:
        chats = case.path in (client.CHAT, client.RESPONSES)
        marks = by_id[case.id]
        assert bool(marks) == chats, case.id


def test_cases_with_the_tokens_of_harmony_need_its_ability():
    """A model with a smaller vocabulary rightly refuses harmony's tokens, so these cases need
    harmony's ability."""
    with_tokens = set()
    for case in cases.shipped().case:
        biased = map(int, case.body.get("logit_bias", ()))
        if case.expect == "served" and max(biased, default=0) >= FIRST_OF_HARMONY:
            with_tokens.add(case.id)
    metafunc = Mock()
    fixtures.parametrize(metafunc)
    (_, parameters) = metafunc.parametrize.call_args.args
    marked = {each.id for each in parameters if pytest.mark.ability("harmony") in each.marks}
    assert len(with_tokens) == 5 and marked == with_tokens
