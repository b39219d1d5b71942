"""Which architecture is meant, and what happens when it is not here."""

import pytest

from sm121.core import architecture
from sm121.plugin.expressions import architectures_asked_for

SMOKE = "tests/test_smoke.py"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        pytest.param("sm121", ("sm121",), id="sm121, sm121"),
        pytest.param("sm121 and smoke", ("sm121",), id="sm121 and smoke, sm121"),
        pytest.param("smoke or sm121", ("sm121",), id="smoke or sm121, sm121"),
        pytest.param("sm90 or sm121", ("sm90", "sm121"), id="sm90 or sm121, sm90 sm121"),
        pytest.param("not sm121", (), id="not sm121"),
        pytest.param("smoke and not sm121", (), id="smoke and not sm121"),
        pytest.param("gpu", (), id="gpu"),
        pytest.param("smoke", (), id="smoke"),
        pytest.param("", (), id="nothing"),
        pytest.param("cpu", ("cpu",), id="cpu, cpu"),
        pytest.param(
            "sm121 and smoke and not kernel", ("sm121",), id="sm121 and smoke and not kernel, sm121"
        ),
        pytest.param(
            "(sm121 or slow) and not cpu", ("sm121",), id="(sm121 or slow) and not cpu, sm121"
        ),
    ],
)
def test_architectures_asked_for_by_name(expression, names):
    assert architectures_asked_for(expression) == names


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-m", "sm121"), id="-m sm121", marks=pytest.mark.slow),
        pytest.param(
            ("--arch", "sm121", "tests/test_smoke.py"), id="--arch sm121 tests/test_smoke.py"
        ),
        pytest.param(("-m", "sm90", "tests/test_smoke.py"), id="-m sm90 tests/test_smoke.py"),
    ],
)
def test_an_architecture_that_is_not_here_is_not_run(run_pytest, arguments):
    status, run = run_pytest(*arguments)
    name = arguments[1]
    assert status == 5, run.output
    assert f"NOT_RUN: {name} was asked for, this machine is cpu" in run.output
    assert "--base-url URL" in run.output, "how to get it"
    assert run.verdict["verdict"] == "NOT_RUN" and run.verdict["exit_status"] == 5
    assert run.verdict["arch"] == name
    assert run.verdict["starts"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-m", "sm121", "--arch", "cpu"), id="-m sm121 --arch cpu"),
        pytest.param(
            ("-m", "sm121", "--profile", "cpu-tiny-gpt-oss"),
            id="-m sm121 --profile cpu-tiny-gpt-oss",
        ),
        pytest.param(("-m", "gpu"), id="-m gpu"),
        pytest.param(
            ("-m", "sm121 and smoke and not kernel"), id="-m sm121 and smoke and not kernel"
        ),
    ],
)
def test_what_was_asked_for_is_never_run_on_something_else(run_pytest, arguments):
    status, run = run_pytest(*arguments, SMOKE)
    assert status == 5 and run.verdict["verdict"] == "NOT_RUN", run.output
    assert run.verdict["starts"] == []


def test_not_an_architecture_is_no_question_of_it(run_pytest, fault_server):
    server = fault_server()
    status, run = run_pytest(
        "-m", "not sm121", *server.options, "meta_tests/whole/scenarios/verdicts.py"
    )
    assert status == 5 and "-m 'not sm121': expected the name of a check" in run.output, run.output


def test_a_level_test_without_applies_to_is_refused(run_pytest, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n@pytest.mark.smoke\ndef test_it(): pass\n")
    status, run = run_pytest("-p", "sm121.plugin", str(file))
    assert status == 4 and "applies_to" in run.output, run.output


@pytest.mark.parametrize(
    ("capability", "nvml", "name", "evidence"),
    [
        pytest.param((12, 1), None, "sm121", None, id="12 1, sm121"),
        pytest.param((12, 0), None, "sm120", None, id="12 0, sm120"),
        pytest.param((9, 0), None, "sm90", None, id="9 0, sm90"),
        pytest.param(None, (12, 1), "sm121", "NVML", id="12 1, sm121, NVML"),
        pytest.param((99, 9), None, None, None, id="99 9"),
    ],
)
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
