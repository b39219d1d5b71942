"""The reason why a first run has no baseline is shown once, with the next step."""

import json

import pytest

SCENARIO = "meta_tests/whole/scenarios/measurements.py"
SAMPLES = {
    "tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8],
    "pp2048@d0": [9200.0, 9220.0, 9180.0, 9210, 9190],
}


@pytest.mark.parametrize(
    ("options", "then"),
    [
        pytest.param((), "Run a build that you trust with --benchmark-autosave", id="not-stored"),
        pytest.param(
            ("--benchmark-autosave",),
            "This run is stored: if it passes, the next run is compared with it",
            id="stored",
        ),
    ],
)
def test_the_reason_is_there_once(run_pytest, fault_server, tmp_path, options, then):
    status, run = run_pytest(
        "--arch", "sm121", *fault_server().options, "--served-model-name", "canary",
        f"--benchmark-storage={tmp_path / 'storage'}", *options, SCENARIO,
        "tests/test_regression.py", environment={"SM121_META_SAMPLES": json.dumps(SAMPLES)},
    )  # fmt: skip
    assert status == 0, run.output
    (message,) = {t["message"] for t in run.verdict["tests"] if t["level"] == "regression"}
    assert ": expected a run that passed with this machine, profile, plan and" in message
    assert message.endswith(f"; metrics not compared: {len(SAMPLES)}. {then}")
    skipped = [line for line in run.output.splitlines() if line.startswith("SKIPPED")]
    assert skipped == [f"SKIPPED [3] tests/test_regression.py: {message}"]
