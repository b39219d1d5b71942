"""How verdicts are combined, that a run without tests is not green, and the fields of a failure."""

import ast
import json

import pytest

from meta_tests.folders import ROOT
from sm121.core import verdict
from sm121.core.unmet import Fact, Unmet, facts_of, require, require_each, require_none
from sm121.core.verdict import Verdict, worst
from sm121.report import summary
from sm121.run import verdict_file
from sm121.run.verdict_file import (
    AgainstReport,
    EngineReport,
    MetricReport,
    TestReport,
    VerdictFile,
)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        pytest.param((), "NOT_RUN", id="NOT_RUN"),
        pytest.param(("PASS",), "PASS", id="PASS, PASS"),
        pytest.param(("PASS", "NOT_RUN"), "NOT_RUN", id="PASS NOT_RUN, NOT_RUN"),
        pytest.param(
            ("NOT_RUN", "INCONCLUSIVE"), "INCONCLUSIVE", id="NOT_RUN INCONCLUSIVE, INCONCLUSIVE"
        ),
        pytest.param(("INCONCLUSIVE", "INVALID"), "INVALID", id="INCONCLUSIVE INVALID, INVALID"),
        pytest.param(("INVALID", "FAIL", "PASS"), "FAIL", id="INVALID FAIL PASS, FAIL"),
    ],
)
def test_the_worst_verdict_counts_and_no_verdict_is_not_run(parts, whole):
    assert worst([Verdict(part) for part in parts]) == whole


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        ("PASS", 0),
        ("FAIL", 1),
        ("INVALID", 1),
        ("INCONCLUSIVE", 1),
        ("NOT_RUN", 5),
    ],
)
def test_exit_status(verdict, status):
    assert Verdict(verdict).exit_status == status


def file_with(*verdicts: Verdict, finished: bool = True, **more) -> VerdictFile:
    """Return a run of tests with these verdicts. Without verdicts, it is a run that failed."""
    tests = [
        TestReport(id=f"t{n}", level="smoke", verdict=verdict, **more)
        for n, verdict in enumerate(verdicts)
    ]
    engine = EngineReport(name="vllm", managed=True, model="m")
    fields = {"arch": "cpu", "profile": "p", "started": "now", "finished": finished}
    file = VerdictFile(**fields, engine=engine, tests=tests)
    file.judge()
    return file


@pytest.mark.parametrize(
    ("verdicts", "fields", "whole"),
    [
        pytest.param((), {}, Verdict.NOT_RUN, id="Verdict.NOT_RUN"),
        pytest.param(
            (Verdict.NOT_RUN,),
            {"skipped": True},
            Verdict.NOT_RUN,
            id="Verdict.NOT_RUN, skipped True, Verdict.NOT_RUN",
        ),
        pytest.param(
            (Verdict.PASS,),
            {"finished": False},
            Verdict.NOT_RUN,
            id="Verdict.PASS, finished False, Verdict.NOT_RUN",
        ),
        pytest.param(
            (Verdict.FAIL,),
            {"finished": False},
            Verdict.FAIL,
            id="Verdict.FAIL, finished False, Verdict.FAIL",
        ),
    ],
)
def test_nothing_and_less_than_all_are_not_green(verdicts, fields, whole):
    assert file_with(*verdicts, **fields).verdict is whole


def test_the_summary_of_a_pull_request_fits_a_screen(monkeypatch):
    """Nine failures with one reason are one line of a pull request's summary.

    Metrics are beside those of the trusted run, and a link leads to the other results."""
    file = file_with(Verdict.FAIL)
    ended = file.tests[0].model_copy(update={"verdict": Verdict.FAIL, "message": "it ended"})
    file.tests = [ended.model_copy(update={"id": f"tests/test_x.py::test_{n}"}) for n in range(9)]
    file.metrics["tg32@d0"] = MetricReport(value=45.1, unit="tok/s", ci_low=45.0, ci_high=45.3)
    older = MetricReport(value=50.0, unit="tok/s", ci_low=49.8, ci_high=50.2)
    file.against = AgainstReport(run="the run of today", engine="vllm", measured={"tg32@d0": older})
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    text = summary.markdown(file)
    assert text.count("it ended") == 1 and "and 8 more for the same reason" in text
    assert "| 45.1 tok/s (45 to 45.3) | 50 (49.8 to 50.2) | -9.8 % |" in text, text
    assert "(https://example.org/a/b/actions/runs/7#artifacts)" in text
    assert len(text.splitlines()) < 40


