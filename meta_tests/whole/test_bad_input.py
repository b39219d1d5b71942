"""Wrong input gives one line with the expected value and exit status 4, before anything slow
happens."""

import sys

import pytest

from meta_tests.fakes.refused_runs import TEST, USAGE_ERROR, refused
from sm121.core.profile import shipped

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("--arch", "sm12"), ("--arch sm12", "expected one of cpu", "sm121"), id="arch"
        ),
        pytest.param(
            ("--profile", "nothing-like-it"),
            ("--profile nothing-like-it", "cpu-tiny-gpt-oss"),
            id="profile",
        ),
        pytest.param(
            ("--arch", "sm121", "--profile", "cpu-tiny-gpt-oss"),
            ("expected a profile for sm121",),
            id="a profile of another architecture",
        ),
        pytest.param(
            ("--waivers", "/nowhere.toml"),
            ("--waivers /nowhere.toml", "expected"),
            id="waivers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("-m", "cpu and"), ("-m 'cpu and'", "expected not OR left parenthesis"), id="marker"
        ),
        pytest.param(
            ("-m", "smoke and ("),
            ("-m 'smoke and (': at column 12: expected not OR left parenthesis",),
            id="marker of a level",
        ),
        pytest.param(
            ("-m", "smoke)"),
            ("-m 'smoke)': at column 6: expected end of input; got right parenthesis",),
            id="marker with one parenthesis",
        ),
        pytest.param(
            ("-k", "health and ("),
            ("-k 'health and (': at column 13: expected not OR left parenthesis",),
            id="keyword",
        ),
        pytest.param(
            ("--arch", "cpu", "--base-url", ""),
            ("--base-url '': expected a value, got an empty one. Leave the option out",),
            id="base-url of a variable that is not set",
        ),
        pytest.param(
            ("--report-dir=",), ("--report-dir '': expected a value",), id="report-dir is empty"
        ),
        pytest.param(
            ("--engine-arg=",), ("--engine-arg '': expected a value",), id="engine-arg is empty"
        ),
        pytest.param(
            ("--report-dir", "/proc/nope"),
            ("--report-dir /proc/nope", "expected a folder"),
            id="report-dir",
        ),
        pytest.param(
            ("--arch", "cpu", "--golden", "nowhere.json"),
            ("--golden nowhere.json: expected a file",),
            id="golden",
        ),
        pytest.param(
            ("--arch", "cpu", "--record-golden", "no/such/file"),
            ("expected the name of a file in a folder",),
            id="record-golden in a folder",
        ),
        pytest.param(
            ("--arch", "cpu", "--exam", "nowhere.jsonl"),
            ("--exam nowhere.jsonl: expected a file",),
            id="exam",
        ),
        pytest.param(
            ("--arch", "cpu", "--reference", "nowhere"),
            ("--reference nowhere: expected a checkpoint folder",),
            id="reference",
        ),
        pytest.param(
            ("--arch", "cpu", "--configuration", "fp3"),
            ("expected one of profile cpu-tiny-gpt-oss: float32",),
            id="configuration",
        ),
        pytest.param(
            ("--plan", "qiuck"),
            (
                (
                    "--plan qiuck: expected one of profile cpu-tiny-gpt-oss: quick, merge, full; "
                    "did you mean quick?"
                ),
            ),
            id="plan",
        ),
        pytest.param(
            ("--plan", "quick", "--certify"),
            ("--certify with paths", "--plan quick: expected a run"),
            id="a plan and --certify",
        ),
        pytest.param(
            ("--hypothesis", "x.toml"),
            ("expected --ab A B as well",),
            id="hypothesis without --ab",
        ),
        pytest.param(
            ("--ab", "--port 1", ""), ("--port is set by the suite itself",), id="a port for A"
        ),
        pytest.param(
            ("--ab", "http://127.0.0.1:1", "http://localhost:1/v1"),
            ("the URLs of two servers",),
            id="two names of one address",
        ),
        pytest.param(("--shard", "0/2"), ("--shard 0/2: expected I/N",), id="shard 0 of 2"),
        pytest.param(("--shard", "3/2"), ("--shard 3/2: expected I/N",), id="shard 3 of 2"),
        pytest.param(("--shard", "1"), ("--shard 1: expected I/N",), id="shard without a count"),
        pytest.param(("--shard", "a/b"), ("--shard a/b: expected I/N",), id="shard of letters"),
        pytest.param(("--shard", "1/0"), ("--shard 1/0: expected I/N",), id="shard of 0"),
        pytest.param(("--shard", "1/99999999"), ("N of at most 4 digits",), id="shard of many"),
        pytest.param(("--depths", ""), ("--depths '': expected a value",), id="no depths"),
        pytest.param(("--against=",), ("--against '': expected a value",), id="against is empty"),
        pytest.param(
            ("--depths", "0;4096"),
            ("--depths 0;4096: expected numbers of at least 0",),
            id="depths with a semicolon",
        ),
        pytest.param(
            ("--depths", "-1"),
            ("--depths -1: expected numbers of at least 0",),
            id="a negative depth",
        ),
    ],
)
def test_one_line_says_what_was_expected(run_pytest, arguments, expected):
    line = refused(run_pytest, *arguments)
    for text in expected:
        assert text in line, line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("--pp=99999999",), "--pp 99999999: expected at most", id="long prompt"),
        pytest.param(
            ("--depths=99999999",), "--depths 99999999: expected at most 3968 tokens", id="deep"
        ),
        pytest.param(
            (f"--depths=0,{'1234567890' * 3}",),
            f"--depths 0,{'1234567890' * 3}: expected numbers of at most 18 digits",
            id="thirty digits",
        ),
        pytest.param(
            (f"--pp={'9' * 5000}",),
            f"--pp {'9' * 40}...: expected numbers of at most 18 digits",
            id="thousands of digits",
        ),
        pytest.param(("--tg=99999",), "--tg 99999: expected at most 4096 tokens", id="long"),
        pytest.param(
            ("--rounds=99999999",), "--rounds 99999999: expected at most 1000 rounds of each",
            id="many rounds",
        ),
        pytest.param(
            ("--concurrency=4,99999999",),
            "--concurrency 4,99999999: expected at most 1024 streams at the same time",
            id="many streams",
        ),
        pytest.param(("--ab", "", ""), "--ab '' '': expected two different", id="A is B"),
        pytest.param(
            ("--depth", "0", "4096"),
            "--depth 0 4096: expected a list with commas instead of spaces, such as --depth "
            "0,4096", id="two words",
        ),
        pytest.param(
            ("--concurrency=2", "8"), (
                "expected a list with commas instead of spaces, such as --concurrency 2,8"
            ),
            id="behind =",
        ),
        pytest.param(
            ("--concurrency", "0"),
            "--concurrency 0: expected numbers of at least 1, as in --concurrency 4,8", id="nobody",
        ),
        pytest.param(("--plan", "qick"), "quick, merge, full; did you mean quick?", id="qick"),
        pytest.param(
            ("--scores", "python3"), "expected a Python with lm-evaluation-harness: pip install",
            id="python3",
        ),
        pytest.param(
            ("--scores", "no-such-python"), "expected a Python, by its path or its name",
            id="no Python",
        ),
        pytest.param(("--exam", "README.md"), "README.md: line 1: expected JSON", id="text"),
        pytest.param(("--golden", "README.md"), "expected a file of --record-golden", id="golden"),
    ],
)  # fmt: skip
def test_a_refused_request_has_one_line_and_no_table(run_pytest, arguments, expected):
    """The suite refuses a wrong option, or options that contradict each other, with one line."""
    status, run = run_pytest(*arguments, TEST)
    lines = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    assert status == USAGE_ERROR and len(lines) == 1 and expected in lines[0], run.output
    assert "sm121 conformance ==" not in run.output and "run again" not in run.output
    assert not [entry for entry in run.report.glob("*") if entry.name != ".lock"], "no report"
    assert not run.left()


