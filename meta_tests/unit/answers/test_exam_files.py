"""Exam files of users: what they may omit, and the messages for wrong files."""

from pathlib import Path

import pytest

from sm121.answers import exam
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun

OWN = (
    '{"prompt": "The capital of France is", "begins": " Paris"}',
    '{"id": "product", "turns": [{"user": "What is 17 times 23?", "right": "391"}]}',
)


def own_profile(tmp_path: Path, lines: str) -> str:
    file = tmp_path / "own.toml"
    file.write_text(f'name = "own"\nextends = "sm121-gpt-oss-120b"\n{lines}', "utf-8")
    return str(file)


def own_exam(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return file


def test_an_exam_of_ones_own_needs_two_lines(tmp_path):
    """A section has defaults. A missing section is NOT_RUN, and the reason says what to add."""
    mine = exam.load(str(own_exam(tmp_path, *OWN)))
    assert (mine.name, mine.answer_tokens) == ("mine", 1536)
    assert [each.prompt for each in mine.completions] == ["The capital of France is"]
    facts = mine.section("facts")
    assert (facts.misses, [each.id for each in facts.questions]) == (0, ["product"])
    with pytest.raises(NotRun, match="exam mine has no section tools: add"):
        mine.section("tools")


def test_a_line_ends_where_json_says(tmp_path):
    line = OWN[1].replace("What is", "What\u2028is")
    mine = exam.load(str(own_exam(tmp_path, "", f"{OWN[0]}\r", line)))
    assert mine.section("facts").questions[0].turns[0].user == "What\u2028is 17 times 23?"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param((), "expected a text to continue, got none. Add a line", id="empty"),
        pytest.param(OWN[1:], "expected a text to continue, got none", id="no completion"),
        pytest.param((*OWN, "{"), "line 3: expected JSON", id="no JSON"),
        pytest.param((*OWN, "[" * 100_000), "line 3: expected JSON", id="nested"),
        pytest.param((*OWN, "[1]"), "line 3: expected a JSON object", id="no object"),
        pytest.param((*OWN, '{"user": "?"}'), "line 3: expected a key prompt", id="no key"),
        pytest.param((*OWN, '{"exam": "x"}'), "line 3: expected a key prompt", id="exam last"),
        pytest.param((*OWN, '{"section": "sums"}'), "line 3: section 'sums'", id="section"),
        pytest.param((*OWN, '{"section": "facts"}'), "line 3: section 'facts'", id="twice"),
        pytest.param((*OWN, OWN[1]), "expected ids that differ: product", id="one id twice"),
        pytest.param(
            (*OWN, '{"section": "tools"}'), "tools.questions", id="a section without questions"
        ),
        pytest.param(
            (OWN[0], '{"id": "a", "turns": [{"user": "?"}]}'),
            "expected the field right, calls or content in the last turn",
            id="nothing is judged",
        ),
        pytest.param(
            (OWN[0], '{"id": "a", "turns": [{"user": "?", "right": "("}]}'),
            "expected a regular expression",
            id="no pattern",
        ),
    ],
)
def test_a_wrong_exam_is_one_line(tmp_path, lines, expected):
    file = own_exam(tmp_path, *lines)
    with pytest.raises(UsageError) as error:
        exam.load(str(file))
    message = str(error.value)
    assert expected in message and str(file) in message and "\n" not in message


def test_known_answers_of_a_profile_are_refused_with_their_new_place(tmp_path):
    file = own_profile(tmp_path, '[[correctness.known_answers]]\nprompt = "1, 2,"\nbegins = " 3"\n')
    with pytest.raises(
        UsageError, match=r"known_answers: expected in the file of the exam .*, one line for each"
    ):
        profile.load(file)


def test_a_required_accuracy_of_a_profile_is_refused_with_its_new_place(tmp_path):
    file = own_profile(tmp_path, '[correctness.accuracy]\nat_least = 0.5\nsource = "mine"\n')
    with pytest.raises(UsageError, match=r'accuracy: expected in the file of the exam.*"misses"'):
        profile.load(file)
