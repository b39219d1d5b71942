"""The accuracy slice: what counts as right, its interval, and the paired comparison."""

import pytest
from data_rows import from_data

from sm121.answers import accuracy
from sm121.answers.accuracy import Output, Question
from sm121.core.errors import UsageError
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive


def load(file, model=Question):
    return accuracy.load(file, model, "--questions")


def outputs(marks: str) -> list[Output]:
    """One output a letter: r right, w wrong."""
    return [
        Output(key=str(n), kind="exact", expected="a", content="", right=mark == "r")
        for n, mark in enumerate(marks)
    ]


@from_data
def test_what_counts_as_right(kind, expected, content, right):
    question = Question(prompt="?", answer=expected, kind=kind)
    assert accuracy.is_right(question, content) is right


def test_the_interval_is_wilsons():
    """Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662."""
    interval = accuracy.interval(outputs("r" * 81 + "w" * 182))
    assert interval.low == pytest.approx(0.2553, abs=5e-5)
    assert interval.high == pytest.approx(0.3662, abs=5e-5)
    whole = accuracy.interval(outputs("r" * 20))
    assert whole.high == 1.0 and whole.low == pytest.approx(0.8389, abs=5e-4)
    assert accuracy.interval(outputs("w" * 20)).low == 0.0


def test_a_gate_decides_on_the_interval():
    fact = Fact("so many")
    accuracy.interval(outputs("r" * 100)).hold(0.9, fact)
    for right, error in ((85, Inconclusive), (40, Unmet)):
        with pytest.raises(error):
            accuracy.interval(outputs("r" * right + "w" * (100 - right))).hold(0.9, fact)


def test_the_paired_test_is_mcnemars():
    """Exact and two-sided: 1 gained, 9 lost of 10 is p = 2 * 11 / 1024."""
    before, now = outputs("r" * 9 + "w" + "r" * 30), outputs("w" * 9 + "r" + "r" * 30)
    comparison = accuracy.paired(before, now)
    assert (comparison.lost, comparison.gained, comparison.same) == (9, 1, 30)
    assert comparison.p_value == pytest.approx(22 / 1024) and comparison.worse
    assert not accuracy.paired(before, before).worse
    assert not accuracy.paired(now, before).worse  # better is not worse


def test_other_questions_are_not_compared():
    with pytest.raises(UsageError, match="same questions"):
        accuracy.paired(outputs("rr"), outputs("rrr"))


def test_outputs_are_kept_and_read_again(tmp_path):
    questions = [Question(prompt=str(n), answer="a") for n in range(9)]
    made = accuracy.run(questions, lambda q: ("a" if q.prompt != "3" else "b", 1))
    assert [output.key for output in made if output.right] == [*"012", *"45678"]
    accuracy.keep(made, tmp_path / "kept.jsonl")
    assert load(tmp_path / "kept.jsonl", Output) == made


@from_data
def test_a_wrong_file_is_one_clear_line(tmp_path, content, expected):
    file = tmp_path / "questions.jsonl"
    for word, long in (("NESTED", "[" * 100_000), ("DIGITS", "1" * 5000), ("LONG", "x" * 9000)):
        content = content.replace(word, long)
    file.write_text(content)
    with pytest.raises(UsageError, match=expected) as error:
        load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd\x1ce", "half a pair: \ud83d", "\x1b[31m\x00"])
def test_any_answer_is_kept_and_read_again(tmp_path, text):
    file = tmp_path / "outputs.jsonl"
    made = [Output(key="k", kind="exact", expected="x", content=text, right=False)]
    accuracy.keep(made, file)
    assert file.read_bytes().isascii() and b"\x1b" not in file.read_bytes()
    try:
        assert load(file, Output) == made
    except UsageError as error:
        assert "\ud83d" in text and "\n" not in str(error)


def test_a_line_ends_where_json_says(tmp_path):
    file = tmp_path / "questions.jsonl"
    line = '{"prompt": "a\u2028b", "answer": "7", "kind": "number", "id": "x"}'
    file.write_text(f"{line}\r\n\n", "utf-8", newline="")
    (question,) = load(file)
    assert (question.prompt, question.key) == ("a\u2028b", "x")
