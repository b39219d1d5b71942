"""The layers of the package are respected, and a violating import is reported by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meta_tests.folders import ROOT

pytest.importorskip("importlinter")

#: For each contract, a file, the import that is injected into it, and the expected output.
UPWARD = {
    "Layers": (
        "core/errors.py",
        "sm121.report.page",
        "sm121.core is not allowed to import sm121.report",
    ),
    "Only the plugin knows pytest": ("oracles/moe.py", "pytest", "sm121.oracles.moe -> pytest"),
    "A server is measured over HTTP alone": (
        "measure/timing.py",
        "psutil",
        "sm121.measure.timing -> psutil",
    ),
    "pytest_gpu_arch works without the suite": (
        "../pytest_gpu_arch/detection.py",
        "sm121.core.errors",
        "pytest_gpu_arch.detection -> sm121.core.errors",
    ),
    "pytest_llm_server uses the engines and nothing of a run": (
        "../pytest_llm_server/servers.py",
        "sm121.run.servers",
        "pytest_llm_server.servers -> sm121.run.servers",
    ),
    "pytest_bench_gate works with what measures alone": (
        "../pytest_bench_gate/judging.py",
        "sm121.run.stored_run",
        "pytest_bench_gate.judging -> sm121.run.stored_run",
    ),
    "No cycle of packages, no cycle of files": (
        "oracles/mxfp4.py",
        "sm121.oracles.mxfp8",
        "No cycles are allowed in sm121.oracles",
    ),
    "What is installed does not need the tools of a checkout": (
        "kernels/cases.py",
        "tools.tolerances",
        "sm121.kernels.cases -> tools",
    ),
}


@pytest.fixture
def package(tmp_path) -> Path:
    """Return a copy of the package, of its imports outside of the layers, and of the contract."""
    copy = tmp_path / "plugins"
    shutil.copytree(ROOT / "plugins", copy, ignore=shutil.ignore_patterns("fixtures"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return copy / "sm121"


def lint_imports(folder: Path) -> tuple[int, str]:
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    environment = {**os.environ, "PYTHONPATH": str(folder / "plugins"), "COLUMNS": "200"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow("make lint asks the same")
def test_the_tree_keeps_every_contract():
    status, output = lint_imports(ROOT)
    assert status == 0, output
    for name in UPWARD:
        assert f"{name} KEPT" in output


#: Only these contracts are tested in `make test`, because for each of them the linter copies and
#: reads the whole tree, which takes about 1 s of CPU.
SAMPLE = ("Layers", "Only the plugin knows pytest")


@pytest.mark.parametrize(
    "contract",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in SAMPLE)) for name in UPWARD],
)
def test_a_planted_import_breaks_its_contract(package, contract):
    file, imported, message = UPWARD[contract]
    with (package / file).open("a", encoding="utf-8") as planted:
        planted.write(f"\n\ndef _planted() -> None:\n    import {imported}\n")
    status, output = lint_imports(package.parents[1])
    assert status == 1, output
    assert f"{contract} BROKEN" in output
    assert message in output
