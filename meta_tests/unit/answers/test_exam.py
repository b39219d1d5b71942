"""Exams accept right answers of a large model in any words, and refuse wrong ones.

Scripted servers answer over real HTTP; `data/exam-answers.toml` contains the answers."""

import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from operator import mul

import jsonschema
import pytest

from meta_tests.fakes.scripted_chats import Script, ScriptedAnswer, reader, script_of, scripted
from meta_tests.folders import DATA
from meta_tests.unit.answers.test_exam_files import OWN, own_exam, own_profile
from sm121.answers import exam, exam_judging
from sm121.api import cases, client, exams, rendering
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun
from sm121.engines import capabilities

ANSWERS = tomllib.loads((DATA / "exam-answers.toml").read_text("utf-8"))
EXAM = exam.load("gpt-oss-120b")
SECTIONS = ("facts", "dialogues", "tools", "formats")
DOCUMENT = EXAM.document


def _chat(answers: object) -> list[ScriptedAnswer]:
    return answers if isinstance(answers, list) else [answers]  # type: ignore[return-value]


def healthy(section: str, variant: int = 0) -> dict[str, list[ScriptedAnswer]]:
    """Return a right chat for each question. Each chat uses one of the phrasings."""
    rights = {name: answers["right"] for name, answers in ANSWERS[section].items()}
    return {name: _chat(right[variant % len(right)]) for name, right in rights.items()}


def sits(
    section: str, script: Script, paper: exam.Exam = EXAM,
    engine: tuple[str, str] = ("vllm", "0.32.0"), **options,
) -> list[str]:  # fmt: skip
    """Let a server answer a section of the exam, and return the remarks."""
    remarks: list[str] = []
    with scripted(script, **options) as endpoint:
        api = client.Api(endpoint, capabilities.capabilities_of(*engine))
        pupil = exams.Candidate(api, cases.Judge(api, remarks.append, {}), paper, remarks.append)
        if section == "document":
            pupil.recalls(8_000)
        elif section == "conversation":
            pupil.converses(8_000)
        else:
            pupil.passes(section)
    return remarks


def with_one(section: str, question: str, misses: int = 0) -> exam.Exam:
    """Return the exam with only one question, and without allowed misses."""
    whole = EXAM.section(section)
    one = tuple(each for each in whole.questions if each.id == question)
    shorter = whole.model_copy(update={"questions": one, "misses": misses})
    return EXAM.model_copy(update={section: shorter})


def each(kind: str, sections: tuple[str, ...] = SECTIONS) -> list:
    rows = []
    for section in sections:
        for name, answers in ANSWERS[section].items():
            for number, text in enumerate(answers.get(kind, ())):
                rows.append(pytest.param(section, name, _chat(text), id=f"{name}-{number}"))
    return rows


# The data.


def test_the_exam_asks_what_it_should():
    assert [len(EXAM.section(name).questions) for name in SECTIONS] == [30, 10, 8, 5]
    turns = [question.turns for question in EXAM.dialogues.questions]
    generated = []
    for each in turns:
        if all(turn.given is None for turn in each):
            generated.append(each)
    assert all(len(each) > 1 for each in turns) and len(generated) >= 5
    assert len(EXAM.tools.functions) == 5
    forms = set()
    for q in EXAM.formats.questions:
        forms.update(q.form.model_fields_set)
    assert forms == {"json_schema", "regex", "choice"}
    assert len(DOCUMENT.needles) == 5 and len({n.depth for n in DOCUMENT.needles}) == 5


def test_each_question_has_answers_to_try_it_with():
    for name in SECTIONS:
        ids = {question.id for question in EXAM.section(name).questions}
        assert ids == ANSWERS[name].keys()
        for question, answers in ANSWERS[name].items():
            assert len(answers["right"]) >= 3 and len(answers["wrong"]) >= 2, question


