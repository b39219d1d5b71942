"""The commands that `make conformance` and `make test` run: each must leave out the tests for which
its planned minutes are too few."""

import os
import subprocess
import sys

import pytest

from meta_tests.folders import ROOT

#: Tests that take minutes, which `make test` leaves to `make catalogues`.
LONGEST = (
    "meta_tests/whole/test_ci_paths.py::test_the_paths_of_both_examples",
    "meta_tests/whole/test_two_nodes.py::test_rank_of_a_real_vllm[killed]",
)


def commands(goal: str) -> list[str]:
    """Return the commands with which a goal of the Makefile runs pytest."""
    # `make test` passes its job server to each make that it starts, which then prints more lines.
    variables = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    for name in ("MFLAGS", "PYTEST_ARGS"):
        variables.pop(name, None)
    done = subprocess.run(
        ["make", "-n", goal], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if " -m pytest " in line]


def test_make_conformance_runs_the_plan_quick():
    (line,) = commands("conformance")
    assert "--plan quick" in line and "--matrix" not in line, line


@pytest.mark.parametrize("goal", ["beside", "test"])
def test_make_test_divides_all_tests_among_workers(goal):
    lines = [line for line in commands(goal) if "--collect-only" not in line]
    assert lines and all(" -n " in line for line in lines), lines


@pytest.mark.parametrize("part", ["K=gate", "M=measure/gate"])
def test_a_part_uses_both_cores_and_one_thread_in_each_test(part):
    """Without workers, torch has two threads, which spin on a busy machine: one module took 97 s
    instead of 24 s."""
    # A command of M is divided into two lines.
    text = subprocess.run(
        ["make", "-n", "test", part], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert " -n 2 --dist loadfile " in text, text


def test_make_test_leaves_the_longest_tests_to_make_catalogues():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *LONGEST],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert f"({len(LONGEST)} deselected)" in done.stdout, done.stdout
