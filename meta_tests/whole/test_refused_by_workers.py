"""A refusal has the same text with and without ``-n``.

No worker starts if the first process can refuse the request.
"""

import os

import pytest

DEAD = ("--base-url", "http://127.0.0.1:9")
#: A plugin that writes a file when workers start.
TELLS = """
from pathlib import Path


def pytest_xdist_setupnodes():
    Path(__file__).with_name("begun").touch()
"""


@pytest.fixture
def begins(tmp_path, monkeypatch) -> tuple[str, ...]:
    """Return the options of a run that writes the file ``begun`` when its workers start."""
    (tmp_path / "begins.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return ("-p", "begins")


def refusal(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("ERROR: ")]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ("--arch", "sm121", *DEAD, "tests/test_smoke.py"),
            id="dead-url",
            marks=pytest.mark.slow("refused by the suite, as a misspelt marker is"),
        ),
        pytest.param(("--arch", "cpu", "-m", "sm12", "tests/test_smoke.py"), id="misspelt-marker"),
        pytest.param(
            ("--arch", "cpu", "--matrix=99", "tests/test_matrix.py"),
            id="too-many-axes",
            marks=pytest.mark.slow("refused by the suite, as a misspelt marker is"),
        ),
        pytest.param(
            ("--arch", "cpu", "--engine", "sglang", "tests/test_smoke.py"),
            id="engine-without-a-profile",
            marks=pytest.mark.slow("refused by the suite, as a misspelt marker is"),
        ),
        pytest.param(("--arch", "cpu", "tests/no_such_file.py"), id="no-such-path"),
    ],
)
def test_the_line_and_the_status_are_those_of_a_run_without_workers(
    run_pytest, begins, tmp_path, arguments
):
    status, alone = run_pytest(*arguments)
    assert status == 4, alone.output
    status, divided = run_pytest(*begins, "-n", "2", *arguments)
    assert not (tmp_path / "begun").exists(), "no worker starts"
    assert status == 4, divided.output
    assert refusal(divided.output) == refusal(alone.output) != []
    assert "INTERNALERROR" not in divided.output


def test_nothing_can_be_compared_with_workers(run_pytest, begins, tmp_path):
    """Workers measure no times, so the first process refuses the option for any stored run."""
    words = ("-n", "2", "--arch", "cpu", "--benchmark-compare=0099", "tests/test_performance.py")
    status, run = run_pytest(*begins, *words)
    assert not (tmp_path / "begun").exists(), "no worker starts"
    assert status == 4, run.output
    (line,) = refusal(run.output)
    assert "--benchmark-compare with -n: the suite measures no times" in line
