"""A project that uses only the markers of `pytest_gpu_arch`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from meta_tests.folders import META, ROOT
from meta_tests.releases import needs

PROJECT = META / "whole" / "downstream_gpu_arch"
#: The line that `-rs` prints on a machine without a GPU.
NEEDS = "needs sm121; this machine is cpu: torch"
NOT_RUN = "NOT_RUN: sm121 was requested; this machine is cpu: torch"
SUITE_IN_INI = "[pytest]\nsm121 = true\n"


@pytest.fixture
def project(tmp_path):
    """Return a copy of the project outside of the suite's checkout."""
    made_by_running = shutil.ignore_patterns("__*", ".*")
    return Path(shutil.copytree(PROJECT, tmp_path / "theirs", ignore=made_by_running))


@dataclass
class Ended:
    """A run that has ended. Both of its streams are in one text."""

    returncode: int
    stdout: str


@pytest.fixture
def run(project, warm_pytest) -> Callable[..., Ended]:
    """Run pytest in the project, in a fork of a process that has imported pytest, unless workers or
    variables are given."""

    def run(*arguments: str, **more: str) -> Ended:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))
        }
        options = ["-p", "no:cacheprovider", "-rs", *arguments]
        if "-n" in arguments or more:
            return in_a_new_interpreter(project, options, inherited | more)
        output = project / "output.txt"
        begun = warm_pytest().start(options, output, inherited, folder=project)
        return Ended(begun.wait(120.0), output.read_text("utf-8"))

    return run


def in_a_new_interpreter(project: Path, options: list[str], variables: dict[str, str]) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=project, env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout)


def counts(output: str) -> dict[str, int]:
    """Return the counts of pytest's last line."""
    found = re.findall(r"(\d+) (passed|failed|skipped|deselected|error)", output.splitlines()[-1])
    return {word: int(number) for number, word in found}


def test_the_entry_point_is_installed():
    points = [point for point in entry_points(group="pytest11") if point.value == "pytest_gpu_arch"]
    assert [point.name for point in points] == ["pytest_gpu_arch"]


def test_a_marked_test_is_skipped_with_its_reason_and_the_others_run(project, run):
    done = run("--strict-markers", "-W", "error")
    assert done.returncode == 0, done.stdout
    assert counts(done.stdout) == {"passed": 2, "skipped": 2}
    assert NEEDS in done.stdout and "needs a GPU; this machine is cpu" in done.stdout
    assert "NOT_RUN" not in done.stdout
    assert not (project / "conformance-report").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["-m", "sm121"], {"skipped": 1, "deselected": 3}, id="marker"),
        pytest.param(["--arch", "sm121"], {"passed": 1, "skipped": 3}, id="option"),
        pytest.param(
            ["--arch", "GB10"],
            {"passed": 1, "skipped": 3},
            id="name of the chip",
            marks=pytest.mark.slow("its names are held by test_names"),
        ),
        pytest.param(["-m", "sm121", "-n", "2"], {"skipped": 1}, id="workers"),
        pytest.param(
            ["-p", "no:sm121", "-p", "pytest_gpu_arch", "-m", "sm121"],
            {"skipped": 1, "deselected": 3},
            id="without the suite",
        ),
    ],
)
def test_an_architecture_that_is_not_here_ends_with_5_and_one_line(run, arguments, expected):
    done = run(*arguments)
    assert done.returncode == 5, done.stdout
    assert counts(done.stdout) == expected
    assert done.stdout.count("NOT_RUN") == 1 and NOT_RUN in done.stdout
    assert NEEDS in done.stdout


def test_an_architecture_that_no_test_names_ends_with_5_and_one_line(run):
    done = run("-m", "sm90")
    assert done.returncode == 5, done.stdout
    assert "NOT_RUN: sm90 was requested; this machine is cpu" in done.stdout


def test_a_name_of_an_architecture_in_k_is_a_request_if_no_test_ran(project, run):
    (project / "test_names.py").write_text("def test_parse_sm90(): pass\n")
    done = run("-k", "sm121")
    assert done.returncode == 5, done.stdout
    assert "NOT_RUN: sm121 was requested, but no test ran" in done.stdout
    done = run("-k", "sm90")
    assert done.returncode == 0 and "NOT_RUN" not in done.stdout, done.stdout
    done = run("-k", "not sm121")
    assert done.returncode == 0 and "NOT_RUN" not in done.stdout, done.stdout


