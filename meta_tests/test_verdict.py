"""How verdicts combine, and that nothing is not green."""

from data_rows import from_data

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


@from_data
def test_the_worst_counts_and_nothing_is_not_run(parts, whole):
    assert worst([Verdict(part) for part in parts]) == whole


@from_data
def test_exit_status(verdict, status):
    assert Verdict(verdict).exit_status == status


def file_with(*verdicts: Verdict, finished: bool = True, **more) -> VerdictFile:
    tests = [
        TestReport(id=f"t{n}", level="smoke", verdict=verdict, **more)
        for n, verdict in enumerate(verdicts)
    ]
    engine = EngineReport(name="vllm", managed=True, model="m")
    file = VerdictFile(
        arch="cpu", profile="p", started="now", engine=engine, tests=tests, finished=finished
    )
    file.judge()
    return file


@from_data
def test_nothing_and_less_than_all_are_not_green(verdicts, fields, whole):
    assert file_with(*verdicts, **fields).verdict is whole


def test_the_summary_of_a_pull_request_fits_a_screen(monkeypatch):
    """Nine failures for one reason are one line; metrics stand beside those of the trusted run;
    a link leads to the rest."""
    file = file_with(Verdict.FAIL)
    ended = file.tests[0].model_copy(update={"verdict": Verdict.FAIL, "message": "it ended"})
    file.tests = [ended.model_copy(update={"id": f"tests/test_x.py::test_{n}"}) for n in range(9)]
    file.metrics["tg32@d0"] = MetricReport(value=45.1, unit="tok/s", ci_low=45.0, ci_high=45.3)
    there = MetricReport(value=50.0, unit="tok/s", ci_low=49.8, ci_high=50.2)
    file.against = AgainstReport(run="the run of today", engine="vllm", measured={"tg32@d0": there})
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    text = summary.markdown(file)
    assert text.count("it ended") == 1 and "and 8 more for the same reason" in text
    assert "| 45.1 tok/s (45 to 45.3) | 50 (49.8 to 50.2) | -9.8 % |" in text, text
    assert "(https://example.org/a/b/actions/runs/7#artifacts)" in text
    assert len(text.splitlines()) < 40


def test_summary_shows_model_output_as_text():
    file = file_with(Verdict.FAIL)
    file.tests[0].message = "seen: <script>alert(1)</script> | `x` \n# heading"
    text = summary.markdown(file)
    assert "<script>" not in text and "\\|" in text and "\n# heading" not in text


def test_summary_of_a_hostile_server_has_one_heading():
    file = file_with(Verdict.FAIL)
    file.engine.version = "1 | x |\n\n# PASS\n![](http://example.org/x.png)"
    file.reason = file.engine.version
    text = summary.markdown(file)
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# SM121 conformance: FAIL"
    ]
    assert "![](" not in text


def test_control_characters_are_written_out():
    file = file_with(Verdict.FAIL)
    file.tests[0].message = "seen: \x1b[31m\x00\u202e\ud83d é 中"
    text = summary.markdown(file)
    assert not any(c in text for c in "\x1b\x00\u202e\ud83d") and "\\x1b" in text
    assert "é 中" in text


def test_half_a_surrogate_pair_leaves_a_verdict_that_can_be_read(tmp_path):
    file = file_with(Verdict.FAIL)
    file.remarks.append("seen: \x9b\u202e é")
    verdict_file.write(file, tmp_path / "verdict.json")
    assert (tmp_path / "verdict.json").read_bytes().isascii(), "no terminal obeys it"
    file.remarks = ["seen: \ud83d"]
    file.environment["a"] = ["\ud83d"]
    verdict_file.write(file, tmp_path / "verdict.json")
    read = verdict_file.read(tmp_path / "verdict.json")
    assert read.remarks == ["seen: \\ud83d"] and read.environment == {"a": ["\\ud83d"]}
