"""The test log of `sm121 testlog`: its baseline, and its file."""

import json
import re

import pytest

from meta_tests.fakes import report_runs
from sm121.cli import main


def _another_model(raw):
    raw["fingerprint"] = {**(raw["fingerprint"] or {}), "model": "another"}


def _another_architecture(raw):
    raw["arch"] = "cpu"


def _invalid_run(raw):
    raw["verdict"] = "INVALID"


def _invalid_number(raw):
    raw["metrics"]["tg32@d0"]["verdict"] = "INVALID"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_model, "No delta: the runs differ in the model's digest: "),
        (_another_architecture, "No delta: the runs differ in the architecture: "),
        (_invalid_run, "No delta: the baseline is INVALID"),
        (_invalid_number, None),
    ],
)
def test_the_test_log_has_no_delta_to_a_baseline_that_is_not_comparable(
    change, reason, tmp_path, capsys
):
    """The test log shows no difference from a baseline of another machine.

    Before, it divided the two numbers without a remark."""
    runs = {}
    for name in ("run", "baseline"):
        runs[name] = report_runs.write("pass", tmp_path / name)
        raw = json.loads((runs[name] / "verdict.json").read_text())
        raw["fingerprint"] = {**(raw.get("fingerprint") or {}), "model": "one"}
        if name == "baseline":
            raw["started"] = "2026-01-11T09:14:03+00:00"
            change(raw)
        (runs[name] / "verdict.json").write_text(json.dumps(raw))
    assert main(["testlog", str(runs["run"]), "--baseline", str(runs["baseline"])]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("| tg32@d0 |")]
    assert row.endswith(" | - |"), row
    assert "54.1" in row, "both values are shown"
    (line,) = [line for line in text.splitlines() if line.startswith("Baseline: ")]
    assert "20260111091403, profile " in line
    assert line.endswith("verdict INVALID" if change is _invalid_run else "verdict PASS")
    if reason is None:
        assert "No delta" not in text and "%" in text, "other numbers have a delta"
    else:
        assert reason in text
        assert not re.search(r"\| [+-]\d+\.\d% \|", text)


def test_the_test_log_of_another_run_of_the_day_stays(tmp_path):
    run = report_runs.write("pass", tmp_path / "run")
    arguments = ["testlog", str(run), "--feature", "x", "--output", str(tmp_path)]
    verdict = json.loads((run / "verdict.json").read_text())
    for hour in ("09", "11", "12", "11"):
        verdict["started"] = f"2026-01-12T{hour}:00:00+00:00"
        (run / "verdict.json").write_text(json.dumps(verdict))
        assert main(arguments) == 0
    logs = {file.name: file.read_text() for file in (tmp_path / "TEST_LOGS").iterdir()}
    expected = {
        "FEATURE_x_2026-01-12.md": "Run: x\\_20260112090000",
        "FEATURE_x_2026-01-12_2.md": "Run: x\\_20260112110000",
        "FEATURE_x_2026-01-12_3.md": "Run: x\\_20260112120000",
    }
    assert logs.keys() == expected.keys(), "the log of the same run is replaced"
    for name, line in expected.items():
        assert line in logs[name]
