"""What other people's packages warn of ends no run of the levels."""

import json
import os
from pathlib import Path

import pytest
from data_rows import from_data

#: As the redirector of the ``pynvml`` package, and worse: it warns on each call, too.
REDIRECTOR = """
import warnings

def say():
    warnings.warn("The pynvml package is deprecated", FutureWarning, stacklevel=3)

class NVMLError(Exception):
    pass

def nvmlInit():
    say()
    raise NVMLError("Driver Not Loaded")

say()
"""


@from_data
def test_a_package_that_warns_ends_no_run(run_pytest, fault_server, tmp_path, arguments):
    (tmp_path / "pynvml.py").write_text(REDIRECTOR)
    folders = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    status, run = run_pytest(
        "tests/test_smoke.py::test_health", *fault_server().options, *arguments,
        environment={"PYTHONPATH": os.pathsep.join(folders)}, warm=False,
    )  # fmt: skip
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    assert "The pynvml package is deprecated" in run.output


@pytest.mark.slow("a run that measures")
def test_what_cannot_be_measured_warns_of_no_benchmark(run_pytest, fault_server):
    why = "a draft has 2 places"
    _, run = run_pytest(
        "meta_tests/scenarios/measurements.py", *fault_server().options,
        environment={"SM121_META_SAMPLES": json.dumps({"acceptance@3": {"not_run": why}})},
    )  # fmt: skip
    assert why in run.output and "Benchmark fixture" not in run.output, run.output


def test_our_own_tests_take_a_warning_for_an_error(pytestconfig):
    assert "error" in pytestconfig.getini("filterwarnings")
    shipped = (Path(__file__).parents[1] / "pytest.ini").read_text()
    assert "filterwarnings" not in shipped