def test_a_summary_shows_what_others_wrote_as_text():
    """The summary shows texts of other programs as plain text: a model's output, a hostile server's
    version, and control characters."""
    file = file_with(Verdict.FAIL)
    file.engine.version = "1 | x |\n\n# PASS\n![](http://example.org/x.png)"
    file.reason = file.engine.version
    escapes = "\x1b[31m\x00\u202e\ud83d é 中"
    file.tests[0].message = f"got <script>alert(1)</script> | `x` \n# heading {escapes}"
    text = summary.markdown(file)
    assert "<script>" not in text and "\\|" in text and "![](" not in text
    headings = [line for line in text.splitlines() if line.startswith("# ")]
    assert headings == ["# SM121 conformance: FAIL"]
    assert not any(c in text for c in "\x1b\x00\u202e\ud83d") and "\\x1b" in text
    assert "é 中" in text


def test_half_a_surrogate_pair_leaves_a_verdict_that_can_be_read(tmp_path):
    file = file_with(Verdict.FAIL)
    file.remarks.append("got \x9b\u202e é")
    verdict_file.write(file, tmp_path / "verdict.json")
    assert (tmp_path / "verdict.json").read_bytes().isascii(), "no terminal obeys it"
    file.remarks = ["got \ud83d"]
    file.environment["a"] = ["\ud83d"]
    verdict_file.write(file, tmp_path / "verdict.json")
    read = verdict_file.read(tmp_path / "verdict.json")
    assert read.remarks == ["got \\ud83d"] and read.environment == {"a": ["\\ud83d"]}


# A failed requirement is a value with fields, and one module writes its text.


def test_no_message_is_written_by_hand():
    """Only `Fact` creates the text of a failed check. No error is raised with a text instead."""
    files = [*(ROOT / "plugins" / "sm121").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    written = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            is_unmet = ast.unparse(node.func).rpartition(".")[2] == "Unmet"
            texts = [each for each in node.args if isinstance(each, ast.JoinedStr | ast.Constant)]
            if is_unmet and texts:
                written.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert written == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param(
            {"required": "200", "observed": "404"},
            "expected 200, got 404",
            id="expected 200 observed 404, expected 200, got 404",
        ),
        pytest.param(
            {"required": "a version"},
            "expected a version, got none",
            id="expected a version, expected a version, got none",
        ),
        pytest.param(
            {
                "required": "at least",
                "observed": "",
                "about": "tg32@d0",
                "value": 51.9996,
                "limit": 52.0,
                "unit": "tok/s",
                "evidence": "x",
            },
            "tg32@d0: expected at least 52 tok/s, got 51.9996 tok/s (x)",
            id="required at least observed about tg32@d0 value 51.9996",
        ),
        pytest.param(
            {"required": "at most", "observed": "at 3", "value": float("nan"), "limit": 1.0},
            "expected at most 1, got nan at 3",
            id="required at most observed at 3 value nan limit 1.0",
        ),
        pytest.param(
            {"required": "", "observed": "it broke", "kind": "KeyError"},
            "KeyError: it broke",
            id="required observed it broke kind KeyError, KeyError: it",
        ),
    ],
)
def test_a_fact_is_one_line_for_people(fields, text):
    fact = Fact(**fields)
    assert str(fact) == text
    report = TestReport.of("a", "smoke", fact)
    assert TestReport.model_validate_json(report.model_dump_json()).unmet == [fact]
    assert json.loads(report.model_dump_json())["unmet"][0]["about"] == fact.about


def test_raised_failures_carry_their_facts():
    with pytest.raises(Unmet, match="expected 1, got 2") as raised:
        require(False, 1, 2)
    assert facts_of(raised.value) == [Fact("1", "2")]
    with pytest.raises(Unmet) as raised:
        require_none([Fact("1", "2"), Fact("3", "4")], evidence="server.log")
    assert str(raised.value) == "expected 1, got 2; expected 3, got 4 (server.log)"
    error = verdict.Inconclusive(Fact("1", "2"), Fact("3", "4"))
    assert str(error) == "expected 1, got 2; expected 3, got 4" and len(facts_of(error)) == 2
    require(True, 1, 2)
    require_none([])


def test_all_failed_cases_are_reported():
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
