"""What does not hold is a value with fields, and one module makes its text."""

import ast
import json
from pathlib import Path

import pytest
from data_rows import from_data

from sm121.core import unmet, verdict
from sm121.core.unmet import Fact, Unmet, facts_of, require, require_each, require_none
from sm121.run.verdict_file import TestReport

ROOT = Path(__file__).resolve().parents[1]


def test_no_message_is_written_by_hand():
    """The words stand in one module. A literal of another one would be a sentence again."""
    files = [*(ROOT / "plugins" / "sm121").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    written = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path != Path(unmet.__file__)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("required: ")
    ]
    assert not written


@from_data
def test_a_fact_is_one_line_for_people(fields, text):
    fact = Fact(**fields)
    assert str(fact) == text
    report = TestReport.of("a", "smoke", fact)
    assert TestReport.model_validate_json(report.model_dump_json()).unmet == [fact]
    assert json.loads(report.model_dump_json())["unmet"][0]["about"] == fact.about


def test_what_is_raised_carries_its_facts():
    with pytest.raises(Unmet, match="required: 1, seen: 2") as raised:
        require(False, 1, 2)
    assert facts_of(raised.value) == [Fact("1", "2")]
    with pytest.raises(Unmet) as raised:
        require_none([Fact("1", "2"), Fact("3", "4")], evidence="server.log")
    assert str(raised.value) == "required: 1, seen: 2; required: 3, seen: 4 (server.log)"
    error = verdict.Inconclusive(Fact("1", "2"), Fact("3", "4"))
    assert str(error) == "required: 1, seen: 2; required: 3, seen: 4" and len(facts_of(error)) == 2
    require(True, 1, 2)
    require_none([])


def test_a_case_that_fails_hides_no_other_one():
    with pytest.raises(Unmet) as raised:
        require_each(lambda city, text: require(city in text, city, text), "abca", "xbyx")
    assert raised.value.facts == (Fact("a", "x"), Fact("c", "y"))
    tried = []

    def crashes(case):
        tried.append(case)
        raise Unmet(Fact("it lives"), never_waived="a crash")

    with pytest.raises(Unmet) as raised:
        require_each(crashes, "ab")
    assert raised.value.never_waived == "a crash" and tried == ["a"]


@pytest.mark.parametrize("open_ones", ["a", "d", "ad"])
@pytest.mark.parametrize("error", [verdict.NotRun, verdict.Inconclusive])
def test_a_case_that_is_not_decided_hides_no_failure(open_ones, error):
    def check(city: str, text: str) -> None:
        if city in open_ones:
            raise error(f"{city} cannot be told")
        require(city == text, city, text)

    with pytest.raises(Unmet) as raised:
        require_each(check, "abcd", "axcd")
    assert raised.value.facts == (Fact("b", "x"),)
    with pytest.raises(error, match=f"{open_ones[0]} cannot"):
        require_each(check, "abcd", "abcd")


@pytest.mark.parametrize(
    "graver, milder", [("Invalid", "Inconclusive"), ("NotRun", "Inapplicable")]
)
def test_the_gravest_case_that_is_not_decided_is_raised(graver, milder):
    def check(name: str) -> None:
        raise getattr(verdict, name)(f"{name} is a reason")

    for names in ([graver, milder], [milder, graver]):
        with pytest.raises(verdict.Undecided) as raised:
            require_each(check, names)
        assert type(raised.value).__name__ == graver


def test_an_answer_is_observed_without_what_differs_by_chance():
    call = {"id": "call_1", "function": {"name": "f"}}
    with pytest.raises(Unmet) as raised:
        require(False, "a call", {"id": "x", "created": 1, "tool_calls": [call]})
    assert raised.value.facts[0].observed == "{'tool_calls': [{'function': {'name': 'f'}}]}"
