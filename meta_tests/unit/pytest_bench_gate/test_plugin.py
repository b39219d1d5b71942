"""Tests that use `gate` through a fixture of their own, in a run of pytest."""

import os
import re

import pytest

WRAPPED = """import pytest

@pytest.fixture
def ours(gate):
    yield gate

@pytest.fixture
def at_the_end(gate):
    samples = []
    yield samples
    gate("late", samples, maximum=2)

def test_wraps(ours): pass
def test_late(at_the_end): at_the_end.extend([1.0] * 20)
@pytest.mark.usefixtures("ours")
def test_uses(): pass
def test_by_name(request): request.getfixturevalue("ours")
def test_calls(ours): ours("y", [1.0] * 20, maximum=2)
def test_fails(ours): raise ValueError("their own")
def test_skips(ours): pytest.skip("not here")
"""
FOR_ALL = """import pytest

@pytest.fixture(autouse=True)
def ours(gate): yield gate

def test_it(): pass
"""


@pytest.fixture
def run(tmp_path, warm_pytest):
    """Run a file of tests. Return the exit status and the output."""

    def run(code: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(code)
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI"))}
        words = ["-p", "no:cacheprovider"]
        output = tmp_path / "output.txt"
        status = warm_pytest().start(words, output, variables, folder=tmp_path).wait(120.0)
        return status, output.read_text("utf-8")

    return run


def test_a_gate_of_a_fixture_that_nobody_calls_fails_the_test(run):
    status, output = run(WRAPPED)
    assert status == 1, output
    failed = set(re.findall(r"^(?:ERROR|FAILED) test_it.py::(\w+) - ", output, re.M))
    assert failed == {"test_wraps", "test_uses", "test_by_name", "test_fails"}, output
    line = "expected a call of gate, which a fixture of this test requests, got none."
    assert output.count(line) >= 3 and "not used at all" not in output, output


def test_a_gate_of_a_fixture_for_all_tests_need_not_be_called(run):
    status, output = run(FOR_ALL)
    assert status == 0, output
