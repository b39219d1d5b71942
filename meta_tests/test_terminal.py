"""What is shown while a run goes on: little when all is well."""

from __future__ import annotations

import json

from sm121.engines.start_progress import StartProgress
from sm121.engines.starting import StartPhase


def shown(*lines: tuple[float, str], everything: bool = False) -> list[str]:
    """What is shown of lines at these seconds."""
    now, said = [0.0], []
    progress = StartProgress(
        lambda name, line: said.append(line), everything=everything, clock=lambda: now[0]
    )
    for now[0], line in lines:
        progress("default", StartPhase(line, ready=line.startswith("ready")))
    return said


def test_a_quick_start_is_one_line():
    phases = ((0, "starting the API server"), (4, "loading weights"), (9, "warming up"))
    assert shown(*phases, (9.5, "ready after 9.5 s on port 1")) == ["ready after 9.5 s on port 1"]
    assert len(shown(*phases, everything=True)) == 3


def test_a_long_start_says_where_it_is():
    weights = [(15 + step, f"loading weights ({step} %)") for step in range(100)]
    lines = shown((0, "starting"), (14, "loading weights"), *weights, (115, "ready after 115 s"))
    assert lines[0] == "starting took 14 s, now loading weights, 14 s since the start"
    assert lines[1] == "loading weights (10 %), 25 s since the start"
    assert 9 <= len(lines) <= 12 and lines[-1] == "ready after 115 s"


def test_tables_of_benchmarks_and_remarks_are_for_the_report(run_pytest, fault_server):
    server = fault_server()
    arguments = [
        *("--arch", "sm121", "--base-url", server.base_url, "--api-key", server.key),
        *("--served-model-name", "canary", "meta_tests/scenarios/measurements.py"),
    ]
    samples = {"SM121_META_SAMPLES": json.dumps({"tg32@d0": [53.5, 53.6, 53.4, 53.5] * 5})}
    _, quiet = run_pytest(*arguments, environment=samples)
    assert "benchmark 'tg32'" not in quiet.output and "Outliers" not in quiet.output
    assert quiet.verdict["metrics"]["tg32@d0"]["value"] == 53.5
    _, verbose = run_pytest(*arguments, "-v", environment=samples)
    assert "Outliers" in verbose.output