@pytest.mark.parametrize("name", ["gpt-oss-120b", "canary"])
def test_expected_calls_fit_the_functions(name):
    """The expected calls of the exam fit the schemas of its functions.

    Text arguments are patterns, so only keys, numbers and objects are compared with the schemas."""
    tools = exam.load(name).section("tools")
    schemas = {f["function"]["name"]: f["function"]["parameters"] for f in tools.functions}
    calls = []
    for q in tools.questions:
        for turn in q.turns:
            calls.extend(turn.calls)
    assert {call.function for call in calls} <= schemas.keys()
    for call in calls:
        jsonschema.validate(call.arguments, schemas[call.function])


# Which answers are right


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("variant", range(3))
def test_a_healthy_server_misses_nothing(section, variant):
    """A healthy server passes with each phrasing, and no allowed miss is used."""
    questions = EXAM.section(section)
    total = len(questions.questions)
    (remark,) = sits(section, script_of(questions, healthy(section, variant)))
    assert remark == f"exam gpt-oss-120b: {section}: {total} of {total} right"


def test_every_phrasing_of_a_fact_is_judged():
    """All phrasings of a fact are judged: the right ones, the wrong ones, and the right phrasings
    of every other fact, which are wrong here.

    The tests over HTTP use three phrasings of each kind.

    Three of each were requested over HTTP."""
    turns = {question.id: question.turns[-1] for question in EXAM.facts.questions}
    for name, answers in ANSWERS["facts"].items():
        phrasings = {}
        for other in turns:
            for text in ANSWERS["facts"][other]["right"]:
                phrasings[text] = other == name
        phrasings |= dict.fromkeys(answers["wrong"], False)
        for text, is_right in phrasings.items():
            missed = exam_judging.miss(turns[name], text, EXAM.facts.unsure)
            assert (missed is None) is is_right, (name, text)
        assert not [text for text in answers["right"] if exam_judging.broken(text, "stop")]


@pytest.mark.parametrize(("section", "question", "wrong"), each("wrong", SECTIONS[1:]))
def test_a_wrong_answer_is_a_miss(section, question, wrong):
    script = script_of(EXAM.section(section), {question: wrong})
    with pytest.raises(AssertionError, match=f"0 of 1 right: {question}: expected .*got "):
        sits(section, script, with_one(section, question))


@pytest.mark.parametrize(("section", "question", "broken"), each("broken", ("formats",)))
def test_an_answer_that_is_not_in_its_form_is_broken(section, question, broken):
    """An answer that does not have the required form fails even if misses are allowed."""
    answers = {**healthy(section), question: broken}
    with pytest.raises(AssertionError, match=f"formats: whole answers, got {question}: "):
        sits(section, script_of(EXAM.section(section), answers))


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("broken", "finish", "why"),
    [
        pytest.param("", None, "a final message", id="empty"),
        pytest.param(None, None, "a final message", id="nothing"),
        pytest.param(" \n", None, "a final message", id="spaces"),
        pytest.param(
            "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
            None,
            "8 times '!'",
            id="exclamation marks",
        ),
        pytest.param(mul("Paris ", 40), None, "times in a row", id="one word"),
        pytest.param(mul("the cat and ", 20), None, "the last 3 tokens", id="a cycle"),
        pytest.param("The answer is", "length", "finish_reason stop", id="cut off"),
    ],
)
def test_one_broken_answer_is_never_excused(section, broken, finish, why):
    question = next(iter(ANSWERS[section]))
    script = script_of(EXAM.section(section), {question: [broken]})
    lenient = with_one(section, question, misses=1)
    with pytest.raises(AssertionError, match=f"{section}: whole answers, got {question}: ") as e:
        sits(section, script, lenient, finish=finish)
    assert why in str(e.value)


@pytest.mark.parametrize("section", SECTIONS)
def test_as_many_may_be_missed_as_the_section_says(section):
    questions = EXAM.section(section)
    names = list(ANSWERS[section])
    for missed, passes in ((questions.misses, True), (questions.misses + 1, False)):
        answers = healthy(section)
        for name in names[-missed:]:
            answers[name] = _chat(ANSWERS[section][name]["wrong"][0])
        count = f"{len(names) - missed} of {len(names)} "
        with nullcontext() if passes else pytest.raises(AssertionError, match=count):
            (remark,) = sits(section, script_of(questions, answers))
            assert f"{count}right; {names[-missed]}: " in remark


