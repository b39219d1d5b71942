"""``--against`` compares the gates of a run with a stored run."""

import os

import pytest

GATED = """
import os

def test_rate(gate):
    level = float(os.environ["OUR_LEVEL"])
    gate("rate", [level + 0.01 * number for number in range(20)], minimum=52)
"""


@pytest.fixture
def run(tmp_path, warm_pytest):
    """Run the tests of a project. Return the exit status and the output."""
    (tmp_path / "test_gated.py").write_text(GATED)
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")

    def run(*words: str, level: str = "60") -> tuple[int, str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI"))}
        output = tmp_path / "output.txt"
        words = ("-p", "no:cacheprovider", *words)
        started = warm_pytest().start(
            words, output, variables | {"OUR_LEVEL": level}, folder=tmp_path
        )
        return started.wait(120.0), output.read_text("utf-8")

    return run


@pytest.fixture
def stored(run):
    """A project with two stored runs: 0001, and 0002, which is 10 % slower."""
    for level in ("60", "54"):
        status, output = run("--benchmark-autosave", level=level)
        assert status == 0, output
    return run


def refusal(ended: tuple[int, str]) -> str:
    """Return the line of a refusal."""
    status, output = ended
    assert status == 4 and " passed" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return line.removeprefix("ERROR: ")


def test_gates_are_compared_with_the_named_run(stored):
    status, output = stored("--against", "0002", level="54")
    assert status == 0 and "PASS (0.0 % better than 0002)" in output, output
    status, output = stored("--against=0001", level="54")
    assert status == 1 and "FAIL (10.0 % worse than 0001)" in output, output


def test_a_file_of_benchmark_json_is_a_run(stored, tmp_path):
    status, output = stored("--benchmark-json=main.json")
    assert status == 0, output
    status, output = stored("--against=main.json", level="54")
    assert status == 1 and "FAIL (10.0 % worse than main)" in output, output
    line = refusal(stored("--against", "main.json"))
    assert line.startswith("--against main.json: expected --against=main.json, got a space"), line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["--against=0099"], "--against '0099': expected the number", id="no such run"),
        pytest.param(["--against=test_gated.py"], "or --against=0001", id="a path"),
        pytest.param(["--against="], "--against '': expected the number", id="empty"),
        pytest.param(["--against=0001", "--benchmark-compare"], "Leave out --benchm", id="both"),
        pytest.param(["--against=0001", "--benchmark-disable"], "times nothing", id="not timed"),
    ],
)
def test_a_comparison_with_nothing_is_refused(stored, words, expected):
    line = refusal(stored(*words))
    assert line.startswith("--against") and expected in line, line


def test_a_run_without_a_gate_does_not_pass(stored):
    status, output = stored("--against=0001", "test_other.py")
    assert status == 5, output
    assert "NOT_RUN: --against: no gate was judged, so nothing was compared" in output, output


def test_a_run_with_only_new_gates_does_not_pass(stored, tmp_path):
    (tmp_path / "test_new.py").write_text(GATED.replace('gate("rate"', 'gate("new"'))
    status, output = stored("--against=0001", "test_new.py")
    assert status == 5 and "PASS (not in a stored run yet)" in output, output
    line = "NOT_RUN: --against: the stored run has no metric of this run, so nothing was compared"
    assert line in output, output
    status, output = stored("--against=0001")
    assert status == 0 and "NOT_RUN" not in output, output


def test_an_option_of_theirs_keeps_its_meaning(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--against')\n"
    )
    status, output = run("--against=theirs")
    assert status == 0 and "compared" not in output, output


@pytest.mark.parametrize("words", [[], ["-p", "sm121.plugin"]])
def test_with_the_suite_the_option_is_that_of_the_suite(run, tmp_path, words):
    setting = "false" if words else "true"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nsm121 = {setting}\n")
    status, output = run(*words, "--help")
    assert status == 0 and output.count("--against=RUN") == 1, output
    assert "report directory, a verdict.json" in " ".join(output.split())