def test_tests_of_this_architecture_run_and_keep_the_status(run):
    for arguments in (["--arch", "cpu"], ["-m", "cpu"], ["-m", "not sm121"]):
        done = run(*arguments)
        assert done.returncode == 0, done.stdout
        assert "NOT_RUN" not in done.stdout and counts(done.stdout)["passed"] >= 1


def test_it_alone_works_without_the_entry_points(run):
    variable = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run("-p", "pytest_gpu_arch", "-m", "sm121", **variable)
    assert done.returncode == 5 and NOT_RUN in done.stdout, done.stdout
    assert run("--arch", "cpu", **variable).returncode == 4, "it is not loaded"


def test_it_loads_nothing_of_the_suite(project, run):
    (project / "test_imports.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "    assert 'pytest_gpu_arch' in loaded and 'torch' not in loaded\n"
        "    assert {name for name in sys.modules if name.startswith('sm121')} <= "
        "{'sm121', 'sm121.entry_point'}\n"
    )
    done = run("test_imports.py", COLD="1")
    assert done.returncode == 0, done.stdout


def test_a_failed_test_keeps_status_1(project, run):
    (project / "test_fails.py").write_text("def test_it():\n    assert False\n")
    done = run("--arch", "sm121")
    assert done.returncode == 1 and NOT_RUN in done.stdout, done.stdout


@pytest.mark.parametrize("option", ["--collect-only", "--fixtures"])
def test_options_that_only_print_have_no_verdict(run, option):
    done = run("--arch", "sm121", option)
    assert done.returncode == 0 and "NOT_RUN" not in done.stdout, done.stdout


def test_a_wrong_name_is_one_line(run):
    done = run("--arch", "sm12")
    assert done.returncode == 4 and "--arch sm12: expected one of cpu, sm80" in done.stdout


THEIRS = "def pytest_addoption(parser):\n    parser.addoption('--arch')\n"


@needs("pytest", "9", "it ignores the options of a conftest.py below the root")
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(".", id="at the root", marks=pytest.mark.slow("found in the same way")),
        pytest.param("below", id="in a folder below"),
    ],
)
def test_an_option_of_theirs_is_one_line_with_its_file(project, run, folder):
    (project / folder).mkdir(exist_ok=True)
    (project / folder / "conftest.py").write_text(THEIRS)
    (project / folder / "test_theirs.py").write_text("def test_theirs(): pass\n")
    done = run()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert done.stdout.strip().endswith(line) and done.stdout.count("--arch") == 1, done.stdout
    expected = f"ERROR: {Path(folder) / 'conftest.py'}: expected an option of another name"
    assert done.returncode == 4 and line.startswith(expected), line
    assert "Traceback" not in done.stdout and "ValueError" not in done.stdout, done.stdout
    assert run("-p", "no:pytest_gpu_arch").returncode == 1, "theirs is left"


@needs("pytest", "9", "it ignores the options of a conftest.py below the root")
@pytest.mark.parametrize("named_by", ["-p", "conftest.py"])
def test_an_option_of_another_plugin_is_one_line(project, run, named_by):
    (project / "theirs.py").write_text(THEIRS)
    words = ["-p", "theirs"]
    if named_by == "conftest.py":
        (project / "conftest.py").write_text("pytest_plugins = ['theirs']\n")
        words = []
    done = run(*words, PYTHONPATH=str(project))
    (line,) = [line for line in done.stdout.splitlines() if line.strip()]
    assert done.returncode == 4 and line.startswith("ERROR: "), done.stdout
    assert "expected an option of another name than --arch" in line
    assert "-p no:pytest_gpu_arch" in line
    done = run(*words, "-p", "no:pytest_gpu_arch", PYTHONPATH=str(project))
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout


@needs("pytest", "9", "it ignores the options of a conftest.py below the root")
def test_a_worker_shows_the_line_in_the_place_of_a_traceback(project, run):
    (project / "below").mkdir()
    (project / "below" / "conftest.py").write_text(THEIRS)
    (project / "below" / "test_theirs.py").write_text("def test_theirs(): pass\n")
    done = run("-n", "1")
    assert done.returncode == 1, done.stdout
    assert "below/conftest.py: expected an option of another name" in done.stdout
    assert "ValueError" not in done.stdout, done.stdout


