"""Another project uses the installed suite, through its entry point and the documented names."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from meta_tests.folders import META, ROOT
from tools.reference import options

PROJECT = META / "whole" / "downstream"


@pytest.fixture
def project(tmp_path):
    """Return a copy of the project outside of the suite's checkout."""
    made_by_running = shutil.ignore_patterns("__*", ".*")
    return Path(shutil.copytree(PROJECT, tmp_path / "theirs", ignore=made_by_running))


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project, env=variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_entry_point_is_installed():
    (point,) = [point for point in entry_points(group="pytest11") if point.name == "sm121"]
    assert point.value == "sm121.entry_point"


def test_their_own_run_passes(project, fault_server):
    # The project's own profile has no requirements on the machine, so other load does not matter.
    shipped = (ROOT / "fixtures" / "profiles" / "cpu-tiny-gpt-oss.toml").read_text()
    without_box = re.sub(r"^\[box\]\n(?:[^\[\n].*\n|\n)*", "", shipped, flags=re.M)
    (project / "theirs.toml").write_text(without_box)
    done = run(project, *("--profile", "theirs.toml", *fault_server().options))
    assert done.returncode == 0, done.stdout + done.stderr
    report = project / "conformance-report"
    verdict = json.loads((report / "verdict.json").read_text())
    assert verdict["verdict"] == "PASS" and verdict["finished"]
    levels = {name: level["verdict"] for name, level in verdict["levels"].items()}
    assert levels == dict.fromkeys(("smoke", "correctness", "performance"), "PASS")
    assert verdict["metrics"]["health_p50"]["rounds"] == 6
    assert (report / "report.html").is_file()


def test_one_level_of_the_suite_runs_from_their_checkout(project, fault_server):
    """To run one level of the suite, `-p sm121.plugin` and a path are sufficient."""
    (project / "pytest.ini").write_text("[pytest]\n")
    options = ("-p", "sm121.plugin", "--arch", "cpu", "-m", "smoke", "--rootdir", str(project))
    test = f"{ROOT / 'tests' / 'test_smoke.py'}::test_health"
    done = run(project, *options, *fault_server().options, test)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^PASS( \(.*\))?: 1 check passed", done.stdout, re.M), done.stdout


def test_a_project_that_does_not_enable_the_suite_has_nothing_of_it(project):
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "test_our_change.py").write_text("def test_it():\n    pass\n")
    done = run(project)
    output = re.sub(r"^plugins: .*$", "", done.stdout.replace(str(project), ""), flags=re.M)
    assert done.returncode == 0 and "sm121" not in output
    assert not (project / "conformance-report").exists()


@pytest.mark.parametrize("fixture", ["server", "client", "kernels"])
def test_a_fixture_of_the_suite_without_a_level_is_one_line(project, fixture):
    code = f"def test_it({fixture}):\n    pass\n"
    (project / "test_our_change.py").write_text(code)
    done = run(project, "--arch", "cpu")
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("fixtures of the suite")]
    assert "got a test without one. Add for example @pytest.mark.smoke and" in line, line
    assert "llm_server" in line and "Traceback" not in done.stdout, done.stdout
    assert "plugins/sm121" not in done.stdout and "NotRun" not in done.stdout, done.stdout


def test_documented_blocks_are_functions_of_the_project():
    """The documented blocks of code are functions of this project."""
    text = (ROOT / "docs" / "python-api.md").read_text()
    mark = r"<!-- run: meta_tests/whole/test_downstream\.py .*?```python\n(.*?)```"
    blocks = re.findall(mark, text, re.S)
    assert len(blocks) == 2
    functions = _functions((PROJECT / "test_our_change.py").read_text())
    for block in blocks:
        assert _functions(block).items() <= functions.items()


def _functions(code: str) -> dict[str, str]:
    """Return the source of each function without its decorators. The keys are their names."""
    return {
        node.name: ast.unparse(ast.FunctionDef(**{**vars(node), "decorator_list": []}))
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
    }


def test_they_use_only_what_is_documented():
    text = (ROOT / "docs" / "python-api.md").read_text()
    code = (PROJECT / "test_our_change.py").read_text()
    for module, names in re.findall(r"^from (sm121[\w.]*) import (.+)$", code, re.M):
        for name in names.split(", "):
            assert f"`{module}.{name}`" in text, f"{module}.{name} is not in docs/python-api.md"
    documented = options.fixtures()
    for arguments in re.findall(r"^def test_\w+\((.*)\)", code, re.M):
        for fixture in filter(None, arguments.split(", ")):
            assert f"`{fixture}`" in text and documented[fixture], f"{fixture} is not documented"
