"""The requested architecture, and the result if this machine does not have it."""

import pytest

from sm121.core import architecture

SMOKE = "tests/test_smoke.py"


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
    assert f"NOT_RUN: {name} was requested, but this machine is cpu" in run.output
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
def test_another_architecture_than_requested_is_not_run(run_pytest, arguments):
    status, run = run_pytest(*arguments, SMOKE)
    assert status == 5 and run.verdict["verdict"] == "NOT_RUN", run.output
    assert run.verdict["starts"] == []


def test_a_negated_architecture_requests_none(run_pytest, fault_server):
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


@pytest.mark.parametrize(("device", "number"), [("cuda:1", 1), ("cuda", 0), ("cpu", 0)])
def test_the_number_of_a_gpu(device, number):
    assert architecture.gpu_number(device) == number
