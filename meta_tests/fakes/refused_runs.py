"""Runs of pytest that are refused with one line."""

USAGE_ERROR = 4
TEST = "tests/test_smoke.py::test_health"


def refused(run_pytest, *arguments: str) -> str:
    """Return the line with which pytest refuses a run."""
    status, run = run_pytest(*arguments, TEST)
    lines = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    assert status == USAGE_ERROR, run.output
    assert len(lines) == 1, run.output
    assert "server" not in run.output.split("collected")[-1] or "starting" not in run.output
    assert not (run.report / "verdict.json").exists() and not run.left(), "nothing was begun"
    return lines[0]
