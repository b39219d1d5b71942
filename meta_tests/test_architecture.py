"""Which architecture is meant, and what happens when it is not here."""

from data_rows import from_data

from sm121.core import architecture
from sm121.plugin.selection import architectures_asked_for

SMOKE = "tests/test_smoke.py"


@from_data
def test_architectures_asked_for_by_name(expression, names):
    assert architectures_asked_for(expression) == names


@from_data
def test_an_architecture_that_is_not_here_is_not_run(run_pytest, arguments):
    status, run = run_pytest(*arguments)
    name = arguments[1]
    assert status == 5, run.output
    assert f"NOT_RUN: {name} was asked for, this machine is cpu" in run.output
    assert "--base-url URL" in run.output, "how to get it"
    assert run.verdict["verdict"] == "NOT_RUN" and run.verdict["exit_status"] == 5
    assert run.verdict["arch"] == name
    assert run.verdict["starts"] == []


@from_data
def test_what_was_asked_for_is_never_run_on_something_else(run_pytest, arguments):
    status, run = run_pytest(*arguments, SMOKE)
    assert status == 5 and run.verdict["verdict"] == "NOT_RUN", run.output
    assert run.verdict["starts"] == []


def test_not_an_architecture_is_no_question_of_it(run_pytest, fault_server):
    server = fault_server()
    status, run = run_pytest("-m", "not sm121", *server.options, "meta_tests/scenarios/verdicts.py")
    assert status == 5 and "no test of a level was executed" in run.output, run.output


def test_a_level_test_without_applies_to_is_refused(run_pytest, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n@pytest.mark.smoke\ndef test_it(): pass\n")
    status, run = run_pytest("-p", "sm121.plugin", str(file))
    assert status == 4 and "applies_to" in run.output, run.output


@from_data
def test_detection_by_capability(monkeypatch, capability, nvml, name, evidence):
    """By torch, else by NVML; a GPU without a name is not called a CPU."""
    monkeypatch.setattr(architecture, "_torch_capability", lambda: (capability, "torch: meta"))
    if nvml is not None:
        monkeypatch.setattr(architecture, "_nvml_capability", lambda: (nvml, "NVML: meta"))
    detected = architecture.detect()
    assert detected.name == name and (evidence or "") in detected.evidence


def test_detection_of_this_machine_says_what_was_looked_at():
    detected = architecture.detect()
    assert detected.name == "cpu" and "torch" in detected.evidence and "NVML" in detected.evidence