def test_arguments_that_are_not_json_are_the_servers_fault():
    answers = {**healthy("tools"), "an-integer": ['-> set_timer {"minutes": 25']}
    with pytest.raises(AssertionError, match=r"whole answers, got an-integer: .* not JSON"):
        sits("tools", script_of(EXAM.tools, answers))


def test_an_unsupported_form_is_not_run_and_the_other_forms_are_judged():
    """SGLang does not support `choice`, so this form is NOT_RUN, and the other forms are judged."""
    for text, error, reason in (
        ("1989-11-09", NotRun, r"1 of 5 .* 4 of 4 right\. .* a-mammal: SGLang .*choice"),
        ("9 November 1989", AssertionError, "whole answers, .*a-date"),
    ):
        script = script_of(EXAM.formats, {**healthy("formats"), "a-date": [text]})
        with pytest.raises(error, match=reason):
            sits("formats", script, engine=("sglang", "0.5.23"))


def test_results_go_back_with_the_calls_and_their_reasoning():
    requests: list[dict] = []
    strict = with_one("tools", "two-steps")
    sits("tools", script_of(EXAM.tools, healthy("tools")), strict, requests=requests)
    roles = []
    for request in requests:
        roles.append([message["role"] for message in request["messages"]])
    once = ["assistant", "tool"]
    assert roles == [["user"], ["user", *once], ["user", *once, *once]]
    call, result = requests[1]["messages"][1:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and call["reasoning"]
    assert result["content"] == strict.tools.questions[0].turns[0].calls[0].result


def test_turns_are_asked_one_after_the_other():
    requests: list[dict] = []
    strict = with_one("dialogues", "the-format-of-a-role")
    sits("dialogues", script_of(EXAM.dialogues, healthy("dialogues")), strict, requests=requests)
    assert len(requests) == 3
    contents = [message["content"] for message in requests[-1]["messages"]]
    assert contents[0].startswith("You are a till") and contents[2::2] == ["TOTAL=6", "TOTAL=11"]


# The document.


def reads(script: Script, **options) -> list[str]:
    # harmony's own messages have 80 tokens
    counted = {"prompt_tokens": lambda text: rendering.count(text) + 80}
    return sits("document", script, **(counted | options))


def test_a_document_is_as_long_as_it_should_be():
    for tokens in (8_000, 32_000, 100_000):
        text = DOCUMENT.text(tokens, rendering.count)
        assert text == DOCUMENT.text(tokens, rendering.count)
        assert 0 <= tokens - rendering.count(text) < 64
        depths = [text.index(needle.text) / len(text) for needle in DOCUMENT.needles]
        expected = [needle.depth for needle in DOCUMENT.needles]
        assert all(abs(a - b) < 0.03 for a, b in zip(depths, expected, strict=True)), depths
        for needle in DOCUMENT.needles:
            assert text.count(needle.text) == 1
        lines = text.split("\n")
        assert len(lines) == len(set(lines)), "an entry is there twice"


def test_a_server_that_reads_finds_every_needle():
    (remark,) = reads(reader(DOCUMENT))
    assert remark == "exam gpt-oss-120b: a document of 8000 tokens: all needles found"


def test_a_fact_missing_in_the_list_is_requested_alone():
    honest = reader(DOCUMENT)

    def hasty(request: dict) -> ScriptedAnswer:
        text = str(honest(request))
        return "```json\n" + text.replace('"crane"', '"kran"') + "\n```" if "{" in text else text

    (remark,) = reads(hasty)
    assert remark.endswith("all needles found; crane was found only in a separate request")


def _without(needle: str):
    (text,) = (n.text for n in DOCUMENT.needles if n.id == needle)
    return lambda document: document.replace(text, "")


LOSSES = {
    "the beginning": (lambda text: text[len(text) // 20 :], {"keeper"}),
    "all but the window": (lambda text: text[-1500:], {"keeper", "crane", "whale", "box"}),
    "the second half": (lambda text: text[: len(text) * 3 // 5], {"box", "flag"}),
    "a block in the middle": (_without("whale"), {"whale"}),
    "the last block": (_without("flag"), {"flag"}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_server_that_lost_a_part_is_seen(loss):
    forgets, lost = LOSSES[loss]
    with pytest.raises(AssertionError, match="all 5 needles") as failed:
        reads(reader(DOCUMENT, forgets))
    named = {needle.id for needle in DOCUMENT.needles if f"{needle.id} (" in str(failed.value)}
    assert named == lost


def test_the_needle_of_another_depth_is_wrong():
    honest = reader(DOCUMENT)

    def swaps(request: dict) -> ScriptedAnswer:
        text = str(honest(request))
        return text.replace("7316", "x").replace("58", "7316").replace("x", "58")

    with pytest.raises(AssertionError, match=r"crane \(depth 0.25\).*; box \(depth 0.75\)"):
        reads(swaps)


def test_a_prompt_that_was_cut_is_seen_by_its_usage():
    with pytest.raises(AssertionError, match="the whole document, 8000 tokens, got usage of 40"):
        reads(reader(DOCUMENT), prompt_tokens=lambda _text: 4096)


@pytest.mark.parametrize("broken", ["", "!" * 40, None])
def test_a_broken_answer_to_a_document_is_not_asked_again(broken):
    requests: list[dict] = []
    with pytest.raises(AssertionError, match="a whole answer"):
        reads(lambda _request: broken, requests=requests)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (4608, r"needs? a context of 10048 tokens; the server has 4608 .*len"),
        (None, "does not report its context length"),
    ],
)
def test_a_short_context_is_not_run_with_what_is_missing(context, reason):
    with pytest.raises(NotRun, match=reason):
        reads(reader(DOCUMENT), context=context)


# Profiles.


@pytest.mark.parametrize(
    ("name", "expected", "reads_documents"),
    [
        ("sm121-gpt-oss-120b", "gpt-oss-120b", True),
        ("sm121-tiny-gpt-oss", "canary", False),
        ("sm90-tiny-gpt-oss", "canary", False),
        ("cpu-tiny-gpt-oss", "canary", False),
        ("cpu-tiny-gpt-oss-llama-cpp", "canary", False),
    ],
)
def test_every_shipped_profile_has_its_exam(name, expected, reads_documents):
    """Every shipped profile has an exam; without one, its certificate would lack the exam's
    test."""
    shipped = profile.load(name)
    assert exam.load(shipped.correctness.exam).name == expected
    assert ("long_document" in shipped.correctness.cannot) is not reads_documents
    assert not reads_documents or exam.load(shipped.correctness.exam).document is not None


def test_an_unknown_exam_is_refused():
    with pytest.raises(UsageError, match=r"exam no: expected .*canary, gpt-oss-120b"):
        exam.load("no")


def _run(run_pytest, endpoint, file: str, chosen: str, *options):
    status, run = run_pytest(
        "tests/test_correctness.py", "-k", chosen, "--profile", file, "--arch", "sm121",
        "--base-url", endpoint.base_url, "--api-key", endpoint.api_key, *map(str, options),
    )  # fmt: skip
    return status, run, run.verdict["tests"] if (run.report / "verdict.json").exists() else []


@pytest.mark.slow("a whole run")
def test_a_whole_run_sits_the_exam(run_pytest, tmp_path):
    """An attached server that knows the facts passes the exam, and one that does not fails."""
    file = own_profile(tmp_path, 'description = "x"\n')
    wrong = {name: ["Paris"] for name in ANSWERS["facts"]}
    for answers, verdict in ((healthy("facts"), "PASS"), (wrong, "FAIL")):
        with scripted(script_of(EXAM.facts, answers)) as endpoint:
            _, run, tests = _run(run_pytest, endpoint, file, "test_facts_are_known")
        assert [test["verdict"] for test in tests] == [verdict], run.output


@pytest.mark.parametrize(("said", "verdict"), [("391", "PASS"), ("392", "FAIL")])
def test_an_exam_that_is_named_is_asked_in_place_of_the_profiles(
    run_pytest, tmp_path, said, verdict
):
    mine = own_exam(tmp_path, *OWN)
    facts = exam.load(str(mine)).section("facts")
    with scripted(script_of(facts, {"product": [said]})) as endpoint:
        chosen = "facts_are_known or dialogues_are"
        _, run, tests = _run(run_pytest, endpoint, "sm121-gpt-oss-120b", chosen, "--exam", mine)
    assert [test["verdict"] for test in tests] == [verdict, "NOT_RUN"], run.output
    assert "exam mine has no section dialogues" in tests[1]["message"]
    assert run.verdict["fingerprint"]["profile_shipped"] is False


def test_a_wrong_exam_ends_a_run_before_it_begins(run_pytest, tmp_path):
    file = own_profile(tmp_path, '[correctness]\nexam = "nothing"\n')
    with scripted(script_of(EXAM.facts, {})) as endpoint:
        status, run, _ = _run(run_pytest, endpoint, file, "facts_are_known")
    assert status == 4 and "exam nothing: expected a file or one of" in run.output


# One long chat with tools.


def in_one_chat(
    spoils: Callable[[list[dict]], ScriptedAnswer] = lambda messages: None, variant: int = 0
) -> Script:
    """Return a script that gives the right answers of the tools section in one chat.

    If `spoils` gives another answer to the last question, that one is used."""
    answers = healthy("tools", variant)
    questions = {question.turns[0].user: question.id for question in EXAM.tools.questions}

    def script(request: dict) -> ScriptedAnswer:
        messages = request["messages"]
        asked = max(n for n, message in enumerate(messages) if message["role"] == "user")
        said = sum(message["role"] == "assistant" for message in messages[asked:])
        spoilt = spoils(messages)
        return answers[questions[messages[asked]["content"]]][said] if spoilt is None else spoilt

    return script


@pytest.mark.parametrize("variant", range(3))
def test_a_healthy_server_in_a_long_chat_with_tools(variant):
    requests: list[dict] = []
    (remark,) = sits("conversation", in_one_chat(variant=variant), requests=requests)
    assert remark.endswith("a chat with 8000 tokens of results: 8 of 8 right")
    results = [m["content"] for m in requests[-1]["messages"] if m["role"] == "tool"]
    assert len(results) >= 8 and len({*results}) == len(results)
    assert 8_000 <= sum(map(rendering.count, results)) < 9_000


@pytest.mark.parametrize(
    "loop", ["!" * 200, "the the " * 40, ""], ids=["token 0", "one word", "nothing"]
)
def test_a_loop_after_many_results_of_tools_is_noticed(loop):
    """With an NVFP4 KV cache, answers were right for each question alone, but became a loop of
    token 0 (`!`) once the chat contained several results.

    Each question alone has at most two results."""

    def spoils(messages: list[dict]) -> ScriptedAnswer:
        has_many = sum(message["role"] == "tool" for message in messages) >= 5
        return loop if has_many and messages[-1]["role"] == "tool" else None

    (remark,) = sits("tools", in_one_chat(spoils))
    assert remark.endswith("8 of 8 right"), "no question alone shows it"
    with pytest.raises(AssertionError, match=r"whole answers, got .*, after \d+ messages: "):
        sits("conversation", in_one_chat(spoils))


def test_a_miss_in_a_long_chat_with_tools_is_a_remark():
    def spoils(messages: list[dict]) -> ScriptedAnswer:
        return "I cannot say." if "Oslo" in messages[-1]["content"] else None

    (remark,) = sits("conversation", in_one_chat(spoils))
    assert "7 of 8 right; two-steps: " in remark