def test_the_suite_in_the_same_run_leaves_the_skip_and_decides_the_status(project, run):
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    done = run()
    assert done.returncode == 0 and NEEDS in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        pytest.param(["-m", "sm121"], "sm121", id="marker"),
        pytest.param(["-m", "gpu"], "a GPU", id="any gpu"),
        pytest.param(["--arch", "sm121"], "sm121", id="option"),
        pytest.param(["-k", "sm121"], "sm121", id="keyword"),
        pytest.param(["-m", "gpu", "-n", "1"], "a GPU", id="workers"),
    ],
)
def test_with_the_suite_a_request_without_a_test_of_a_level_ends_with_5(
    project, run, arguments, asked
):
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    done = run(*arguments)
    assert done.returncode == 5, done.stdout
    assert done.stdout.count("NOT_RUN") == 1, done.stdout
    assert f"NOT_RUN: {asked} was requested" in done.stdout, done.stdout
    assert not (project / "conformance-report").exists()


@pytest.mark.parametrize("arguments", [["--arch", "cpu"], ["-m", "cpu"], ["-m", "cpu", "-n", "1"]])
def test_with_the_suite_tests_without_a_level_run_on_their_architecture(project, run, arguments):
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    done = run(*arguments)
    assert done.returncode == 0 and "NOT_RUN" not in done.stdout, done.stdout
    assert counts(done.stdout)["passed"] >= 1


def test_the_suite_needs_it(project, run):
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    done = run("-p", "no:pytest_gpu_arch")
    assert done.returncode == 4 and "the suite needs this plugin" in done.stdout, done.stdout


def test_a_marker_narrows_a_test_of_a_level(project, run, fault_server):
    """If the project's tests run together with those of levels, the target is the server's
    machine."""
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    (project / "test_levels.py").write_text(
        "import pytest\n\npytestmark = [pytest.mark.smoke, pytest.mark.applies_to('gpu', 'cpu')]\n"
        "@pytest.mark.cpu\ndef test_cpu(): pass\n@pytest.mark.sm90\ndef test_sm90(): pass\n"
    )
    (project / "test_our_kernels.py").write_text(
        "import pytest\n@pytest.mark.sm121\ndef test_gb10(): pass\n"
        "@pytest.mark.cpu\ndef test_cpu(): pass\n"
    )
    attached = [*fault_server().options, "--served-model-name", "canary"]
    done = run("--arch", "cpu", *attached, "-v")
    assert done.returncode == 0, done.stdout
    assert "needs sm121; the target is cpu" in done.stdout
    outcomes = dict(re.findall(r"^(test_\w+\.py::\w+) (PASSED|SKIPPED)", done.stdout, re.M))
    assert outcomes == {
        "test_levels.py::test_cpu": "PASSED",
        "test_levels.py::test_sm90": "SKIPPED",
        "test_our_kernels.py::test_gb10": "SKIPPED",
        "test_our_kernels.py::test_cpu": "PASSED",
    }
    done = run("--arch", "sm121", *attached, "-v", "test_our_kernels.py")
    outcomes = dict(re.findall(r"^(test_\w+\.py::\w+) (PASSED|SKIPPED)", done.stdout, re.M))
    assert outcomes == {
        "test_our_kernels.py::test_gb10": "PASSED",
        "test_our_kernels.py::test_cpu": "SKIPPED",
    }, done.stdout


def test_with_a_server_a_marker_alone_means_this_machine(project, run, fault_server):
    """``-m sm121`` requires a GB10 in this machine; only ``--arch`` describes the server's."""
    (project / "pytest.ini").write_text(SUITE_IN_INI)
    (project / "test_our_kernels.py").write_text(
        "import pytest\n@pytest.mark.sm121\ndef test_gb10(): pass\n"
    )
    done = run("-m", "sm121", *fault_server().options, "--served-model-name", "canary")
    assert done.returncode == 5, done.stdout
    assert "NOT_RUN: sm121 was requested" in done.stdout, done.stdout


def test_the_page_begins_with_the_project():
    text = (ROOT / "docs" / "pytest-gpu-arch.md").read_text("utf-8")
    mark = r"<!-- run: meta_tests/whole/test_downstream_gpu_arch.*?```python\n(.*?)```"
    (block,) = re.findall(mark, text, re.S)
    code = (PROJECT / "test_our_kernels.py").read_text("utf-8")
    for part in block.strip().split("\n\n\n"):
        assert part in code, part
