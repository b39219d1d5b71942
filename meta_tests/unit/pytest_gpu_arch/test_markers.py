"""Which tests are skipped on which simulated machine, in a run of pytest."""

import os
import re

import pytest

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

def test_of_the_module(): pass

@pytest.mark.cpu
def test_cpu(): pass

@pytest.mark.sm90
class TestHopper:
    def test_of_the_class(self): pass

    @pytest.mark.sm121
    def test_closest(self): pass

    @pytest.mark.parametrize("on", ["any", pytest.param("gb10", marks=pytest.mark.sm121)])
    def test_case(self, on): pass
"""
MACHINE = """
import os

from pytest_gpu_arch import detection

detection.detect = lambda: detection.Detection(os.environ["MACHINE"] or None, "planted")
"""


@pytest.fixture
def passed(tmp_path, warm_pytest):
    """Run the tests on a simulated machine.

    Return the exit status, the names of the passed tests, and the output."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "machine.py").write_text(MACHINE)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}

    def run(machine, *arguments):
        words = ["-p", "no:cacheprovider", "-p", "machine", "-v", "-rs", *arguments]
        of_machine = variables | {"MACHINE": machine, "PYTHONPATH": str(tmp_path)}
        output = tmp_path / "output.txt"
        status = warm_pytest().start(words, output, of_machine, folder=tmp_path).wait(120.0)
        text = output.read_text("utf-8")
        return status, set(re.findall(r"::(test_[\w\[\]]+) PASSED", text)), text

    return run


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param("cpu", {"test_cpu"}, id="cpu"),
        pytest.param(
            "sm90", {"test_of_the_module", "test_of_the_class", "test_case[any]"}, id="sm90"
        ),
        pytest.param(
            "sm121", {"test_of_the_module", "test_closest", "test_case[gb10]"}, id="sm121"
        ),
        pytest.param(
            "",
            {"test_of_the_module"},
            id="a GPU without a name",
            marks=pytest.mark.slow("no architecture, as a CPU has none"),
        ),
    ],
)
def test_the_closest_markers_decide(passed, machine, expected):
    status, names, output = passed(machine)
    assert status == 0 and names == expected, output
    place = machine or "a GPU without a name here"
    assert f"this machine is {place}: planted" in output


@pytest.mark.parametrize(
    ("machine", "arguments", "status", "expected"),
    [
        pytest.param("sm121", ("-m", "sm121"), 0, {"test_closest", "test_case[gb10]"}, id="here"),
        pytest.param("sm90", ("-m", "sm121"), 5, set(), id="elsewhere"),
        pytest.param("sm90", ("-m", "gpu and not sm90"), 0, {"test_of_the_module"}, id="any gpu"),
        pytest.param("sm121", ("--arch", "sm90"), 5, set(), id="option"),
        pytest.param(
            "sm121", ("--arch", "sm121", "-k", "of_the_class"), 5, set(), id="all skipped"
        ),
        pytest.param("sm90", ("--arch", "sm121", "-m", "sm90"), 5, set(), id="two that differ"),
    ],
)
def test_tests_of_a_requested_architecture_run_only_on_it(
    passed, machine, arguments, status, expected
):
    ended, names, output = passed(machine, *arguments)
    assert ended == status and names == expected, output
    assert output.count("NOT_RUN") == (1 if status == 5 else 0), output