def test_the_report_of_the_run_before_stays(run_pytest, tmp_path):
    """If the suite refuses a run after it opened the report directory, it restores the earlier
    report."""
    report = tmp_path / "report"
    (report).mkdir()
    (report / "verdict.json").write_text("{}")
    status, run = run_pytest(f"--report-dir={report}", "--exam", "README.md", TEST)
    assert status == USAGE_ERROR, run.output
    assert (report / "verdict.json").read_text() == "{}" and not (report / "earlier").exists()
    assert run_pytest("--collect-only", f"--report-dir={report}", TEST)[0] == 0


@pytest.mark.parametrize(
    ("path", "check"),
    [
        ("tests", "test_decode_rate[d4096-tg32]"),
        ("tests/test_kernel.py", "test_kernel_speed[decode-window-32768]"),
    ],
    ids=["every level", "kernel benchmarks"],
)
def test_a_marker_s_architecture_has_its_profile_s_checks(run_pytest, path, check):
    """With --base-url on another machine, ``-m sm121`` selects the checks of ``--arch sm121``."""
    asked = {}
    for words in (("-m", "sm121"), ("--arch", "sm121")):
        status, run = run_pytest(
            "--collect-only", "-q", *words, "--base-url", "http://127.0.0.1:9", path
        )
        assert status == 0, run.output
        asked[words] = [line for line in run.output.splitlines() if line.startswith("tests/")]
    assert asked["-m", "sm121"] == asked["--arch", "sm121"] != []
    assert any(check in line for line in asked["-m", "sm121"])


@pytest.mark.parametrize("depths", ["0", "0,3968"])
def test_a_depth_that_fits_is_no_mistake(run_pytest, depths):
    status, run = run_pytest("--collect-only", f"--depths={depths}", "tests/test_performance.py")
    assert status == 0, run.output


def test_an_unknown_profile_key_is_named_with_its_file(run_pytest, tmp_path):
    text = shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("stalled_after_s", "staled_after_s"))
    line = refused(run_pytest, "--profile", str(file))
    assert str(file) in line and "engine.staled_after_s" in line and "stalled_after_s" in line


def test_a_report_folder_with_other_things_in_it(run_pytest, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    line = refused(run_pytest, "--report-dir", str(tmp_path))
    assert "expected a new or empty folder" in line
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_an_unknown_marker_is_refused(run_pytest):
    status, run = run_pytest("meta_tests/whole/scenarios/verdicts.py", "-m", "sm12")
    assert status in (4, 5), run.output


@pytest.mark.slow("it collects everything")
def test_collecting_starts_and_needs_nothing(run_pytest):
    status, run = run_pytest("--collect-only", "-q", "--engine-python", sys.executable)
    assert status == 0, run.output
    assert not run.report.exists()


def test_a_request_refused_after_the_run_was_opened_leaves_one_line(run_pytest, tmp_path):
    """If the suite refuses a run after opening it, pytest prints neither a table nor a command.

    The table is that of the levels, and the command is the one to run the tests again."""
    golden = tmp_path / "golden.json"
    golden.write_text("{}")
    arguments = ("--arch", "cpu", "--golden", str(golden), "tests/test_correctness.py")
    status, run = run_pytest(*arguments)
    assert status == USAGE_ERROR and "expected a file of --record-golden" in run.output
    for text in ("sm121 conformance", "run again", "NOT_RUN", "level "):
        assert text not in run.output.split("collected")[-1], run.output
